"""Nested tensors as arguments: a call with them is as one with any other tensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_tune import autotune, contextual
from dist_tune.keys import bucketed, key_text, power_of_two, to_hashable
from dist_tune.measure.compare import difference

pytestmark = pytest.mark.once

LAYOUTS = [torch.strided, torch.jagged]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("LOG_DIR", "CACHE_DIR"):
        monkeypatch.setenv(f"DIST_TUNE_{name}", str(tmp_path))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested tensors.*")
        yield


def nested(layout: torch.layout, *lengths: int, width: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A batch of matrices of these lengths."""
    return torch.nested.nested_tensor([torch.ones(length, width, dtype=dtype) for length in lengths], layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nested_tensor_is_a_key(layout: torch.layout):
    """Of its layout, its dtype, and the sizes that all its parts share; ragged ones are left out."""
    key = to_hashable(nested(layout, 3, 5))
    assert key == to_hashable(nested(layout, 2, 9))
    assert key_text(key) == f"[(2,None,8),'{layout}',torch.float32]"
    others = [nested(layout, 3, 5, 7), nested(layout, 3, 5, width=4), nested(layout, 3, 5, dtype=torch.float16)]
    assert len({key, *map(to_hashable, others)}) == 4
    assert bucketed(nested(layout, 3, 5, 7, width=6), power_of_two)[0] == (4, None, 8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_keyword", [False, True])
def test_calls_with_nested_tensors_are_of_one_kind(layout: torch.layout, is_keyword: bool, monkeypatch: pytest.MonkeyPatch):
    """The first is heard from its beginning, the others are ordinary calls, alone or beside other arguments."""
    opened: list[int] = []
    open_one = contextual._ClosureTuner.open
    monkeypatch.setattr(contextual._ClosureTuner, "open", lambda self: opened.append(1) or open_one(self))  # type: ignore[func-returns-value]
    step = contextual.contextual_autotune()(lambda x, scale: x * scale)
    for n in (5, 6, 7):
        x = nested(layout, 3, n)
        y = step(x=x, scale=2.0) if is_keyword else step(x, 2.0)
        assert y.is_nested
    assert len(opened) == 1
    x = nested(layout, 3, 5, width=4)
    step(x=x, scale=2.0) if is_keyword else step(x, 2.0)
    assert len(opened) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_of_nested_tensors_alone(layout: torch.layout):
    """Returns what it computes."""
    step = contextual.contextual_autotune()(lambda x: x + x)
    assert step(nested(layout, 3, 5)).unbind()[1].sum().item() == 80.0
    assert len(step(nested(layout, 3, 5)).unbind()) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_function_of_nested_tensors_is_tuned_once(layout: torch.layout):
    """For its key; the results are checked."""
    ran: list[int] = []

    def double(x: torch.Tensor, *, block: int) -> torch.Tensor:
        ran.append(block)
        return x * 2.0

    def is_right(y: Any, x: torch.Tensor) -> bool:
        return bool(y.unbind()[0].sum() == 2 * x.unbind()[0].sum())

    tuned = autotune([{"block": 1}, {"block": 2}], to_hashable, check=is_right, n_warmup=0, n_repeat=1)(double)
    tuned(nested(layout, 3, 5))
    n_runs = len(ran)
    assert tuned(nested(layout, 3, 6)).is_nested
    assert (len(ran), len(tuned.records)) == (n_runs + 1, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nested_result_is_compared_part_by_part(layout: torch.layout):
    """With another nested tensor; a plain one is another thing."""
    result = nested(layout, 3, 5)
    assert difference(result, nested(layout, 3, 5)) == ""
    assert "wrong" in difference(result, nested(layout, 3, 5) * 2.0)
    assert (
        difference(result, nested(layout, 3, 4))
        == "returned a tensor [5, 8] torch.float32 in result[1], expected a tensor [4, 8] torch.float32"
    )
    assert difference(result, torch.ones(2)) == "returned a nested tensor of torch.float32, expected a tensor [2] torch.float32"
