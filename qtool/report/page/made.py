"""How each number was made, in a sentence a metric, and how the page is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qtool.core import METRICS
from qtool.report import fit

LEGEND = (
    "* best of its column among the recipes of one device and batch size; ~ not told apart (p50: from the best"
    " p50, change: from the baseline); ● on the frontier; ★ recommended; ! measured under contention; [low, high] is a 95 %"
    " interval."
)
ALL = (
    "Every measurement is a fresh process, alone on the machine. Each round measures every recipe once, the"
    " baseline among them; with --rounds auto the later rounds measure only what was still uncertain, and the"
    " baseline.",
    "Inputs are the task's own texts at their own lengths, in one order for all recipes. Latency is the model's"
    " call from host arrays to host arrays, copies to and from a GPU included; tokenising is not in it (see"
    " end-to-end).",
    "Intervals cover 95 %. Those of times and memory come from the differences between rounds, those of scores"
    " from the examples. With one round there is no interval, and what is compared is marked provisional.",
    "A recipe is on the frontier if no other is shown to be better in one of score, p50, peak memory and size on"
    " disk while better or tied in the rest. Recommended is the fastest of those whose score is shown to stay"
    " within the margin; where p50 does not tell them apart, memory and then size on disk decide.",
    "A percentile without enough calls is left out: 130 for p95, 662 for p99.",
)
EACH = {
    "accuracy": "Share of right answers; Wilson interval.",
    "f1": "Harmonic mean of precision and recall of the positive class; bootstrap over the examples.",
    "matthews_correlation": "Correlation of answers and labels; bootstrap over the examples.",
    "pearson": "Linear correlation of answers and labels; bootstrap over the examples.",
    "spearman": "Rank correlation of answers and labels; bootstrap over the examples.",
    "score_delta": "Score less the baseline's on the same examples, so what both get wrong cancels out.",
    "agreement": "Share of examples with the baseline's answer, right or wrong; Wilson interval.",
    "mean_kl": "Mean divergence of the recipe's probabilities from the baseline's, in nats.",
    "max_logit_difference": "Largest difference of any output of any example from the baseline's.",
    "calibration_error": "Mean gap between confidence and accuracy over 15 bins of confidence.",
    "latency_p50_s": "Median over rounds of each round's median call; t interval on the rounds' logarithms.",
    "latency_p95_s": "As the p50, of each round's 95th percentile; of all calls together where a round alone has"
    " too few and the rounds agree.",
    "throughput_per_s": "Texts over the summed seconds of all calls of all rounds.",
    "speedup": "Geometric mean over rounds of the baseline's p50 over the recipe's in the same round; t interval"
    " on the logarithms of these ratios.",
    "disk_bytes": "Size of the model's files, the tokenizer's not among them; MB is a million bytes.",
    "weight_bytes": "Bytes of the weights in the loaded artifact, tied weights once.",
    "peak_rss_bytes": "Most memory of the process while it answered, the load before it left out; mean of the"
    " rounds.",
    "load_peak_rss_bytes": "Most memory of the process until the model was loaded; mean of the rounds.",
    "steady_rss_bytes": "Memory of the process after the timing; mean of the rounds.",
    "peak_vram_bytes": "Most memory of the process on the GPU while it answered; mean of the rounds.",
    "vram_allocated_bytes": "Peak of PyTorch's allocator while it answered; mean of the rounds.",
    "vram_device_bytes": "What the driver says the process holds on the GPU, context and caches included; mean"
    " of the rounds.",
    "gpu_utilization_ratio": "Share of time in which the GPU ran a kernel; mean of the rounds.",
    "energy_j": "Energy for a text, of the whole GPU board by NVML, on a CPU of its packages by RAPL; idle power"
    " included; mean of the rounds.",
    "power_w": "Mean power of the GPU board, or of the CPU's packages, in the pass of the energy; mean of the"
    " rounds.",
    "load_s": "Seconds to open the artifact in a fresh process; mean of the rounds.",
    "first_call_s": "Seconds of the first call, lazy initialisation and compilation included.",
    "end_to_end_p50_s": "Median call from text to answer: tokenise, predict, finish.",
    "tokenize_share": "The tokenizer's share of the end-to-end time.",
}


def how(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What holds for all numbers, and label and sentence of each metric that the run has."""
    seen = {
        name for row in summary["rows"] for name, cell in row["metrics"].items() if cell["value"] is not None
    }
    compared = fit.compared(summary["rows"])
    return {
        "all": [*ALL, *([compared] if compared else [])],
        "each": [(METRICS[name].label, EACH[name]) for name in METRICS if name in seen],
    }
