"""What a tuned closure does on real ranks when something goes wrong: one answer on all ranks, and never a hang."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from dist_tune import contextual_autotune
from dist_tune.testing import values
from tests.ranks.kernels import autotuned, best, is_unpatched, launch
from tests.ranks.world import DEADLINE_S, same_error
from tests.ranks.worlds import on_ranks

QUICK: Any = {"n_repeat": 1, "n_warmup": 0}


def _fails(rank: int, on: dict[int, list[int]], when: str) -> Any:
    """Configs whose hook raises: ``on`` maps a rank to the indices; ``when`` is "always" or the number of the launch."""
    counts: dict[int, int] = {}

    def hook(index: int) -> Any:
        def raise_here(full: dict[str, Any]) -> None:
            counts[index] = counts.get(index, 0) + 1
            if index in on.get(rank, []) and (when == "always" or counts[index] == int(when)):
                raise RuntimeError(f"config {index} is out on rank {rank}")

        return raise_here

    blocks = (16, 32, 64, 128)
    kernel = autotuned(configs=[triton.Config({"BLOCK": b}, pre_hook=hook(i)) for i, b in enumerate(blocks)])

    @contextual_autotune(is_dist=True, n_repeat=2, n_warmup=1, search="exhaustive")
    def step(x: torch.Tensor) -> torch.Tensor:
        y = launch(kernel, x)
        dist.all_reduce(y)
        return y

    y = step(torch.zeros(64))
    return best(kernel), y[0].item(), [c.failure for c in step.records[0].candidates], is_unpatched()


@pytest.mark.once
@pytest.mark.parametrize(("on", "when"), [({1: [0]}, "always"), ({1: [2]}, "always"), ({0: [0], 1: [1]}, "always"), ({1: [3]}, "2")])
def test_a_launch_that_fails_on_one_rank_drops_the_config_on_all(on: dict[int, list[int]], when: str):
    """Another config stands in, the closure's collective stays matched, and nobody ends with the failed config."""
    got = values(on_ranks(2, _fails, on, when))
    assert got[0] == got[1]
    winner, y, failures, unpatched = got[0]
    assert unpatched
    assert y == 2.0
    for rank, indices in on.items():
        for index in indices:
            assert failures[index] is not None
            assert f"rank {rank}: RuntimeError: config {index} is out" in failures[index]
            assert winner != [(16, 32, 64, 128)[index]]
    assert sum(f is not None for f in failures) == sum(map(len, on.values()))


@pytest.mark.once
@pytest.mark.parametrize("on", [{0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}, {0: [0, 1], 1: [2, 3]}, {1: [0, 1, 2, 3]}])
def test_all_configs_failing_is_one_clear_error_on_every_rank(on: dict[int, list[int]]):
    """Also where every config works somewhere, and where one rank alone has none."""
    same_error(on_ranks(2, _fails, on, "always"), "NoValidConfigError", "add_kernel[64", "is out on rank", within_s=4 * DEADLINE_S)


@triton.jit
def _rank_kernel(x_ptr, y_ptr, n, RANK: tl.constexpr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK != 32 or RANK != 1, "not on rank 1")
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


def _fails_to_compile(rank: int) -> Any:
    from dist_tune.testing import FakeH200

    FakeH200.launch_ms = staticmethod(lambda src, metadata: 1.0 if src.constants[(4,)] == 32 else 2.0)
    kernel = autotuned(_rank_kernel, blocks=(16, 32, 64))
    x = torch.zeros(64)
    step = contextual_autotune(is_dist=True, n_repeat=2, n_warmup=0, search="exhaustive")(lambda: kernel[(1,)](x, x, 64, rank))
    step()
    return best(kernel), [c.failure for c in step.records[0].candidates], step.records[0].n_replays


@pytest.mark.once
def test_a_config_that_does_not_compile_on_one_rank_is_never_launched():
    """The fastest config does not compile on rank 1: it is dropped on both before the first measured replay."""
    got = values(on_ranks(2, _fails_to_compile, mode="fake"))
    assert got[0] == got[1]
    winner, failures, n_replays = got[0]
    assert winner != [32]
    assert "rank 1: CompileTimeAssertionFailure" in failures[1]
    assert n_replays == 2 + 2 * 2 + 1


