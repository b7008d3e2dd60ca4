"""One config for all sizes of a class: by hand-made times, where another rule would choose another one."""

from typing import Any

import pytest
import torch

from dist_tune.offline.class_configs import (
    N_SHORTLISTED,
    ConfigFile,
    Settled,
    SizeClass,
    choose,
    classes_of,
    gain,
    shortlist,
    slowdowns,
)
from dist_tune.offline.config_files import m_leq
from dist_tune.offline.problem import Ended, Failed, Outcome

pytestmark = pytest.mark.once

SPACE = [{"BM": 16 << i} for i in range(4)]


def config_file(space: Any = SPACE, callback: Any = None, sizes: tuple[int, ...] = (16, 64)) -> ConfigFile:
    return ConfigFile("GEMM.json", sizes, lambda size: lambda config: (lambda: config, None), space, m_leq(1024), callback)


def outcome(us: dict[int, float], failures: tuple[int, ...] = ()) -> Outcome:
    winner = min(us, key=us.__getitem__)
    return Outcome("problem", winner, us[winner], us, dict.fromkeys(failures, "wrong result"), n_configs=len(SPACE))


def size_class(found: dict[int, Outcome], old: dict[str, Any] | None = None, space: Any = SPACE, callback: Any = None) -> SizeClass:
    return SizeClass(config_file(space, callback), "M_LEQ_1024", found, old)


def final(one: SizeClass, us: dict[int, float]) -> Outcome:
    """Times of the final, told by candidate; the final itself counts those on the list."""
    return outcome({one.shortlisted.index(i): each for i, each in us.items()})


def test_relative_losses_decide_and_not_seconds():
    """Config 0 is the best at the last size, 1 has the least sum, 2 is worst by the sum and loses least: 1.1 at both."""
    by_size = [{0: 3.0, 1: 2.0, 2: 1.1, 3: 1.0}, {0: 100.0, 1: 100.5, 2: 110.0, 3: 150.0}]
    assert choose(by_size) == 2
    assert slowdowns(by_size)[2] == pytest.approx(1.1)
    assert slowdowns(by_size)[0] == pytest.approx(3**0.5)


def test_twice_as_fast_and_twice_as_slow_cancel():
    """By their geometric mean equals, of which the first is taken; an arithmetic mean would prefer the config in between."""
    by_size = [{2: 1.0, 1: 4.0, 3: 2.0}, {2: 4.0, 1: 1.0, 3: 2.0}]
    assert slowdowns(by_size) == {i: pytest.approx(2.0) for i in (1, 2, 3)}
    assert choose([{2: 1.0, 1: 4.0}, {2: 4.0, 1: 1.0}]) == 1
    assert gain(by_size, 1, 2) == pytest.approx(0.0)


def test_what_does_not_run_at_every_size_is_not_chosen():
    """However fast it is at the others; and nothing is chosen where no config runs at all of them."""
    assert choose([{0: 1.0, 1: 2.0}, {1: 2.0, 2: 1.0}]) == 1
    assert choose([{0: 1.0}, {1: 1.0}]) is None
    assert choose([{0: 1.0}, {}]) is None
    assert choose([]) is None


def test_the_best_of_each_size_and_over_all_are_shortlisted():
    """Twelve configs: the best eight over both sizes, and the winner of one although it is hopeless at the other."""
    by_size = [{i: 1.0 + i for i in range(11)} | {11: 1e6}, {i: 1.0 + i for i in range(11)} | {11: 0.5}]
    assert shortlist(by_size, winners={0, 11}, failed=[]) == [*range(N_SHORTLISTED), 11]
    assert shortlist(by_size, winners={0, 11}, failed=[0, 3]) == [1, 2, 4, 5, 6, 7, 8, 9, 11]


def test_a_gain_is_relative_over_all_sizes():
    """44 % at one of two sizes is 20 %."""
    assert gain([{0: 144.0, 1: 100.0}, {0: 2.0, 1: 2.0}], new=1, old=0) == pytest.approx(0.2)


def test_the_choice_is_made_of_the_times_of_the_final():
    """What was measured before only makes the shortlist: config 3 is not on it, and 1 wins in the end."""
    one = size_class({16: outcome({0: 1.0, 1: 1.5, 2: 9.0}), 64: outcome({0: 9.0, 1: 1.5, 2: 1.0}, failures=(3,))})
    assert one.shortlisted == [0, 1, 2]
    assert [(size, problem.search_space) for size, problem in one.finals()] == [(16, SPACE[:3]), (64, SPACE[:3])]
    settled = one.settle({16: final(one, {0: 1.0, 1: 1.1, 2: 5.0}), 64: final(one, {0: 5.0, 1: 1.1, 2: 1.0})}, None)
    assert isinstance(settled, Settled)
    assert (settled.config, settled.latencies_us, settled.gain, settled.is_saved) == (SPACE[1], {16: 1.1, 64: 1.1}, None, True)


def test_one_size_needs_no_final():
    one = size_class({16: outcome({0: 3.0, 2: 2.0})})
    settled = one.settle({}, None)
    assert one.finals() == []
    assert isinstance(settled, Settled)
    assert (settled.config, settled.latencies_us, settled.is_saved) == (SPACE[2], {16: 2.0}, True)


