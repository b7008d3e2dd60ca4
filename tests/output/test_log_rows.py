"""Rows of a line of the log that is longer than a row."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.output.log import WIDTH, unwrapped, wrapped

pytestmark = pytest.mark.once
_INDENT = 23
_words = st.lists(st.tuples(st.integers(1, 190), st.integers(1, 6)), min_size=1, max_size=20)


@given(_words)
def test_rows_are_those_of_textwrap(words: list[tuple[int, int]]):
    """Words and spaces of any lengths, also words that fit into no row."""
    line = "".join("x" * n + " " * m for n, m in words).rstrip(" ")
    rows = textwrap.wrap(line, WIDTH, subsequent_indent=" " * _INDENT, expand_tabs=False, replace_whitespace=False, break_on_hyphens=False)
    # textwrap leaves the spaces before a word that it breaks at the very end of a row.
    assert wrapped(line).split("\n") == [row.rstrip(" ") for row in rows] or len(line) <= WIDTH


@given(st.lists(st.text("ab-/.", min_size=1, max_size=WIDTH - _INDENT), min_size=1, max_size=40))
def test_words_that_fit_into_a_row_come_back_whole(words: list[str]):
    """What ``unwrapped`` makes of the rows is the line, and no row is too long."""
    line = " ".join(words)
    assert unwrapped(wrapped(line)) == line
    assert all(len(row) <= WIDTH for row in wrapped(line).split("\n"))
