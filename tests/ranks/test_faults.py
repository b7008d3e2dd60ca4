"""Candidates that fail on some ranks, and the slowest rank: one answer on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from dist_tune import NoValidConfigError
from dist_tune.testing import FakeH200
from tests.steps import autotuned, best, configs, is_unpatched, launch, product_kernel, tuned
from tests.worlds import on_each_rank

BLOCKS = (16, 32, 64, 128)
On = dict[int, list[int]]
"""Rank -> configs that fail there."""


def failing(rank: int, on: On, at_launch: int = 0) -> Any:
    """A step whose configs' hooks raise, always or at their n-th launch."""
    counts = dict.fromkeys(BLOCKS, 0)

    def hook(full: dict[str, Any]) -> None:
        counts[full["BLOCK"]] += 1
        index = BLOCKS.index(full["BLOCK"])
        if index in on.get(rank, []) and at_launch in (0, counts[full["BLOCK"]]):
            raise RuntimeError(f"config {index} is out on rank {rank}")

    kernel = autotuned(configs=configs(*BLOCKS, pre_hook=hook))

    def step(x: torch.Tensor) -> torch.Tensor:
        y = launch(kernel, x)
        dist.all_reduce(y)
        return y

    return tuned(kernel, step, n_repeat=2, n_warmup=1, search="exhaustive")


@on_each_rank(cases=[({1: [0]}, 0), ({1: [2]}, 0), ({0: [0], 1: [1]}, 0), ({1: [3]}, 2)])
def test_a_launch_that_fails_on_one_rank_drops_the_config_on_all(rank: int, case: tuple[On, int]):
    """Another config stands in, the closure's collective stays matched, and nobody ends with the failed config."""
    on, at_launch = case
    step = failing(rank, on, at_launch)
    assert (step(torch.zeros(64))[0], is_unpatched()) == (2.0, True)
    (record,) = step.records
    out = {index: f"rank {each}: RuntimeError: config {index} is out" for each, indices in on.items() for index in indices}
    assert {i for i, each in enumerate(record.candidates) if each.failure} == {*out}
    assert all(text in record.candidates[index].failure for index, text in out.items())
    assert record.winner not in out
    return record.winner


@on_each_rank(cases=[{0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}, {0: [0, 1], 1: [2, 3]}, {1: [0, 1, 2, 3]}])
def test_all_configs_failing_is_one_clear_error_on_every_rank(rank: int, on: On):
    """Also where every config works somewhere, and where one rank alone has none."""
    with pytest.raises(NoValidConfigError, match=r"add_kernel\[64") as told:
        failing(rank, on)(torch.zeros(64))
    assert "is out on rank" in str(told.value)


@triton.jit
def _rank_kernel(x_ptr, y_ptr, n, RANK: tl.constexpr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK != 32 or RANK != 1, "not on rank 1")
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


@on_each_rank(modes=("fake",))
def test_a_config_that_does_not_compile_on_one_rank_is_never_launched(rank: int):
    """The fastest config does not compile on rank 1: it is dropped on both before the first measured replay."""
    FakeH200.launch_ms = staticmethod(lambda src, metadata: 1.0 if src.constants[(4,)] == 32 else 2.0)
    kernel, x = autotuned(_rank_kernel), torch.zeros(64)
    step = tuned(kernel, lambda: kernel[(1,)](x, x, 64, rank), n_repeat=2, search="exhaustive")
    step()
    (record,) = step.records
    assert "rank 1: CompileTimeAssertionFailure" in record.candidates[1].failure
    assert record.n_replays == 2 + 2 * 2 + 1
    assert record.winner != 1
    return best(kernel)


@on_each_rank(modes=("fake",), is_alone=True)
def test_out_of_resources_on_one_rank_is_found_by_loading(rank: int):
    """Rank 1 has less shared memory: what does not fit there is dropped on both, with Triton's own reason."""
    if rank == 1:
        FakeH200.shared_limit_bytes = 40_000
    FakeH200.launch_ms = staticmethod(lambda src, metadata: 1e6 / max(metadata.shared, 1) / 10)
    kernel = autotuned(product_kernel, configs=[triton.Config({"BLOCK": 64}, num_stages=n) for n in (2, 3, 4, 8)])
    a = torch.zeros(64, 64, dtype=torch.float16)
    step = tuned(kernel, lambda: kernel[(1,)](a, a, 64))
    step()
    failures = [each.failure for each in step.records[0].candidates]
    assert any(failures)
    assert all("rank 1: OutOfResources" in each for each in failures if each)
    assert step.records[0].winner == max(i for i, each in enumerate(failures) if not each)


@on_each_rank(modes=("fake",))
def test_the_slowest_rank_decides(rank: int):
    """Block 16 is fastest on rank 0 and slowest on rank 1; both take 32, by the MAX over ranks of the medians."""
    ms = [{16: 10.0, 32: 20.0, 64: 30.0}, {16: 40.0, 32: 20.0, 64: 30.0}][rank]
    FakeH200.launch_ms = staticmethod(lambda src, metadata: ms[src.constants[(3,)]])
    kernel = autotuned()
    step = tuned(kernel, n_repeat=3, n_warmup=1)
    step(torch.zeros(64))
    (record,) = step.records
    times = [each.latency_ms for each in record.candidates]
    assert all(-0.5 < ms - expected_ms < 9.5 for ms, expected_ms in zip(times, [40.0, 20.0, 30.0], strict=True))
    assert (best(kernel), {*record.best.rank_latencies_ms}, len(kernel.configs_timings)) == ([32], {0, 1}, 3)
