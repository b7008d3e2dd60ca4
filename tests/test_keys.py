"""Tuning keys of functions: hashable, one line of text that tells them apart, and classes of
sizes.
"""

import dataclasses
import enum
import gc
import os
import re
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_tune import contextual_autotune, keys
from dist_tune.keys import bucketed, key_text, power_of_two, size_classes, to_hashable
from dist_tune.measure.differences import difference
from tests.steps import quiet

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.sampled_from([torch.float32, torch.int8])
)
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
    """A key with the types of its scalars, so that 1, 1.0 and True differ, and nan equals
    itself.
    """
    if isinstance(key, tuple):
        return tuple(map(exactly, key))
    return type(key), repr(key) if isinstance(key, float) else key


def test_a_tensor_is_its_shape_strides_and_dtype():
    """Of two tensors that differ only in what they hold, or in the device, the keys are equal."""
    assert to_hashable(torch.empty(4, 8, dtype=torch.bfloat16)) == ((4, 8), (8, 1), torch.bfloat16)
    assert to_hashable(torch.empty(8, 4).T) == ((4, 8), (1, 4), torch.float32)
    assert (
        to_hashable(torch.zeros(3))
        == to_hashable(torch.ones(3))
        == to_hashable(torch.empty(3, device="meta"))
    )
    assert to_hashable(torch.nn.Parameter(torch.zeros(3))) == to_hashable(torch.zeros(3))
    assert to_hashable(torch.eye(3).to_sparse()) == ((3, 3), "torch.sparse_coo", torch.float32)


def test_containers_become_tuples():
    """Lists, dicts and sets within each other, in one order however they were filled; a dataclass
    that is not frozen, too.
    """
    x = torch.empty(2)
    assert to_hashable([x, (1, [2])]) == (((2,), (1,), torch.float32), (1, (2,)))
    assert (
        to_hashable({"b": 1, "a": [x]})
        == to_hashable({"a": [x], "b": 1})
        == (("a", (((2,), (1,), torch.float32),)), ("b", 1))
    )
    assert to_hashable({3, 1, 2}) == to_hashable(frozenset({2, 1, 3})) == (1, 2, 3)
    assert to_hashable(Context(8, [x])) == (
        "Context",
        ("width", 8),
        ("weights", (((2,), (1,), torch.float32),)),
    )
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
        "from dist_tune.keys import key_text\nclass Thing: pass\ntext = key_text([({'nccl', 'gloo',"
        " 'copy', 'push'}, dict.fromkeys({'a', 'b', 'c', 'd'}, 1)), (Thing(), len, Thing)])"
    )
    here: dict[str, Any] = {"__name__": "__main__"}
    exec(program, here)
    command, env = (
        [sys.executable, "-c", f"{program}\nprint(text)"],
        {**os.environ, "PYTHONHASHSEED": "77"},
    )
    done = subprocess.run(
        command, env=env, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True
    )
    assert (done.stdout, "0x" in done.stdout) == (f"{here['text']}\n", False)


@given(st.integers(min_value=1))
def test_power_of_two_is_the_next_one(size: int):
    """Not smaller than the size, and less than twice it; 0 and negative numbers stay."""
    power = power_of_two(size)
    assert (power & (power - 1), size <= power < 2 * size) == (0, True)
    assert power_of_two(1 - size) == 1 - size


@given(st.lists(st.integers(1, 50), min_size=1, unique=True).map(sorted), st.integers())
def test_a_size_is_in_the_first_class_that_holds_it(limits: list[int], size: int):
    assert (
        size_classes(*limits)(size)
        == [*[f"<={limit}" for limit in limits if size <= limit], f">{limits[-1]}"][0]
    )


@pytest.mark.parametrize("limits", [(), (0, 1), (-1,), (2, 2), (3, 2)])
def test_limits_that_are_none_not_positive_or_not_ascending_are_refused(limits: tuple[int, ...]):
    with pytest.raises(ValueError, match="ascending"):
        size_classes(*limits)


def test_every_int_is_bucketed_and_nothing_else():
    """Sizes and strides, however deep; no bool, float, string or dtype."""
    key = (torch.Size([100, 7]), (7, 1), torch.float16, True, 3.0, "5", (1000,), Mode.FAST)
    assert bucketed(key, power_of_two) == (
        (128, 8),
        (8, 1),
        torch.float16,
        True,
        3.0,
        "5",
        (1024,),
        Mode.FAST,
    )
    assert bucketed([torch.empty(3, 5)], power_of_two) == (((4, 8), (8, 1), torch.float32),)
    assert bucketed(100, size_classes(64, 1024)) == "<=1024"


# -- kinds of calls: the first call of each ends in a meeting of all ranks -------------------------


