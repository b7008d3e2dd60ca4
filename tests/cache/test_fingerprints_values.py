"""Fingerprints of code: what it has captured, wraps and calls, each told apart without asking it."""

import contextlib
import dataclasses
import enum
import functools
import importlib.util
import json
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from dist_tune.cache.fingerprints import fingerprint
from tests.source_programs import Compiled, adding, returning, subtracting, with_globals

VALUES: list[Any] = [
    *(None, True, 1, 1.0, "1", b"1", 1j, (1,), [1], {1: 1}, {1}, (), 2, -0.0, 0.0, float("nan"), float("inf"), "", 1 << 70, 10**5000),
    *(torch.float16, torch.float32, torch.empty(2), torch.empty(3), torch.empty(2, dtype=torch.int8), torch.empty(2, 1)),
    *(tl.float16, tl.bfloat16, tl.constexpr(3), tl.constexpr(4), triton.Config({"A": 1}), triton.Config({"A": 2})),
    *(np.int64(1), np.int64(2), np.float32(1), np.zeros(2), np.zeros(3), np.dtype("f4"), np.dtype("f8"), range(3), range(4)),
    *(
        "x" * 5000,
        "x" * 5001,
        "x" * 4999 + "y",
        b"x" * 5000,
        (1, (2, 3)),
        ((1, 2), 3),
        [[1], 2],
        [[1, 2]],
        {"a": {"b": 1}},
        {"a": {"b": 2}},
    ),
    *(len, max, returning, fingerprint, threading.Lock(), enum.Enum, contextlib.suppress, torch.device("cpu"), torch.device("cuda", 0)),
]


def test_captured_values_are_told_apart():
    """Every scalar, container, dtype, shape, constexpr and function; also where Python holds them equal."""
    read = [fingerprint(returning(value)) for value in VALUES]
    assert len(set(read)) == len(read)
    assert [fingerprint(returning(value)) for value in VALUES] == read


@dataclasses.dataclass
class Config:
    rank: int


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (threading.Lock(), threading.Lock()),
        (torch.device("cuda", 0), torch.device("cuda", 1)),
        (torch.zeros(3), torch.ones(3)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (object(), object()),
        (Config(rank=0), Config(rank=1)),
        (torch.nn.Linear(2, 2), torch.nn.Linear(3, 3)),
    ],
)
def test_what_may_differ_between_ranks_does_not_count(one: object, other: object):
    """Objects by their class, a device by its kind, a tensor without what is in it, a dict in any order."""
    assert fingerprint(returning(one)) == fingerprint(returning(other))


def test_an_object_is_not_asked():
    """Not even for its class, though it answers for every attribute."""
    asked: list[str] = []

    class Asking:
        def __getattribute__(self, name: str) -> Any:
            asked.append(name)
            return self

        def __call__(self) -> None:
            pass

    for function in (Asking(), returning(Asking()), returning([Asking()]), with_globals("def f(): return a.b, A", a=Asking(), A=Asking())):
        fingerprint(function)
    assert asked == []


class Slotted:
    __slots__ = ("anything",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.anything = 1

    __call__ = adding


class Holder(Compiled):
    def __init__(self, function: Callable[..., Any]) -> None:
        self.anything = function


class Named(NamedTuple):
    field: Callable[..., Any]


WRAPPERS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "lru_cache": functools.lru_cache,
    "partial": functools.partial,
    "wraps": lambda function: functools.wraps(function)(lambda *args: function(*args)),
    "wraps only": lambda function: functools.update_wrapper(lambda x: x, function),
    "wraps nothing": lambda function: lambda *args: function(*args),
    "no_grad": torch.no_grad(),
    "contextmanager": contextlib.contextmanager,
    "callable object": Compiled,
    "object that holds it": Holder,
    "bound method": lambda function: types.MethodType(function, 7),
    "staticmethod": staticmethod,
    "property": property,
    "class": lambda function: type("Made", (), {"method": function}),
    "subclass": lambda function: type("Made", (type("Base", (), {"method": function}),), {}),
    "object": lambda function: type("Made", (), {"method": function})(),
    "module": lambda function: type("Made", (torch.nn.Module,), {"forward": function})(),
    "list": lambda function: [function, 1],
    "dict": lambda function: {"a": [function]},
    "set": lambda function: {function, len},
    "named": lambda function: Named(function),
    "cached_property": functools.cached_property,
    "custom_op": lambda function: types.SimpleNamespace(_init_fn=function),
}


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_are_looked_through(wrapper: Callable[[Callable[..., Any]], Any]):
    """The same wrapper around two functions is two things; whether it is called, captured, a default or a global."""
    for place in (
        lambda thing: thing,
        returning,
        functools.partial(returning, None),
        lambda thing: with_globals("def f(x=thing): return x", thing=thing),
        lambda thing: with_globals("def f(): return THING", THING=thing),
    ):
        assert fingerprint(place(wrapper(adding))) != fingerprint(place(wrapper(subtracting)))
        assert fingerprint(place(wrapper(adding))) == fingerprint(place(wrapper(adding)))


