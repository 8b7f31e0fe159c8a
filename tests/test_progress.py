"""Progress lines: a reader that goes away does not end the sweep."""

from __future__ import annotations

import os

from qtool.progress import Say, tell


def test_a_reader_that_has_gone_is_no_reason_to_stop():
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as stream:
        tell("one", stream)
        tell("two", stream)


def test_the_time_left_is_the_mean_of_what_was_seen_and_a_guess_before(capsys):
    say = Say()
    say.left = {"measure": 3}
    say.finished("measure", 10.0)
    say.finished("measure", 20.0)
    say.stage("measure", "fp32")
    assert capsys.readouterr().err.split() == ["fp32", "15", "s", "left"]
