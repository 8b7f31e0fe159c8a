"""Spearman's rank correlation of predicted and true values."""

import datasets
import evaluate
from scipy.stats import spearmanr


class Metric(evaluate.Metric):
    """Real values."""

    def _info(self):
        features = datasets.Features(
            {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}
        )
        return evaluate.MetricInfo(description=__doc__ or "", citation="", features=features)

    def _compute(self, *, predictions=None, references=None, **kwargs):
        return {"spearman": float(spearmanr(references, predictions).statistic)}  # pyright: ignore
