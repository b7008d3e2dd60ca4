"""Text of a kernel's tuning key: equal keys read the same, and different ones do not."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
import triton

from dist_tune.runtime import Launch
from tests.ranks.kernels import configs

pytestmark = pytest.mark.once


@triton.jit
def kernel(x_ptr, act, n):
    pass


def text_of(act: Any) -> str:
    """The key of a launch with this argument."""
    tuned = triton.autotune(configs=configs(16, 32), key=["act", "n"])(kernel)
    return Launch(tuned, (torch.zeros(4), act, 64), {}).key_text


@pytest.mark.parametrize(("act", "text"), [("silu", "silu"), (None, "None"), (1, "1"), (1.5, "1.5"), (torch.float16, "torch.float16")])
def test_a_plain_word_is_not_quoted(act: Any, text: str):
    """Nor are numbers and dtypes: records of earlier versions are found."""
    assert text_of(act) == f"[{text},64,torch.float32]"


VALUES: list[Any] = [None, "None", True, "True", 1, "1", 1.0, "1.0", "a,b", "a", "", "'a'", "[", "inf", float("inf"), "nan"]


@pytest.mark.parametrize(("one", "other"), list(combinations(VALUES, 2)), ids=ascii)
def test_values_that_differ_read_differently(one: Any, other: Any):
    """None and "None" are two keys, on disk as in ``kernel.cache``."""
    assert text_of(one) != text_of(other)
