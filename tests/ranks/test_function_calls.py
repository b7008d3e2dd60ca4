"""Calls of an autotuned function on real ranks: the seed's example, any config values, random numbers, calls without tuning."""

from __future__ import annotations

import enum
import re
import time
import warnings
from typing import Any

import pytest
import torch
import triton

from dist_tune import autotune, prune_by_shared_memory, to_hashable
from dist_tune.testing import values
from tests.ranks.functions import BLOCKS, QUICK, Results, chosen, runs_of_this_process, shape_of
from tests.ranks.kernels import add_kernel
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All that two ranks can do one after the other in one world."""
    return values(on_ranks(2, _scenarios, str(tmp_path_factory.mktemp("caches"))))


def _scenarios(rank: int, folder: str) -> dict[str, Any]:
    told = {each.__name__: each(rank) for each in (_as_the_seed_writes_it, _any_values, _side_effects)}
    return {**told, "_nearest": _nearest(rank, folder)}


def _as_the_seed_writes_it(rank: int) -> Any:
    import contextlib
    import io

    space = [{"gemm_config": triton.Config({"BLOCK": b, "GROUP": g}, num_warps=w)} for b in (16, 32, 64) for g in (1,) for w in (4, 8)]
    space += space[:2]
    seen: list[Any] = []
    ran: list[triton.Config] = []

    def key_fn(A: torch.Tensor, ctx: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return to_hashable(A), ctx["num_ranks"]

    def prune_fn(config: Any, A: torch.Tensor, ctx: dict[str, Any], *args: Any, **kwargs: Any) -> bool:
        inner = config["gemm_config"]
        seen.append((config["BLOCK"], inner["BLOCK"], inner.kwargs["BLOCK"], inner.all_kwargs()["BLOCK"], config.num_warps))
        return prune_by_shared_memory(config, A, *args, **kwargs) and bool(inner.kwargs["BLOCK"] > 16)

    @autotune(config_space=space, key_fn=key_fn, prune_fn=prune_fn, **QUICK)
    def my_gemm(A: torch.Tensor, ctx: dict[str, Any], gemm_config: triton.Config, straggler_option: Any = None) -> torch.Tensor:
        ran.append(gemm_config)
        y = torch.empty_like(A)
        add_kernel[(triton.cdiv(A.numel(), gemm_config.kwargs["BLOCK"]),)](A, y, A.numel(), BLOCK=gemm_config.kwargs["BLOCK"])
        return y

    x, ctx = torch.arange(40.0), {"num_ranks": 2, "workspace": torch.zeros(1)}
    untuned, first = my_gemm(x, ctx, autotune=False), ran.pop()
    with contextlib.redirect_stderr(io.StringIO()) as terminal:
        tuned = my_gemm(x, ctx, autotune_verbose=True, straggler_option=(0, 1))
    n_tuned = len(ran)
    again = my_gemm(x, ctx=ctx, autotune=True)
    right = all(torch.equal(y, x + 1) for y in (untuned, tuned, again))
    return right, first.kwargs["BLOCK"], seen, chosen(my_gemm), len(my_gemm.configs), len(ran) - n_tuned, terminal.getvalue()


def test_the_seeds_example_runs_as_written(pair: Results):
    """Configs in a mapping, both ways to index them in prune_fn, to_hashable, the call-time keywords; verbose is rank 0's alone."""
    got = [each["_as_the_seed_writes_it"] for each in pair]
    assert got[0][:6] == got[1][:6]
    is_right, first, seen, config, n_configs, n_later, terminal = got[0]
    assert is_right
    assert first == 16
    assert seen == [(b, b, b, b, w) for b in (16, 32, 64) for w in (4, 8)]
    assert n_configs == 6
    assert n_later == 1
    assert "BLOCK=32" in config[0] or "BLOCK=64" in config[0]
    assert re.search(r"^dist_tune:   3  +\d", terminal, re.MULTILINE)  # a row of the table
    assert "winner=" in terminal
    assert got[1][6] == ""


class _Policy:
    """Reads like any other object of its class, and is equal to none."""

    def __init__(self, ms: float) -> None:
        self.ms = ms


class _Mode(enum.Enum):
    FAST = 1
    SLOW = 20


def _slow(ms: float = 20.0) -> float:
    return ms


