"""What only real GPUs show: event times, host ahead of device, NCCL, capture, dead contexts. Needs two.

python -m pytest -m gpu tests/gpu
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from dist_tune import CaptureError, contextual_autotune
from dist_tune.testing import on_ranks, values
from tests.ranks.kernels import autotuned, best, configs, launch
from tests.ranks.world import DEADLINE_S

pytestmark = pytest.mark.gpu


@triton.jit
def _turns_kernel(x_ptr, n, turns, BLOCK: tl.constexpr):
    """Its time is in proportion to ``turns`` over BLOCK."""
    value = tl.load(x_ptr)
    for _ in range(turns // BLOCK):
        value = value * 1.0001 + 0.5
    tl.store(x_ptr, value)


def _real_times(rank: int) -> Any:
    kernel = autotuned(_turns_kernel, blocks=(1, 2, 4), key=("n",))
    x = torch.zeros(64, device="cuda")

    @contextual_autotune(is_dist=True, n_repeat=5, n_warmup=1)
    def step() -> torch.Tensor:
        y = x * 2
        kernel[(1,)](y, 64, 400_000)
        dist.all_reduce(y)
        return y

    step()
    record = step.records[0]
    return best(kernel), [c.latency_ms for c in record.candidates], [c.closure_ms for c in record.candidates], record.best.rank_latencies_ms


def test_all_ranks_take_the_same_config_and_know_each_others_times():
    """Real events on two GPUs: the agreed times fall with the block, and a replay takes longer than its kernel."""
    got = values(on_ranks(2, _real_times, mode="gpu"))
    assert got[0] == got[1]
    winner, kernel_ms, closure_ms, rank_ms = got[0]
    assert winner == [4]
    assert kernel_ms == sorted(kernel_ms, reverse=True)
    assert all(whole > kernel for whole, kernel in zip(closure_ms, kernel_ms, strict=True))
    assert set(rank_ms) == {0, 1}


def _launch_gaps(rank: int) -> Any:
    kernel = autotuned(blocks=(64, 128))
    x = torch.zeros(64, device="cuda")

    @contextual_autotune(is_dist=True, n_repeat=9, n_warmup=2)
    def step() -> torch.Tensor:
        for _ in range(20):
            x.mul_(1)
        time.sleep(2e-4)  # a slow host, right before the launch
        return launch(kernel, x)

    step()
    return [c.latency_ms for c in step.records[0].candidates]


def test_launch_gaps_are_not_timed():
    """A kernel of some microseconds measures as such although the host needs hundreds for it."""
    for latencies in values(on_ranks(2, _launch_gaps, mode="gpu")):
        assert all(ms < 0.02 for ms in latencies), latencies


def _out_of_resources(rank: int) -> Any:
    from tests.ranks.test_faults import _matmul_kernel

    candidates = [triton.Config({"BLOCK": block}, num_stages=stages) for block, stages in ((64, 2), (128, 8), (64, 3))]
    kernel = triton.autotune(configs=candidates, key=["n"])(_matmul_kernel)
    a = torch.randn(128, 128, dtype=torch.float16, device="cuda")
    c = torch.empty_like(a)
    step = contextual_autotune(is_dist=True, n_repeat=2, n_warmup=1)(lambda: kernel[(1,)](a, a, c, 128))
    step()
    candidates_found = step.records[0].candidates
    return [x.failure for x in candidates_found], [x.shared_bytes for x in candidates_found], [x.n_regs for x in candidates_found]


def test_what_does_not_fit_is_dropped_before_a_launch():
    """The loader's own reason, and shared memory and registers of the others."""
    for failures, shared, registers in values(on_ranks(2, _out_of_resources, mode="gpu")):
        assert "OutOfResources" in failures[1]
        assert failures[0] is failures[2] is None
        assert shared[0] < shared[2]
        assert registers[0] > 0


