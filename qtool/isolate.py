"""The only place that starts processes: runs one worker stage and gives back its answer or how it died.

The parent blocks in one `select` on the answer pipe while a child works: no polling and no drawing beside a
measurement. Each child leads its own process group and exits with the whole group when the parent is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Libraries that phone home, ask a hub or draw bars would disturb a measurement or a log.
QUIET_ENV = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "ORT_DISABLE_TELEMETRY": "1",
    "NNCF_CI": "1",
    "CUDA_MODULE_LOADING": "LAZY",
}

# OpenBLAS, which is numpy's, heeds its own variable before OpenMP's; RAYON's is of the fast tokenizers.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


@dataclass(frozen=True)
class Outcome:
    """How a child ended: `status` is ok, user_error, unavailable, failed, timeout or oom."""

    status: str
    values: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    next_step: str | None = None


def run(
    stage: str,
    spec: dict[str, Any],
    *,
    log: Path,
    timeout_s: float,
    threads: int,
    offline: bool = True,
    stop: int | None = None,
) -> Outcome:
    """Run `qtool.worker <stage>` with `spec` in a fresh process; its output goes to `log`.

    `offline` keeps the child off the hub: only the probe may reach for one. With `stop`, a pipe's read end,
    the child may run beside others: it ends when that pipe is closed, and its idle threads sleep.
    Raises KeyboardInterrupt when it was stopped.
    """
    env = {**os.environ, **QUIET_ENV, **dict.fromkeys(THREAD_VARIABLES, str(threads))}
    if stop is not None:
        env.setdefault("OMP_WAIT_POLICY", "passive")  # it is not timed, and spinning starves its neighbour
    if offline:
        env |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    oom_before = oom_kills()
    log.parent.mkdir(parents=True, exist_ok=True)
    read_end, write_end = os.pipe()
    with log.open("ab") as output, os.fdopen(read_end, "rb", buffering=0) as answers:
        try:
            child = subprocess.Popen(
                # -P: a file of the user's called evaluate.py or random.py is not the library of that name
                [sys.executable, "-P", "-m", "qtool.worker", stage, str(write_end)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=env,
                pass_fds=(write_end,),
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        try:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(json.dumps(spec).encode() + b"\n")
                child.stdin.flush()
            answer = _read_until_closed(answers, time.monotonic() + timeout_s, stop)
            timed_out = answer is None
        finally:
            # The answer pipe is closed or the time is up: whatever is left of the group is not wanted.
            _kill_group(child, grace_s=5.0 if not sys.exc_info()[0] else 0.0)
    if timed_out:
        return Outcome(
            "timeout", {}, f"no answer within {timeout_s:g} s ({stage})", "give it more time with --timeout"
        )
    with contextlib.suppress(json.JSONDecodeError):  # killed in the middle of its answer
        message = json.loads(answer or b"")
        return Outcome(
            message["status"], message.get("values", {}), message.get("error"), message.get("next_step")
        )
    return _died(child.returncode, oom_kills() - oom_before, log)


def _read_until_closed(pipe: Any, deadline: float, stop: int | None) -> bytes | None:
    """Everything the child writes until it closes the pipe or dies; None when the time is up."""
    parts = []
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        if stop is not None:
            selector.register(stop, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            ready = [key.fileobj for key, _ in selector.select(left)]
            if stop in ready:
                raise KeyboardInterrupt
            if not ready:
                break
            part = pipe.read(1 << 20)
            if not part:
                return b"".join(parts)
            parts.append(part)
    return None


def _kill_group(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """Let the child exit by itself for `grace_s`, then end it and everything it started."""
    if grace_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    if child.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()


def _died(returncode: int, new_oom_kills: int, log: Path) -> Outcome:
    if returncode == -signal.SIGKILL and new_oom_kills > 0:
        return Outcome(
            "oom",
            {},
            "the kernel killed it: out of memory",
            "use a smaller batch, a smaller model or a machine with more memory",
        )
    if returncode < 0:
        name = signal.Signals(-returncode).name
        hint = "it may have run out of memory; " if returncode == -signal.SIGKILL else ""
        return Outcome("failed", {}, f"killed by {name}", f"{hint}see {log.name}, then --resume")
    return Outcome("failed", {}, f"ended with exit code {returncode} and no answer", f"see {log.name}")


def oom_kills() -> int:
    """How many processes this kernel has killed for memory since it started; 0 where it does not tell."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        return 0
    return 0
