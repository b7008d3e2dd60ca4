"""Texts for people: short, safe and right to the last digit."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dist_tune.cli.records.record_page import hardware, phases, shared_fields
from dist_tune.cli.tables import ago, facts, grid, least_width, milliseconds, plain, size
from dist_tune.output import amount
from tests.cached_records import candidate, environment, record

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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(30, "30 s"), (90, "1 min"), (3500, "58 min"), (5400, "1 h"), (80_000, "22 h"), (90_000, "1 d"), (40_000_000, "462 d"), (-30, "0 s")],
)
def test_ages_are_short(seconds: float, text: str):
    """Rounded down; a clock that is some seconds behind is no reason for a minus sign."""
    assert ago(datetime.now(UTC) - timedelta(seconds=seconds)) == text


def test_what_has_not_happened_yet_has_a_date():
    """A clock is wrong, here or there: no age then."""
    assert ago(datetime(2999, 1, 2, tzinfo=UTC)) == "2999-01-02"
    assert ago(datetime.min.replace(tzinfo=UTC)).endswith(" d")


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (232448, "227 KiB"),
        (2**20 - 1, "1 MiB"),
        (2**37, "128 GiB"),
    ],
)
def test_sizes_have_units(n_bytes: int, text: str):
    assert size(n_bytes) == text


def test_times_have_the_digits_that_matter():
    """Four decimals as in the log where a kernel is fast, fewer where noise is larger than they are."""
    assert [milliseconds(value) for value in (None, 0.0, 0.13914)] == ["", "0.0000", "0.1391"]
    assert [milliseconds(value) for value in (12.3456, 1234.56, -0.5)] == ["12.35", "1235", "-0.5000"]


def test_words():
    assert [amount(n, "record") for n in (0, 1, 2)] == ["0 records", "1 record", "2 records"]
    assert hardware(environment(world_size=1, ranks_per_host=1, device="x86_64", device_count=0)) == "1 rank on x86_64 without a GPU"
    assert phases(record()) == "race 8.0"
    assert shared_fields(record(n_candidates=5)) == {"num_warps": 4, "FAST": True, "MODE": "x", "NONE": None}
    assert shared_fields(record(candidates=[candidate(0)], winner=0)) == {}


def test_a_table_is_never_squeezed_below_its_numbers():
    """``least_width`` is enough for every column but the last, which wraps."""
    table = grid("id", "ms\nof all", "why", right=("ms\nof all",))
    table.add_row("0123456789 " * 6, "0.1391", "because " * 30)
    assert least_width("no table") == 0
    assert least_width(facts({"name": "x" * 20})) < 40
    console = Console(width=least_width(table))
    with console.capture() as rendered:
        console.print(table)
    lines = rendered.get().splitlines()
    assert lines[2].startswith("0123456789 " * 6 + "  0.1391  because because")
    assert len(lines) > 4
