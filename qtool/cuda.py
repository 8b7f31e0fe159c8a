"""Why nothing runs on CUDA here, and what would change that: the parent's cheap look, no ML library imported.

A GPU needs a driver that answers, a process that may see it, and libraries that were built for it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

from qtool import host
from qtool.procfs import ROOT

Reason = tuple[str, str]
"""What is wrong, and what would change it."""


def no_gpu(root: Path = ROOT) -> Reason | None:
    """Why no GPU can be used; None where one can."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if host.cuda_available():
        return None
    if host.gpus():
        return (
            f"needs a CUDA GPU and CUDA_VISIBLE_DEVICES='{hidden}' hides those of this machine",
            "unset CUDA_VISIBLE_DEVICES",
        )
    driver = (root / "proc/driver/nvidia/version").exists()
    if host.installed("pynvml") is None:
        found = "NVML's bindings are missing"
        found = f"a driver is loaded, but {found}" if driver else found
        reason = f"needs a CUDA GPU and none is visible ({found})"
        return reason, "pip install 'qtool[cuda]', or --device cpu"
    if driver:
        return (
            "needs a CUDA GPU and none is visible (the loaded NVIDIA driver shows none)",
            "see nvidia-smi, or use --device cpu",
        )
    return (
        "needs a CUDA GPU and none is visible (no NVIDIA driver answers)",
        "install the driver (in a container, start it with --gpus all), use another machine or --device cpu",
    )


def not_built(packages: Iterable[str]) -> Reason | None:
    """The first installed library that was built without CUDA; None where none is.

    bitsandbytes and torchao bring their kernels or use PyTorch's.
    """
    for package in packages:
        version = host.installed(package) or ""
        if package == "torch" and version.endswith("+cpu"):
            return (
                f"needs PyTorch built for CUDA, found {version}",
                f"pip install torch=={version.removesuffix('+cpu')} from PyTorch's index for your CUDA version",
            )
        if package == "onnxruntime" and not _has_cuda_provider():
            return (
                f"needs ONNX Runtime's CUDA provider, found onnxruntime {version} without it",
                "pip uninstall onnxruntime, then pip install onnxruntime-gpu",
            )
    return None


def _has_cuda_provider() -> bool:
    """Whether the library of the provider lies beside the engine: the same test that it makes when asked for it."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        return False
    folder = Path(spec.origin).parent / "capi"
    return any(folder.glob("*onnxruntime_providers_cuda.*"))
