"""Arguments that are compiled in and never come again, kernels made anew, and compilations of kernels that are not tuned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dist_tune import DistTuneError, autotune
from dist_tune.testing import FakeH200, values
from kernels import shard_gemm
from tests.cases import further
from tests.ranks.test_variants import result
from tests.ranks.variants import autotuned, constant_kernel, counting, epoch_kernel, on_fake, tuned, watch

pytestmark = [pytest.mark.once, pytest.mark.processes]


def _constants(rank: int, warps: tuple[int, ...]) -> Any:
    seen = watch()
    step = counting(autotuned(constant_kernel, warps=warps), seen)
    with pytest.raises(DistTuneError) as caught:
        step()
    return type(caught.value).__name__, str(caught.value), seen.n_runs


@pytest.mark.parametrize("warps", [(4,), (1, 2, 4, 8, 16)])
@pytest.mark.parametrize("n", [further(1), 2])
def test_a_constant_that_counts_up_ends_the_tuning_with_its_name_and_the_remedy(n: int, warps: tuple[int, ...]) -> None:
    """A tl.constexpr of a new value in each launch: a message on all ranks, after a bounded number of runs."""
    got = values(on_fake(n, _constants, warps))
    assert len({message for _, message, _ in got}) == 1
    for kind, message, n_runs in got:
        assert kind == "EndlessVariantsError"
        assert all(each in message for each in ("constant_kernel", "argument step", ", 3, 4, 5, ...)", 'do_not_specialize=["step"]'))
        assert n_runs <= 25


def _alternating(rank: int) -> Any:
    seen, n = watch(), 0
    kernel, x, y = autotuned(constant_kernel), torch.zeros(64), torch.zeros(64)

    def step() -> None:
        nonlocal n
        n += 1
        kernel[(1,)](x, y, 64, n % 5)

    run = tuned(step, seen)
    run()
    return result(run, seen)


def test_constants_that_come_again_are_variants_as_any() -> None:
    """Five values of a tl.constexpr in turn."""
    for in_timed, winners, n_variants, unmeasured in values(on_fake(2, _alternating)):
        assert (in_timed, winners, n_variants, unmeasured) == ([], [32], [5], [])


@triton.jit
def plain_kernel(x_ptr, step: tl.constexpr):
    tl.store(x_ptr, step)


def _plain(rank: int, n_values: int) -> Any:
    seen, n = watch(), 0
    kernel, x, y = autotuned(), torch.zeros(64), torch.zeros(64)

    def step() -> None:
        nonlocal n
        n += 1
        plain_kernel[(1,)](x, n % n_values)
        kernel[(1,)](x, y, 64, 3)

    run = tuned(step, seen)
    run()
    return len(result(run, seen)[0]), *result(run, seen)[1:]


@pytest.mark.parametrize("n", [further(1), 2])
def test_a_replay_that_compiles_a_kernel_beside_the_tuned_one_does_not_count(n: int) -> None:
    """Five values in turn, three of them in runs before: two replays are thrown away."""
    outcomes = on_fake(n, _plain, 5)
    for n_in_timed, winners, _, unmeasured in values(outcomes):
        assert (n_in_timed, winners, unmeasured) == (2, [32], [])
    assert all(each.log.count("does not count: it compiled tests.ranks.test_variants_endless.plain_kernel") == 2 for each in outcomes)
    assert all(" thrown_away=2 " in each.log for each in outcomes)


def test_replays_count_in_spite_of_a_kernel_that_each_of_them_compiles() -> None:
    """A constant of a plain kernel that counts up for ever: told once, and the tuning ends with times."""
    outcomes = on_fake(2, _plain, 10**6)
    for _, winners, _, unmeasured in values(outcomes):
        assert (winners, unmeasured) == ([32], [])
    assert all(each.log.count("replays that compile it count from now on") == 1 for each in outcomes)


def _large_function(rank: int) -> Any:
    seen, epoch = watch(), 0
    x, y = torch.zeros(64), torch.zeros(64)
    space = [{"BLOCK": block, "num_warps": warps} for block in (16, 32, 64, 128) for warps in (1, 2, 4, 8, 16)]

    @autotune(space, lambda n: n, n_warmup=1, n_repeat=2, cache=False)
    def step(n: int, BLOCK: int, num_warps: int) -> None:
        nonlocal epoch
        epoch += 1
        seen.run()
        epoch_kernel[(1,)](x, y, n, epoch, BLOCK=BLOCK, num_warps=num_warps)

    step(64)
    record = step.records[0]
    return len(seen.lazy), [each.index for each in record.candidates if each.latency_ms is None], record.best.fields["BLOCK"]


def test_configs_of_a_function_are_compiled_ahead_for_the_class_of_an_epoch_that_comes_next() -> None:
    """20 configs: the first runs compile inside, then what comes with multiples of 16."""
    for n_lazy, unmeasured, winner in values(on_fake(2, _large_function)):
        assert n_lazy <= 8
        assert (unmeasured, winner) == ([], 32)


def _gemm(rank: int, n_ranks: int) -> Any:
    seen, epoch = watch(), 0
    FakeH200.launch_ms = lambda src, metadata: 6.0 - 4.0 * (metadata.num_warps == 8)
    blocks = ((64, 64, 4), (128, 64, 4), (128, 64, 8))
    configs = [shard_gemm.make_config(m, n, 64, warps=warps, stages=2) for m, n, warps in blocks]
    kernel = shard_gemm.with_int_epoch()
    shard_gemm.ag_gemm_kernel = triton.autotune(configs=configs, key=["M", "N", "K"])(kernel.fn)
    a, b = torch.zeros(128, 128, dtype=torch.float16), torch.zeros(128, 128, dtype=torch.float16)
    gathered, c = torch.zeros(128 * n_ranks, 128, dtype=torch.float16), torch.zeros(128 * n_ranks, 128, dtype=torch.float16)
    flags = torch.zeros(n_ranks, dtype=torch.int32)

    def step() -> None:
        nonlocal epoch
        epoch += 1
        shard_gemm.multiply_shards(a, gathered, b, c, flags, epoch=epoch, rank=rank)

    run = tuned(step, seen)
    run()
    n_lazy = len(seen.lazy)
    for _ in range(32):
        run()
    (record,) = run.records
    untimed = [(each.index, each.left, each.failure, each.equal_to) for each in record.candidates if each.n_replays == 0]
    return result(run, seen)[0], record.best.fields["num_warps"], record.n_variants, untimed, len(seen.lazy) - n_lazy


@pytest.mark.parametrize("n", [further(1), 2])
def test_a_gemm_with_a_plain_epoch_is_tuned_without_a_compilation_in_timed_replays(n: int) -> None:
    """Descriptors, whose blocks a hook sets, beside an epoch that counts up; a different int `rank` on each rank besides."""
    assert values(on_fake(n, _gemm, n)) == [([], 8, 3, [], 0)] * n
