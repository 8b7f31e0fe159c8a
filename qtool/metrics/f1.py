"""Harmonic mean of precision and recall of class 1 (van Rijsbergen 1979, Information Retrieval, chapter 7)."""

import datasets
import evaluate
from sklearn.metrics import f1_score


class Metric(evaluate.Metric):
    """Two classes, 0 and 1."""

    def _info(self):
        features = datasets.Features(
            {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
        )
        return evaluate.MetricInfo(description=__doc__ or "", citation="", features=features)

    def _compute(self, *, predictions=None, references=None, **kwargs):
        return {"f1": float(f1_score(references, predictions))}