def _any_values(rank: int) -> Any:
    space = [
        {"mode": _Mode.SLOW}, {"mode": _slow}, {"mode": lambda: 20.0}, {"mode": lambda: 20.0}, {"mode": torch.float32}, {"mode": (1, "a")},
        {"mode": _Policy(20.0)}, {"mode": _Policy(1.0)}, {"mode": None}, {"mode": _Mode.SLOW}, {"mode": 20.0}, {"mode": "20.0"},
        {"mode": torch.arange(2)},
    ]  # fmt: skip

    @autotune(space, None, n_warmup=1, n_repeat=3)
    def step(mode: Any) -> Any:
        time.sleep((mode.ms if isinstance(mode, _Policy) else 20.0) / 1e3)
        return mode.ms if isinstance(mode, _Policy) else mode

    call: Any = step
    return call(), [each.config for each in step.records[0].candidates], call()


def test_config_values_are_of_any_kind(pair: Results):
    """Enums, functions, dtypes, tuples, tensors, objects; two that read alike are two, and the right one of them wins."""
    got = [each["_any_values"] for each in pair]
    assert got[0] == got[1]
    value, texts, again = got[0]
    assert value == again == 1.0
    assert len(texts) == len(set(texts)) == 12
    assert not any("0x" in text for text in texts)
    assert sum("_Policy" in text for text in texts) == 2
    assert sum("<lambda>" in text for text in texts) == 2
    assert [text for text in texts if "20.0" in text] == ["mode=20.0", "mode='20.0'"]


def _side_effects(rank: int) -> Any:
    resets: list[int] = []
    log: list[int] = []

    def draws(is_tuned: bool) -> Any:
        torch.manual_seed(7)

        def step(x: torch.Tensor, block: int) -> float:
            log.append(block)
            return torch.rand(()).item()

        f: Any = autotune(BLOCKS, None, reset=lambda: resets.append(len(log)), **QUICK)(step) if is_tuned else step
        return f(torch.zeros(1)) if is_tuned else f(torch.zeros(1), block=1), torch.rand(()).item()

    tuned = draws(True)
    n_runs = len(log)
    return tuned == draws(False), resets == list(range(1, n_runs))


def test_random_numbers_and_reset_are_as_for_a_closure(pair: Results):
    """The value is drawn from the numbers of an untuned call, which leaves the generator as one; reset before each run but the first."""
    assert [each["_side_effects"] for each in pair] == [(True, True)] * 2


def _nearest(rank: int, folder: str) -> Any:
    import os

    os.environ["DIST_TUNE_CACHE_DIR"] = f"{folder}/{rank}"
    ran = runs_of_this_process

    def step(x: torch.Tensor, block: int) -> int:
        time.sleep({1: 30, 2: 1, 4: 30}[block] / 1e3)
        runs_of_this_process.append(block)
        return block

    def new(nearest: bool = True) -> Any:
        return autotune(BLOCKS, shape_of, nearest=nearest, n_warmup=0, n_repeat=2)(step)

    x = torch.zeros(1024, 8)
    none = new()(x, autotune=False)
    if rank == 1:  # one rank's directory stays empty
        os.environ["DIST_TUNE_CACHE_DIR"] = f"{folder}/elsewhere"
    new()(x)
    os.environ["DIST_TUNE_CACHE_DIR"] = f"{folder}/{rank}"
    ran.clear()
    fresh, told = new(), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exact = fresh(x, autotune=False)
        near = [fresh(torch.zeros(1000, 8), autotune=False) for _ in range(3)]
        told = [(str(each.message), each.filename == __file__) for each in caught]
    return none, exact, near, list(ran), told, new(nearest=False)(x, autotune=False)


def test_without_tuning_the_nearest_shape_decides_if_asked(pair: Results):
    """No record: the first config. An exact one, a near one: on all ranks, though one has none; one warning with both shapes."""
    got = [each["_nearest"] for each in pair]
    assert [each[:4] for each in got] == [(1, 2, [2, 2, 2], [2, 2, 2, 2])] * 2
    assert [each[5] for each in got] == [1, 1]
    ((told, is_here),), others = got[0][4], got[1][4]
    assert "[1000,8]" in told
    assert "[1024,8]" in told
    assert is_here
    assert others == []
