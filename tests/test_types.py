"""Decorated functions as type checkers, ``help`` and ``inspect`` see them."""

from __future__ import annotations

import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dist_tune import autotune, contextual_autotune
from tests.function_options import BLOCKS

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[1]
PROGRAM = """
from typing import assert_type

import torch

from dist_tune import TunedClosure, TunedFunction, autotune, contextual_autotune


@contextual_autotune(is_dist=True)
def step(x: torch.Tensor, n: int = 1) -> float:
    return float(x[n])


@autotune([{"block": 1}], None)
def scaled(x: torch.Tensor, factor: float = 1.0, *, block: int = 0) -> torch.Tensor:
    return x * factor


@autotune(configs=[{"n_chunks": 1}], key=["x"])
def chunked(x: torch.Tensor, n_chunks: int) -> int:
    return n_chunks


class Layer:
    @contextual_autotune()
    def step(self, x: torch.Tensor) -> int:
        return len(x)

    @autotune([{"block": 1}], None)
    def scaled(self, x: torch.Tensor, block: int = 0) -> torch.Tensor:
        return x

    @autotune([{"block": 1}], None)
    def chunked(self, x: torch.Tensor, block: int) -> str:
        return ""


x = torch.ones(4)
assert_type(step(x, n=2), float)
assert_type(scaled(x, factor=2.0), torch.Tensor)
assert_type(scaled(x, autotune=False), torch.Tensor)
assert_type(scaled(x, autotune_pg=None, autotune_verbose=True), torch.Tensor)
assert_type(scaled(x, block=3, autotune_allow_arg_overwrite=True), torch.Tensor)
assert_type(chunked(x), int)
assert_type(Layer().step(x), int)
assert_type(Layer().scaled(x), torch.Tensor)
assert_type(Layer().scaled(x, autotune_verbose=True), torch.Tensor)
assert_type(Layer().chunked(x), str)
assert_type(Layer.chunked(Layer(), x), str)
Layer.step(Layer(), x)
scaled.records[0].winner, scaled.configs[0], step.records, Layer().step.records, step.__wrapped__(x), scaled.__name__

step("x")  # wrong
step()  # wrong
step(x, m=2)  # wrong
step(x, 1, 2)  # wrong
word: str = step(x)  # wrong
number: int = scaled(x)  # wrong
Layer().step(3)  # wrong
Layer().step()  # wrong
scaled.recrods  # wrong
step.recrods  # wrong
autotune(configs=3, key=["x"])  # wrong
contextual_autotune(reset=5)  # wrong
"""


@pytest.mark.processes
def test_wrong_calls_are_rejected_and_right_ones_are_not(tmp_path: Path):
    """By mypy --strict, line by line: closures with their arguments, tuned functions by what they return, and methods of both."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(program)]  # torch is in the cache of `make lint`
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    errors = {int(line) for line in re.findall(r"program\.py:(\d+): error", done.stdout)}
    lines = PROGRAM.splitlines()
    assert errors, done.stdout + done.stderr
    assert {lines[i - 1] for i in errors} == {line for line in lines if line.endswith("# wrong")}, done.stdout


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