def _too_large(rank: int) -> Any:
    from dist_tune.testing import FakeH200

    if rank == 1:
        FakeH200.shared_limit_bytes = 40_000
    FakeH200.launch_ms = staticmethod(lambda src, metadata: 1e6 / max(metadata.shared, 1) / 10)
    candidates = [triton.Config({"BLOCK": 64}, num_stages=stages) for stages in (2, 3, 4, 8)]
    kernel = triton.autotune(configs=candidates, key=["n"])(_matmul_kernel)
    a = torch.zeros(64, 64, dtype=torch.float16)
    step = contextual_autotune(is_dist=True, n_repeat=1, n_warmup=0)(lambda: kernel[(1,)](a, a, a, 64))
    step()
    return (
        [c.num_stages for c in kernel.cache.values()],
        [c.failure for c in step.records[0].candidates],
        dict(FakeH200.__dict__)["launches"],
    )


@triton.jit
def _matmul_kernel(a_ptr, b_ptr, c_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, n, BLOCK):
        a = tl.load(a_ptr + at[:, None] * n + k + at[None, :])
        b = tl.load(b_ptr + (k + at[:, None]) * n + at[None, :])
        acc += tl.dot(a, b)
    tl.store(c_ptr + at[:, None] * n + at[None, :], acc.to(tl.float16))


def test_out_of_resources_on_one_rank_is_found_by_loading():
    """Rank 1 has less shared memory: what does not fit there is dropped on both, with Triton's own reason."""
    got = values(on_ranks(2, _too_large, mode="fake"))
    assert got[0][:2] == got[1][:2]
    stages, failures, _ = got[0]
    dropped = [f for f in failures if f]
    assert dropped
    assert all("rank 1: OutOfResources" in f for f in dropped)
    assert stages == [max(s for s, f in zip((2, 3, 4, 8), failures, strict=True) if not f)]


def _slowest_decides(rank: int) -> Any:
    from dist_tune.testing import FakeH200

    ms = [{16: 10.0, 32: 20.0, 64: 30.0}, {16: 40.0, 32: 20.0, 64: 30.0}][rank]
    FakeH200.launch_ms = staticmethod(lambda src, metadata: ms[src.constants[(3,)]])
    kernel = autotuned(blocks=(16, 32, 64))
    step = contextual_autotune(is_dist=True, n_repeat=3, n_warmup=1)(lambda x: launch(kernel, x))
    step(torch.zeros(64))
    record = step.records[0]
    return best(kernel), [c.latency_ms for c in record.candidates], record.best.rank_latencies_ms, len(kernel.configs_timings)


@pytest.mark.once
def test_the_slowest_rank_decides():
    """Block 16 is fastest on rank 0 and slowest on rank 1; both take 32, by the MAX over ranks of the medians."""
    got = values(on_ranks(2, _slowest_decides, mode="fake"))
    assert got[0] == got[1]
    winner, times, rank_ms, n_timings = got[0]
    assert winner == [32]
    assert all(-0.5 < ms - expected_ms < 9.5 for ms, expected_ms in zip(times, [40.0, 20.0, 30.0], strict=True))  # busy machines only add
    assert set(rank_ms) == {0, 1}
    assert n_timings == 3


def _error_without_collective(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32))
    runs = []

    @contextual_autotune(is_dist=True, n_repeat=50, n_warmup=0)
    def step(x: torch.Tensor) -> None:
        runs.append(1)
        launch(kernel, x)
        time.sleep(0.1)
        if rank == 0 and len(runs) == 4:
            raise KeyError("mine")

    try:
        step(torch.zeros(64))
    except Exception as error:  # noqa: BLE001  # the test looks at it
        return type(error).__name__, str(error), len(runs)


@pytest.mark.once
def test_peers_leave_a_long_batch_early():
    """Ranks that wait for nothing in the closure hear of the abort between two replays."""
    got = values(on_ranks(2, _error_without_collective))
    assert got[0][0] == "KeyError"
    assert got[1][0] == "PeerFailedError"
    assert "rank 0" in got[1][1]
    assert got[1][2] < 20
