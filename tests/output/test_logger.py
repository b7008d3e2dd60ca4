"""The logger: levels, bound values, lines of several threads, and the program's logging, which neither hears it nor changes it."""

from __future__ import annotations

import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dist_tune.output.logger import Logger, Record

pytestmark = pytest.mark.once


def heard(least: str = "DEBUG") -> tuple[Logger, list[tuple[str, Record]]]:
    """A logger, and what it writes."""
    lines: list[tuple[str, Record]] = []
    return Logger(lambda line, record: lines.append((line, record)), least), lines


def test_a_line_is_time_level_and_message():
    """As it was given: nothing in it is a placeholder."""
    log, lines = heard()
    log.info("a {b} <c> %s")
    ((line, record),) = lines
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} INFO    a \{b\} <c> %s", line)
    assert (record.level, record.level_name, record.message) == (20, "INFO", "a {b} <c> %s")


@pytest.mark.parametrize(("least", "kept"), [("TRACE", 5), ("DEBUG", 4), ("INFO", 3), ("WARNING", 2), ("ERROR", 1)])
def test_events_below_the_level_are_left_out(least: str, kept: int):
    log, lines = heard(least)
    for name in ("trace", "debug", "info", "warning", "error"):
        getattr(log, name)(name)
    assert [record.message for _, record in lines] == ["trace", "debug", "info", "warning", "error"][5 - kept :]


def test_bound_values_are_the_bound_logger_s_alone():
    """A binding adds to those before it, and changes neither the logger that it was made from nor a sister."""
    log, lines = heard()
    one, other = log.bind(a=1), log.bind(a=2)
    for each in (log, one, other, one.bind(b=3)):
        each.info("")
    assert [record.bound for _, record in lines] == [{}, {"a": 1}, {"a": 2}, {"a": 1, "b": 3}]


def test_the_program_s_settings_do_not_reach_it(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Neither logging.disable, nor a level of the root, nor a factory of records; and the program's handlers hear nothing."""

    def factory(*args: Any, **values: Any) -> logging.LogRecord:
        raise AssertionError("the program's own")

    monkeypatch.setattr(logging, "_logRecordFactory", factory)
    monkeypatch.setattr(logging.root, "level", logging.CRITICAL)
    logging.disable(logging.CRITICAL)
    try:
        log, lines = heard()
        log.info("a")
    finally:
        logging.disable(logging.NOTSET)
    assert len(lines) == 1
    assert caplog.records == []


def test_lines_of_several_threads_are_whole(tmp_path: Path):
    """One thread writes at a time, also through loggers that were bound apart."""
    with open(tmp_path / "log", "w", encoding="utf-8") as file:

        def write(line: str, record: Record) -> None:
            for part in f"{line}\n".partition(" "):
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
