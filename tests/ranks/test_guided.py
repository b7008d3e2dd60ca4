"""Guided search of large spaces through both decorators: real compilation, a fake device."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dist_tune import NoValidConfigError, autotune, contextual_autotune
from dist_tune.search import NOT_TRIED
from dist_tune.search.guided import ConfigSpace
from dist_tune.testing import ExactTime, FakeH200
from tests.steps import autotuned, launch
from tests.worlds import gathered, log, on_each_rank

SPACE = [
    triton.Config({"BLOCK": block, "PAD": pad, "FLAT": flat}, num_warps=warps)
    for block in (16, 32, 64, 128)
    for pad in (1, 2, 4, 8)
    for flat in (False, True)
    for warps in (1, 2, 4, 8)
]
"""128 configs."""
BEST = {"BLOCK": 128, "PAD": 4, "FLAT": True, "num_warps": 4}
N_AT_MOST = 64
"""Of 128 candidates, 16 and three eighths."""


@triton.jit
def padded_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, PAD: tl.constexpr, FLAT: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + PAD, mask=at < n)


def launch_ms(src: Any, metadata: Any) -> float:
    """Milliseconds of a launch on the fake device: 4 for the best config, 0.8 more for each step away from it; 1 of other kernels."""
    constants = {src.fn.arg_names[place]: value for (place,), value in src.constants.items()}
    if "PAD" not in constants:
        return 1.0
    sizes = (constants["BLOCK"], 128), (constants["PAD"], 4), (metadata.num_warps, 4)
    n_steps: int = sum(abs(one.bit_length() - other.bit_length()) for one, other in sizes) + (not constants["FLAT"])
    return 4.0 + 0.8 * n_steps


@on_each_rank(modes=("fake",))
def test_ranks_try_the_same_part_of_a_large_space_and_find_the_best(rank: int) -> Any:
    """At most 64 of 128 configs are compiled, once on both ranks together; the rest has no time. A small site beside it races whole."""
    compiled: list[Any] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **facts: compiled.extend([facts] * (not cache_hit))
    FakeH200.launch_ms = staticmethod(launch_ms)
    kernel, small = triton.autotune(configs=SPACE, key=["n"])(padded_kernel), autotuned(blocks=(64, 128))
    x, y = torch.zeros(256), torch.zeros(256)

    @contextual_autotune(is_dist=True, search="guided", n_warmup=1, n_repeat=3)
    def step() -> None:
        kernel[(1,)](x, y, 256)
        launch(small, x)

    step()
    large, other = sorted((record.candidates for record in step.records), key=len, reverse=True)
    config = kernel.best_config.all_kwargs()
    assert {name: config[name] for name in BEST} == BEST
    untried = [each.index for each in large if each.left == NOT_TRIED]
    assert len(SPACE) - len(untried) <= N_AT_MOST
    assert [i for i, each in enumerate(SPACE) if kernel.configs_timings[each][0] == float("inf")] == untried
    assert [each.index for each in large if each.shared_bytes is None] == untried
    assert NOT_TRIED not in [each.left for each in other]
    assert sum(gathered(len(compiled))) <= N_AT_MOST + 2 + 2  # both may compile what they launch first
    assert re.search(r" tries \d+ more of 128 candidates, \d+ are untried", log())
    assert re.search(r"\d+ tried: .* \d+ untried", log())
    return untried, config, [each.latency_ms for each in large]


WIDE = [{"depth": depth, "width": width} for depth in range(10) for width in range(8)]
TEXTS = [f"depth={each['depth']} width={each['width']}" for each in WIDE]


def tuned(search: Any, running: list[int]) -> tuple[str, int, int]:
    """A function of 80 configs, of which these run: the best, how many have run, how many were not tried."""
    ran: set[int] = set()

    @autotune(WIDE, None, n_warmup=1, n_repeat=2, search=search, cache=False)
    def step(x: torch.Tensor, depth: int, width: int) -> torch.Tensor:
        ran.add(depth * 8 + width)
        if depth * 8 + width not in running:
            raise RuntimeError("does not run")
        ExactTime.pass_ms(2.0 + abs(depth - 6) + abs(width - 5))
        return x

    step(torch.zeros(4))
    record = step.records[0]
    return record.best.config, len(ran), [each.left for each in record.candidates].count(NOT_TRIED)


@on_each_rank()
def test_a_function_runs_a_part_of_its_configs(rank: int):
    """80 configs: each config that is not tried saves its run; with search="racing" each one runs."""
    best, n_ran, n_untried = tuned(None, [*range(80)])
    assert (best, n_ran + n_untried, n_ran <= 46) == ("depth=6 width=5", 80, True)
    assert tuned("racing", [*range(80)]) == ("depth=6 width=5", 80, 0)


@on_each_rank()
def test_a_function_whose_spread_fails_is_searched_further(rank: int):
    """One of 80 configs runs, and not one of the first 46 to be tried; and with none left, the error names what failed."""
    last = ConfigSpace(TEXTS).spread(80)[-1]
    best, n_ran, _ = tuned("guided", [last])
    assert (best, n_ran > 46) == (TEXTS[last], True)
    with pytest.raises(NoValidConfigError, match="none of its 80 configs runs"):
        tuned("guided", [])
