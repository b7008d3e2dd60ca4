"""What only real GPUs show: event times, host ahead of device, memory, capture, dead contexts, killed ranks.

python -m pytest -m gpu tests/gpu
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from dist_tune import CaptureError, autotune, contextual_autotune
from dist_tune.testing import on_ranks
from tests.gpu import needs_two_gpus
from tests.ranks.journaled import BLOCKS
from tests.ranks.test_journals import supervised
from tests.steps import autotuned, best, configs, launch, product_kernel, tuned
from tests.worlds import DEADLINE_S, on_each_rank

pytestmark = pytest.mark.gpu


@triton.jit
def _turns_kernel(x_ptr, n, turns, lag, BLOCK: tl.constexpr):
    """Its time is in proportion to ``turns`` over BLOCK; with BLOCK 4 it takes ``lag`` times as long."""
    value = tl.load(x_ptr)
    for _ in range(turns // BLOCK * (lag if BLOCK == 4 else 1)):
        value = value * 1.0001 + 0.5
    tl.store(x_ptr, value)


@on_each_rank(modes=("gpu",), cases=[1, 10])
def test_the_slowest_rank_decides_and_all_know_its_time(rank: int, lag: int):
    """Real events on two GPUs: agreed times fall with the block, below those of a replay; where rank 1 is late with 4, both take 2."""
    kernel, x = autotuned(_turns_kernel, blocks=(1, 2, 4)), torch.zeros(64, device="cuda")

    def closure() -> None:
        y = x * 2
        kernel[(1,)](y, 64, 400_000, lag if rank == 1 else 1)
        dist.all_reduce(y)

    step = tuned(None, closure, n_repeat=5, n_warmup=1)
    step()
    (record,) = step.records
    assert best(kernel) == [4 if lag == 1 else 2]
    assert {*record.best.rank_latencies_ms} == {0, 1}
    if lag == 1:
        kernel_ms = [each.latency_ms for each in record.candidates]
        assert kernel_ms == sorted(kernel_ms, reverse=True)
        assert all(each.closure_ms > each.latency_ms for each in record.candidates)
    return [each.latency_ms for each in record.candidates]


@on_each_rank(modes=("gpu",))
def test_launch_gaps_are_not_timed(rank: int):
    """A kernel of some microseconds measures as such although the host needs hundreds for it."""
    kernel, x = autotuned(blocks=(64, 128)), torch.zeros(64, device="cuda")

    def closure() -> None:
        for _ in range(20):
            x.mul_(1)
        time.sleep(2e-4)  # a slow host, right before the launch
        launch(kernel, x)

    step = tuned(None, closure, n_repeat=9, n_warmup=2)
    step()
    assert all(each.latency_ms < 0.02 for each in step.records[0].candidates)


@on_each_rank(modes=("gpu",))
def test_what_does_not_fit_is_dropped_before_a_launch(rank: int):
    """The loader's own reason, and shared memory and registers of the others."""
    candidates = [triton.Config({"BLOCK": block}, num_stages=stages) for block, stages in ((64, 2), (128, 8), (64, 3))]
    kernel, a = autotuned(product_kernel, configs=candidates), torch.randn(128, 128, dtype=torch.float16, device="cuda")
    step = tuned(None, lambda: kernel[(1,)](a, torch.empty_like(a), 128), n_repeat=2, n_warmup=1)
    step()
    first, second, third = step.records[0].candidates
    assert "OutOfResources" in second.failure
    assert first.failure is third.failure is None
    assert first.shared_bytes < third.shared_bytes
    assert first.n_regs > 0


@on_each_rank(modes=("gpu",))
def test_a_config_that_needs_too_much_memory_on_one_rank_is_dropped_on_both(rank: int):
    """It fails before its collective, so another config stands in there."""

    @autotune([{"n_bytes": n} for n in (1 << 20, 1 << 50)], None, cache=False, n_warmup=0, n_repeat=2)
    def step(x: torch.Tensor, n_bytes: int = 0) -> torch.Tensor:
        scratch = torch.empty(n_bytes if rank == 1 else 1 << 20, dtype=torch.uint8, device="cuda")
        y = x + scratch[:1].float() * 0
        dist.all_reduce(y)
        return y

    assert step(torch.ones(4, device="cuda"))[0] == 2.0
    (record,) = step.records
    assert (record.winner, record.candidates[0].failure) == (0, None)
    assert re.match("rank 1: .*OutOfMemoryError", str(record.candidates[1].failure))


@needs_two_gpus
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_costs_one_restart(tmp_path: Path, rank: int):
    """SIGKILL in the fifth replay of a supervised job, before ranks have agreed on a time: a second start is no longer than a first one."""
    (first, n_restarts), (second, _) = supervised(tmp_path, (0, rank, 5, "once"), "cuda")
    assert n_restarts == "1"
    assert first["runs"] == second["runs"] <= len(BLOCKS) + 3
    assert first["best"] == second["best"]
    assert first["y"] == second["y"] == 2.0
    assert not list((tmp_path / "cache" / "journals").iterdir())