def test_the_only_config_that_runs_everywhere_is_chosen():
    """0 is the best at 16 and wrong at 64: 1 is left, and need not be measured again to be chosen."""
    one = size_class({16: outcome({0: 1.0, 1: 2.0}), 64: outcome({1: 3.0}, failures=(0,))})
    assert one.shortlisted == [1]
    settled = one.settle({size: final(one, {1: 2.5}) for size, _ in one.finals()}, None)
    assert isinstance(settled, Settled)
    assert settled.config == SPACE[1]


def test_nothing_is_settled_where_nothing_runs():
    """No size could be tuned; no config runs at all sizes; the final failed."""
    assert isinstance(size_class({}).settle({}, None), Failed)
    apart = size_class({16: outcome({0: 1.0}, failures=(1,)), 64: outcome({1: 1.0}, failures=(0,))})
    assert isinstance(apart.settle({size: Failed("problem", "no config") for size, _ in apart.finals()}, None), Failed)
    both = size_class({16: outcome({0: 1.0, 1: 2.0}), 64: outcome({0: 2.0, 1: 1.0})})
    assert isinstance(both.settle(dict.fromkeys((16, 64), Failed("problem", "no config")), None), Failed)


def test_nothing_is_settled_where_a_size_has_no_final():
    """None of the shortlist ran there, so what was best at the other size does not run at all sizes."""
    both = size_class({16: outcome({0: 1.0, 1: 2.0}), 64: outcome({0: 2.0, 1: 1.0})})
    assert isinstance(both.settle({16: final(both, {0: 1.0, 1: 2.0}), 64: Failed("problem", "no config")}, None), Failed)


def test_an_old_config_of_the_space_is_no_other(monkeypatch: pytest.MonkeyPatch):
    """Measured once, with AMD's keys or without; where it wins, the file stays."""
    monkeypatch.setattr(torch.version, "hip", None)
    space = [{"BM": 16, "waves_per_eu": 1}, {"BM": 16, "waves_per_eu": 2}, {"BM": 32, "waves_per_eu": 1}]
    one = size_class({16: outcome({0: 1.0, 1: 2.0})}, {"BM": 32, "waves_per_eu": 8}, space)
    assert [problem.search_space for _, problem in one.finals()] == [[space[0], space[2]]]
    settled = one.settle({16: final(one, {0: 2.0, 1: 1.0})}, 0.0)
    assert isinstance(settled, Settled)
    assert (settled.config, settled.gain, settled.is_saved) == (space[2], 0.0, False)


def test_an_old_config_is_the_same_in_whatever_order_its_keys_stand():
    """A file that somebody else wrote lists them in another one."""
    space = [{"BM": 16, "BN": 32}, {"BM": 32, "BN": 32}]
    one = size_class({16: outcome({0: 1.0, 1: 2.0})}, {"BN": 32, "BM": 16}, space)
    assert one.finals() == []


@pytest.mark.parametrize(
    ("old_us", "min_gain", "is_saved"), [(102.9, 0.03, False), (103.1, 0.03, True), (99.0, None, False), (99.0, -0.5, False)]
)
def test_a_file_is_changed_for_what_is_worth_it(old_us: float, min_gain: float | None, is_saved: bool):
    """An old config that is none of the space is measured beside the new one: 2.9 % are not worth it, 3.1 % are."""
    one = size_class({16: outcome({0: 1.0, 1: 2.0})}, {"BM": 999})
    assert one.shortlisted == [0, len(SPACE)]
    settled = one.settle({16: final(one, {0: 100.0, len(SPACE): old_us})}, min_gain)
    assert isinstance(settled, Settled)
    assert settled.is_saved is is_saved
    assert settled.config == (SPACE[0] if old_us > 100 else {"BM": 999})
    assert settled.old_latencies_us == {16: old_us}
    assert settled.gain == pytest.approx(max(0.0, old_us / 100 - 1))


def test_an_old_config_that_does_not_run_any_more_is_replaced():
    one = size_class({16: outcome({0: 1.0})}, {"BM": 999})
    settled = one.settle({16: final(one, {0: 100.0})}, 0.03)
    assert isinstance(settled, Settled)
    assert (settled.config, settled.gain, settled.is_saved) == (SPACE[0], None, True)


def test_a_config_is_written_as_the_callback_leaves_it():
    one = size_class({16: outcome({1: 1.0})}, callback=lambda config: config.update(SPLITK=config["BM"] // 8))
    settled = one.settle({}, None)
    assert isinstance(settled, Settled)
    assert settled.config == {"BM": 32, "SPLITK": 4}


@pytest.mark.parametrize("is_compared", [False, True])
def test_sizes_come_to_their_classes(is_compared: bool):
    """In the order of sizes; what failed is in none; each with the config it is compared with."""
    one, other = outcome({0: 1.0}), outcome({1: 1.0})
    ended: dict[int, Ended] = {4096: one, 16: other, 64: Failed("problem", "no config"), 2048: other}
    classes = classes_of(config_file(sizes=(4096, 16, 64, 2048)), ended, {"any": {"BM": 999}} if is_compared else {})
    old = {"BM": 999} if is_compared else None
    assert [(each.name, each.found, each.old) for each in classes] == [
        ("any", {4096: one, 2048: other}, old),
        ("M_LEQ_1024", {16: other}, None),
    ]
