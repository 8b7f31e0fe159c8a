"""The child processes of gpu_check.py: they import, wait for their job, and answer on their last line of output.

A child that waits has imported and not touched the GPU, so that the next recipe's imports cost no time of their own.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from qtool import isolate, plugins
from qtool.core import Unavailable

CHILD_TIMEOUT_S = 150


def start(mode: str, spec: dict[str, Any]) -> subprocess.Popen[str]:
    """A child that imports what `spec`'s recipe needs and then waits for `go`."""
    recipe = spec["recipe"]
    method, runtime = plugins.load("methods", recipe["method"]), plugins.load("runtimes", recipe["runtime"])
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, **isolate.QUIET_ENV, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    env |= dict.fromkeys(isolate.THREAD_VARIABLES, str(spec["threads"])) | {"PYTHONPATH": path}
    with Path(f"{spec['artifact']}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=env,
            text=True,
        )
    assert process.stdin is not None
    process.stdin.write(json.dumps([*method.PACKAGES, *runtime.PACKAGES]) + "\n")
    process.stdin.flush()
    return process


def finish(process: subprocess.Popen[str], spec: dict[str, Any]) -> dict[str, Any]:
    """Let a started child work on `spec`; its answer, with a status of a trial."""
    try:
        output, _ = process.communicate(json.dumps(spec) + "\n", timeout=CHILD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"status": "timeout", "error": f"no answer within {CHILD_TIMEOUT_S} s"}
    try:
        return json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        return {"status": "failed", "error": f"ended with exit code {process.returncode} and no answer"}


def child(mode: str) -> None:
    """Import, wait, work, answer on the last line of standard output. Does not return."""
    for package in json.loads(sys.stdin.readline()):
        importlib.import_module(package)

    from qtool import worker

    spec = json.loads(sys.stdin.readline())
    answer: dict[str, Any]
    try:
        answer = {"status": "ok", "values": {"prepare": prepare, "measure": measured}[mode](spec)}
    except Unavailable as error:
        answer = {"status": "skipped", "error": str(error)}
    # whatever a library raises is this recipe's row
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        message = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        answer = {"status": "oom" if worker._is_oom(error) else "failed", "error": message}
    print(f"\n{json.dumps(answer, allow_nan=False)}", flush=True)
    os._exit(0)  # interpreter shutdown of engine libraries can hang


def prepare(spec: dict[str, Any]) -> dict[str, Any]:
    """Build the artifact, then reload, audit and score it, in one process: what a sweep does in two."""
    from qtool import worker

    built = worker.build(spec)
    gc.collect()
    scored = worker.score({name: value for name, value in spec.items() if name != "batch_size"})
    return {"build_s": built["build_s"], "check_max_abs_diff": scored["check_max_abs_diff"]} | {
        "predictions": spec["predictions"],
        "audit": scored["audit"],
    }


def measured(spec: dict[str, Any]) -> dict[str, Any]:
    """A measuring child's values and its p50, from fewer calls than a sweep's."""
    from qtool import gpu, measure, stats

    measure.MIN_TIME_S, measure.CALLS, measure.E2E_CALLS, measure.WARM_UP_MAX_S = 0.5, 32, 8, 3.0
    gpu.PASS_S = 2.0
    found = measure.measure(spec)
    return found["values"] | {"latency_p50_s": stats.percentile(found["samples"]["latency_s"], 0.5)}


if __name__ == "__main__":
    child(sys.argv[1])
