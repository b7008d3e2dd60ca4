"""A kernel after its tuning: the attributes, the printed line and the call of Triton's listener are vanilla's."""

from __future__ import annotations

import io
import math
import os
import re
import time
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
from triton import knobs

from dist_tune import contextual_autotune
from dist_tune.testing import values
from tests.ranks.kernels import autotuned, best, launch
from tests.ranks.worlds import on_ranks

HAS_LISTENER = hasattr(knobs.autotuning, "listener")
QUICK: Any = {"is_dist": True, "n_repeat": 3, "n_warmup": 0}
VANILLA: Any = {"do_bench": lambda call, quantiles: (call(), [1.0, 0.5, 2.0])[1]}


def stepping(kernel: Any, is_tuned: bool) -> Any:
    """A step that launches a kernel; tuned, or left to Triton."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return launch(kernel, x)

    return contextual_autotune(**QUICK)(step) if is_tuned else step


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


def _attributes(rank: int, *, is_tuned: bool) -> Any:
    kernel = autotuned(blocks=(16, 32, 64), **VANILLA)
    step = stepping(kernel, is_tuned)
    began = time.monotonic()
    step(torch.zeros(64))
    assert kernel.bench_time <= time.monotonic() - began
    found = left_on(kernel)
    step(torch.zeros(64))
    assert left_on(kernel) == found
    kernel.cache.clear()
    if is_tuned:
        dist.barrier()  # until the record is written
    del kernel.best_config, kernel.configs_timings, kernel.bench_time
    step(torch.zeros(64))  # from the record, if it was tuned
    return found, left_on(kernel)


def test_attributes_are_those_that_vanilla_leaves():
    """After a tuning, after a later call, and with a config from the cache."""
    expected = values(on_ranks(1, _vanilla, is_dist=False))[0]
    assert values(on_ranks(2, _tuned)) == [expected] * 2


def _vanilla(rank: int) -> Any:
    return _attributes(rank, is_tuned=False)


def _tuned(rank: int) -> Any:
    return _attributes(rank, is_tuned=True)


def _failing(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32, 64))

    def grid(meta: dict[str, Any]) -> tuple[int]:
        if meta["BLOCK"] == 32:
            raise ValueError("no")
        return (triton.cdiv(64, meta["BLOCK"]),)

    contextual_autotune(**QUICK)(lambda x: kernel[grid](x, torch.empty_like(x), 64))(torch.zeros(64))
    return [math.isinf(each[0]) for each in kernel.configs_timings.values()]


def test_a_config_that_failed_has_infinite_times():
    """As in vanilla, where a config does not fit."""
    assert values(on_ranks(2, _failing)) == [[False, True, False]] * 2


def _printed(rank: int, *, is_tuned: bool, value: str = "1") -> str:
    os.environ["TRITON_PRINT_AUTOTUNING"] = value
    kernel = autotuned(blocks=(16, 32), **VANILLA)
    step = stepping(kernel, is_tuned)
    with redirect_stdout(io.StringIO()) as out:
        for n in (64, 64, 32):
            step(torch.zeros(n))
        kernel.cache.clear()
        if is_tuned:
            step(torch.zeros(64))  # from the record: nothing is tuned
    told = "".join(line for line in out.getvalue().splitlines(keepends=True) if not line.startswith("Autotuning kernel"))
    assert all(f"best config selected: {config};" in told for config in kernel.cache.values()) or value == "0"
    return re.sub(r"BLOCK: \d+", "BLOCK", re.sub(r"after \d+\.\d\ds", "after SECONDS", told))


def _vanilla_prints(rank: int) -> str:
    return _printed(rank, is_tuned=False)


def _tuned_prints(rank: int, value: str) -> str:
    return _printed(rank, is_tuned=True, value=value)


def test_the_line_of_print_autotuning_is_vanillas():
    """Once for each tuned key on each rank, in the words of the installed Triton; none without the variable."""
    (expected,) = values(on_ranks(1, _vanilla_prints, is_dist=False))
    assert expected.count("Triton autotuning for function add_kernel") == 2
    assert values(on_ranks(2, _tuned_prints, "1")) == [expected] * 2
    assert values(on_ranks(1, _tuned_prints, "0")) == [""]


def _heard(rank: int, *, is_tuned: bool) -> Any:
    heard: list[dict[str, Any]] = []
    knobs.autotuning.listener = lambda **told: heard.append(told)
    kernel = autotuned(blocks=(16, 32), **VANILLA)
    pruned = autotuned(blocks=(16, 32), prune_configs_by={"early_config_prune": lambda configs, named, **kwargs: configs[:1]}, **VANILLA)

    def run(x: torch.Tensor) -> torch.Tensor:
        return launch(pruned, launch(kernel, x))

    step = contextual_autotune(**QUICK)(run) if is_tuned else run
    for _ in range(2):
        step(torch.zeros(64))
    first = heard[0]
    assert first["configs_timings"] is kernel.configs_timings
    assert first["best_config"] is kernel.cache[first["key"]]
    told = [(sorted(each), each["key"], each["duration"] is None, each["cache_hit"], type(each["fn"]).__name__) for each in heard]
    if is_tuned:
        kernel.cache.clear()
        contextual_autotune(**QUICK)(run)(torch.zeros(64))
        (again,) = heard[1:]
        assert (again["cache_hit"], again["duration"], again["key"]) == (True, None, first["key"])
        assert again["configs_timings"] is kernel.configs_timings
    return told


def _vanilla_hears(rank: int) -> Any:
    return _heard(rank, is_tuned=False)


def _tuned_hears(rank: int) -> Any:
    return _heard(rank, is_tuned=True)


def test_the_listener_hears_what_vanilla_tells_it():
    """Once for each key with a choice, with vanilla's arguments; of a record as of a hit in Triton's own cache on disk."""
    if HAS_LISTENER:
        (expected,) = values(on_ranks(1, _vanilla_hears, is_dist=False, mode="fake"))
        assert values(on_ranks(2, _tuned_hears, mode="fake")) == [expected] * 2


def _raising(rank: int, where: str) -> Any:
    def listener(**told: Any) -> None:
        if rank == 1:
            raise LookupError("the listener has no table")

    kernel, other = autotuned(blocks=(16, 32)), autotuned(blocks=(16, 32))
    step = contextual_autotune(**QUICK)(lambda x: launch(kernel, x)[0].item())
    if where == "cache":
        contextual_autotune(**QUICK)(lambda x: launch(kernel, x)[0].item())(torch.zeros(64))
        kernel.cache.clear()
    knobs.autotuning.listener = listener
    told, began = "", time.monotonic()
    try:
        step(torch.zeros(64))
    except Exception as error:  # noqa: BLE001  # of any kind: the test compares it
        told = f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', ()))}"
    knobs.autotuning.listener = None
    again = contextual_autotune(**QUICK)(lambda x: launch(other, x)[0].item())
    return told, step(torch.zeros(64)), again(torch.zeros(64)), best(kernel), time.monotonic() - began < 10


@pytest.mark.parametrize("where", ["tuned", "cache"])
def test_a_listener_that_raises_ends_the_call_and_leaves_the_winner(where: str):
    """On its rank with its own error, as in vanilla; no rank waits, and the next call and the next tuning go on."""
    if HAS_LISTENER:
        got = values(on_ranks(2, _raising, where))
        assert "LookupError: the listener has no table" in got[1][0]
        assert "add_kernel[64," in got[1][0]
        assert where == "cache" or "LookupError" in got[0][0]
        assert got[0][1:] == got[1][1:]
        assert got[0][1:3] == (1.0, 1.0)
        assert got[0][4]
