"""Options of the decorators that cannot work: refused at decoration, by name."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import re
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


REFUSED = r"""
contextual_autotune(objective="fast")             ValueError: objective must be one of \('closure', 'kernel', 'graph'\), got 'fast'
contextual_autotune(reset=object())               TypeError: reset must be .* got an object of type object
contextual_autotune(is_dist=True, group=[0, 1])   TypeError: group must be a process group.* got \[0, 1\]
both(reset=5)                                     TypeError: reset must be a function, reset\(\), got 5
both(n_repeat=0)                                  ValueError: need n_repeat >= 1, got 0
both(n_repeat=1.5)                                TypeError: n_repeat must be .*got 1.5
both(n_warmup=-1)                                 ValueError: need n_warmup >= 0, got -1
both(n_warmup=True)                               TypeError: n_warmup must be .*got True
both(budget_s=0)                                  ValueError: need budget_s >= 0.001, got 0
both(budget_s=math.nan)                           ValueError: .*budget_s
both(budget_s=math.inf)                           ValueError: .*budget_s
both(budget_s=True)                               TypeError: budget_s must be .* got True
both(search="random")                             ValueError: search must be one of .* got 'random'
both(release=3)                                   TypeError: release must be a list .* got 3
autotune(BLOCKS, None, check=3)                   TypeError: check must be a function.* got 3
autotune(BLOCKS, None, bucket=5)                  TypeError: bucket must be a function.* got 5
autotune(BLOCKS, None, prune_fn=["x"])            TypeError: prune_fn must be a function.* got \['x'\]
autotune(BLOCKS, ["x"])                           TypeError: key_fn must be a function.* names of arguments go to key=\['x'\]
autotune(3, None)                                 TypeError: config_space must be a list of configs, got 3
autotune(step, None)                              TypeError: config_space must be a list of configs, got the function step
autotune({"block": 1}, None)                      TypeError: config_space must be a list of configs.*write config_space=\[...\]
autotune("block", None)                           TypeError: config_space must be a list of configs, got 'block'
autotune(BLOCKS, None, configs=BLOCKS)            TypeError: .*config_space= or configs=, got both
autotune(BLOCKS, None, key=["x"])                 TypeError: .*key_fn= or key=, got both
autotune()                                        TypeError: autotune needs .*got neither
autotune(BLOCKS)                                  TypeError: autotune needs .*got neither
autotune(step)                                    TypeError: .*not the function: write @autotune\(\[
autotune([{("block",): 1}], None)                 TypeError: config_space holds a config with the name \('block',\)
autotune([{"nothing": step}], None)               TypeError: the function step takes no keyword 'nothing'
autotune([triton.Config({"B": 16})], None)        TypeError: config_space holds .*B=16.* step has no parameter named config
autotune([], None)                                ValueError: config_space is empty
autotune(configs=BLOCKS, key="x")                 TypeError: key must be a list of names of arguments, got 'x'
autotune(configs=BLOCKS, key=["x", 3])            TypeError: key must be a list of names of arguments, got 3 among them
autotune(configs=BLOCKS, key=lambda x: x)         TypeError: key= takes names of arguments.*a function is key_fn=
autotune(configs=BLOCKS, key=["z"])               ValueError: .*'z', which is no argument of the function step; it has \['x', 'block'\]
autotune(configs=BLOCKS, key=["block"])           ValueError: key names 'block', which is an argument that the configs choose
"""  # noqa: E501
NAMES = {
    "autotune": autotune,
    "contextual_autotune": contextual_autotune,
    "BLOCKS": BLOCKS,
    "step": step,
    "math": math,
    "triton": triton,
}
ROWS = [re.split("   +", line) for line in REFUSED.strip().splitlines()]
BOTH = ("contextual_autotune(", "autotune(BLOCKS, None, ")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (call.replace("both(", each), told)
        for call, told in ROWS
        for each in BOTH[: 1 + ("both" in call)]
    ],
)
def test_an_option_that_does_not_fit_is_named(call: str, told: str):
    """At decoration, with the value, and without the address of an object."""
    with pytest.raises((TypeError, ValueError)) as caught:
        eval(call, NAMES)(step)
    text = f"{type(caught.value).__name__}: {caught.value}"
    assert (bool(re.match(told, text)), " at 0x" in text) == (True, False), text


def test_what_a_call_or_a_check_is_given_is_named():
    tuned: Any = autotune(BLOCKS, None, **QUICK)(step)
    with pytest.raises(TypeError, match=r"autotune_pg must be a process group.* got 'tp'"):
        tuned(1, autotune_pg="tp")
    assert tuned(1) == 1
    with pytest.raises(TypeError, match=r"reference must be a function.* got 3"):
        matches(3)  # type: ignore[arg-type]


# -- key= ------------------------------------------------------------------------------------------


def test_names_of_arguments_are_a_key():
    """By position, by name and by default; a tensor is its shape, strides and dtype; dtypes of all
    tensors count, as in Triton.
    """

    @autotune(configs=BLOCKS, key=["n", "scale", "x"], **QUICK)
    def f(
        y: torch.Tensor, n: int, *, x: torch.Tensor | None = None, scale: int = 7, block: int = 0
    ) -> int:
        return n

    tuned: Any = f
    y = torch.ones(2)
    calls: list[Any] = [
        ((y, 3), {}),
        ((y,), {"n": 3}),
        ((), {"n": 3, "y": torch.ones(5)}),
        ((y.double(), 3), {}),
    ]
    for args, kwargs in [*calls, ((y, 3), {"x": y, "scale": 8})]:
        tuned(*args, **kwargs)
    assert [record.key for record in f.records] == [
        "[3,7,None,torch.float32]",
        "[3,7,None,torch.float64]",
        "[3,8,((2),(1),torch.float32),torch.float32,torch.float32]",
    ]


# -- what cannot be heard --------------------------------------------------------------------------


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
    (managed, "context manager"),
    (managed_later, "context manager"),
    (later, "coroutine"),
    (one_by_one, "generator"),
    (Later(), "coroutine"),
    (OneByOne(), "generator"),
    (functools.partial(one_by_one, 1), "generator"),
]


@pytest.mark.parametrize(
    "decorate",
    [contextual_autotune(), autotune(BLOCKS, None)],
    ids=["contextual_autotune", "autotune"],
)
@pytest.mark.parametrize(("function", "kind"), DEFERRED)
def test_what_has_not_run_when_it_returns_is_refused(decorate: Any, function: Any, kind: str):
    """With its kind, and without the address of an object."""
    with pytest.raises(
        TypeError,
        match=(
            f"which have run when they return; got .* makes a {kind}. Put .* decorate that one, .*"
            f" {kind}$"
        ),
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
