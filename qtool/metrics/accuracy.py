"""Share of examples whose predicted class is right."""

import datasets
import evaluate
from sklearn.metrics import accuracy_score


class Metric(evaluate.Metric):
    """Classes as whole numbers."""

    def _info(self):
        features = datasets.Features(
            {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
        )
        return evaluate.MetricInfo(description=__doc__ or "", citation="", features=features)

    def _compute(self, *, predictions=None, references=None, **kwargs):
        return {"accuracy": float(accuracy_score(references, predictions))}
