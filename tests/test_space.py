"""Configs as values: described alike on every rank, and without repeats."""

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import triton
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.space import config_fields, describe, digest, stable_repr, unique


def hook(args: dict[str, Any]) -> None:
    pass


def test_a_config_is_one_line():
    """Constants in their order, then warps and stages; what is at its default is left out."""
    config = triton.Config({"BLOCK_M": 128, "EVEN": True, "MODE": "fast"}, num_warps=8, num_stages=2)
    assert describe(config) == "BLOCK_M=128 EVEN=True MODE='fast' num_warps=8 num_stages=2"
    assert config_fields(config) == {"BLOCK_M": 128, "EVEN": True, "MODE": "fast", "num_warps": 8, "num_stages": 2}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_ctas": 2}, "num_ctas=2"),
        ({"maxnreg": 64}, "maxnreg=64"),
        ({"ir_override": "kernel.ttgir"}, "ir_override='kernel.ttgir'"),
        ({"pre_hook": hook}, f"pre_hook={__name__}.hook"),
        ({"pre_hook": functools.partial(hook)}, "pre_hook=functools.partial"),
    ],
)
def test_every_option_tells_configs_apart(options: dict[str, Any], text: str):
    """Also those that ``str(Config)`` leaves out."""
    config, plain = triton.Config({"B": 16}, **options), triton.Config({"B": 16})
    assert describe(config) == f"{describe(plain)} {text}"
    assert unique([plain, config]) == [plain, config]


def test_addresses_are_no_part_of_a_value():
    """An object among the constants reads the same in two processes."""
    program = "from dist_tune.space import stable_repr; print(stable_repr([lambda: 0, object().__init__]))"
    texts = {subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout for _ in range(2)}
    (text,) = texts
    assert "0x" not in text
    assert "<lambda>" in text
    assert "0x" not in describe(triton.Config({"POLICY": object()}))
    assert stable_repr("at 0") == "'at 0'"


def test_unique_keeps_the_first_of_equals():
    """In their order; equal configs are one even if they are two objects."""
    a, b, again = triton.Config({"B": 16}), triton.Config({"B": 32}), triton.Config({"B": 16})
    assert [id(config) for config in unique([b, a, again, b])] == [id(b), id(a)]


def test_hooks_compare_by_identity():
    """Two closures of one function look alike and may do different things."""

    def make(value: int) -> Callable[[dict[str, Any]], None]:
        return lambda args: args.update(value=value)

    hooks = [make(1), make(2)]
    configs = [triton.Config({"B": 16}, pre_hook=each) for each in [*hooks, hooks[0]]]
    assert unique(configs) == configs[:2]


@given(st.lists(st.sampled_from([1, 2, 16, 1.0, 0.5, True, False, None, "1", "fast", "None", "True"]), unique_by=lambda v: (type(v), v)))
def test_unique_drops_nothing_that_differs(values: list[Any]):
    """Constants that differ, if only in type, make different kernels: none is dropped, and no two read the same."""
    configs = [triton.Config({"MODE": value}) for value in values]
    assert len(unique(configs)) == len(values)


def test_a_digest_is_of_texts_and_order():
    """Short, equal for equal lists, different for another order or length."""
    assert digest(["a", "b"]) == digest(["a", "b"])
    assert len({digest(texts) for texts in (["a", "b"], ["b", "a"], ["a"], [], ["ab"])}) == 5
    assert len(digest([])) == 16