def _user_error(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32))
    runs = []

    @contextual_autotune(is_dist=True, n_repeat=3, n_warmup=1)
    def step(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        y = launch(kernel, x)
        if rank == 1 and len(runs) == 4:
            raise ValueError("rank 1 had enough")
        dist.all_reduce(y)
        return y

    step(torch.zeros(64, device="cuda"))


def test_a_rank_that_raises_frees_peers_that_wait_on_the_device():
    """The peer's GPU waits in NCCL; its host does not, and raises well before any timeout."""
    outcomes = on_ranks(2, _user_error, mode="gpu", env={"DIST_TUNE_DEADLINE_S": "20"})
    assert (outcomes[1].error, outcomes[1].message) == ("ValueError", "rank 1 had enough")
    assert outcomes[0].error == "PeerFailedError", outcomes[0].notes
    assert "rank 1 raised ValueError: rank 1 had enough" in outcomes[0].message
    assert outcomes[0].seconds < 20


@triton.jit
def _fault_kernel(x_ptr, n, offset, BLOCK: tl.constexpr):
    tl.store(x_ptr + offset * (BLOCK == 32), 1.0)


def _dead_context(rank: int) -> Any:
    kernel = autotuned(_fault_kernel, blocks=(16, 32, 64), key=("n",))
    x = torch.zeros(64, device="cuda")
    far = (1 << 45) if rank == 1 else 0

    @contextual_autotune(is_dist=True, n_repeat=2, n_warmup=0)
    def step() -> torch.Tensor:
        kernel[(1,)](x, 64, far)
        return x

    step()


def test_an_illegal_access_on_one_rank_ends_the_tuning_on_all():
    """The context of rank 1 is gone, so no config can stand in: it raises CUDA's error, the other names it."""
    outcomes = on_ranks(2, _dead_context, mode="gpu", env={"DIST_TUNE_DEADLINE_S": "20"})
    assert "illegal memory access" in outcomes[1].message
    assert outcomes[0].error == "PeerFailedError", outcomes[0].notes
    assert "rank 1" in outcomes[0].message
    assert "illegal memory access" in outcomes[0].message


@triton.jit
def _spin_kernel(flag_ptr, n, BLOCK: tl.constexpr):
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") < n * (BLOCK == 32):
        pass


def _spins(rank: int) -> Any:
    kernel = autotuned(_spin_kernel, configs=configs(16, 32), key=())
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    contextual_autotune(is_dist=True, n_repeat=1, n_warmup=0)(lambda: kernel[(1,)](flag, rank))()


def test_a_kernel_that_spins_for_ever_is_an_error_after_the_deadline():
    """Rank 1 waits for a signal that never comes: all ranks raise, and none hangs."""
    outcomes = on_ranks(2, _spins, mode="gpu")
    assert [o.error for o in outcomes] == ["StuckDeviceError"] * 2, [o.notes for o in outcomes]
    assert all("rank 1" in o.message and o.seconds < 6 * DEADLINE_S for o in outcomes)


def _released(rank: int) -> Any:
    kernel = autotuned(_spin_kernel, configs=configs(16, 32), key=())
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    step = contextual_autotune(is_dist=True, n_repeat=1, n_warmup=0, reset=lambda: None, release=[flag])(lambda: kernel[(1,)](flag, rank))
    step()
    return best(kernel), [each.failure for each in step.records[0].candidates]


def test_a_kernel_that_spins_is_ended_by_release():
    """Rank 1 waits for a signal that never comes: the watchdog writes it, and both ranks drop that config and go on."""
    got = values(on_ranks(2, _released, mode="gpu", env={"DIST_TUNE_DEADLINE_S": "10"}))
    assert got[0] == got[1]
    winner, failures = got[0]
    assert winner == [16]
    assert "release=" in str(failures[1])


def _capture(rank: int) -> Any:
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
    step_of_new_key = contextual_autotune(is_dist=True)(lambda: launch(kernel, wide))
    with pytest.raises(CaptureError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        step_of_new_key()
    return y[0].item(), len(kernel.cache)


def test_a_tuned_step_can_be_captured():
    """The captured step replays with new inputs; a key without a config cannot be captured."""
    assert values(on_ranks(2, _capture, mode="gpu")) == [(5.0, 1)] * 2


class _Double(torch.autograd.Function):
    kernel: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return launch(_Double.kernel, grads[0].contiguous())


def _backward(rank: int) -> Any:
    _Double.kernel = autotuned(blocks=(16, 32))
    x = torch.zeros(64, device="cuda", requires_grad=True)
    torch.cuda.manual_seed(7)

    @contextual_autotune(is_dist=True, n_repeat=2, n_warmup=1)
    def step() -> tuple[float, float]:
        (gradient,) = torch.autograd.grad(_Double.apply(x).sum(), x)
        return gradient[0].item(), torch.rand((), device="cuda").item()

    gradient, number = step()
    later = torch.rand((), device="cuda").item()
    torch.cuda.manual_seed(7)
    expected = [torch.rand((), device="cuda").item() for _ in range(2)]
    return gradient, len(_Double.kernel.cache), len(step.records), [number, later] == expected


def test_autograds_threads_are_heard_and_the_gpus_generator_is_kept():
    """A kernel of a backward pass, launched by a thread of autograd's, is tuned; random numbers are as without tuning."""
    assert values(on_ranks(2, _backward, mode="gpu")) == [(2.0, 1, 1, True)] * 2
