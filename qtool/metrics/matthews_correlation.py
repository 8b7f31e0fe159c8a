"""Matthews 1975, https://doi.org/10.1016/0005-2795(75)90109-9."""

import datasets
import evaluate
from sklearn.metrics import matthews_corrcoef


class Metric(evaluate.Metric):
    """Classes as whole numbers."""

    def _info(self):
        features = datasets.Features(
            {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
        )
        return evaluate.MetricInfo(description=__doc__ or "", citation="", features=features)

    def _compute(self, *, predictions=None, references=None, **kwargs):
        return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}
