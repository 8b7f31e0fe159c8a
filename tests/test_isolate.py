"""Child processes: every way to die becomes an outcome, and nothing is left behind."""

from __future__ import annotations

import functools
import os
import threading
import time

import pytest

from qtool import isolate


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Let a shell script stand in for the Python interpreter of the child; gives back a runner."""

    def run(script: str, timeout_s: float = 20.0) -> isolate.Outcome:
        path = tmp_path / "fake-python"
        path.write_text("#!/bin/bash\n" + script)
        path.chmod(0o755)
        monkeypatch.setattr(isolate.sys, "executable", str(path))
        return isolate.run(
            "measure", {"a": 1}, log=tmp_path / "logs" / "x.log", timeout_s=timeout_s, threads=1
        )

    return run


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_an_answer_on_the_pipe_is_the_outcome_and_the_log_keeps_the_rest(child, tmp_path):
    outcome = child(
        'read job; echo "job $job"; echo "{\\"status\\": \\"ok\\", \\"values\\": {\\"x\\": 2}}" >&$5'
    )
    assert outcome == isolate.Outcome("ok", {"x": 2})
    assert (tmp_path / "logs" / "x.log").read_text() == 'job {"a": 1}\n'


def test_a_killed_child_is_failed_with_the_signals_name(child):
    outcome = child("kill -9 $$")
    assert (outcome.status, outcome.error) == ("failed", "killed by SIGKILL")
    assert "--resume" in outcome.next_step


def test_a_child_killed_for_memory_is_oom(child, monkeypatch):
    counts = iter([3, 4])
    monkeypatch.setattr(isolate, "oom_kills", lambda: next(counts))
    assert child("kill -9 $$").status == "oom"


def test_a_crash_is_failed_with_its_exit_code(child):
    outcome = child("exit 7")
    assert (outcome.status, outcome.error) == ("failed", "ended with exit code 7 and no answer")


def test_a_child_killed_in_the_middle_of_its_answer_is_a_failure(child):
    assert child('echo \'{"status": "o\' >&$5; kill -9 $$').error == "killed by SIGKILL"


def test_a_segmentation_fault_is_named(child):
    assert child("kill -SEGV $$").error == "killed by SIGSEGV"


def test_time_up_ends_the_child_and_all_it_started(child, tmp_path):
    outcome = child(f"sleep 300 & echo $! > {tmp_path}/pid; sleep 300", timeout_s=1.0)
    assert outcome.status == "timeout"
    assert "--timeout" in outcome.next_step
    pid = int((tmp_path / "pid").read_text())
    for _ in range(50):
        if not alive(pid):
            break
        time.sleep(0.1)
    assert not alive(pid)


def test_what_a_child_started_does_not_outlive_its_answer(child, tmp_path):
    outcome = child(
        f'sleep 300 >&- 2>&- & echo $! > {tmp_path}/pid; echo \'{{"status": "ok"}}\' >&$5; exec 3>&-; kill -9 $$',
        timeout_s=3.0,
    )
    assert outcome.status in ("ok", "timeout")
    pid = int((tmp_path / "pid").read_text())
    time.sleep(0.3)
    assert not alive(pid)


def test_a_bad_job_fails_with_the_reason_and_a_traceback_in_the_log(tmp_path):
    outcome = isolate.run("harness", {"data": str(tmp_path)}, log=tmp_path / "x.log", timeout_s=60, threads=1)
    assert outcome.status == "failed"
    assert "FileNotFoundError" in outcome.error
    assert "Traceback" in (tmp_path / "x.log").read_text()


def test_closing_the_stop_pipe_ends_the_child_and_says_interrupted(child, tmp_path, monkeypatch):
    stop, write_end = os.pipe()
    threading.Timer(0.5, os.close, [write_end]).start()
    run = functools.partial(isolate.run, stop=stop)
    monkeypatch.setattr(isolate, "run", run)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        child(f"echo $$ > {tmp_path}/pid; sleep 300")
    os.close(stop)
    assert time.monotonic() - started < 15
    assert not alive(int((tmp_path / "pid").read_text()))


def test_only_children_that_run_side_by_side_wait_passively(child, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    stop, write_end = os.pipe()
    with monkeypatch.context() as patch:
        patch.setattr(isolate, "run", functools.partial(isolate.run, stop=stop))
        child(f'echo "${{OMP_WAIT_POLICY-unset}}" > {tmp_path}/env; exit 0')
    os.close(stop)
    os.close(write_end)
    assert (tmp_path / "env").read_text() == "passive\n"


def test_a_file_in_the_users_folder_does_not_stand_in_for_a_library(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise SystemExit(5)")
    monkeypatch.chdir(tmp_path)
    outcome = isolate.run("harness", {"data": "none"}, log=tmp_path / "x.log", timeout_s=60, threads=1)
    assert "FileNotFoundError" in outcome.error


def test_children_keep_the_waiting_policy_of_the_user(child, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    child(
        f'echo "$OMP_NUM_THREADS $RAYON_NUM_THREADS ${{OMP_WAIT_POLICY-unset}} $HF_HUB_OFFLINE" > {tmp_path}/env; exit 0'
    )
    assert (tmp_path / "env").read_text() == "1 1 unset 1\n"
    assert "OMP_WAIT_POLICY" not in os.environ
