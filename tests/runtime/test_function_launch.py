"""Calls of a function that has configs: what the caller may fix, the key, the candidates, and which code counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import triton

from dist_tune import NoValidConfigError, autotune, power_of_two, to_hashable
from dist_tune.configs import as_configs, describe, distinct
from dist_tune.runtime.function_launch import FunctionLaunch, TunableFunction
from tests.function_options import BLOCKS, QUICK, quiet

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quiet(monkeypatch, tmp_path)


def tunable(function: Callable[..., Any], space: Any = BLOCKS, key_fn: Any = None, prune_fn: Any = None, **options: Any) -> TunableFunction:
    given = {"check": None, "bucket": None, **options}
    return TunableFunction(function, *distinct(as_configs(space, function)), key_fn, prune_fn, **given)


def launch(of: TunableFunction, *args: Any, **kwargs: Any) -> FunctionLaunch:
    key = of.key_of_fixed(args, kwargs) if of.names & kwargs.keys() else of.key(*args, **kwargs)
    return FunctionLaunch(of, key, args, kwargs, is_whole=True)


def ordinary(x: int, y: int = 2, *, block: int = 0) -> int:
    return x + y


# -- what the caller says ----------------------------------------------------------------------------------------------


def _spied(space: Any = None, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    ran: list[dict[str, Any]] = []

    def function(x: int, block: int, stages: int = 7) -> int:
        ran.append({"block": block, "stages": stages})
        return x

    space = space or [{"block": block, "stages": stages} for block in (1, 2) for stages in (3, 4)]
    return autotune(space, lambda x: x, options.pop("prune_fn", None), **{**QUICK, **options})(function), ran


def test_calls_with_nothing_to_choose():
    """autotune=False uses the first config, with what the caller gives; a config that is wholly given is an ordinary call."""
    tuned, ran = _spied()
    assert tuned(1, autotune=False) == 1
    tuned(1, autotune=False, autotune_allow_arg_overwrite=True, stages=9)
    tuned(1, block=30, stages=40, autotune_allow_arg_overwrite=True)
    assert ran == [{"block": 1, "stages": 3}, {"block": 1, "stages": 9}, {"block": 30, "stages": 40}]
    assert tuned.records == []


def test_config_arguments_of_the_caller_are_refused_unless_asked_for():
    """The message says which, and how to ask."""
    tuned, ran = _spied()
    with pytest.raises(ValueError, match=r"called with \['block'\].*autotune_allow_arg_overwrite=True"):
        tuned(1, block=3)
    with pytest.raises(ValueError, match=r"\['block', 'stages'\]"):
        tuned(1, block=3, stages=1, autotune=False)
    assert ran == []


def test_a_partly_given_config_is_tuned_for_itself():
    """The rest is chosen with what was given, under a key of its own; key_fn and prune_fn need not know."""
    pruned: list[Any] = []

    def prune_fn(config: Any, x: int) -> bool:
        pruned.append((config["block"], config["stages"]))
        return True

    tuned, ran = _spied(prune_fn=prune_fn)
    tuned(1, stages=9, autotune_allow_arg_overwrite=True)
    assert {(each["block"], each["stages"]) for each in ran} == {(1, 9), (2, 9)}
    assert pruned == [(1, 9), (2, 9)]
    record = tuned.records[0]
    assert (record.key, [each.config for each in record.candidates]) == ("[1,'stages=9']", ["block=1 stages=9", "block=2 stages=9"])
    n_ran = len(ran)
    tuned(1, stages=9, autotune_allow_arg_overwrite=True)
    assert len(ran) == n_ran + 1
    tuned(1)
    assert tuned.records[1].key == "[1]"
    assert len(tuned.records[1].candidates) == 4
    tuned(1, stages=8, autotune_allow_arg_overwrite=True)
    assert len(tuned.records) == 3


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "missing a required argument: 'x'"),
        ((1,), {"z": 1}, "unexpected keyword argument 'z'"),
        ((1, 2), {}, r"multiple values for argument 'block'; autotune passes \['block'\] as keywords"),
    ],
)
def test_arguments_that_do_not_fit_are_the_callers_mistake(args: Any, kwargs: Any, words: str):
    """And no reason to drop every config."""
    tuned = autotune(BLOCKS, None, **QUICK)(lambda x, block: x)
    with pytest.raises(TypeError, match=f"<lambda>: .*{words}"):
        tuned(*args, **kwargs)
    assert tuned.records == []


# -- keys --------------------------------------------------------------------------------------------------------------


def test_a_key_that_cannot_be_found_again_is_refused():
    """A list cannot be hashed, and a tensor is equal to no other: either would be tuned for ever."""
    listed: Any = autotune(BLOCKS, cast("Any", lambda x: [1, 2]), **QUICK)(lambda x, block: x)
    with pytest.raises(TypeError, match=r"key_fn of .*<lambda> returned \[1, 2\].*to_hashable"):
        listed(1)
    for key_fn in (lambda x: x, lambda x: (1, (x,)), lambda x: frozenset([x])):
        tensor: Any = autotune(BLOCKS, key_fn, **QUICK)(lambda x, block: x)
        with pytest.raises(TypeError, match=r"returned a tensor.*to_hashable"):
            tensor(torch.ones(1))
    right = autotune(BLOCKS, lambda x: to_hashable([x, {"a": 1}]), **QUICK)(lambda x, block: x)
    right(torch.ones(1))
    right(torch.ones(1))
    assert len(right.records) == 1
    assert right.records[0].key == "[((1),(1),torch.float32),(('a',1))]"


def test_sizes_in_classes_share_a_config():
    """With a bucket, sizes near each other have one key."""
    tuned = autotune(BLOCKS, lambda x, y: (x, y, "fast"), bucket=power_of_two, **QUICK)(lambda x, y, block: x)
    for x in (65, 100, 128):
        tuned(x, 1)
    tuned(129, 1)
    assert [record.key for record in tuned.records] == ["[128,1,'fast']", "[256,1,'fast']"]


def test_a_key_reads_the_same_wherever_it_is_one():
    """One value or a tuple of one; nothing at all without key_fn."""
    assert launch(tunable(ordinary, key_fn=lambda x: x), 3).key_text == "[3]"
    assert launch(tunable(ordinary, key_fn=lambda x: (x,)), 3).key_text == "[3]"
    assert launch(tunable(ordinary), 3).key_text == "[]"


# -- candidates and code -----------------------------------------------------------------------------------------------


def test_prune_fn_sees_the_arguments_and_keeps_what_is_true():
    """Of the config it sees mapping and fields; what it keeps stays in order; a rule that keeps nothing is an error."""
    space = [{"gemm_config": triton.Config({"BLOCK_M": block}, num_warps=2)} for block in (16, 32, 64)]

    def rule(config: Any, x: int, least: int = 0) -> Any:
        assert config["gemm_config"]["BLOCK_M"] == config["gemm_config"].kwargs["BLOCK_M"] == config["BLOCK_M"]
        return config["BLOCK_M"] >= least and x

    def gemm(x: int, gemm_config: triton.Config, least: int = 0) -> int:
        return x

    of = tunable(gemm, space, prune_fn=rule)
    assert launch(of, 1, least=32).candidates() == (space[1:], [describe(each) for each in space[1:]], 1)
    with pytest.raises(NoValidConfigError, match=r"gemm\[\]: prune_fn keeps none of 3 configs. It must return True"):
        launch(of, 0).candidates()


def test_the_code_of_configs_and_check_counts():
    """A record is found again by the code that runs: that of the function, of functions among its configs, of hooks, of the check."""

    def made(scale: int) -> Any:
        return lambda x: scale * x

    def of(value: Any, **options: Any) -> str:
        return tunable(lambda x, act: act(x), [{"act": value}], **options).code.digest

    assert of(made(1)) == of(made(1))
    assert of(made(1)) != of(made(2))
    assert of(1, check=made(1)) != of(1, check=made(2))
    hooked = [triton.Config({}, pre_hook=made(scale)) for scale in (1, 2, 2)]
    assert of(hooked[0]) != of(hooked[1]) == of(hooked[2])


def test_a_methods_source_is_that_of_its_class():
    """It may call other methods through self; a function whose first argument has a method of its name is none."""

    def tuned(value: int) -> Any:
        class Layer:
            def helper(self) -> int:
                return value

            @autotune([{"n": 1}], None, n_warmup=0, n_repeat=1)
            def step(self, n: int) -> int:
                return self.helper() * n

        return Layer

    def source(value: int) -> str:
        layer = tuned(value)
        layer().step()
        return str(vars(layer)["step"].records[0].cache_key.source)

    assert source(1) == source(1) != source(2)
