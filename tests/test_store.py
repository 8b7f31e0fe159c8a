"""The run folder: whole lines only, nothing rewritten, one writer, the last line for a measurement counts."""

from __future__ import annotations

import errno
import json
import os

import pytest

from qtool import store
from qtool.core import Measurement, QtoolError


def measurement(trial="t", status="ok", number=1):
    return Measurement(
        trial_id=trial,
        recipe="fp32",
        device="cpu",
        batch_size=1,
        stage="measure",
        round=number,
        status=status,
        samples={"latency_s": [0.25, 0.5]},
        started_at="2026-01-01T00:00:00+00:00",
    )


def test_what_is_written_is_read_back_equal(tmp_path):
    with store.Writer(tmp_path) as writer:
        writer.append(measurement())
    assert store.read(tmp_path) == [measurement()]


def test_a_torn_last_line_is_dropped_and_the_whole_ones_stay_byte_for_byte(tmp_path):
    with store.Writer(tmp_path) as writer:
        writer.append(measurement())
    path = tmp_path / "results.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"schema_version": 1, "tri')
    assert len(store.read(tmp_path)) == 1
    with store.Writer(tmp_path) as writer:
        writer.append(measurement("u"))
    assert path.read_bytes().startswith(whole)
    assert [m.trial_id for m in store.read(tmp_path)] == ["t", "u"]


def test_a_second_writer_is_refused(tmp_path):
    with store.Writer(tmp_path), pytest.raises(QtoolError, match="another sweep is writing"):
        store.Writer(tmp_path)


def test_the_last_line_for_a_measurement_counts():
    first, second = measurement(status="failed"), measurement(status="ok")
    assert store.latest([first, second]) == {("t", "measure", 1): second}


def test_not_a_number_is_never_written(tmp_path):
    with store.Writer(tmp_path) as writer, pytest.raises(ValueError, match="not JSON compliant"):
        writer.append(measurement().model_copy(update={"samples": {"latency_s": [float("nan")]}}))
    assert (tmp_path / "results.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    "line", ["{}", "[]", "null", '{"schema_version": "1"}', "{", '{"schema_version": 2}']
)
def test_a_line_that_is_no_measurement_is_named_by_its_number(tmp_path, line):
    good = json.dumps(measurement().model_dump())
    (tmp_path / "results.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(QtoolError, match="line 2"):
        store.read(tmp_path)


def test_json_files_are_replaced_whole(tmp_path):
    store.write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.write_json(tmp_path / "a.json", {"x": float("inf")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}


@pytest.mark.parametrize("fault", ["short", "error"])
def test_a_full_disk_is_a_line_for_the_user_and_the_run_stays_readable(tmp_path, monkeypatch, fault):
    real = os.write

    def full(descriptor, data):
        real(descriptor, data[: len(data) // 2])
        if fault == "error":
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(data) // 2

    with store.Writer(tmp_path) as writer:
        writer.append(measurement())
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(QtoolError, match=r"Make room, then add --resume"):
            writer.append(measurement("u"))
        monkeypatch.setattr(os, "write", real)
        writer.append(measurement("v"))
    assert [m.trial_id for m in store.read(tmp_path)] == ["t", "v"]
