"""What only real GPUs show: event times, host ahead of device, capture, autograd's threads, kernels
that spin, dead contexts.

python -m pytest -m gpu tests/gpu
"""

from __future__ import annotations

import time
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from dist_tune import CaptureError, contextual_autotune
from dist_tune.testing import on_ranks
from tests.gpu import ALONE, turns_kernel
from tests.steps import autotuned, best, configs, failures, launch, product_kernel, tuned
from tests.worlds import DEADLINE_S, on_each_rank

pytestmark = pytest.mark.gpu


@on_each_rank(modes=("gpu",))
def test_the_slowest_rank_decides_and_all_know_its_time(rank: int):
    """Rank 1 takes ten times as long with 4, the fastest block on rank 0: both take 2."""
    kernel, x = autotuned(turns_kernel, blocks=(1, 2, 4)), torch.zeros(64, device="cuda")

    def closure() -> None:
        y = x * 2
        kernel[(1,)](y, 64, 400_000, 10 if rank == 1 else 1)
        dist.all_reduce(y)

    step = tuned(None, closure, n_repeat=5, n_warmup=1)
    step()
    (record,) = step.records
    assert best(kernel) == [2]
    assert {*record.best.rank_latencies_ms} == {0, 1}
    return [each.latency_ms for each in record.candidates]


@on_each_rank(**ALONE)
def test_times_are_the_kernel_s_without_launch_gaps(rank: int):
    """They fall with the work, are below those of the step, and tell microseconds although the host
    needs hundreds for a launch.
    """
    turns, short, x = (
        autotuned(turns_kernel, blocks=(1, 2, 4)),
        autotuned(blocks=(64, 128)),
        torch.zeros(64, device="cuda"),
    )

    def closure() -> None:
        for _ in range(20):
            x.mul_(1)
        time.sleep(2e-4)  # a slow host, right before the launch
        launch(short, x)
        turns[(1,)](x + 1, 64, 400_000, 1)

    step = contextual_autotune(n_repeat=9, n_warmup=2)(closure)
    step()
    by_n: dict[int, Any] = {len(record.candidates): record.candidates for record in step.records}
    assert max(each.latency_ms for each in by_n[2]) < 0.02
    of_turns = [each.latency_ms for each in by_n[3]]
    assert of_turns == sorted(of_turns, reverse=True)
    assert all(each.closure_ms > each.latency_ms for each in by_n[3])


@on_each_rank(**ALONE)
def test_what_does_not_fit_is_dropped_before_a_launch(rank: int):
    """The loader's own reason, and shared memory and registers of the others."""
    space = [
        triton.Config({"BLOCK": block}, num_stages=stages)
        for block, stages in ((64, 2), (128, 8), (64, 3))
    ]
    kernel, a = (
        autotuned(product_kernel, configs=space),
        torch.randn(128, 128, dtype=torch.float16, device="cuda"),
    )
    step = contextual_autotune(n_repeat=2, n_warmup=1)(
        lambda: kernel[(1,)](a, torch.empty_like(a), 128)
    )
    step()
    first, second, third = cast(Any, step.records[0].candidates)
    assert "OutOfResources" in second.failure
    assert first.failure is third.failure is None
    assert first.shared_bytes < third.shared_bytes
    assert first.n_regs > 0


