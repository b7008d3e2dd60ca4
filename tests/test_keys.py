"""Tuning keys of functions: hashable, one line of text that tells them apart, and classes of sizes."""

import dataclasses
import enum
import json
import math
import os
import subprocess
import sys
import time
import timeit
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.keys import bucketed, key_text, power_of_two, size_classes, to_hashable

pytestmark = pytest.mark.once

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


@given(KEYS)
def test_what_is_hashable_stays_equal(key: Any):
    hash(to_hashable(key))
    assert exactly(to_hashable(key)) == exactly(key)


def test_a_tensor_takes_no_time():
    """A key is made in every call: less than half a microsecond more than its tuple on an idle machine."""
    x = torch.empty(4, 4)

    def seconds(make: Any) -> float:
        return min(timeit.repeat(make, timer=time.thread_time, number=2000, repeat=20)) / 2000

    assert seconds(lambda: to_hashable(x)) - seconds(lambda: (x.shape, x.stride(), x.dtype)) < 1.5e-6


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
    assert key_text(one) == key_text(one)
    assert key_text(one).isascii()
    assert "\n" not in key_text(one)


class Thing:
    pass


def hashed_anew() -> list[Any]:
    """Keys whose parts come in another order, or lie elsewhere, in another process."""
    return [({"nccl", "gloo", "copy", "push"}, dict.fromkeys({"a", "b", "c", "d"}, 1)), (Thing(), len, Thing)]


@pytest.mark.processes
def test_texts_are_equal_in_every_process():
    """Sets of strings under another hash seed, and objects at another address."""
    program = "import json\nfrom tests.test_keys import *\nprint(json.dumps([key_text(key) for key in hashed_anew()]))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [key_text(key) for key in hashed_anew()]
    assert "0x" not in done.stdout


@given(st.integers(min_value=1))
def test_power_of_two_is_the_next_one(size: int):
    """Not smaller than the size, and less than twice it."""
    power = power_of_two(size)
    assert power & (power - 1) == 0
    assert size <= power < 2 * size


def test_power_of_two_leaves_what_has_none():
    assert [power_of_two(size) for size in (-5, -1, 0, 1, 2, 3, 4096, 4097)] == [-5, -1, 0, 1, 2, 4, 4096, 8192]


@given(st.lists(st.integers(min_value=1), min_size=1, unique=True).map(sorted), st.integers())
def test_a_size_is_in_the_first_class_that_holds_it(limits: list[int], size: int):
    holding = [f"<={limit}" for limit in limits if size <= limit]
    assert size_classes(*limits)(size) == [*holding, f">{limits[-1]}"][0]


def test_size_classes_are_named_by_their_limits():
    small_medium_large = size_classes(64, 1024)
    assert [small_medium_large(size) for size in (1, 64, 65, 1024, 1025)] == ["<=64", "<=64", "<=1024", "<=1024", ">1024"]


@pytest.mark.parametrize("limits", [(), (0,), (-1, 5), (5, 5), (64, 32), (1, 3, 2)])
def test_limits_must_ascend(limits: tuple[int, ...]):
    with pytest.raises(ValueError, match="ascending"):
        size_classes(*limits)


def test_every_int_is_bucketed_and_nothing_else():
    """Sizes and strides, however deep; no bool, float, string or dtype."""
    key = (torch.Size([100, 7]), (7, 1), torch.float16, True, 3.0, "5", (1000,), Mode.FAST)
    assert bucketed(key, power_of_two) == ((128, 8), (8, 1), torch.float16, True, 3.0, "5", (1024,), Mode.FAST)
    assert bucketed(100, size_classes(64, 1024)) == "<=1024"
    assert bucketed([torch.empty(3, 5)], power_of_two) == (((4, 8), (8, 1), torch.float32),)
    assert bucketed(True, power_of_two) is True


@given(KEYS)
def test_a_bucket_of_one_size_each_changes_nothing(key: Any):
    assert exactly(bucketed(key, lambda size: size)) == exactly(key)
    sizes = bucketed(key, lambda size: math.inf)
    assert "inf" in key_text(sizes) or exactly(sizes) == exactly(key)
