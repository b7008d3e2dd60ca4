"""JSON of lines that a tuning writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.json_bytes import json_bytes

pytestmark = pytest.mark.once
_plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_values = st.recursive(_plain, lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(), each, max_size=4), max_leaves=20)


@given(_values)
def test_it_is_read_as_what_json_writes(values: Any):
    """Any plain values, on one line; numbers of any size."""
    line = json_bytes(values)
    assert json.loads(line) == json.loads(json.dumps(values))
    assert b"\n" not in line


def test_what_json_does_not_know_is_text():
    """A path as its name, a lone surrogate as a question mark; integers as names of fields are their digits."""
    assert json.loads(json_bytes({"folder": Path("/a"), 3: ("x",)})) == {"folder": "/a", "3": ["x"]}
    assert json_bytes({"file": "a\udcff", "folder": Path("/a")}) == b'{"file":"a?","folder":"/a"}'