@on_each_rank(**ALONE)
def test_a_tuned_step_can_be_captured_and_one_that_was_never_called_where_nothing_may_be_tuned(
    rank: int,
):
    """With the config of its record, of the nearest one, or the first: compiled and loaded under
    the capture; else nothing is captured.
    """
    x = {n: torch.zeros(n, device="cuda") for n in (64, 128, 256)}
    known, other, new = (autotuned(blocks=(16, 32)) for _ in range(3))
    for kernel, mode, n in (
        (known, "", 64),
        (other, "cached", 64),
        (other, "cached", 128),
        (new, "first", 64),
    ):
        y, graph = torch.zeros(n, device="cuda"), torch.cuda.CUDAGraph()
        step = contextual_autotune(n_repeat=2, n_warmup=1)(
            lambda kernel=kernel, n=n, y=y: launch(kernel, x[n], y)
        )
        if not mode:
            step()
        with pytest.MonkeyPatch.context() as patch, torch.cuda.graph(graph):
            if mode:
                patch.setenv("DIST_TUNE_MODE", mode)
            step()
        x[n].fill_(4.0)
        graph.replay()
        torch.cuda.synchronize()
        block = 16 if mode == "first" else best(known)[0]
        assert (y[0].item(), [*kernel.cache.values()][-1].kwargs["BLOCK"]) == (5.0, block)
    with pytest.raises(CaptureError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        contextual_autotune(cache=False)(lambda: launch(known, x[256]))()
    assert len(known.cache) == 1


@on_each_rank(**ALONE)
def test_autograds_threads_are_heard_and_the_gpus_generator_is_kept(rank: int):
    """A kernel of a backward pass, launched by a thread of autograd's, is tuned; random numbers are
    as without tuning.
    """
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
    step = contextual_autotune(n_repeat=2, n_warmup=1)(
        lambda: (torch.autograd.grad(Double.apply(x).sum(), x)[0][0].item(), drawn())
    )
    (gradient, number), later = step(), drawn()
    torch.cuda.manual_seed(7)
    assert (number, later) == (drawn(), drawn())
    assert (gradient, len(kernel.cache), len(step.records)) == (2.0, 1, 1)


# -- what never ends, and what fails ---------------------------------------------------------------


@triton.jit
def fault_kernel(x_ptr, n, offset, BLOCK: tl.constexpr):
    tl.store(x_ptr + offset * (BLOCK == 32), 1.0)


@triton.jit
def spin_kernel(flag_ptr, n, BLOCK: tl.constexpr):
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") < n * (BLOCK == 32):
        pass


def spins(rank: int, **options: Any) -> Any:
    """A step in which rank 1 waits for a signal that never comes, with one of two configs."""
    kernel, flag = (
        autotuned(spin_kernel, configs=configs(16, 32), key=()),
        torch.zeros(1, dtype=torch.int32, device="cuda"),
    )
    step = tuned(
        None,
        lambda: kernel[(1,)](flag, rank),
        **{name: made(flag) for name, made in options.items()},
    )
    step()
    return best(kernel), failures(step)


@on_each_rank(modes=("gpu",), is_alone=True)
def test_a_kernel_that_spins_is_ended_by_release(rank: int):
    """The watchdog writes the signal, and both ranks drop that config and go on."""
    blocks, (right, wrong) = spins(
        rank, reset=lambda flag: lambda: None, release=lambda flag: [flag]
    )
    assert (blocks, right) == ([16], None)
    assert "release=" in wrong


def test_a_kernel_that_spins_for_ever_is_an_error_after_the_deadline():
    """All ranks raise, and none hangs."""
    outcomes = on_ranks(2, spins, mode="gpu")
    assert [o.error for o in outcomes] == ["StuckDeviceError"] * 2, [o.notes for o in outcomes]
    assert all("rank 1" in o.message and o.seconds < 20 * DEADLINE_S for o in outcomes)


def raises(rank: int) -> None:
    kernel, runs = autotuned(blocks=(16, 32)), list[int]()

    def step(x: torch.Tensor) -> None:
        runs.append(1)
        y = launch(kernel, x)
        if rank == 1 and len(runs) == 4:
            raise ValueError("rank 1 had enough")
        dist.all_reduce(y)

    tuned(None, step, n_repeat=3, n_warmup=1)(torch.zeros(64, device="cuda"))


def faults(rank: int) -> None:
    kernel, x = autotuned(fault_kernel), torch.zeros(64, device="cuda")
    tuned(None, lambda: kernel[(1,)](x, 64, (1 << 45) if rank == 1 else 0), n_repeat=2)()


@pytest.mark.parametrize(
    ("job", "error", "told"),
    [(raises, "ValueError", "rank 1 had enough"), (faults, None, "illegal memory access")],
)
def test_a_rank_that_fails_frees_peers_that_wait_on_the_device(
    job: Any, error: str | None, told: str
):
    """The peer's GPU waits, its host does not; where the context of rank 1 is gone, no config can
    stand in, and the peer names it too.
    """
    first, second = on_ranks(2, job, mode="gpu", env={"DIST_TUNE_DEADLINE_S": "60"})
    assert second.error == (error or second.error)
    assert told in second.message
    assert first.error == "PeerFailedError", first.notes
    assert "rank 1" in first.message
    assert told in first.message
    assert first.seconds < 60  # its deadline
