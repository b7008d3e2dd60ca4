"""One config for all sizes of a class: by hand-made times, where another rule would choose another one."""

from typing import Any

import pytest
import torch

from dist_tune.offline import ConfigFile, Failed, Outcome, Settled, m_leq
from dist_tune.offline.class_configs import N_SHORTLISTED, SizeClass, classes_of, slowdowns
from dist_tune.offline.problem import Ended

pytestmark = pytest.mark.once

SPACE = [{"BM": 16 << i} for i in range(4)]


def config_file(space: Any = SPACE, callback: Any = None, sizes: tuple[int, ...] = (16, 64)) -> ConfigFile:
    return ConfigFile("GEMM.json", sizes, lambda size: lambda config: (lambda: config, None), space, m_leq(1024), callback)


def outcome(us: dict[int, float], failures: tuple[int, ...] = ()) -> Outcome:
    winner = min(us, key=us.__getitem__)
    return Outcome("problem", winner, us[winner], us, dict.fromkeys(failures, "wrong result"), n_configs=len(SPACE))


def size_class(found: dict[int, Outcome], old: dict[str, Any] | None = None, space: Any = SPACE, callback: Any = None) -> SizeClass:
    return SizeClass(config_file(space, callback), "M_LEQ_1024", found, old)


def settled(one: SizeClass, times: dict[int, dict[int, float]], min_gain: float | None = None) -> Settled:
    """The choice by the times of finals, told by candidate; a final itself counts those on the list."""
    measured: dict[int, Ended] = {size: outcome({one.shortlisted.index(i): t for i, t in us.items()}) for size, us in times.items()}
    choice = one.settle(measured, min_gain)
    assert isinstance(choice, Settled)
    return choice


def test_relative_losses_decide_and_not_seconds():
    """Config 0 is the best at the last size, 1 has the least sum, 2 is worst by the sum and loses least: 1.1 at both."""
    times = {16: {0: 3.0, 1: 2.0, 2: 1.1, 3: 1.0}, 64: {0: 100.0, 1: 100.5, 2: 110.0, 3: 150.0}}
    choice = settled(size_class({size: outcome(us) for size, us in times.items()}), times)
    assert choice.config == SPACE[2]
    assert choice.regret == pytest.approx(0.1)


def test_twice_as_fast_and_twice_as_slow_cancel():
    """By their geometric mean equals, of which the first is taken; an arithmetic mean would prefer the config in between."""
    times = {16: {2: 1.0, 1: 4.0, 3: 2.0}, 64: {2: 4.0, 1: 1.0, 3: 2.0}}
    assert slowdowns(list(times.values())) == {i: pytest.approx(2.0) for i in (1, 2, 3)}
    choice = settled(size_class({size: outcome(us) for size, us in times.items()}, SPACE[2]), times)
    assert choice.config == SPACE[1]
    assert choice.gain == pytest.approx(0.0)


def test_what_does_not_run_at_every_size_is_not_chosen():
    """However fast it is at the others."""
    assert slowdowns([{0: 1.0, 1: 2.0}, {1: 2.0, 2: 1.0}]) == {1: pytest.approx(2.0)}
    assert slowdowns([{0: 1.0}, {}]) == slowdowns([]) == {}


def test_the_best_of_each_size_and_over_all_are_shortlisted():
    """Twelve configs: the best eight over both sizes, and the winner of one although it is hopeless at the other."""
    first, second = {i: 1.0 + i for i in range(11)} | {11: 1e6}, {i: 1.0 + i for i in range(11)} | {11: 0.5}
    space = [{"BM": i} for i in range(12)]
    assert size_class({16: outcome(first), 64: outcome(second)}, space=space).shortlisted == [*range(N_SHORTLISTED), 11]
    assert size_class({16: outcome(first, (0, 3)), 64: outcome(second)}, space=space).shortlisted == [1, 2, 4, 5, 6, 7, 8, 9, 11]


def test_the_choice_is_made_of_the_times_of_the_final():
    """What was measured before only makes the shortlist: config 3 is not on it, and 1 wins in the end."""
    one = size_class({16: outcome({0: 1.0, 1: 1.5, 2: 9.0}), 64: outcome({0: 9.0, 1: 1.5, 2: 1.0}, failures=(3,))})
    assert [(size, problem.search_space) for size, problem in one.finals()] == [(16, SPACE[:3]), (64, SPACE[:3])]
    choice = settled(one, {16: {0: 1.0, 1: 1.1, 2: 5.0}, 64: {0: 5.0, 1: 1.1, 2: 1.0}})
    assert (choice.config, choice.latencies_us, choice.gain, choice.is_saved) == (SPACE[1], {16: 1.1, 64: 1.1}, None, True)


