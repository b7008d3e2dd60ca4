"""Configs as values: described alike on every rank, and without repeats."""

import enum
import functools
from typing import Any

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpretedFunction

from dist_tune.configs import (
    ConfigView,
    as_configs,
    by_kind,
    config_fields,
    describe,
    distinct,
    functions_in,
    stable_repr,
)
from dist_tune.records import digest


def hook(args: dict[str, Any]) -> None:
    pass


def test_a_config_is_one_line():
    """Constants in their order, then warps and stages; what is at its default is left out."""
    config = triton.Config(
        {"BLOCK_M": 128, "EVEN": True, "MODE": "fast"}, num_warps=8, num_stages=2
    )
    assert describe(config) == "BLOCK_M=128 EVEN=True MODE='fast' num_warps=8 num_stages=2"
    assert config_fields(config) == {
        "BLOCK_M": 128,
        "EVEN": True,
        "MODE": "fast",
        "num_warps": 8,
        "num_stages": 2,
    }


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
    assert distinct([plain, config])[0] == [plain, config]


def test_addresses_are_no_part_of_a_value():
    """They differ between processes (see tests/test_keys.py)."""
    assert stable_repr([iter(()), "at 0"]) == "[<tuple_iterator object>, 'at 0']"
    assert "0x" not in describe(triton.Config({"POLICY": object()}))


def test_a_digest_is_of_texts_and_order():
    assert len({digest(texts) for texts in (["a", "b"], ["b", "a"], ["a"], [], ["ab"])}) == 5


class Mode(enum.Enum):
    FAST = 1


class Plain:
    """Without a repr, and equal to nothing else."""


