"""Builds that run at the same time: one artifact is made once, and the lines of all stay whole."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

from qtool import isolate, store, sweep
from tests.test_store import measurement


def test_recipes_that_share_an_artifact_build_it_one_after_the_other(tmp_path, monkeypatch):
    inside, most = [], []

    def build(self, trial):
        inside.append(trial)
        most.append(len(inside))
        time.sleep(0.05)
        inside.remove(trial)
        return isolate.Outcome("ok")

    monkeypatch.setattr(sweep.Sweep, "_build_alone", build)
    made = sweep.Sweep.__new__(sweep.Sweep)
    made.plan = SimpleNamespace(artifacts={"fp32": "key", "twin": "key"})
    made.building = {"key": threading.Lock()}
    threads = [
        threading.Thread(target=made._build, args=[SimpleNamespace(recipe=name)]) for name in ("fp32", "twin")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1]


def test_lines_of_many_threads_are_whole(tmp_path):
    with store.Writer(tmp_path) as writer:
        threads = [
            threading.Thread(target=lambda n=n: [writer.append(measurement(f"{n}-{i}")) for i in range(20)])
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len({line.trial_id for line in store.read(tmp_path)}) == 80
