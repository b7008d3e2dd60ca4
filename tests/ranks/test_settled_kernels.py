"""A kernel after its tuning: the attributes, the printed line and the call of Triton's listener are vanilla's."""

from __future__ import annotations

import io
import math
import os
import re
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
from triton import knobs

from dist_tune import PeerFailedError
from tests.steps import autotuned, best, launch, tuned
from tests.worlds import on_each_rank

HAS_LISTENER = hasattr(knobs.autotuning, "listener")
VANILLA: Any = {"do_bench": lambda call, quantiles: (call(), [1.0, 0.5, 2.0])[1]}
Step = Callable[..., Any]


def vanilla(step: Step) -> Step:
    return step


def by_ranks(step: Step) -> Step:
    return tuned(None, step, n_repeat=3)  # type: ignore[no-any-return]


def left_on(kernel: Any) -> Any:
    """What a tuning has left, without what was measured."""
    quantiles_ms = list(kernel.configs_timings.values())
    return {
        "nargs": kernel.nargs,
        "best is in the cache": any(kernel.best_config is each for each in kernel.cache.values()),
        "timed": [each.kwargs["BLOCK"] for each in kernel.configs_timings],
        "are quantiles": all(len(each) == 3 and each[1] <= each[0] <= each[2] for each in quantiles_ms if math.isfinite(each[0])),
        "types": {type(each).__name__ for each in quantiles_ms},
        "seconds": 0 < kernel.bench_time < 60,
    }


@on_each_rank()
def test_attributes_are_those_that_vanilla_leaves(rank: int):
    """After a tuning, after a later call, and with a config from the cache."""

    def found(decorated: Callable[[Step], Step]) -> Any:
        kernel = autotuned(**VANILLA)
        step, began = decorated(lambda x: launch(kernel, x)), time.monotonic()
        step(torch.zeros(64))
        assert kernel.bench_time <= time.monotonic() - began
        after = [left_on(kernel), (step(torch.zeros(64)), left_on(kernel))[1]]
        kernel.cache.clear()
        dist.barrier()  # until the record is written
        del kernel.best_config, kernel.configs_timings, kernel.bench_time
        step(torch.zeros(64))  # from the record, if it was tuned
        return [*after, left_on(kernel)]

    expected = found(vanilla)
    assert expected[0] == expected[1]
    assert found(by_ranks) == expected


@on_each_rank()
def test_a_config_that_failed_has_infinite_times(rank: int):
    """As in vanilla, where a config does not fit."""
    kernel = autotuned()

    def grid(meta: dict[str, Any]) -> tuple[int]:
        if meta["BLOCK"] == 32:
            raise ValueError("no")
        return (triton.cdiv(64, meta["BLOCK"]),)

    by_ranks(lambda x: kernel[grid](x, torch.empty_like(x), 64))(torch.zeros(64))
    assert [math.isinf(each[0]) for each in kernel.configs_timings.values()] == [False, True, False]


@on_each_rank()
def test_the_line_of_print_autotuning_is_vanillas(rank: int):
    """Once for each tuned key on each rank, in the words of the installed Triton; none without the variable."""

    def printed(decorated: Callable[[Step], Step], value: str = "1") -> str:
        os.environ["TRITON_PRINT_AUTOTUNING"] = value
        kernel = autotuned(blocks=(16, 32), **VANILLA)
        step = decorated(lambda x: launch(kernel, x))
        with redirect_stdout(io.StringIO()) as out:
            for n in (64, 64, 32):
                step(torch.zeros(n))
            kernel.cache.clear()
            if decorated is by_ranks:
                step(torch.zeros(64))  # from the record: nothing is tuned
        told = "".join(line for line in out.getvalue().splitlines(keepends=True) if not line.startswith("Autotuning kernel"))
        assert all(f"best config selected: {config};" in told for config in kernel.cache.values()) or value == "0"
        return re.sub(r"BLOCK: \d+", "BLOCK", re.sub(r"after \d+\.\d\ds", "after SECONDS", told))

    expected = printed(vanilla)
    assert expected.count("Triton autotuning for function add_kernel") == 2
    assert (printed(by_ranks), printed(by_ranks, "0")) == (expected, "")


@on_each_rank(modes=["fake"])
def test_the_listener_hears_what_vanilla_tells_it(rank: int):
    """Once for each key with a choice that is tuned, with vanilla's arguments."""
    if not HAS_LISTENER:
        return
    heard: list[dict[str, Any]] = []
    knobs.autotuning.listener = lambda **told: heard.append(told)

    def told(decorated: Callable[[Step], Step]) -> Any:
        heard.clear()
        kernel = autotuned(blocks=(16, 32), **VANILLA)
        pruned = autotuned(
            blocks=(16, 32), prune_configs_by={"early_config_prune": lambda configs, named, **kwargs: configs[:1]}, **VANILLA
        )
        step = decorated(lambda x: launch(pruned, launch(kernel, x)))
        for _ in range(2):
            step(torch.zeros(64))
        (first,) = heard
        assert first["configs_timings"] is kernel.configs_timings
        assert first["best_config"] is kernel.cache[first["key"]]
        if decorated is by_ranks:
            kernel.cache.clear()
            decorated(lambda x: launch(pruned, launch(kernel, x)))(torch.zeros(64))  # from the record: nothing is tuned
            assert len(heard) == 1
        return sorted(first), first["key"], first["duration"] is None, first["cache_hit"], type(first["fn"]).__name__

    assert told(by_ranks) == told(vanilla)
    knobs.autotuning.listener = None


@on_each_rank()
def test_a_listener_that_raises_ends_the_call_and_leaves_the_winner(rank: int) -> Any:
    """On its rank with its own error, as in vanilla; no rank waits, and the next call and the next tuning go on."""
    if not HAS_LISTENER:
        return None

    def listener(**told: Any) -> None:
        if rank == 1:
            raise LookupError("the listener has no table")

    kernel, other = autotuned(blocks=(16, 32)), autotuned(blocks=(16, 32))
    step, began = by_ranks(lambda x: launch(kernel, x)[0].item()), time.monotonic()
    knobs.autotuning.listener = listener
    with pytest.raises(LookupError if rank == 1 else PeerFailedError, match="the listener has no table"):
        step(torch.zeros(64))
    knobs.autotuning.listener = None
    again = by_ranks(lambda x: launch(other, x)[0].item())
    assert (step(torch.zeros(64)), again(torch.zeros(64))) == (1.0, 1.0)
    assert time.monotonic() - began < 10
    return best(kernel)
