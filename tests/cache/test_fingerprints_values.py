"""Fingerprints of code: what it has captured, wraps and calls, each told apart without asking it; what refuses to answer raises nothing."""

import contextlib
import dataclasses
import enum
import functools
import json
import sys
import threading
import time
import types
import unittest.mock
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.source_programs import Compiled, adding, fingerprint, returning, subtracting, with_globals

VALUES: list[Any] = [
    *(None, True, 1, 1.0, "1", b"1", (1,), [1], {1: 1}, {1}, (), 2, -0.0, 0.0, float("nan"), float("inf"), "", 1 << 70, 10**5000),
    *(torch.float16, torch.float32, torch.empty(2), torch.empty(3), torch.empty(2, dtype=torch.int8), torch.empty(2, 1)),
    *(tl.float16, tl.bfloat16, tl.constexpr(3), tl.constexpr(4), triton.Config({"A": 1}), triton.Config({"A": 2})),
    *(np.int64(1), np.int64(2), np.zeros(2), np.zeros(3), np.dtype("f4"), range(3), "x" * 5000, "x" * 4999 + "y"),
    *((1, (2, 3)), ((1, 2), 3), [[1], 2], [[1, 2]], {"a": {"b": 1}}, {"a": {"b": 2}}),
    *(len, max, returning, fingerprint, threading.Lock(), enum.Enum, torch.device("cpu"), torch.device("cuda", 0)),
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


def test_nothing_is_asked():
    """An object not even for its class, though it answers for every attribute; a lazy module stays unloaded."""
    asked: list[str] = []

    class Asking:
        def __getattribute__(self, name: str) -> Any:
            asked.append(name)
            return self

        def __call__(self) -> None:
            pass

    for thing in (Asking(), returning(Asking()), returning([Asking()]), with_globals("def f(): return a.b, A", a=Asking(), A=Asking())):
        fingerprint(thing)
    module = types.ModuleType("asking")
    module.__getattr__ = asked.append  # type: ignore[method-assign]
    function = with_globals("def f(x): return module.function(x)", module=module)
    before = fingerprint(function)
    assert asked == []
    vars(module)["function"] = adding
    assert fingerprint(function) != before


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


def test_code_without_a_source_is_read():
    """Functions made by exec, lambdas, and a body that calls itself or its caller."""
    codes = [
        *(f"def f({arguments}): return x" for arguments in ("x", "*x", "x, /", "x, y")),
        *("def f(x): return f(x - 1)", "def f(x): yield x", "f = lambda x: x * 2"),
        *(f"def f(x): return g(x)\ndef g(x): return f({argument})" for argument in ("x", "-x")),
        *(f"def f(x):\n    try: return x\n    except {error}: return 1" for error in ("OSError", "ValueError")),
        *(f"def f(x): return [y * {n} for y in x]" for n in (2, 3)),
        *(f"class f:\n    def g(self): return {n}" for n in (1, 2)),
    ]
    read = [fingerprint(with_globals(code)) for code in codes]
    assert len(set(read)) == len(codes)
    assert [fingerprint(with_globals(code)) for code in codes] == read


def test_libraries_are_not_entered(monkeypatch: pytest.MonkeyPatch):
    """Their versions are in a record. But a library's function may itself be tuned, and a user's file have a library's name."""
    calls_json = with_globals("def f(x): return m.dumps(x)", m=json)
    before = fingerprint(calls_json), fingerprint(json.dumps)
    monkeypatch.setattr(json.JSONEncoder, "encode", adding)
    assert fingerprint(calls_json) == before[0]
    assert fingerprint(json.dumps) != before[1]
    own = types.ModuleType("turtledemo")
    own.__file__ = "/home/user/turtledemo.py"
    monkeypatch.setitem(sys.modules, "turtledemo", own)
    read = []
    for code in ("def f(x): return x", "def f(x): return -x"):
        exec(code, vars(own))
        read.append(fingerprint(with_globals("def f(x): return m.f(x)", m=own)))
    assert read[0] != read[1]


# -- objects that refuse to answer, and huge ones ----------------------------------------------------------------------


def refuse(*args: object, **kwargs: object) -> Any:
    raise RuntimeError("asked")


QUESTIONS = ("repr", "str", "hash", "eq", "len", "iter", "bool", "call", "format", "getattr", "getattribute", "getitem")
REFUSING: dict[str, Any] = {f"__{name}__": refuse for name in QUESTIONS}


class RefusingMeta(type):
    __getattribute__ = __hash__ = __eq__ = __instancecheck__ = __subclasscheck__ = __repr__ = refuse


class Partial(functools.partial[Any]):
    func = property(refuse)


@functools.cache
def nasty() -> dict[str, Any]:
    kinds: list[Any] = [type(f"Nasty_{base.__name__}", (base,), REFUSING) for base in (object, str, int, tuple, list, dict, set)]
    cyclic: list[Any] = [{}]
    cyclic[0]["again"] = cyclic
    deep: list[Any] = []
    shared: list[Any] = []
    for _ in range(50_000):
        deep, shared = [deep], [shared, shared]
    loop = types.SimpleNamespace()
    loop.fn = loop.__wrapped__ = loop
    return {
        **{kind.__name__: kind.__new__(kind) for kind in kinds},
        "class attribute": type("Nasty", (), {"p": property(refuse), "__class__": property(refuse)})(),
        "dict property": type("Nasty", (), {"__dict__": property(refuse), "__module__": 5, "__slots__": ()})(),
        "metaclass": object.__new__(RefusingMeta("Nasty", (), {})),  # type: ignore[arg-type]
        "class": RefusingMeta("Nasty", (), {}),
        "cyclic": cyclic,
        "wraps itself": loop,
        "deep": deep,
        "shared": shared,
        "partial": Partial(len),
        "mock": unittest.mock.MagicMock(),
        "ops": torch.ops.aten,
        "empty cell": with_globals("def f():\n    def g(): return x\n    return g\n    x = 1")(),
    }


def from_below(depth: int, function: object) -> str:
    """The fingerprint as it is with less of the stack left."""
    return from_below(depth - 1, function) if depth else fingerprint(function)


@pytest.mark.parametrize("name", nasty())
def test_nothing_raises_and_nothing_hides_the_code_beside_it(name: str):
    """Objects that refuse to answer, wherever they are: a result, and another one when the code beside them changes."""
    thing = nasty()[name]
    assert len(fingerprint(thing)) == 16
    assert fingerprint(returning(thing)) == from_below(300, returning(thing))
    for places in (
        [returning(thing, 1), returning(thing, 2)],
        [with_globals(f"def f(): return odd, {n}", odd=thing) for n in (1, 2)],
        [with_globals(f"def f(): return ODD, {n}", ODD=[thing]) for n in (1, 2)],
        [with_globals(f"class f:\n    ODD = odd\n    def g(self): return {n}", odd=thing) for n in (1, 2)],
        [with_globals(f"def f(x={{1: odd}}, *, y=odd): return {n}", odd=thing) for n in (1, 2)],
    ):
        one, other = map(fingerprint, places)
        assert one != other


def seconds(function: object) -> float:
    """Of this thread alone: other processes may keep the processor busy."""
    began = time.thread_time()
    fingerprint(function)
    return time.thread_time() - began


def test_huge_values_take_no_time():
    """Captured or a constant of the module: their start counts, and their length; what is beyond four thousand elements does not."""
    for value in (range(10**9), [0] * 10**6, {n: str(n) for n in range(10**5)}, set(map(str, range(10**5))), "x" * 10**7, 1 << 10**6):
        assert seconds(returning(value)) < 1
        assert seconds(with_globals("def f(): return VALUE", VALUE=value)) < 1
    one, other = [0] * 10**5, [0] * (10**5 - 1) + [1]
    assert fingerprint(returning(one)) == fingerprint(returning(other)) != fingerprint(returning(one[:-1]))


def test_many_callees_take_no_time():
    """The last of a thousand counts, and that of a chain of 1,500; of three thousand those that come first."""
    many = {f"g{n:04}": returning(n) for n in range(3000)}
    thousand = f"def f(): return [{','.join(sorted(many)[:1000])}]"
    everything = f"def f(): return [{','.join(many)}]"
    chain = "\n".join(f"def f{n}(x): return f{n + 1}(x)" for n in range(1500)) + "\nf = f0\ndef f1500(x): return "
    same, other = {"g2999": returning(-1)}, {"g0999": returning(-1)}
    assert fingerprint(with_globals(thousand, **many)) != fingerprint(with_globals(thousand, **many | other))
    assert fingerprint(with_globals(everything, **many)) == fingerprint(with_globals(everything, **many | same))
    assert fingerprint(with_globals(chain + "x")) != fingerprint(with_globals(chain + "-x"))
    assert seconds(with_globals(everything, **many)) < 1
