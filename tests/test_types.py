"""Decorated functions as ``help`` and ``inspect`` see them; tests/test_wheel.py has what type checkers say."""

from __future__ import annotations

import inspect
import pydoc
import re
from typing import Any

import pytest

from dist_tune import autotune, contextual_autotune
from tests.function_options import BLOCKS

pytestmark = pytest.mark.once


def scaled(x: int, factor: float = 1.0, *, block: int = 0, **more: Any) -> float:
    """Scale it."""
    return x * factor


def test_help_shows_the_keywords_of_the_tuner():
    """Behind the function's own parameters, before ``**more``; a method's without ``self``."""
    tuned: Any = autotune(BLOCKS, None)(scaled)
    text = re.sub("\x08.", "", pydoc.render_doc(tuned))
    own = "scaled(x: 'int', factor: 'float' = 1.0, *, block: 'int' = 0, "
    keywords = (
        "autotune: 'bool' = True, autotune_verbose: 'bool' = False, autotune_pg: 'ProcessGroup | None' = None, "
        "autotune_allow_arg_overwrite: 'bool' = False"
    )
    assert "Scale it." in text
    flat = re.sub(r"(?<=\() | (?=\))", "", " ".join(text.split()))  # Python 3.13 puts each parameter on a line of its own
    assert f"{own}{keywords}, **more: 'Any') -> 'float'" in flat
    assert list(inspect.signature(tuned.__get__(3)).parameters)[:3] == ["factor", "block", "autotune"]


def test_both_tuners_keep_the_function():
    for tuned in (autotune(BLOCKS, None)(scaled), contextual_autotune()(scaled)):
        assert (tuned.__wrapped__, tuned.__name__, tuned.__doc__) == (scaled, "scaled", "Scale it.")
    assert inspect.signature(contextual_autotune()(scaled)) == inspect.signature(scaled)
