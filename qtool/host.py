"""What this machine and installation are: CPU, memory, GPUs, library versions, hub.

Every answer is read from the system when asked, cheaply and without importing a heavy library.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from qtool import topology
from qtool.procfs import ROOT, cgroup, text, usable_cpus

FLAGS = {
    "x86": (
        *("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16"),
        *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    ),
    "arm": ("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme"),
}
"""CPU flags that decide which kernels a recipe runs on, by Linux' names, per `family()`."""

# Apple names the same Arm features differently.
APPLE_FLAGS = {
    "FEAT_FP16": "asimdhp",
    "FEAT_DotProd": "asimddp",
    "FEAT_I8MM": "i8mm",
    "FEAT_BF16": "bf16",
    "FEAT_SME": "sme",
}
POLICY_VARIABLES = (
    *("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    *(
        "OPENBLAS_NUM_THREADS",
        "OPENBLAS_CORETYPE",
        "OMP_DYNAMIC",
        "OMP_PROC_BIND",
        "OMP_PLACES",
        "GOMP_CPU_AFFINITY",
    ),
    *("KMP_AFFINITY", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "ATEN_CPU_CAPABILITY"),
    *("MALLOC_ARENA_MAX", "LD_PRELOAD"),
)
"""Environment variables that change speed: waiting, threads, instruction set, allocator."""

LIBRARIES = (
    *("torch", "transformers", "tokenizers", "safetensors", "accelerate", "torchao", "bitsandbytes"),
    *("onnx", "onnxruntime", "openvino", "nncf", "optimum.intel", "numpy", "evaluate", "datasets"),
)
"""Import names of the libraries whose version decides numbers."""

# Only the import names that differ from the distribution's, or that several distributions provide.
DISTRIBUTIONS = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino"),
    "pynvml": ("nvidia-ml-py",),
    "yaml": ("PyYAML",),
    "sklearn": ("scikit-learn",),
}
HUB = "https://huggingface.co"


def family() -> str:
    """'x86', 'arm' or the machine's own name: the key of `FLAGS`."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64", "i686"):
        return "x86"
    return "arm" if machine.startswith(("arm", "aarch64")) else machine


def cpu_flags() -> frozenset[str]:
    """Instruction set flags of the first CPU by Linux' names; empty where the system does not tell."""
    if sys.platform == "darwin":
        intel = _sysctl("machdep.cpu.features") + b" " + _sysctl("machdep.cpu.leaf7_features")
        apple = {flag for name, flag in APPLE_FLAGS.items() if any(_sysctl(f"hw.optional.arm.{name}"))}
        return frozenset({*intel.decode().lower().split(), *apple, *(["asimd"] if family() == "arm" else [])})
    info = _cpuinfo()
    return frozenset((info.get("flags") or info.get("Features") or "").split())


def cpu_model() -> str:
    """The CPU's name, or its part number where an Arm kernel has no name for it."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string").decode() or platform.machine()
    info = _cpuinfo()
    if "model name" not in info and "CPU part" in info:
        return f"Arm implementer {info.get('CPU implementer')} part {info['CPU part']}"
    return info.get("model name") or platform.processor() or platform.machine()


def physical_cores(root: Path = ROOT) -> int:
    """Physical cores this process may use: its CPU affinity, SMT siblings once, within the cgroup's quota.

    A quota of 1.5 CPUs counts as one: a second thread would be throttled for part of every period.
    """
    cores = set()
    usable = usable_cpus()
    for cpu in usable:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        core, package = text(topology / "core_id"), text(topology / "physical_package_id")
        cores.add((package, core or cpu))
    quota = cgroup_cpus(root)
    return max(1, len(cores) if quota is None else min(len(cores), int(quota)))


def memory_bytes(root: Path = ROOT) -> int:
    """Memory this process may use: the machine's, or the cgroup's limit where that is lower."""
    import psutil

    limits = cgroup("memory", "memory.max", root) + cgroup("memory", "memory.limit_in_bytes", root)
    return min([psutil.virtual_memory().total, *(int(limit) for limit in limits if limit.isdigit())])


def available_bytes(root: Path = ROOT) -> int:
    """Memory that can still be taken: the machine's, or what the cgroup's limit leaves where that is less."""
    import psutil

    left = []
    for most, now in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        pairs = zip(cgroup("memory", most, root), cgroup("memory", now, root), strict=False)
        left += [int(limit) - int(used) for limit, used in pairs if limit.isdigit()]
    return min([psutil.virtual_memory().available, *left])


def cgroup_cpus(root: Path = ROOT) -> float | None:
    """CPUs granted by the tightest cgroup v1 or v2 quota on this process; None without one."""
    pairs = [line.split() for line in cgroup("cpu", "cpu.max", root)]
    quotas, periods = cgroup("cpu", "cpu.cfs_quota_us", root), cgroup("cpu", "cpu.cfs_period_us", root)
    pairs += [list(pair) for pair in zip(quotas, periods, strict=True)]
    return min((int(quota) / int(period) for quota, period in pairs if quota.isdigit()), default=None)


def gpus() -> list[dict[str, Any]]:
    """NVIDIA GPUs: name, memory_bytes, capability (such as 8.9), driver. Empty without a driver."""
    try:
        import pynvml as nvml
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        driver = nvml.nvmlSystemGetDriverVersion()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return [_gpu(nvml, handle, driver) for handle in handles]
    except nvml.NVMLError:
        return []
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any, driver: str) -> dict[str, Any]:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
    except nvml.NVMLError_NotSupported:
        memory = None  # boards that share the host's memory have none of their own to report
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return {
        "name": nvml.nvmlDeviceGetName(handle),
        "memory_bytes": memory,
        "capability": float(f"{major}.{minor}"),
        "driver": driver,
    }


def cuda_available() -> bool:
    """Whether a driver shows a GPU that CUDA_VISIBLE_DEVICES does not hide; no word on a library's build."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in ("", "-1", "NoDevFiles")
    return not hidden and bool(gpus())