@on_each_rank(modes=("gpu",))
def test_a_tuned_step_can_be_captured(rank: int):
    """The captured step replays with new inputs; a key without a config cannot be captured."""
    kernel = autotuned(blocks=(16, 32))
    x, y = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")
    step = contextual_autotune(is_dist=True, n_repeat=2, n_warmup=1)(lambda x, y: launch(kernel, x, y))
    step(x, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(x, y)
    x.fill_(4.0)
    graph.replay()
    torch.cuda.synchronize()
    wide = torch.zeros(128, device="cuda")
    with pytest.raises(CaptureError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        contextual_autotune(is_dist=True)(lambda: launch(kernel, wide))()
    assert (y[0].item(), len(kernel.cache)) == (5.0, 1)


@on_each_rank(modes=("gpu",))
def test_a_step_that_was_never_called_is_captured_where_nothing_may_be_tuned(rank: int):
    """With the config of its record, of the nearest one, or the first: compiled and loaded under the capture."""
    x, kernels = {n: torch.zeros(n, device="cuda") for n in (64, 128)}, [autotuned(blocks=(16, 32)) for _ in range(3)]
    contextual_autotune(is_dist=True, n_repeat=2, n_warmup=1)(lambda: launch(kernels[0], x[64]))()
    won = next(iter(kernels[0].cache.values())).kwargs["BLOCK"]
    for kernel, mode, n, block in ((kernels[1], "cached", 64, won), (kernels[1], "cached", 128, won), (kernels[2], "first", 64, 16)):
        y, graph = torch.zeros(n, device="cuda"), torch.cuda.CUDAGraph()
        step = contextual_autotune(is_dist=True)(lambda kernel=kernel, n=n, y=y: launch(kernel, x[n], y))
        with pytest.MonkeyPatch.context() as patch, torch.cuda.graph(graph):
            patch.setenv("DIST_TUNE_MODE", mode)
            step()
        x[n].fill_(4.0)
        graph.replay()
        torch.cuda.synchronize()
        assert (y[0].item(), [*kernel.cache.values()][-1].kwargs["BLOCK"]) == (5.0, block)


@on_each_rank(modes=("gpu",))
def test_autograds_threads_are_heard_and_the_gpus_generator_is_kept(rank: int):
    """A kernel of a backward pass, launched by a thread of autograd's, is tuned; random numbers are as without tuning."""
    kernel, x = autotuned(blocks=(16, 32)), torch.zeros(64, device="cuda", requires_grad=True)

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return launch(kernel, grads[0].contiguous())

    def drawn() -> float:
        return torch.rand((), device="cuda").item()

    torch.cuda.manual_seed(7)
    step = tuned(None, lambda: (torch.autograd.grad(Double.apply(x).sum(), x)[0][0].item(), drawn()), n_repeat=2, n_warmup=1)
    (gradient, number), later = step(), drawn()
    torch.cuda.manual_seed(7)
    assert (number, later) == (drawn(), drawn())
    assert (gradient, len(kernel.cache), len(step.records)) == (2.0, 1, 1)


@triton.jit
def _fault_kernel(x_ptr, n, offset, BLOCK: tl.constexpr):
    tl.store(x_ptr + offset * (BLOCK == 32), 1.0)


@triton.jit
def _spin_kernel(flag_ptr, n, BLOCK: tl.constexpr):
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") < n * (BLOCK == 32):
        pass


@on_each_rank(modes=("gpu",), is_alone=True)
def test_a_kernel_that_spins_is_ended_by_release(rank: int):
    """Rank 1 waits for a signal that never comes: the watchdog writes it, and both ranks drop that config and go on."""
    kernel, flag = autotuned(_spin_kernel, configs=configs(16, 32), key=()), torch.zeros(1, dtype=torch.int32, device="cuda")
    step = tuned(None, lambda: kernel[(1,)](flag, rank), reset=lambda: None, release=[flag])
    step()
    assert best(kernel) == [16]
    assert "release=" in step.records[0].candidates[1].failure


def _raises(rank: int) -> None:
    kernel, runs = autotuned(blocks=(16, 32)), list[int]()

    def step(x: torch.Tensor) -> None:
        runs.append(1)
        y = launch(kernel, x)
        if rank == 1 and len(runs) == 4:
            raise ValueError("rank 1 had enough")
        dist.all_reduce(y)

    tuned(None, step, n_repeat=3, n_warmup=1)(torch.zeros(64, device="cuda"))


def _faults(rank: int) -> None:
    kernel, x = autotuned(_fault_kernel), torch.zeros(64, device="cuda")
    tuned(None, lambda: kernel[(1,)](x, 64, (1 << 45) if rank == 1 else 0), n_repeat=2)()


def _spins(rank: int) -> None:
    kernel, flag = autotuned(_spin_kernel, configs=configs(16, 32), key=()), torch.zeros(1, dtype=torch.int32, device="cuda")
    tuned(None, lambda: kernel[(1,)](flag, rank))()


@pytest.mark.parametrize(("job", "error", "told"), [(_raises, "ValueError", "rank 1 had enough"), (_faults, None, "illegal memory access")])
def test_a_rank_that_fails_frees_peers_that_wait_on_the_device(job: Any, error: str | None, told: str):
    """The peer's GPU waits, its host does not; where the context of rank 1 is gone, no config can stand in, and the peer names it too."""
    first, second = on_ranks(2, job, mode="gpu", env={"DIST_TUNE_DEADLINE_S": "20"})
    assert second.error == (error or second.error)
    assert told in second.message
    assert first.error == "PeerFailedError", first.notes
    assert "rank 1" in first.message
    assert told in first.message
    assert first.seconds < 20


def test_a_kernel_that_spins_for_ever_is_an_error_after_the_deadline():
    """Rank 1 waits for a signal that never comes: all ranks raise, and none hangs."""
    outcomes = on_ranks(2, _spins, mode="gpu")
    assert [o.error for o in outcomes] == ["StuckDeviceError"] * 2, [o.notes for o in outcomes]
    assert all("rank 1" in o.message and o.seconds < 6 * DEADLINE_S for o in outcomes)
