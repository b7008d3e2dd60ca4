"""Tuning keys of functions: hashable, one line of text that tells them apart, and classes of sizes."""

import dataclasses
import enum
import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_tune import contextual, keys
from dist_tune.keys import bucketed, key_text, power_of_two, size_classes, to_hashable
from dist_tune.measure.compare import difference

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.sampled_from([torch.float32, torch.int8])
KEYS = st.recursive(SCALARS, lambda inner: st.lists(inner).map(tuple), max_leaves=8)


class Mode(enum.Enum):
    FAST = "fast"


class Sizes(NamedTuple):
    rows: int
    columns: int


@dataclasses.dataclass(frozen=True)
class Frozen:
    width: int


@dataclasses.dataclass
class Context:
    width: int
    weights: list[torch.Tensor]


def exactly(key: Any) -> Any:
    """A key with the types of its scalars, so that 1, 1.0 and True differ, and nan equals itself."""
    if isinstance(key, tuple):
        return tuple(map(exactly, key))
    return type(key), repr(key) if isinstance(key, float) else key


def test_a_tensor_is_its_shape_strides_and_dtype():
    """Of two tensors that differ only in what they hold, or in the device, the keys are equal."""
    assert to_hashable(torch.empty(4, 8, dtype=torch.bfloat16)) == ((4, 8), (8, 1), torch.bfloat16)
    assert to_hashable(torch.empty(8, 4).T) == ((4, 8), (1, 4), torch.float32)
    assert to_hashable(torch.zeros(3)) == to_hashable(torch.ones(3)) == to_hashable(torch.empty(3, device="meta"))
    assert to_hashable(torch.nn.Parameter(torch.zeros(3))) == to_hashable(torch.zeros(3))
    assert to_hashable(torch.eye(3).to_sparse()) == ((3, 3), "torch.sparse_coo", torch.float32)


def test_containers_become_tuples():
    """Lists, dicts and sets within each other, in one order however they were filled; a dataclass that is not frozen, too."""
    x = torch.empty(2)
    assert to_hashable([x, (1, [2])]) == (((2,), (1,), torch.float32), (1, (2,)))
    assert to_hashable({"b": 1, "a": [x]}) == to_hashable({"a": [x], "b": 1}) == (("a", (((2,), (1,), torch.float32),)), ("b", 1))
    assert to_hashable({3, 1, 2}) == to_hashable(frozenset({2, 1, 3})) == (1, 2, 3)
    assert to_hashable(Context(8, [x])) == ("Context", ("width", 8), ("weights", (((2,), (1,), torch.float32),)))
    assert to_hashable(Sizes(1, 2)) == (1, 2)
    for same in (Frozen(3), Mode.FAST, 1.5, None, "text", torch.Size([2]), len):
        assert to_hashable(same) is same


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ((4096, 4096, torch.bfloat16), "[4096,4096,torch.bfloat16]"),
        ((torch.Size([2, 3]), (4,), ()), "[(2,3),(4),()]"),
        ([1, [True, None]], "[1,(True,None)]"),
        (("a,b", "'", '"', "\n", "é", b"x"), r"""['a,b',"'",'"','\n','\xe9',b'x']"""),
        (7, "7"),
        ((7,), "[7]"),
        ("7", "'7'"),
        ((1.0, float("inf")), "[1.0,inf]"),
        ((Mode.FAST, Frozen(1)), "[<Mode.FAST: 'fast'>,Frozen(width=1)]"),
        (torch.empty(2, 3), "[(2,3),(3,1),torch.float32]"),
        ({"b": {2, 1}, "a": 0}, "[('a',0),('b',(1,2))]"),
        (("x at 0x7f",), "['x at 0x7f']"),
    ],
)
def test_a_key_is_one_line(key: Any, text: str):
    """Strings in quotes, nested tuples in parentheses, a torch.Size as a tuple."""
    assert key_text(key) == text


@given(KEYS, KEYS)
def test_texts_are_equal_iff_keys_are(one: Any, other: Any):
    """1, 1.0, True and '1' are four keys; a key and its copy are one."""
    assert (key_text(one) == key_text(other)) == (exactly(one) == exactly(other))
    assert exactly(bucketed(one, lambda size: size)) == exactly(to_hashable(one)) == exactly(one)
    assert key_text(one).isascii()
    assert "\n" not in key_text(one)