class Touchy:
    """Cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("ambiguous")

    __hash__ = None  # type: ignore[assignment]


def gemm(
    a: Any,
    b: Any,
    gemm_config: triton.Config,
    persistent: bool = True,
    *rest: Any,
    mode: Any = None,
) -> None:
    pass


def test_a_mapping_is_one_line_and_plain_fields():
    """What is in a triton.Config is in brackets, or has the name of the parameter before it;
    interpreted kernels read as others.
    """
    config = {
        "gemm_config": triton.Config({"BLOCK_M": 64}, num_warps=8),
        "persistent": True,
        "mode": Mode.FAST,
    }
    assert (
        describe(config)
        == "gemm_config=(BLOCK_M=64 num_warps=8 num_stages=3) persistent=True mode=<Mode.FAST: 1>"
    )
    assert config_fields(config) == {
        "gemm_config.BLOCK_M": 64,
        "gemm_config.num_warps": 8,
        "gemm_config.num_stages": 3,
        "persistent": True,
        "mode": "<Mode.FAST: 1>",
    }
    assert stable_repr(InterpretedFunction(hook)) == "InterpretedFunction(tests.test_configs:hook)"
    assert (
        describe({"f": gemm, "c": Plain, "o": Plain(), "t": torch.float16})
        == f"f={__name__}.gemm c={__name__}.Plain o=<{__name__}.Plain object> t=torch.float16"
    )


def test_what_differs_is_kept_and_what_is_equal_is_not():
    """By description and then by equality; what cannot be compared is not known to be equal."""
    one, other, touchy = Plain(), Plain(), Touchy()
    # They read alike and may do different things.
    hooks = [triton.Config({}, pre_hook=functools.partial(hook)) for _ in range(2)]
    values: list[Any] = [
        1,
        True,
        1.0,
        "1",
        1,
        one,
        other,
        one,
        touchy,
        Touchy(),
        touchy,
        *hooks,
        hooks[0],
        float("nan"),
        torch.ones(2),
    ]
    configs, texts = distinct([{"x": value} for value in values])
    assert [id(each["x"]) for each in configs] == [
        id(values[i]) for i in (0, 1, 2, 3, 5, 6, 8, 9, 11, 12, 14, 15)
    ]
    assert len(set(texts)) == len(texts)
    assert texts[4:6] == [f"x=<{__name__}.Plain object>", f"x=<{__name__}.Plain object> (#2)"]


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from("ab"),
            st.sampled_from([0, 1, 0.5, True, False, None, "1", "None"]),
            max_size=2,
        ),
        max_size=8,
    )
)
def test_no_two_candidates_read_alike(space: list[dict[str, Any]]):
    """Each is described once, in order; plain values that differ, if only in type, or in the order
    of names, are all there.
    """
    configs, texts = distinct(space)
    assert len(set(texts)) == len(texts) == len(configs)
    assert [config for config in configs if config not in space] == []
    assert {describe(each) for each in space} == set(texts)


def test_configs_of_one_kind_differ_in_warps_stages_and_numbers_other_than_one():
    """The largest kind first, and in it the config with the most different numbers."""
    texts = [
        "A=16 B=16 num_warps=1",
        "A=32 B=16 num_warps=4",
        "A=1 B=32 num_warps=4",
        "A=11 B=1.5 num_warps=4",
        "A=16 B='v2' num_warps=4",
    ]
    texts += ["A=16 B='v1' num_warps=4", "A=1 B=-8 num_warps=8"]
    assert by_kind(dict(enumerate(texts))) == [[1, 3, 0], [2, 6], [4], [5]]


def test_a_space_becomes_mappings():
    """Mappings stay; a bare value goes to ``config``, a bare triton.Config to the one parameter
    annotated so. Functions are told.
    """
    tile = triton.Config({"BLOCK_M": 64})
    assert as_configs([tile], gemm) == [{"gemm_config": tile}]
    assert as_configs(({"config": 1}, 2), lambda x, config: x) == [{"config": 1}, {"config": 2}]
    assert as_configs([{"anything": 1}], lambda x, **options: x) == [{"anything": 1}]
    assert as_configs([{"mode": 1}], gemm) == [{"mode": 1}]
    hooked = triton.Config({}, pre_hook=hook)
    assert functions_in([{"a": gemm, "b": 1}, {"a": gemm, "b": hooked}, {"a": print}]) == [
        gemm,
        print,
        hook,
    ]


@pytest.mark.parametrize(
    ("space", "function", "words"),
    [
        ([{"rest": 1}], gemm, "takes no keyword 'rest'"),
        ([{"x": 1}], lambda x, /: x, "takes no keyword 'x'"),
        ([3], gemm, r"\{'parameter': value\}"),
    ],
)
def test_a_space_that_does_not_fit_its_function(space: Any, function: Any, words: str):
    """Is found where it is decorated; tests/test_validation.py has more."""
    with pytest.raises(TypeError, match=words):
        as_configs(space, function)


def test_a_view_of_a_config_is_what_prune_fn_expects():
    """A mapping by keyword, and what is in the first triton.Config, in all ways in which examples
    write it.
    """
    config = triton.Config({"BLOCK_M": 64}, num_warps=8, num_stages=2)
    view = ConfigView({"gemm_config": config, "persistent": True})
    assert dict(view).keys() == {"gemm_config", "persistent"}
    assert (len(view), "BLOCK_M" in view, "num_warps" in view, "other" in view) == (
        2,
        True,
        True,
        False,
    )
    assert (
        view["gemm_config"]["BLOCK_M"]
        == view["BLOCK_M"]
        == view.kwargs["BLOCK_M"]
        == view["gemm_config"].kwargs["BLOCK_M"]
        == 64
    )
    assert (
        view["num_stages"]
        == view.num_stages
        == view["gemm_config"].num_stages
        == view.all_kwargs()["num_stages"]
        == 2
    )
    assert (view["persistent"], view.get("other", 5)) == (True, 5)
    view["gemm_config"].num_warps = 1  # what a rule writes to it is not what runs
    assert (isinstance(view["gemm_config"], triton.Config), config.num_warps) == (True, 8)
    plain = ConfigView({"block": 3})
    for of, name in ((view, "other"), (view, "gemm"), (plain, "BLOCK_M")):
        with pytest.raises(KeyError, match=name):
            of[name]
    for of, told in ((view, "other"), (plain, r"no other; it has \['block'\]")):
        with pytest.raises(AttributeError, match=told):
            _ = of.other
