"""What ``bucket=`` of a step takes, which kernels it means, what it makes of a key, and what it
tells of.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from dist_tune import contextual_autotune, power_of_two, size_classes
from dist_tune.launches import Buckets, Launch
from dist_tune.launches.kernel import key_of
from tests.steps import add_kernel, autotuned, configs, shift_kernel

POWERS: Any = {"n": power_of_two}
NAME = "tests.steps.add_kernel"


def key(kernel: Any, n: object, bucket: Any = None) -> str:
    """The key of a launch over ``n`` elements, as text."""
    buckets = Buckets({"*": POWERS} if bucket is None else bucket)
    x = torch.zeros(4)
    return Launch(kernel, (x, x, n), {}, buckets.of(kernel)).key_text


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_sizes_of_one_bucket_have_one_key(n: int, other: int):
    """And of two buckets two. A record of exactly the bucket's size has that key, too."""
    kernel = autotuned()
    assert (key(kernel, n) == key(kernel, other)) == (power_of_two(n) == power_of_two(other))
    assert (
        key(kernel, n)
        == Launch(kernel, (torch.zeros(4), torch.zeros(4), power_of_two(n)), {}).key_text
    )


@pytest.mark.parametrize(
    ("pattern", "is_meant"),
    [
        ("add_kernel", True),
        (NAME, True),
        ("*.steps.add_*", True),
        ("add", False),
        ("ADD_*", False),
        ("kernels.add_kernel", False),
    ],
)
def test_kernels_are_named_by_patterns(pattern: str, is_meant: bool):
    """Of the bare name, or of the name with its module, in the case that they are written in."""
    assert bool(Buckets({pattern: POWERS}).of(autotuned())) == is_meant


def test_the_first_pattern_decides_about_an_argument():
    """Others add what it does not name."""
    kernel = autotuned(shift_kernel, key=("n", "shift"))
    x = torch.zeros(4)
    buckets = Buckets(
        {"shift_kernel": {"n": size_classes(64)}, "*": {"n": power_of_two, "shift": power_of_two}}
    )
    assert key_of(kernel, {"x_ptr": x, "n": 65, "shift": 9}, {}, buckets.of(kernel)) == (
        ">64",
        16,
        "torch.float32",
        "in buckets",
    )


def test_what_is_no_size_stays():
    """A size that is not given, a switch, a number that is no int; kernels with one config have no
    key at all.
    """
    assert [key(autotuned(), n) for n in (None, True, 2.5)] == [
        f"[{n},torch.float32,torch.float32]" for n in (None, True, 2.5)
    ]
    assert key(autotuned(configs=configs(16)), 100) == "[]"


@pytest.mark.parametrize(
    ("bucket", "error", "text"),
    [
        (
            power_of_two,
            TypeError,
            'as {"layer_norm_*": {"NB": power_of_two}}, got the function power_of_two',
        ),
        ([("add_kernel", POWERS)], TypeError, "got a list of 1 values"),
        ({add_kernel: POWERS}, TypeError, "got the function add_kernel: an object of type dict"),
        ({"add_kernel": power_of_two}, TypeError, "got 'add_kernel': the function power_of_two"),
        ({"add_kernel": {}}, ValueError, "bucket names no argument of 'add_kernel'"),
        (
            {"add_kernel": {"n": 64}},
            TypeError,
            (
                "bucket of 'n' of 'add_kernel' must be a function, function(size), as power_of_two,"
                " got 64"
            ),
        ),
    ],
)
def test_what_is_no_bucket_is_refused_at_decoration(bucket: Any, error: type[Exception], text: str):
    """With one line that says what fits."""
    with pytest.raises(error, match=re.escape(text)) as raised:
        contextual_autotune(bucket=bucket)
    assert "\n" not in str(raised.value)


def fails(size: int) -> int:
    raise LookupError(f"no bucket for {size}")


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (fails, ValueError, "raised LookupError: no bucket for 100"),
        (lambda size: [size], TypeError, "raised TypeError: unhashable type: 'list'"),
        (size_classes, TypeError, "returned the function size_classes.<locals>.<lambda>"),
        (
            lambda size: float("nan"),
            TypeError,
            "returned nan, which is not equal to what it returns next",
        ),
        (lambda size: (size, object()), TypeError, "which is not equal to what it returns next"),
    ],
)
def test_a_function_that_makes_no_bucket_is_an_error(
    function: Any, error: type[Exception], text: str
):
    """It names the kernel, the argument and its value, and what to return."""
    with pytest.raises(error, match=re.escape(f"bucket of {NAME} ")) as raised:
        key(autotuned(), 100, {"add_kernel": {"n": function}})
    assert text in str(raised.value)
    assert str(raised.value).endswith(
        "it was asked of n=100, and must return what can be hashed and is equal each time, as"
        " an int"
    )


def test_what_has_no_effect_is_told():
    """A name that nothing has, an argument that no key holds; each with the names that there
    are.
    """
    buckets = Buckets({"attend": POWERS, "add_*": {"n": power_of_two, "T": power_of_two}})
    assert buckets.told("step") == {}  # nothing was launched
    for kernel in (autotuned(), autotuned(shift_kernel), autotuned(configs=configs(16))):
        buckets.of(kernel)
    there = "no kernel launched so far is called so, they are add_kernel, shift_kernel"
    assert buckets.told("step") == {
        "bucket attend": f"step: bucket= has no effect on 'attend': {there}",
        f"bucket {NAME} T": f"step: bucket= has no effect on 'T' of {NAME}, whose key is ['n']",
    }


def test_kernels_that_are_gone_are_forgotten():
    """A factory makes one in each call."""
    buckets, kernels = Buckets({"*": POWERS}), WeakSet[Any]()
    for _ in range(3):
        kernels.add(kernel := autotuned())
        buckets.of(kernel)
    assert len(kernels) <= 1


def test_a_launch_that_only_compiles_has_triton_s_own_key():
    """``warmup=True`` asks Triton for all configs."""
    from dist_tune.launches import interception

    patch, kernel = interception.triton_patch(), autotuned()
    listener: Any = SimpleNamespace(
        buckets=Buckets({"*": POWERS}), launching=None, members=frozenset()
    )
    before, patch.has_buckets = patch.has_buckets, True
    interception.push(listener)
    try:
        assert [bool(patch.buckets_of(kernel, {"warmup": each})) for each in (False, True)] == [
            True,
            False,
        ]
    finally:
        interception.pop()
        patch.has_buckets = before
    assert triton.runtime.autotuner.Autotuner.run.__code__ is patch.own_code
