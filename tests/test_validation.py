"""Options of the decorators that cannot work: refused at decoration, by name."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from dist_tune import autotune, contextual_autotune, matches
from tests.function_options import BLOCKS, QUICK, quiet

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quiet(monkeypatch, tmp_path)


def step(x: Any, block: int = 1) -> Any:
    return x


SPACE: Any = {"config_space": BLOCKS, "key_fn": None}


@pytest.mark.parametrize(
    ("decorator", "options", "words"),
    [
        (contextual_autotune, {"reset": 5}, "reset must be a function, reset\\(\\), got 5"),
        (contextual_autotune, {"reset": object()}, "reset must be .* got an object of type object"),
        (contextual_autotune, {"is_dist": True, "group": "tp"}, "group must be a process group.* got 'tp'"),
        (contextual_autotune, {"is_dist": True, "group": [0, 1]}, r"group must be a process group.* got \[0, 1\]"),
        (autotune, {**SPACE, "reset": 5}, r"reset must be a function, reset\(\), got 5"),
        (autotune, {**SPACE, "check": 3}, "check must be a function.* got 3"),
        (autotune, {**SPACE, "bucket": 5}, "bucket must be a function.* got 5"),
        (autotune, {**SPACE, "prune_fn": ["x"]}, r"prune_fn must be a function.* got \['x'\]"),
        (autotune, {**SPACE, "key_fn": 4}, "key_fn must be a function.* got 4"),
        (autotune, {**SPACE, "key_fn": ["x"]}, r"key_fn must be a function.* names of arguments go to key=\['x'\]"),
        (autotune, {**SPACE, "config_space": 3}, "config_space must be a list of configs, got 3"),
        (autotune, {**SPACE, "config_space": step}, "config_space must be a list of configs, got the function step"),
        (autotune, {**SPACE, "config_space": {"block": 1}}, r"config_space must be a list of configs.*write config_space=\[...\]"),
        (autotune, {**SPACE, "config_space": "block"}, "config_space must be a list of configs, got 'block'"),
        (autotune, {**SPACE, "configs": BLOCKS}, "config_space= or configs=, got both"),
        (autotune, {**SPACE, "key": ["x"]}, "key_fn= or key=, got both"),
        (autotune, {}, "autotune needs .*got neither"),
        (autotune, {"config_space": BLOCKS}, "autotune needs .*got neither"),
        (autotune, {"key": ["x"]}, "autotune needs .*got neither"),
        (autotune, {"config_space": step}, r"not the function: write @autotune\(\["),
        (matches, {"reference": 3}, "reference must be a function.* got 3"),
    ],
)
def test_an_option_is_named(decorator: Any, options: dict[str, Any], words: str):
    """Without the address of an object."""
    with pytest.raises(TypeError, match=words) as caught:
        decorator(**options)
    assert " at 0x" not in str(caught.value)


@pytest.mark.parametrize("decorator", [contextual_autotune, partial(autotune, **SPACE)])
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"n_repeat": 0}, ValueError, "need n_repeat >= 1, got 0"),
        ({"n_repeat": 1.5}, TypeError, "n_repeat must be .*got 1.5"),
        ({"n_warmup": -1}, ValueError, "need n_warmup >= 0, got -1"),
        ({"n_warmup": True}, TypeError, "n_warmup must be .*got True"),
        ({"budget_s": 0}, ValueError, "need budget_s >= 0.001, got 0"),
        ({"search": "random"}, ValueError, "search must be one of .* got 'random'"),
        ({"release": 3}, TypeError, "release must be a list .* got 3"),
    ],
)
def test_a_number_or_word_out_of_range_is_named(decorator: Any, options: dict[str, Any], error: type[Exception], words: str):
    """By both decorators, with the value."""
    with pytest.raises(error, match=words):
        decorator(**options)(step)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ([{3: 4}], "config_space holds a config with the name 3"),
        ([{"block": 1}, {("block",): 1}], r"config_space holds a config with the name \('block',\)"),
        ([{"nothing": step}], "the function step takes no keyword 'nothing'"),
        ([triton.Config({"BLOCK": 16})], "config_space holds .*BLOCK=16.* and the function step has no parameter named config"),
    ],
)
def test_a_config_that_does_not_fit_is_shown_as_it_reads(space: Any, words: str):
    """Without the address of a function or a triton.Config."""
    with pytest.raises(TypeError, match=words) as caught:
        autotune(space, None)(step)
    assert " at 0x" not in str(caught.value)


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


@pytest.mark.parametrize(
    ("key", "error", "words"),
    [
        ("x", TypeError, "key must be a list of names of arguments, got 'x'"),
        (["x", 3], TypeError, "key must be a list of names of arguments, got 3 among them"),
        (5, TypeError, "key must be a list of names of arguments, got 5"),
        (lambda x: x, TypeError, "key= takes names of arguments.*a function is key_fn="),
        (["z"], ValueError, r"key names 'z', which is no argument of the function step; it has \['x', 'block'\]"),
        (["block"], ValueError, "key names 'block', which is an argument that the configs choose"),
    ],
)
def test_a_key_that_names_nothing_is_refused(key: Any, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        autotune(BLOCKS, key=key)(step)


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
    (Later(), "coroutine"), (OneByOne(), "generator"), (functools.partial(managed, 1), "context manager"),
]  # fmt: skip


@pytest.mark.parametrize("decorate", [contextual_autotune(), autotune(BLOCKS, None)], ids=["contextual_autotune", "autotune"])
@pytest.mark.parametrize(("function", "kind"), DEFERRED)
def test_what_has_not_run_when_it_returns_is_refused(decorate: Any, function: Any, kind: str):
    """With its kind, and without the address of an object."""
    with pytest.raises(TypeError, match=f"which have run when they return; got .* makes a {kind}") as caught:
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
