"""A launch that is put off because its kernel is not loaded leaves nothing behind: hooks, copies, wrappers, votes, other kernels."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dist_tune.testing import FakeH200, values
from tests.cases import further
from tests.ranks.test_variants import result
from tests.ranks.variants import autotuned, counting, epoch_kernel, on_fake, tuned, watch

pytestmark = pytest.mark.processes


def _hooks(rank: int) -> Any:
    seen, calls, epoch = watch(), Counter[str](), 0
    x, y, z = torch.ones(64), torch.ones(64), torch.ones(64)

    def pre_hook(args: dict[str, Any], reset_only: bool = False) -> None:
        calls["pre"] += not reset_only

    def post_hook(args: dict[str, Any], exception: BaseException | None) -> None:
        calls["post"] += 1

    configs = [triton.Config({"BLOCK": block}) for block in (16, 32, 64)]
    hooked = triton.autotune(configs=configs, key=["n"], pre_hook=pre_hook, post_hook=post_hook)(epoch_kernel)
    restoring = triton.autotune(configs=configs, key=["n"], restore_value=["y_ptr"], reset_to_zero=["x_ptr"])(epoch_kernel)

    def step() -> None:
        nonlocal epoch
        epoch += 1
        hooked[(1,)](x, y, 64, epoch)
        restoring[(1,)](z, y, 64, epoch)

    run = tuned(step, seen)
    run()
    return result(run, seen), calls["pre"] == calls["post"] > 0, y.tolist() == [1.0] * 64, z.tolist() == [0.0] * 64


def test_hooks_come_in_pairs_and_copies_are_put_back() -> None:
    """A pre_hook and a post_hook of the kernel, restore_value and reset_to_zero, beside an epoch counter."""
    for (in_timed, winners, _, unmeasured), has_pairs, is_restored, is_zeroed in values(on_fake(2, _hooks)):
        assert (in_timed, winners, unmeasured) == ([], [32, 32], [])
        assert (has_pairs, is_restored, is_zeroed) == (True, True, True)


class Wrapped:
    """A layer of the user's between the autotuner and the kernel."""

    def __init__(self, fn: Any, swallows: bool) -> None:
        self.fn, self.arg_names, self.base_fn, self.swallows = fn, fn.arg_names, fn.fn, swallows

    def run(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.fn.run(*args, **kwargs)
        except RuntimeError:
            raise AssertionError("an error of the tuner's own reached the user") from None
        except BaseException:
            if not self.swallows:
                raise


def _wrapper(rank: int, swallows: bool) -> Any:
    seen = watch()
    step = counting(autotuned(Wrapped(epoch_kernel, swallows)), seen)
    launches = []
    step()
    for _ in range(3):
        FakeH200.launches.clear()
        step()
        launches.append(len(FakeH200.launches))
    return result(step, seen), launches, [c.failure for c in step.records[0].candidates]


@pytest.mark.parametrize("swallows", [False, True])
def test_wrappers_around_a_kernel_neither_stop_nor_hide_the_notice(swallows: bool) -> None:
    """One that turns each exception into another; and one that passes over all, so that nothing can be compiled ahead: such replays go."""
    outcomes = on_fake(1, _wrapper, swallows)
    for (in_timed, winners, _, unmeasured), launches, failures in values(outcomes):
        assert (winners, unmeasured) == ([32], [])
        assert len(in_timed) == outcomes[0].log.count("does not count: it compiled")
        # One for each candidate but the first, for the class that comes first; more where a timed replay meets epoch 16.
        assert len(in_timed) in (range(3, 6) if swallows else [0])
        assert (launches, failures) == ([1] * 3, [None] * 4)


@triton.jit
def picky_kernel(x_ptr, y_ptr, n, epoch, FAILS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.static_assert(not (FAILS and BLOCK == 32 and epoch != 1))
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + epoch, mask=at < n)


def _picky(rank: int, at: int) -> Any:
    seen, epoch = watch(), 0
    kernel, x, y = autotuned(picky_kernel, blocks=(16, 32, 64)), torch.zeros(64), torch.zeros(64)

    def step() -> None:
        nonlocal epoch
        epoch += 1
        kernel[(1,)](x, y, 64, 1 if epoch < at else 2, rank == 1)

    run = tuned(step, seen)
    run()
    return *result(run, seen)[:2], [c.failure for c in run.records[0].candidates]


@pytest.mark.once
@pytest.mark.parametrize("at", [further(2), 5])
def test_a_candidate_that_fails_for_a_variant_on_one_rank_is_dropped_on_all(at: int) -> None:
    """On rank 1 the fastest does not compile for the class of a later epoch, which comes before the race or in its midst."""
    for in_timed, winners, failures in values(on_fake(2, _picky, at)):
        assert (in_timed, winners) == ([], [64])
        assert [each is not None for each in failures] == [False, True, False]
        assert "rank 1" in failures[1]