def test_an_object_counts_by_its_class():
    """A callable object with slots, whatever is in them."""
    one, other = Slotted(adding), Slotted(adding)
    other.anything = 2
    assert fingerprint(one) == fingerprint(other) != fingerprint(Compiled(adding))


def test_code_without_a_source_is_read():
    """Functions made by exec, lambdas, and a body that calls itself or its caller."""
    codes = [
        "def f(x): return x",
        "def f(x): return f(x - 1)",
        "def f(x): return g(x)\ndef g(x): return f(x)",
        "def f(x): return g(x)\ndef g(x): return f(-x)",
        "def f(*x): return x",
        "def f(**x): return x",
        "def f(x, /): return x",
        "def f(x, y): return x",
        "async def f(x): return x",
        "def f(x): yield x",
        "f = lambda x: x * 2",
        "def f(x):\n    try: return x\n    except OSError: return 1",
        "def f(x):\n    try: return x\n    except ValueError: return 1",
        "def make():\n    def f(): return x, 1\n    return f\n    x = 1\nf = make()",
        "def make():\n    def f(): return x, 2\n    return f\n    x = 1\nf = make()",
        "def f(x): return [y * 2 for y in x]",
        "def f(x): return [y * 3 for y in x]",
        "class f:\n    def g(self): return 1",
        "class f:\n    def g(self): return 2",
        'def f(x):\n    "text"\n    return "text"',
        'def f(x):\n    "another"\n    return "another"',
    ]
    read = [fingerprint(with_globals(code)) for code in codes]
    assert len(set(read)) == len(codes)
    assert [fingerprint(with_globals(code)) for code in codes] == read


def test_a_lazy_module_stays_unloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither importlib's lazy modules nor a module's own __getattr__ is asked for anything."""
    (tmp_path / "lazily_loaded.py").write_text("raise RuntimeError('loaded')")
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.find_spec("lazily_loaded")
    assert spec is not None
    assert spec.loader is not None
    loader = importlib.util.LazyLoader(spec.loader)
    spec.loader = loader
    lazy = importlib.util.module_from_spec(spec)
    loader.exec_module(lazy)
    asking = types.ModuleType("asking")
    asked: list[str] = []
    asking.__getattr__ = asked.append  # type: ignore[method-assign]
    function = with_globals("def f(x): return lazy.function(x) + asking.function(x)", lazy=lazy, asking=asking)
    before = fingerprint(function)
    assert asked == []
    vars(asking)["function"] = adding
    assert fingerprint(function) != before


def test_libraries_are_not_entered(monkeypatch: pytest.MonkeyPatch):
    """Their versions are in a record. But a library's function may itself be tuned, and a user's file have a library's name."""
    calls_json = with_globals("def f(x): return m.dumps(x)", m=json)
    calls_torch = with_globals("def f(x): return g(x)", g=torch.nn.functional.relu)
    before = fingerprint(calls_json), fingerprint(calls_torch), fingerprint(json.dumps)
    monkeypatch.setattr(json.JSONEncoder, "encode", adding)
    monkeypatch.setattr(torch.nn.functional.relu, "__code__", adding.__code__.replace(co_qualname="relu"))
    assert (fingerprint(calls_json), fingerprint(calls_torch)) == before[:2]
    assert fingerprint(json.dumps) != before[2]
    wrapping = (
        "def make(wrapped, rule):\n    def f(x): return wrapped(rule(x))\n    f.__wrapped__ = wrapped\n    return f\nf = make(one, other)"
    )
    wrapper, changed, ruled = (
        fingerprint(with_globals(wrapping, __name__="dist_tune.some", one=one, other=other))
        for one, other in [(adding, adding), (subtracting, adding), (adding, subtracting)]
    )
    assert changed != wrapper == ruled
    own = types.ModuleType("turtledemo")
    own.__file__ = "/home/user/turtledemo.py"
    monkeypatch.setitem(sys.modules, "turtledemo", own)
    exec("def f(x): return x", vars(own))
    calls_own = with_globals("def f(x): return m.f(x)", m=own)
    before_own = fingerprint(calls_own)
    exec("def f(x): return -x", vars(own))
    assert fingerprint(calls_own) != before_own
