"""In which forms a function that has configs may come, which are refused, and what it is called."""

from __future__ import annotations

import functools
import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dist_tune import autotune
from tests.function_options import BLOCKS, QUICK, quiet

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quiet(monkeypatch, tmp_path)


def ordinary(x: int, y: int = 2, *, block: int = 0) -> int:
    return x + y


def variadic(*xs: int, block: int = 0) -> int:
    return sum(xs)


def anything(*xs: int, **options: Any) -> int:
    return sum(xs) + int(options.get("more", 0))


class Caller:
    def __call__(self, x: int, block: int) -> int:
        return x

    def method(self, x: int, block: int) -> int:
        return x


class Layer:
    """Two instances of which share what was tuned."""

    ran: list[str] = []  # noqa: RUF012  # a test's

    def __init__(self, name: str) -> None:
        self.name = name

    @autotune(BLOCKS, lambda self, x: x, **QUICK)
    def forward(self, x: int, block: int = 0) -> str:
        self.ran.append(self.name)
        return f"{self.name} {x}"

    @staticmethod
    @autotune(BLOCKS, None, **QUICK)
    def static(x: int, block: int) -> int:
        return x

    @classmethod
    @autotune(BLOCKS, None, **QUICK)
    def of_class(cls, x: int, block: int) -> str:
        return f"{cls.__name__} {x}"


def test_methods():
    """An instance's, a class's and static ones; a second instance uses what the first one's call has tuned."""
    a, b = Layer("a"), Layer("b")
    assert (a.forward(1), b.forward(1), b.forward(x=1)) == ("a 1", "b 1", "b 1")
    assert Layer.ran.count("b") == 2
    assert (Layer.static(3), a.of_class(4)) == (3, "Layer 4")
    assert Layer.forward(a, 2) == "a 2"
    records = vars(Layer)["forward"].records
    assert [record.kernel for record in records] == [f"{__name__}.Layer.forward"] * 2


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "value", "name"),
    [
        (ordinary, (1,), {}, 3, "ordinary"),
        (ordinary, (), {"y": 5, "x": 1}, 6, "ordinary"),
        (variadic, (1, 2, 3), {}, 6, "variadic"),
        (variadic, (), {}, 0, "variadic"),
        (anything, (1, 2), {"more": 4}, 7, "anything"),
        (lambda x, block: x, (1,), {}, 1, "<lambda>"),
        (functools.partial(ordinary, y=10), (1,), {}, 11, "ordinary"),
        (functools.partial(functools.partial(ordinary, 1), 2), (), {}, 3, "ordinary"),
        (Caller(), (8,), {}, 8, "Caller"),
        (Caller().method, (9,), {}, 9, "Caller.method"),
    ],
)
def test_what_can_be_called_can_be_tuned(function: Any, args: Any, kwargs: Any, value: Any, name: str):
    """Positional and keyword arguments, defaults, lambdas, partials, objects: the value is that of an ordinary call."""
    tuned = autotune(BLOCKS, None, **QUICK)(function)
    assert [tuned(*args, **kwargs), tuned(*args, **kwargs)] == [value] * 2
    (record,) = tuned.records
    assert record.kernel == f"{__name__}.{name}"
    assert [each.config for each in record.candidates] == ["block=1", "block=2", "block=4"]


def test_a_builtin_without_a_signature():
    """Nothing can be checked before it is called."""
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(torch.add)
    tuned = autotune([{"alpha": 1}, {"alpha": 2}], None, **QUICK)(torch.add)
    assert tuned(torch.ones(2), 0 * torch.ones(2)).tolist() == [1.0, 1.0]


def test_a_function_without_source():
    """As one typed into an interpreter."""
    names: dict[str, Any] = {"math": math}
    exec("def typed(x, block):\n    return math.sqrt(x)", names)
    tuned = autotune(BLOCKS, None, n_warmup=0, n_repeat=1)(names["typed"])
    assert tuned(16.0) == 4.0
    again = autotune(BLOCKS, None, n_warmup=0, n_repeat=1)(names["typed"])
    assert again(16.0) == 4.0
    assert again.records[0].is_recalled


@triton.jit
def kernel(x_ptr, block: tl.constexpr):
    pass


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (staticmethod(ordinary), "put @staticmethod above @autotune"),
        (classmethod(lambda cls, block: None), "put @classmethod above @autotune"),
        (3, "autotune decorates ordinary functions"),
        (kernel, "Those have triton.autotune"),
        (triton.autotune([triton.Config({"block": 1})], key=[])(kernel), "Those have triton.autotune"),
    ],
)
def test_what_cannot_be_tuned_says_why(function: Any, words: str):
    """At decoration."""
    with pytest.raises(TypeError, match=words):
        autotune(BLOCKS, None)(function)


def test_a_decorated_function_looks_like_itself():
    """Its name and what it wraps, its parameters before those of the tuner; and it shows what it chooses from."""
    tuned = autotune([*BLOCKS, BLOCKS[0]], None)(ordinary)
    assert (tuned.__name__, tuned.__wrapped__) == ("ordinary", ordinary)
    own = inspect.signature(ordinary).parameters
    assert dict(list(inspect.signature(tuned).parameters.items())[: len(own)]) == dict(own)
    assert (tuned.configs, tuned.records) == (BLOCKS, [])
