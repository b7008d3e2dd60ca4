"""The logger: levels, bound values, and lines of several threads."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dist_tune.logger import Logger, Message

pytestmark = pytest.mark.once


def test_a_line_is_time_level_and_message():
    """With the line's end; the record holds the parts."""
    lines: list[Message] = []
    Logger(lines.append).info("a {b} <c> %s")
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} INFO    a \{b\} <c> %s\n", lines[0])
    assert (lines[0].record["level"], lines[0].record["message"]) == (("INFO", 20), "a {b} <c> %s")


@pytest.mark.parametrize(("least", "kept"), [("TRACE", 5), ("DEBUG", 4), ("INFO", 3), ("WARNING", 2), ("ERROR", 1)])
def test_events_below_the_level_are_left_out(least: str, kept: int):
    lines: list[Message] = []
    log = Logger(lines.append, least)
    for name in ("trace", "debug", "info", "warning", "error"):
        getattr(log, name)(name)
    assert [each.record["message"] for each in lines] == ["trace", "debug", "info", "warning", "error"][5 - kept :]


def test_bound_values_are_the_bound_logger_s_alone():
    """A binding adds to those before it, and changes neither the logger that it was made from nor a sister."""
    lines: list[Message] = []
    log = Logger(lines.append)
    one, other = log.bind(a=1), log.bind(a=2)
    for each in (log, one, other, one.bind(b=3)):
        each.info("")
    assert [each.record["extra"] for each in lines] == [{}, {"a": 1}, {"a": 2}, {"a": 1, "b": 3}]


def test_lines_of_several_threads_are_whole(tmp_path: Path):
    """One thread writes at a time, also through loggers that were bound apart."""
    with open(tmp_path / "log", "w", encoding="utf-8") as file:

        def write(line: Message) -> None:
            for part in line.partition(" "):
                file.write(part)
                time.sleep(0)  # another thread's turn

        log = Logger(write)

        def tell(number: int) -> None:
            for _ in range(200):
                log.bind(n=number).info("x" * 40)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(tell, range(4)))
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 800
    assert all(re.fullmatch(r"[\d:.]{12} INFO    x{40}", line) for line in lines)
