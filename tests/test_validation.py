"""Options of the decorators that cannot work: refused at decoration, by name."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from dist_tune import autotune, contextual_autotune, matches
from tests.steps import BLOCKS, QUICK, quiet


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quiet(monkeypatch, tmp_path)


def step(x: Any, block: int = 1) -> Any:
    return x


SPACE: Any = {"config_space": BLOCKS, "key_fn": None}
OF_CLOSURES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"objective": "fast"}, ValueError, r"objective must be one of \('closure', 'kernel', 'graph'\), got 'fast'"),
    ({"reset": object()}, TypeError, "reset must be .* got an object of type object"),
    ({"is_dist": True, "group": "tp"}, TypeError, "group must be a process group.* got 'tp'"),
    ({"is_dist": True, "group": [0, 1]}, TypeError, r"group must be a process group.* got \[0, 1\]"),
]
OF_BOTH: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"reset": 5}, TypeError, r"reset must be a function, reset\(\), got 5"),
    ({"n_repeat": 0}, ValueError, "need n_repeat >= 1, got 0"),
    ({"n_repeat": 1.5}, TypeError, "n_repeat must be .*got 1.5"),
    ({"n_warmup": -1}, ValueError, "need n_warmup >= 0, got -1"),
    ({"n_warmup": True}, TypeError, "n_warmup must be .*got True"),
    ({"n_repeat": "3"}, TypeError, "n_repeat must be .*got '3'"),
    ({"budget_s": 0}, ValueError, "need budget_s >= 0.001, got 0"),
    ({"budget_s": math.nan}, ValueError, "budget_s"),
    ({"budget_s": math.inf}, ValueError, "budget_s"),
    ({"budget_s": True}, TypeError, "budget_s must be .* got True"),
    ({"search": "random"}, ValueError, "search must be one of .* got 'random'"),
    ({"release": 3}, TypeError, "release must be a list .* got 3"),
]
OF_FUNCTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({**SPACE, "check": 3}, TypeError, "check must be a function.* got 3"),
    ({**SPACE, "bucket": 5}, TypeError, "bucket must be a function.* got 5"),
    ({**SPACE, "prune_fn": ["x"]}, TypeError, r"prune_fn must be a function.* got \['x'\]"),
    ({**SPACE, "key_fn": 4}, TypeError, "key_fn must be a function.* got 4"),
    ({**SPACE, "key_fn": ["x"]}, TypeError, r"key_fn must be a function.* names of arguments go to key=\['x'\]"),
    ({**SPACE, "config_space": 3}, TypeError, "config_space must be a list of configs, got 3"),
    ({**SPACE, "config_space": step}, TypeError, "config_space must be a list of configs, got the function step"),
    ({**SPACE, "config_space": {"block": 1}}, TypeError, r"config_space must be a list of configs.*write config_space=\[...\]"),
    ({**SPACE, "config_space": "block"}, TypeError, "config_space must be a list of configs, got 'block'"),
    ({**SPACE, "configs": BLOCKS}, TypeError, "config_space= or configs=, got both"),
    ({**SPACE, "key": ["x"]}, TypeError, "key_fn= or key=, got both"),
    ({}, TypeError, "autotune needs .*got neither"),
    ({"config_space": BLOCKS}, TypeError, "autotune needs .*got neither"),
    ({"key": ["x"]}, TypeError, "autotune needs .*got neither"),
    ({"config_space": step}, TypeError, r"not the function: write @autotune\(\["),
    ({**SPACE, "config_space": [{3: 4}]}, TypeError, "config_space holds a config with the name 3"),
    ({**SPACE, "config_space": [{("block",): 1}]}, TypeError, r"config_space holds a config with the name \('block',\)"),
    ({**SPACE, "config_space": [{"nothing": step}]}, TypeError, "the function step takes no keyword 'nothing'"),
    (
        {**SPACE, "config_space": [triton.Config({"B": 16})]},
        TypeError,
        "config_space holds .*B=16.* the function step has no parameter named config",
    ),
    ({**SPACE, "config_space": []}, ValueError, "config_space is empty"),
    ({"configs": BLOCKS, "key": "x"}, TypeError, "key must be a list of names of arguments, got 'x'"),
    ({"configs": BLOCKS, "key": ["x", 3]}, TypeError, "key must be a list of names of arguments, got 3 among them"),
    ({"configs": BLOCKS, "key": 5}, TypeError, "key must be a list of names of arguments, got 5"),
    ({"configs": BLOCKS, "key": lambda x: x}, TypeError, "key= takes names of arguments.*a function is key_fn="),
    ({"configs": BLOCKS, "key": ["z"]}, ValueError, r"key names 'z', which is no argument of the function step; it has \['x', 'block'\]"),
    ({"configs": BLOCKS, "key": ["block"]}, ValueError, "key names 'block', which is an argument that the configs choose"),
]
CASES = [
    *[(contextual_autotune, *case) for case in OF_CLOSURES + OF_BOTH],
    *[(autotune, {**SPACE, **options}, *case) for options, *case in OF_BOTH],
    *[(autotune, *case) for case in OF_FUNCTIONS],
]


@pytest.mark.parametrize(("decorator", "options", "error", "words"), CASES)
def test_an_option_that_does_not_fit_is_named(decorator: Any, options: dict[str, Any], error: type[Exception], words: str):
    """At decoration, with the value, and without the address of an object."""
    with pytest.raises(error, match=words) as caught:
        decorator(**options)(step)
    assert " at 0x" not in str(caught.value)


def test_a_reference_that_is_no_function_is_named():
    with pytest.raises(TypeError, match=r"reference must be a function.* got 3"):
        matches(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("group", "text"), [("tp", "'tp'"), ([0, 1], r"\[0, 1\]")])
def test_a_group_at_the_call_is_named(group: Any, text: str):
    tuned: Any = autotune(BLOCKS, None, **QUICK)(step)
    with pytest.raises(TypeError, match=f"autotune_pg must be a process group.* got {text}"):
        tuned(1, autotune_pg=group)
    assert tuned(1) == 1


# -- key= --------------------------------------------------------------------------------------------------------------


def test_names_of_arguments_are_a_key():
    """By position, by name and by default; a tensor is its shape, strides and dtype; dtypes of all tensors count, as in Triton."""

    @autotune(configs=BLOCKS, key=["n", "scale", "x"], **QUICK)
    def f(y: torch.Tensor, n: int, *, x: torch.Tensor | None = None, scale: int = 7, block: int = 0) -> int:
        return n

    tuned: Any = f
    y = torch.ones(2)
    for _ in range(2):
        tuned(y, 3)
    tuned(y, n=3)
    tuned(n=3, y=torch.ones(5))
    assert [record.key for record in f.records] == ["[3,7,None,torch.float32]"]
    tuned(y.double(), 3)
    tuned(y, 3, scale=8)
    tuned(y, 3, x=torch.ones(4))
    assert [record.key for record in f.records[1:]] == [
        "[3,7,None,torch.float64]", "[3,8,None,torch.float32]", "[3,7,((4),(1),torch.float32),torch.float32,torch.float32]",
    ]  # fmt: skip


# -- what cannot be heard ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def managed(x: int, block: int = 0) -> Any:
    yield x


@contextlib.asynccontextmanager
async def managed_later(x: int, block: int = 0) -> Any:
    yield x


async def later(x: int, block: int = 0) -> int:
    return x


def one_by_one(x: int, block: int = 0) -> Any:
    yield x


class Later:
    async def __call__(self, x: int, block: int = 0) -> int:
        return x


class OneByOne:
    def __call__(self, x: int, block: int = 0) -> Any:
        yield x


DEFERRED = [
    (managed, "context manager"), (managed_later, "context manager"), (later, "coroutine"), (one_by_one, "generator"),
    (Later(), "coroutine"), (OneByOne(), "generator"), (functools.partial(one_by_one, 1), "generator"),
]  # fmt: skip


@pytest.mark.parametrize("decorate", [contextual_autotune(), autotune(BLOCKS, None)], ids=["contextual_autotune", "autotune"])
@pytest.mark.parametrize(("function", "kind"), DEFERRED)
def test_what_has_not_run_when_it_returns_is_refused(decorate: Any, function: Any, kind: str):
    """With its kind, and without the address of an object."""
    with pytest.raises(
        TypeError, match=f"which have run when they return; got .* makes a {kind}. Put .* decorate that one, .* {kind}$"
    ) as caught:
        decorate(function)
    assert " at 0x" not in str(caught.value)


def test_a_wrapper_that_runs_a_generator_is_ordinary():
    """A decorated generator function that is used up inside has run when it returns."""

    @functools.wraps(one_by_one)
    def drained(x: int, block: int = 0) -> list[int]:
        return list(one_by_one(x))

    @functools.wraps(later)
    def awaited(x: int, block: int = 0) -> int:
        return asyncio.run(later(x))

    assert autotune(BLOCKS, None, **QUICK)(drained)(1) == [1]
    assert contextual_autotune()(awaited)(1) == 1