@pytest.mark.processes
def test_texts_are_equal_in_every_process():
    """Sets of strings under another hash seed, and objects at another address."""
    program = (
        "from dist_tune.keys import key_text\nclass Thing: pass\n"
        "text = key_text([({'nccl', 'gloo', 'copy', 'push'}, dict.fromkeys({'a', 'b', 'c', 'd'}, 1)), (Thing(), len, Thing)])"
    )
    here: dict[str, Any] = {"__name__": "__main__"}
    exec(program, here)
    command, env = [sys.executable, "-c", f"{program}\nprint(text)"], {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run(command, env=env, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    assert (done.stdout, "0x" in done.stdout) == (f"{here['text']}\n", False)


@given(st.integers(min_value=1))
def test_power_of_two_is_the_next_one(size: int):
    """Not smaller than the size, and less than twice it; 0 and negative numbers stay."""
    power = power_of_two(size)
    assert (power & (power - 1), size <= power < 2 * size) == (0, True)
    assert power_of_two(1 - size) == 1 - size


@given(st.lists(st.integers(1, 50), unique=True).map(sorted) | st.lists(st.integers(-3, 50), max_size=4), st.integers())
def test_a_size_is_in_the_first_class_that_holds_it(limits: list[int], size: int):
    """Limits that are none, not positive or not ascending are refused."""
    if not limits or limits[0] <= 0 or limits != sorted(set(limits)):
        with pytest.raises(ValueError, match="ascending"):
            size_classes(*limits)
        return
    holding = [f"<={limit}" for limit in limits if size <= limit]
    assert size_classes(*limits)(size) == [*holding, f">{limits[-1]}"][0]


def test_every_int_is_bucketed_and_nothing_else():
    """Sizes and strides, however deep; no bool, float, string or dtype."""
    key = (torch.Size([100, 7]), (7, 1), torch.float16, True, 3.0, "5", (1000,), Mode.FAST)
    assert bucketed(key, power_of_two) == ((128, 8), (8, 1), torch.float16, True, 3.0, "5", (1024,), Mode.FAST)
    assert bucketed(100, size_classes(64, 1024)) == "<=1024"
    assert bucketed([torch.empty(3, 5)], power_of_two) == (((4, 8), (8, 1), torch.float32),)
    assert bucketed(True, power_of_two) is True


# -- kinds of calls: the first call of each ends in a meeting of all ranks -------------------------


class Shaped:
    """What counts as a tensor does, beside nothing but such objects and tensors."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.dtype = shape, "fp4"


def of(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def kind_of(call: Any) -> Any:
    """The signature of a call; that by a closer look is equal, now and when the types are known."""
    first, lasting = keys.call_signature(*call), keys.lasting_signature(*call)
    assert keys.call_signature(*call) == first
    if not any(hasattr(arg, "shape") and not isinstance(arg, torch.Tensor) for arg in call[0]):
        assert first == lasting
    return lasting


X = torch.zeros(4, 8)
ONE_KIND = [
    (of(X), of(torch.ones(8, 4).T)),
    (of(torch.nn.Parameter(X), x=X), of(X, x=torch.nn.Parameter(X))),
    (of(X, 0.5, 3, True, "a", None), of(X, 1.5, 4, False, "b", None)),
    (of([X], (X,), {"x": X}), of([X, X], (1, 2), {})),
    (of(torch.nn.Linear(2, 2), X), of(torch.nn.Linear(4, 4), X)),
    (of(X, scale=0.5), of(X, scale=1.5)),
    (of(np.zeros(2), 3), of(np.zeros(5, int), 3)),
    (of(Shaped(4), scale=np.zeros(2)), of(Shaped(4), scale=np.zeros(3))),
    (of(Shaped(4), None), of(Shaped(5), None)),
]
TWO_KINDS = [
    (of(X), of(X[:2])),
    (of(X), of(X.half())),
    (of(X, X[:2]), of(X[:2], X)),
    (of(X), of(X, X)),
    (of(X), of(x=X)),
    (of(x=X), of(y=X)),
    (of(x=X, y=3), of(y=3, x=X)),
    (of(X, x=X[:2]), of(X[:2], x=X)),
    (of(True), of(1)),
    (of(1), of(1.0)),
    (of(None), of()),
    (of("x", 3), of(x=3)),
    (of(X, 1), of(X, "1")),
    (of(X, x=1), of(X, x=None)),
    (of(torch.nn.Linear(2, 2)), of(torch.nn.Bilinear(2, 2, 2))),
    (of(np.zeros(2)), of(np.zeros(3))),
    (of(X, Shaped(4)), of(X, Shaped(5))),
    (of(X, np.zeros(2)), of(X, np.zeros(2, int))),
]


@pytest.mark.parametrize(("one", "other"), ONE_KIND)
def test_calls_are_of_one_kind(one: Any, other: Any):
    """Tensors of one shape and dtype, also parameters, and objects of one type."""
    assert kind_of(one) == kind_of(other)


@pytest.mark.parametrize(("one", "other"), TWO_KINDS)
def test_calls_are_of_two_kinds(one: Any, other: Any):
    """By a shape, a dtype, a type, the number and order of arguments, and their names."""
    assert kind_of(one) != kind_of(other)
    assert hash(kind_of(one)) == hash(kind_of(one))


def test_types_made_in_each_call_are_not_kept_for_ever():
    """Nor any object."""
    gone = []
    for _ in range(keys._MAX_TYPES + 5):
        thing = type("Made", (), {})()
        keys.call_signature((thing, X), {"y": thing})
        gone.append(weakref.ref(thing))
        del thing
    assert len(keys._is_tensor) <= keys._MAX_TYPES
    assert [each for each in gone if each() is not None] == []
    assert keys.call_signature((X,), {}) == (X.shape, X.dtype)


@pytest.mark.usefixtures("_quiet")
def test_a_steady_call_reads_nothing_of_an_object():
    """A module searches in Python for what it lacks, and isinstance asks for its class."""
    read: list[str] = []

    class Owner(torch.nn.Module):
        def __getattribute__(self, name: str) -> Any:
            read.append(name)
            return super().__getattribute__(name)

    owner, step = Owner(), contextual.contextual_autotune()(lambda owner, x, y=None: x)
    for call in (lambda: step(owner, X), lambda: step(X, X, y=owner)):
        call()
        read.clear()
        call()
        assert read == []


# -- nested tensors: a call with them is as one with any other ones ---------------------------------------------------------

LAYOUTS = [torch.strided, torch.jagged]


@pytest.fixture
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("LOG_DIR", "CACHE_DIR"):
        monkeypatch.setenv(f"DIST_TUNE_{name}", str(tmp_path))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested tensors.*")
        yield


def nested(layout: torch.layout, *lengths: int, width: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A batch of matrices of these lengths."""
    return torch.nested.nested_tensor([torch.ones(length, width, dtype=dtype) for length in lengths], layout=layout)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nested_tensor_is_a_key(layout: torch.layout):
    """Of its layout, its dtype, and the sizes that all its parts share; ragged ones are left out."""
    key = to_hashable(nested(layout, 3, 5))
    assert key == to_hashable(nested(layout, 2, 9))
    assert key_text(key) == f"[(2,None,8),'{layout}',torch.float32]"
    others = [nested(layout, 3, 5, 7), nested(layout, 3, 5, width=4), nested(layout, 3, 5, dtype=torch.float16)]
    assert len({key, *map(to_hashable, others)}) == 4
    assert bucketed(nested(layout, 3, 5, 7, width=6), power_of_two)[0] == (4, None, 8)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_with_nested_tensors_are_of_one_kind(layout: torch.layout, monkeypatch: pytest.MonkeyPatch):
    """The first is heard from its beginning, the others are ordinary calls, alone or beside other arguments."""
    opened: list[int] = []
    open_one = contextual._ClosureTuner.open
    monkeypatch.setattr(contextual._ClosureTuner, "open", lambda self: opened.append(1) or open_one(self))  # type: ignore[func-returns-value]
    step = contextual.contextual_autotune()(lambda x, scale: x * scale)
    for n in (5, 6, 7):
        x = nested(layout, 3, n)
        for y in (step(x=x, scale=2.0), step(x, 2.0)):
            assert y.unbind()[1].sum().item() == 16.0 * n
    assert len(opened) == 2  # by position, and by name
    step(nested(layout, 3, 5, width=4), 2.0)
    assert len(opened) == 3


@pytest.mark.usefixtures("_quiet")
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
