"""Texts for people: short, safe and right to the last digit."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.cli.render import ago, milliseconds, plain, rendered, table

pytestmark = pytest.mark.once


@given(st.text(), st.integers(4, 50))
def test_a_plain_text_is_one_printable_line(text: str, limit: int):
    """Whatever is in it, and never longer than allowed."""
    assert plain(text, limit).isprintable()
    assert len(plain(text, limit)) <= limit


def test_a_plain_text_keeps_what_can_be_read():
    """Both ends of a long one, accents, and characters that cannot be shown by their code."""
    assert plain("größe  =\n 7") == "größe = 7"
    assert plain("a\x1b[2Jb\udc80\x00") == "a\\x1b[2Jb\\udc80\\x00"
    assert plain("begin" + "x" * 100 + "end", 12) == "beginxx…xend"


def test_numbers_are_short():
    """Ages are rounded down; a clock some seconds behind is no reason for a minus sign; what is to come has a date."""
    ages = {30: "30 s", 90: "1 min", 3500: "58 min", 5400: "1 h", 80_000: "22 h", 90_000: "1 d", 40_000_000: "462 d", -30: "0 s"}
    assert [ago(datetime.now(UTC) - timedelta(seconds=seconds)) for seconds in ages] == [*ages.values()]
    assert ago(datetime(2999, 1, 2, tzinfo=UTC)) == "2999-01-02"
    times = {0.0: "0.0000", 0.13914: "0.1391", 12.3456: "12.35", 1234.56: "1235", -0.5: "-0.5000"}
    assert [milliseconds(value) for value in times] == [*times.values()]


def test_a_table_shows_what_there_is(monkeypatch: pytest.MonkeyPatch):
    """Numbers to the right, no column without a text, and on a narrow terminal only the last column is folded."""
    rows = [
        {"id": "0123456789 " * 6, "ms\nof all": 0.1391, "regs": None, "why": "because " * 30},
        {"id": "a", "ms\nof all": 12.0, "regs": None, "why": ""},
    ]
    lines = rendered([table(rows)]).splitlines()
    assert lines[0].split() == ["ms"]
    assert lines[2] == ("0123456789 " * 6).ljust(68)[:65] + "  0.1391  " + ("because " * 30).rstrip()
    assert lines[3].split() == ["a", "12.00"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    for terminal in ("xterm", "dumb"):
        monkeypatch.setenv("TERM", terminal)
        lines = rendered([table(rows)]).splitlines()
        assert "  0.1391  because because" in lines[2]
        assert "".join(lines).count("because") == 30
    assert rendered(["a", table([]), "b"]) == "a\nb\n"
