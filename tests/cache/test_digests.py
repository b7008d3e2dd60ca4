"""Lines with a checksum: what was written comes back, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.cache import sealed_line, text_of

pytestmark = pytest.mark.once

TEXTS = st.binary(max_size=200).filter(lambda text: b"\n" not in text)


@given(TEXTS)
def test_a_text_comes_back(text: bytes):
    line = sealed_line(text)
    assert line.endswith(b"\n")
    assert text_of(line[:-1]) == text


@given(TEXTS, st.data())
def test_a_torn_line_is_none(text: bytes, data: st.DataObject):
    """Cut anywhere."""
    line = sealed_line(text)[:-1]
    n_bytes = data.draw(st.integers(0, len(line) - 1))
    assert text_of(line[:n_bytes]) is None or text_of(line[:n_bytes]) == b""


@given(TEXTS, st.data())
def test_a_damaged_line_is_none(text: bytes, data: st.DataObject):
    """A byte of the text changed."""
    line = bytearray(sealed_line(text + b"x")[:-1])
    at = data.draw(st.integers(9, len(line) - 1))
    line[at] ^= data.draw(st.integers(1, 255))
    assert text_of(bytes(line)) is None