@functools.cache
def installed(package: str) -> str | None:
    """Version of the distribution behind an import name, without importing it; None when it is missing.

    A folder of that name in the working directory (a namespace package) is not an installation.
    """
    from importlib import metadata

    spec = importlib.util.find_spec(package.partition(".")[0])
    # a dotted name lies in a namespace that several distributions share, which has no origin of its own
    if spec is None or (spec.origin is None and "." not in package):
        return None
    for distribution in DISTRIBUTIONS.get(package, (package,)):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None if spec.origin is None else "unknown"


def versions() -> dict[str, str]:
    """Versions of Python, qtool and the libraries that decide numbers; a missing one is left out."""
    import qtool

    found = {name: installed(name) for name in LIBRARIES}
    own = {"python": platform.python_version(), "qtool": qtool.__version__}
    return own | {name: version for name, version in found.items() if version is not None}


def fingerprint() -> dict[str, Any]:
    """What decides numbers on this machine and stays the same from run to run: no free memory, no load.

    Ask in the parent: the thread variables are those of the caller's environment, so in a child they would be
    the ones qtool itself has set. Memory is rounded to GiB because boots differ by some pages.
    """
    flags = cpu_flags()
    try:
        system = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        system = f"{platform.system()} {platform.mac_ver()[0]}".strip()
    cpu = ROOT / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
    return {
        "cpu_model": cpu_model(),
        "cpu_flags": sorted(flags.intersection(FLAGS.get(family(), ()))),
        "physical_cores": physical_cores(),
        "logical_cpus": len(usable_cpus()),
        "memory_gib": round(memory_bytes() / 2**30),
        "kernel": platform.release(),
        "os": system,
        "libc": " ".join(platform.libc_ver()).strip(),
        "governor": text(cpu),
        "huge_pages": text(ROOT / "sys/kernel/mm/transparent_hugepage/enabled"),
        "gpus": gpus(),
        **({"topology": joined} if (joined := topology.read()) else {}),
        "environment": {name: os.environ[name] for name in POLICY_VARIABLES if name in os.environ},
    }


def fingerprint_hash(facts: dict[str, Any]) -> str:
    """Sixteen hex digits of the SHA-256 of `facts` as canonical JSON: equal on the same machine."""
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def hub_switched_off() -> str | None:
    """The environment variable that keeps this process off the hub, by huggingface_hub's own rule; else None."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return next((n for n in names if os.environ.get(n, "").upper() in ("1", "ON", "YES", "TRUE")), None)


def hub_status(timeout_s: float = 3.0) -> tuple[bool, str]:
    """Whether the Hugging Face hub answers within `timeout_s`, and a sentence that says so or why not.

    Honours HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE and HF_ENDPOINT as huggingface_hub's `constants.py` does.
    """
    import threading

    if name := hub_switched_off():
        return False, f"the hub is switched off by {name}={os.environ[name]}"
    endpoint = (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    if not endpoint.startswith(("http://", "https://")):
        return False, f"HF_ENDPOINT is '{endpoint}', expected a URL such as {HUB}"
    answers: list[tuple[bool, str]] = []
    # urllib's timeout does not cover the name look-up, which alone can hang for much longer.
    thread = threading.Thread(target=lambda: answers.append(_head(endpoint, timeout_s)), daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else (False, f"{endpoint} did not answer within {timeout_s:g} s")


def _head(endpoint: str, timeout_s: float) -> tuple[bool, str]:
    import http.client
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=timeout_s):
            return True, f"{endpoint} is reachable"
    except urllib.error.HTTPError as error:
        # A mirror need not answer HEAD at its root; a proxy's refusal or a broken server is no hub.
        if error.code in (404, 405, 501):
            return True, f"{endpoint} is reachable"
        return False, f"{endpoint} answered {error.code} {error.reason}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return False, f"{endpoint} cannot be reached: {getattr(error, 'reason', error)}"


def _cpuinfo() -> dict[str, str]:
    """The first processor's block of /proc/cpuinfo; on Arm the lines that follow the blocks as well."""
    info: dict[str, str] = {}
    for line in (text(ROOT / "proc/cpuinfo") or "").splitlines():
        name, separator, value = line.partition(":")
        if separator:
            info.setdefault(name.strip(), value.strip())
    return info


def _sysctl(name: str) -> bytes:
    """A macOS kernel value, without starting a process; empty where there is none of that name."""
    libc = ctypes.CDLL(None)
    size = ctypes.c_size_t(4096)
    buffer = ctypes.create_string_buffer(size.value)
    if libc.sysctlbyname(name.encode(), buffer, ctypes.byref(size), None, ctypes.c_size_t(0)):
        return b""
    return buffer.raw[: size.value].rstrip(b"\0")
