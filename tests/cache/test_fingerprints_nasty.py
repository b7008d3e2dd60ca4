"""Fingerprints of code: objects that refuse to answer raise nothing, and huge ones take no time."""

import functools
import sys
import time
import types
import unittest.mock
import weakref
from typing import Any

import pytest
import torch

from dist_tune.cache.fingerprints import fingerprint
from tests.source_programs import Compiled, adding, returning, subtracting, with_globals

pytestmark = pytest.mark.once


def refuse(*args: object, **kwargs: object) -> Any:
    raise RuntimeError("asked")


QUESTIONS = ("repr", "str", "hash", "eq", "len", "iter", "bool", "call", "format", "getattr", "getattribute", "getitem")
REFUSING: dict[str, Any] = {f"__{name}__": refuse for name in QUESTIONS}


class RefusingMeta(type):
    __getattribute__ = __hash__ = __eq__ = __instancecheck__ = __subclasscheck__ = __repr__ = refuse


class Partial(functools.partial[Any]):
    func = property(refuse)


class RefusingTensor(torch.Tensor):
    __torch_function__: Any = classmethod(refuse)


@functools.cache
def nasty() -> dict[str, Any]:
    bases: tuple[type, ...] = (object, str, int, float, tuple, list, dict, set, types.ModuleType)
    kinds: list[Any] = [type(f"Nasty_{base.__name__}", (base,), REFUSING) for base in bases]
    things = {kind.__name__: kind.__new__(kind, *(["m"] if kind.__base__ in (str, types.ModuleType) else [])) for kind in kinds}
    cyclic: list[Any] = [{}]
    cyclic[0]["again"] = cyclic
    deep: list[Any] = []
    shared: list[Any] = []
    for _ in range(50_000):
        deep, shared = [deep], [shared, shared]
    loop = types.SimpleNamespace()
    loop.fn = loop.__wrapped__ = loop
    odd = Compiled(adding)
    vars(odd)[5] = vars(odd)[None] = subtracting  # type: ignore[index]
    gone = type("Gone", (), {})()
    return {
        **things,
        "class attribute": type("Nasty", (), {"p": property(refuse), "x": things["Nasty_object"], "__class__": property(refuse)})(),
        "dict property": type("Nasty", (), {"__dict__": property(refuse), "__module__": 5, "__slots__": ()})(),
        "metaclass": object.__new__(RefusingMeta("Nasty", (), {})),  # type: ignore[arg-type]
        "class": RefusingMeta("Nasty", (), {}),
        "tensor": torch.empty(2).as_subclass(RefusingTensor),
        "cyclic": cyclic,
        "wraps itself": loop,
        "dead proxy": weakref.proxy(gone),
        "surrogates": "\ud800" * 500,
        "deep": deep,
        "shared": shared,
        "odd attributes": odd,
        "partial": Partial(len),
        "frame": sys._getframe(),
        "mock": unittest.mock.MagicMock(),
        "ops": torch.ops.aten,
        "empty cell": with_globals("def f():\n    def g(): return x\n    return g\n    x = 1")(),
        "no module name": with_globals("def f(): pass", __name__=5),
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
        [with_globals(f"def f(): return ODD, {n}", ODD=thing) for n in (1, 2)],
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


@pytest.mark.parametrize(
    "value",
    [range(10**9), list(range(10**6)), {n: str(n) for n in range(10**5)}, set(map(str, range(10**5))), "x" * 10**7, 1 << 10**6],
    ids=["range", "list", "dict", "set", "str", "int"],
)
def test_huge_values_take_no_time(value: object):
    """Captured or a constant of the module: it is their start and their length that count."""
    assert seconds(returning(value)) < 1
    assert seconds(with_globals("def f(): return VALUE", VALUE=value)) < 1


def test_the_start_of_a_huge_container_counts():
    """And its length: what is beyond four thousand elements does not."""
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


def test_a_usual_function_takes_milliseconds():
    """One with ten callees of a dozen lines each: less than 2 on an idle machine."""
    lines = "".join(f"    v{n} = x * {n} + inner({n}, y)[{n}].attribute\n" for n in range(12))
    callees = "".join(f"def g{n}(x, y=1):\n{lines}    return v3\n" for n in range(10))
    calls = " + ".join(f"g{n}(x)" for n in range(10))
    function = with_globals(f"{callees}def inner(a, b): return a\ndef f(x): return {calls}")
    assert min(seconds(function) for _ in range(50)) < 5e-3