class Shaped:
    """What counts as a tensor does, beside nothing but such objects and tensors."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.dtype = shape, "fp4"


def of(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def nested(
    layout: torch.layout, *lengths: int, width: int = 8, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A batch of matrices of these lengths."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested tensors.*")
        return torch.nested.nested_tensor(
            [torch.ones(length, width, dtype=dtype) for length in lengths], layout=layout
        )


X = torch.zeros(4, 8)
LAYOUTS = [torch.strided, torch.jagged]
# Arguments of two calls in a line.
ONE_KIND = """
X                                       torch.ones(8, 4).T
torch.nn.Parameter(X), x=X              X, x=torch.nn.Parameter(X)
X, 0.5, 3, True, "a", None              X, 1.5, 4, False, "b", None
[X], (X,), {"x": X}                     [X, X], (1, 2), {}
torch.nn.Linear(2, 2), scale=0.5        torch.nn.Linear(4, 4), scale=1.5
np.zeros(2), 3                          np.zeros(5, int), 3
Shaped(4), scale=np.zeros(2)            Shaped(4), scale=np.zeros(3)
Shaped(4), None                         Shaped(5), None
"""
TWO_KINDS = """
X                                       X[:2]
X                                       X.half()
X, X[:2]                                X[:2], X
X                                       X, X
X                                       x=X
x=X                                     y=X
x=X, y=3                                y=3, x=X
X, x=X[:2]                              X[:2], x=X
True                                    1
1                                       1.0
None                                    *()
"x", 3                                  x=3
X, x=1                                  X, x=None
torch.nn.Linear(2, 2)                   torch.nn.Bilinear(2, 2, 2)
np.zeros(2)                             np.zeros(3)
X, Shaped(4)                            X, Shaped(5)
X, np.zeros(2)                          X, np.zeros(2, int)
"""
KINDS = [
    (n, *re.split("   +", line))
    for n, lines in ((1, ONE_KIND), (2, TWO_KINDS))
    for line in lines.strip().splitlines()
]


@pytest.mark.parametrize(("n", "one", "other"), KINDS)
def test_calls_are_of_one_kind_or_of_two(n: int, one: str, other: str):
    """Tensors count by shape and dtype, all else by type; so do the number and order of arguments,
    and their names.

    A closer look says the same, and for each call the same again.
    """
    calls = [eval(f"of({text})") for text in (one, other)]
    assert len({keys.lasting_signature(*call) for call in calls}) == n
    for call in calls:
        first = keys.call_signature(*call)
        assert first == keys.call_signature(*call)
        assert first == keys.lasting_signature(*call) or any(
            isinstance(each, Shaped | np.ndarray) for each in call[0]
        )


def test_types_made_in_each_call_are_not_kept_for_ever():
    """Nor any object."""
    things, types = [], []
    for _ in range(4000):
        made = type("Made", (), {})
        thing = made()
        keys.call_signature((thing, X), {"y": thing})
        things.append(weakref.ref(thing))
        types.append(weakref.ref(made))
    del made, thing
    gc.collect()
    assert (
        sum(each() is not None for each in things),
        sum(each() is not None for each in types) < 2000,
    ) == (0, True)
    assert keys.call_signature((X,), {}) == (X.shape, X.dtype)


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_a_steady_call_reads_nothing_of_an_object(
    layout: torch.layout | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A module searches in Python for what it lacks, and isinstance asks for its class.

    Steady is the second call of a kind, by position or by name, also with nested tensors whose
    ragged sizes differ; by one read.
    """
    quiet(monkeypatch, tmp_path)
    read: list[str] = []

    class Owner(torch.nn.Module):
        def __getattribute__(self, name: str) -> Any:
            read.append(name)
            return super().__getattribute__(name)

    owner, step = Owner(), contextual_autotune()(lambda x, y=None: x)
    for call in (lambda x: step(x, owner), lambda x: step(x, y=owner)):
        n_read = []
        for length in (5, 6, 7):
            read.clear()
            call(X if layout is None else nested(layout, 3, length))
            n_read.append(len(read))
        assert n_read[0] > 5
        assert max(n_read[1:]) <= (layout is not None)


# -- nested tensors: a call with them is as one with any other ones --------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nested_tensor_is_a_key(layout: torch.layout):
    """Of its layout, its dtype, and the sizes that all its parts share; ragged ones are left
    out.
    """
    key = to_hashable(nested(layout, 3, 5))
    assert key == to_hashable(nested(layout, 2, 9))
    assert key_text(key) == f"[(2,None,8),'{layout}',torch.float32]"
    others = [
        nested(layout, 3, 5, 7),
        nested(layout, 3, 5, width=4),
        nested(layout, 3, 5, dtype=torch.float16),
    ]
    assert len({key, *map(to_hashable, others)}) == 4
    assert bucketed(nested(layout, 3, 5, 7, width=6), power_of_two)[0] == (4, None, 8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nested_result_is_compared_part_by_part(layout: torch.layout):
    """With another nested tensor; a plain one is another thing."""
    result = nested(layout, 3, 5)
    assert difference(result, nested(layout, 3, 5)) == ""
    assert "wrong" in difference(result, nested(layout, 3, 5) * 2.0)
    assert (
        difference(result, nested(layout, 3, 4))
        == "returned a tensor [5, 8] torch.float32 in result[1], expected a tensor [4, 8]"
        " torch.float32"
    )
    assert (
        difference(result, torch.ones(2))
        == "returned a nested tensor of torch.float32, expected a tensor [2] torch.float32"
    )