def test_one_size_needs_no_final():
    """And what is written is as the callback leaves it."""
    one = size_class({16: outcome({0: 3.0, 2: 2.0})}, callback=lambda config: config.update(SPLITK=config["BM"] // 8))
    assert one.finals() == []
    choice = settled(one, {})
    assert (choice.config, choice.latencies_us, choice.regret) == ({**SPACE[2], "SPLITK": 8}, {16: 2.0}, 0.0)


def test_the_only_config_that_runs_everywhere_is_chosen():
    """0 is the best at 16 and wrong at 64: 1 is left, and need not be measured again to be chosen."""
    one = size_class({16: outcome({0: 1.0, 1: 2.0}), 64: outcome({1: 3.0}, failures=(0,))})
    assert (one.finals(), settled(one, {}).config) == ([], SPACE[1])


def test_nothing_is_settled_where_nothing_runs_at_all_sizes():
    """No config did before; the finals failed; one of two finals failed."""
    failed = Failed("problem", "no config")
    apart = size_class({16: outcome({0: 1.0}, failures=(1,)), 64: outcome({1: 1.0}, failures=(0,))})
    assert isinstance(apart.settle({size: failed for size, _ in apart.finals()}, None), Failed)
    both = size_class({16: outcome({0: 1.0, 1: 2.0}), 64: outcome({0: 2.0, 1: 1.0})})
    for first in (failed, outcome({0: 1.0, 1: 2.0})):
        assert isinstance(both.settle({16: first, 64: failed}, None), Failed)


@pytest.mark.parametrize("old", [{"BM": 32, "BN": 8, "waves_per_eu": 8}, {"BN": 8, "BM": 32}])
def test_an_old_config_of_the_space_is_no_other(monkeypatch: pytest.MonkeyPatch, old: dict[str, Any]):
    """Measured once, with AMD's keys or without, in whatever order its keys stand; where it wins, the file stays."""
    monkeypatch.setattr(torch.version, "hip", None)
    space = [{"BM": bm, "BN": 8, "waves_per_eu": waves} for bm, waves in ((16, 1), (16, 2), (32, 1))]
    one = size_class({16: outcome({0: 1.0, 1: 2.0})}, old, space)
    assert one.shortlisted == [0, 1]
    choice = settled(one, {16: {0: 2.0, 1: 1.0}}, 0.0)
    assert (choice.config, choice.gain, choice.is_saved) == (space[2], 0.0, False)


@pytest.mark.parametrize(
    ("old_us", "min_gain", "is_saved"), [(102.9, 0.03, False), (103.1, 0.03, True), (99.0, None, False), (99.0, -0.5, False)]
)
def test_a_file_is_changed_for_what_is_worth_it(old_us: float, min_gain: float | None, is_saved: bool):
    """An old config that is none of the space is measured beside the new one: 2.9 % are not worth it, 3.1 % are."""
    choice = settled(size_class({16: outcome({0: 1.0, 1: 2.0})}, {"BM": 999}), {16: {0: 100.0, len(SPACE): old_us}}, min_gain)
    assert choice.is_saved is is_saved
    assert choice.config == (SPACE[0] if old_us > 100 else {"BM": 999})
    assert choice.old_latencies_us == {16: old_us}
    assert choice.gain == pytest.approx(max(0.0, old_us / 100 - 1))


def test_an_old_config_that_does_not_run_any_more_is_replaced():
    choice = settled(size_class({16: outcome({0: 1.0})}, {"BM": 999}), {16: {0: 100.0}}, 0.03)
    assert (choice.config, choice.gain, choice.is_saved) == (SPACE[0], None, True)


def test_sizes_come_to_their_classes():
    """In the order of sizes; what failed is in none; each with the config it is compared with."""
    one, other, old = outcome({0: 1.0}), outcome({1: 1.0}), {"BM": 999}
    ended: dict[int, Ended] = {4096: one, 16: other, 64: Failed("problem", "no config"), 2048: other}
    classes = classes_of(config_file(sizes=(4096, 16, 64, 2048)), ended, {"any": old})
    found = [(each.name, each.found, each.old) for each in classes]
    assert found == [("any", {4096: one, 2048: other}, old), ("M_LEQ_1024", {16: other}, None)]
