"""Notices about many sites at once: a few on the terminal, all in the log."""

from __future__ import annotations

from typing import Any

import pytest

from dist_tune.output import Logger
from dist_tune.tuning.notices import Notices

pytestmark = pytest.mark.once


def test_of_twenty_sites_three_are_told_on_the_terminal():
    """And how many more there are; the log has a line for each, and a second tuning shows nothing."""
    shown: list[str] = []
    lines: list[str] = []

    def write(line: str, record: Any) -> None:
        lines.append(line)
        if record.bound.get("progress"):
            shown.append(line[21:])

    notices, told = Notices(), {f"missed {k}": f"site {k} is tuned" for k in range(20)}
    notices.say_each(Logger(write), told, "sites more are tuned for such reasons: {rank-0}.log")
    notices.say_each(Logger(write), told, "")
    assert shown == ["site 0 is tuned", "site 1 is tuned", "site 2 is tuned", "17 sites more are tuned for such reasons: {rank-0}.log"]
    assert len(lines) == 41
