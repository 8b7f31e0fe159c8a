"""Progress of a sweep as plain lines, with the time that is left."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from qtool.plan import STAGE_S, minutes


def tell(text: str, stream: TextIO) -> None:
    """Print a line. A reader that has gone, as in `qtool sweep ... | head`, does not end the work."""
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Say:
    """Progress as plain lines on standard error: whole, and only while no child is timing."""

    def __init__(self) -> None:
        self.done: dict[str, list[float]] = {}
        self.left: dict[str, int] = {}

    def __call__(self, text: str) -> None:
        tell(text, sys.stderr)

    def stage(self, stage: str, text: str) -> None:
        seconds = 0.0
        for name, count in self.left.items():
            seen = self.done.get(name)
            seconds += count * (sum(seen) / len(seen) if seen else STAGE_S[name])
        self(f"{text:<50} {minutes(seconds)} left")

    def finished(self, stage: str, seconds: float) -> None:
        self.left[stage] = max(0, self.left.get(stage, 0) - 1)
        if seconds > 0:
            self.done.setdefault(stage, []).append(seconds)
