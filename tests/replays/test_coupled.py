"""The choice among candidates at the launch of a coupled kernel: pure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from hypothesis import given
from hypothesis import strategies as st

from dist_tune import contextual_autotune
from dist_tune.replays.coupled import Bid, Choice, Coupling, choose
from dist_tune.replays.launched import Returned
from dist_tune.sites import Site

N = 6
ORDERS = st.lists(st.permutations(range(N)), min_size=1, max_size=4)
FAILED = st.lists(st.sets(st.integers(0, N - 1)), min_size=4, max_size=4)


def bids_of(orders: list[list[int]], failed: list[set[int]], candidates: list[int]) -> dict[int, Bid]:
    """Bids of ranks; those that have failed are in no order."""
    found = {}
    for rank, order in enumerate(orders):
        mine = dict.fromkeys(failed[rank], "no memory")
        found[rank] = Bid("k[1]", "same", "", [i for i in order if i not in mine], mine, candidates[rank])
    return found


@given(ORDERS, FAILED, st.lists(st.integers(-1, N - 1), min_size=4, max_size=4))
def test_a_candidate_is_launched_only_where_all_ranks_have_it_at_hand_and_none_has_failed(
    orders: list[list[int]], failed: list[set[int]], candidates: list[int]
):
    """And the next one to try fails on none; there is none only if each fails on some rank."""
    bids = bids_of(orders, failed, candidates)
    choice = choose(bids)
    bad = set().union(*(each.failed for each in bids.values()))
    hands = {each.candidate for each in bids.values()}
    assert choice.is_agreed == (len(hands) == 1 and not hands & (bad | {-1}))
    assert set(choice.failed) == bad
    assert (choice.candidate == -1) == (len(bad) == N)
    assert choice.candidate not in bad


@given(ORDERS, FAILED)
def test_ranks_that_try_what_was_chosen_come_to_an_end(orders: list[list[int]], failed: list[set[int]]):
    """Each round launches, or takes a candidate out."""
    hands, known = [order[0] for order in orders], [set[int]() for _ in orders]
    for _ in range(N + 2):
        for rank, hand in enumerate(hands):
            known[rank] |= {hand} & failed[rank]
        choice = choose(bids_of(orders, known, hands))
        for mine in known:
            mine |= choice.failed.keys()
        if choice.is_agreed or choice.candidate < 0:
            break
        hands = [choice.candidate] * len(orders)
    assert choice.is_agreed or choice.candidate < 0
    assert not choice.is_agreed or all(hands[0] not in each for each in failed[: len(orders)])


def test_a_known_config_is_launched_only_if_all_ranks_know_it():
    """One rank that misses is enough for all to miss."""
    same = {0: Bid("k[1]", known="BLOCK=16"), 1: Bid("k[1]", known="BLOCK=16")}
    assert choose(same).is_agreed
    assert not choose({**same, 1: Bid("k[1]", known="BLOCK=32")}).is_agreed
    missed = choose({**same, 1: Bid("k[1]", "list", "", [0, 1], {}, 0)})
    assert (missed.is_agreed, missed.has_known) == (False, True)


class Mirror:
    """Two ranks, of which the other one does as this one; counts meetings."""

    members = (0, 1)
    rank = 0

    def __init__(self) -> None:
        self.n_meetings = 0

    def reduce(self, topic: str, bid: Bid, fn: object) -> Choice:
        self.n_meetings += 1
        return choose({0: bid, 1: bid})

    gather = reduce

    def interrupted(self) -> nullcontext[None]:
        return nullcontext()


class _Kernel:
    """Can be referred to weakly, and is a key."""


def coupling_of(ranks: Mirror) -> Coupling:
    watchdog: Any = SimpleNamespace(meeting=lambda topic: nullcontext())
    return Coupling(ranks, watchdog, lambda: None, is_for_all=True)  # type: ignore[arg-type]


def test_a_launch_that_the_machine_failed_is_made_again_without_another_meeting():
    """The other rank has made its own launch by then: one meeting before both tries, and one after."""
    ranks, site = Mirror(), Site("k[1]", "k", "[1]", [16, 32], ["BLOCK=16", "BLOCK=32"])

    def make(candidate: int, ask: Callable[[], None]) -> Returned:
        ask()
        ask()
        return Returned(candidate)

    made = coupling_of(ranks).launch(site, "k[1]", 1, make)
    assert made == Returned(1)
    assert ranks.n_meetings == 2
    assert site.run_by_all == {1}


def test_ranks_agree_once_on_a_config_that_they_know():
    """A later call may be new to one rank alone, and the others do not come to a meeting; another config is asked about."""
    configs, ranks = [triton.Config({"BLOCK": each}) for each in (16, 32)], Mirror()
    launch: Any = SimpleNamespace(owner=_Kernel(), key=(1,), name="k", key_text="[1]", describe=str)
    for config in (configs[0], configs[0], configs[1]):
        assert coupling_of(ranks).is_known_to_all(launch, config)
    assert ranks.n_meetings == 2


def test_other_launches_and_other_candidates_are_told():
    """Keys differ, or lists."""
    assert "rank 0 is at k[1], rank 2 at k[2]" in choose({0: Bid("k[1]"), 2: Bid("k[2]")}).mismatch
    assert "different candidates for k[1]" in choose({0: Bid("k[1]", "a", "", [0]), 1: Bid("k[1]", "b", "", [0])}).mismatch


def test_coupled_needs_other_ranks_and_is_true_or_false():
    """Each process alone would choose its own; single kernels are marked themselves."""
    with pytest.raises(ValueError, match="coupled= is given but is_dist is False"):
        contextual_autotune(coupled=True)
    with pytest.raises(TypeError, match="coupled must be True or False"):
        contextual_autotune(is_dist=True, coupled=[test_other_launches_and_other_candidates_are_told])(lambda: None)  # type: ignore[arg-type]
