"""Arguments whose class changes while a step is tuned: no launch of a replay that counts compiles its kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dist_tune.testing import values
from tests.cases import further
from tests.ranks.variants import Seen, autotuned, counting, heuristic_kernel, on_fake, tuned, watch

pytestmark = pytest.mark.processes


def result(step: Any, seen: Seen) -> Any:
    """Times that a timed launch compiled, blocks that won, variants, candidates without a time."""
    in_timed = [run for run, is_timed in seen.lazy if is_timed]
    winners = [each.best.fields.get("BLOCK") for each in step.records]
    unmeasured = [c.index for each in step.records for c in each.candidates if c.latency_ms is None and c.failure is None]
    return in_timed, winners, [each.n_variants for each in step.records], unmeasured


def _epoch(rank: int, firsts: list[int], kind: str) -> Any:
    seen = watch()
    step = counting(autotuned(heuristic_kernel) if kind == "heuristics" else autotuned(), seen, firsts[rank])
    step()
    n_lazy = len(seen.lazy)
    for _ in range(40):
        step()
    return *result(step, seen), len(seen.lazy) - n_lazy


@pytest.mark.parametrize("kind", ["plain", further("heuristics")])
@pytest.mark.parametrize("firsts", [further([1]), [1, 1], further([1, 5]), [14, 31]])
def test_an_epoch_counter_compiles_nothing_inside_timed_replays(firsts: list[int], kind: str) -> None:
    """1, 2, 3, ... as a plain int: its three variants are compiled between replays, and all there for later calls."""
    for in_timed, winners, n_variants, unmeasured, n_later in values(on_fake(len(firsts), _epoch, firsts, kind)):
        assert in_timed == []
        assert winners == [32]
        assert n_variants[0] >= 3
        assert kind == "heuristics" or n_variants == [3]
        assert unmeasured == []
        assert n_later == 0 or kind == "heuristics"


def _strides(rank: int, has_two_sites: bool, warps: tuple[int, ...] = (4,), **options: Any) -> Any:
    seen = watch()
    kernels = [autotuned(warps=warps) for _ in range(1 + has_two_sites)]
    x, y, n = torch.zeros(64), torch.zeros(64), 0

    def step() -> None:
        nonlocal n
        n += 1
        for k, kernel in enumerate(kernels):
            kernel[(1,)](x, y, 64 - k, 64 if (n + k) % 2 else 100)

    run = tuned(step, seen, **options)
    run()
    return result(run, seen)


@pytest.mark.once
@pytest.mark.parametrize("has_two_sites", [further(False), True])
@pytest.mark.parametrize("n", [further(1), 2])
def test_a_stride_that_changes_every_time_is_timed_with_all_candidates(n: int, has_two_sites: bool) -> None:
    """64 and 100 in turn, at one site and at two out of step: both are compiled for all candidates, and each gets its time."""
    for in_timed, winners, n_variants, unmeasured in values(on_fake(n, _strides, has_two_sites)):
        assert in_timed == []
        assert winners == [32] * (1 + has_two_sites)
        assert all(2 <= each <= 3 for each in n_variants)
        assert unmeasured == []


def _unaligned(rank: int) -> Any:
    seen = watch()
    kernel, n = autotuned(), 0
    whole, y = torch.zeros(65), torch.zeros(64)

    def step() -> None:
        nonlocal n
        n += 1
        kernel[(1,)](whole[n % 2 :][:64], y, 64, 3)

    run = tuned(step, seen)
    run()
    return result(run, seen)


@pytest.mark.parametrize("n", [1, 2])
def test_an_unaligned_slice_in_turn_with_an_aligned_one_has_two_variants(n: int) -> None:
    """A tensor that starts at a multiple of 16 bytes is another kernel than one that does not."""
    assert values(on_fake(n, _unaligned)) == [([], [32], [2], [])] * n


def _many(rank: int) -> Any:
    seen = watch()
    step = counting(autotuned(warps=(1, 2, 4, 8, 16)), seen, n_warmup=3)
    step()
    n_lazy = len(seen.lazy)
    for _ in range(40):
        step()
    return *result(step, seen)[:3], len(seen.lazy) - n_lazy, seen.compiled


@pytest.mark.once
def test_a_large_space_is_compiled_for_the_class_that_comes_and_for_others_once_few_are_left() -> None:
    """20 candidates: epoch 1 is seen to pass before it is compiled for all; multiples of 16 are compiled for the finalists."""
    outcomes = on_fake(2, _many)
    got = values(outcomes)
    assert max(each.log.count("is not loaded for") for each in outcomes) <= 3  # epoch 2, and 16 and 32 where a rank has not met them before
    for in_timed, winners, n_variants, n_later, _ in got:
        assert (in_timed, winners, n_variants, n_later) == ([], [32], [3], 0)
    n_compiled = {kind: sum(compiled[kind] for *_, compiled in got) for kind in ("1", "16", "other")}
    assert 20 <= n_compiled["other"] <= 21  # both ranks compile the first of them at once
    assert n_compiled["16"] <= 8
    assert n_compiled["1"] <= 12  # what the threads had begun


def _options(rank: int, options: dict[str, Any]) -> Any:
    return _strides(rank, False, **options)


@pytest.mark.once
@pytest.mark.parametrize("options", [{"n_warmup": 0}, {"search": "exhaustive"}, further({"objective": "kernel", "budget_s": 20.0})])
def test_other_plans_time_all_candidates_as_well(options: dict[str, Any]) -> None:
    """No warm-up, an exhaustive search, a budget: what was lost is run again."""
    for in_timed, winners, _, unmeasured in values(on_fake(1, _options, options)):
        assert (in_timed, winners, unmeasured) == ([], [32], [])


def _heuristic_multiples(rank: int) -> Any:
    """Multiples of 16 in turn, which are multiples of different blocks: 16, 32, 48, 64, 80, 96, ..."""
    seen, n = watch(), 0
    kernel, x, y = autotuned(heuristic_kernel), torch.zeros(64), torch.zeros(64)

    def step() -> None:
        nonlocal n
        n += 1
        kernel[(1,)](x, y, 64, 16 * (n % 8 + 1))

    run = tuned(step, seen, search="exhaustive", n_repeat=8)
    run()
    n_lazy = len(seen.lazy)
    for _ in range(8):
        run()
    return *result(run, seen), len(seen.lazy) - n_lazy


@pytest.mark.parametrize("n", [further(1), 2])
def test_heuristics_that_follow_from_an_argument_and_the_config_are_variants_too(n: int) -> None:
    """The arguments are of one class, and the constant made of them and of the block is not."""
    for in_timed, winners, n_variants, unmeasured, n_later in values(on_fake(n, _heuristic_multiples)):
        assert (in_timed, winners, unmeasured) == ([], [32], [])
        assert 2 <= n_variants[0] <= 4
        assert n_later == 0
