"""Races and finals, fed with plain numbers: who runs, how often, what it costs at most, who wins,
and why.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.errors import CandidateFailure, FailureKind
from dist_tune.search import ONLINE, Plan, PriorTimes, Race, Report, Times, Trial
from dist_tune.search.selection import RacingOptions
from tests.search.playing import Take, World, entered, searching

FINALISTS = RacingOptions().max_finalists


def of(times_ms: Sequence[float | str]) -> Take:
    """Ranks that take these times, whatever the replay."""
    return lambda rank, site, i, replay: times_ms[i]


def raced(
    times_ms: Sequence[float | str], plan: Plan | None = None, n_ranks: int = 2, **given: Any
) -> World:
    """To its end."""
    return World(entered(len(times_ms), plan, **given), n_ranks, of(times_ms)).finish()


def test_a_plan_reads_as_the_options_that_a_user_wrote():
    """Messages of ranks that came with different options quote it."""
    assert (
        str(Plan(0, 2, budget_s=3.0))
        == "n_warmup=0, n_repeat=2, search='racing', objective='closure', budget_s=3.0"
    )


# -- an exhaustive search --------------------------------------------------------------------------


def table(n_warmup: int, n_repeat: int) -> Plan:
    """Each candidate in turn."""
    return Plan(n_warmup, n_repeat, search="exhaustive", objective="kernel")


def test_every_candidate_gets_its_row_of_the_table():
    """Each candidate in order, n_warmup untimed and then n_repeat timed replays, and nothing after;
    where it is met now and then, more.
    """
    world = raced([1.0, 2.0, 3.0], table(1, 2))
    assert world.trials() == [
        Trial(i, is_timed) for i in range(3) for is_timed in (False, True, True)
    ]
    missing = World(
        entered(2, table(1, 3)), 2, lambda rank, site, i, k: None if rank and k % 2 else 1.0 + i
    ).finish()
    assert all(len(times) >= 3 for times in missing.samples["s"][1].values())
    assert 8 < len(missing.replays) <= 6 * 6


def test_a_site_met_late_gets_its_whole_table():
    """A site entered after the first batch is measured in full, while others run their winner; that
    of one candidate runs untimed.
    """
    world = World(searching(table(1, 1), {"early": 2, "single": 1}), 2, of([1.0, 2.0, 3.0]))
    world.batch()
    world.search.add("late", 3, {2: "rank 1: x"})
    world.finish()
    assert world.trials("late")[4:] == [
        Trial(i, is_timed) for i in range(2) for is_timed in (False, True)
    ]
    assert (world.search["late"].best, world.trials("early")[4:]) == (
        0,
        [Trial(0, is_timed=False)] * 4,
    )
    assert world.trials("single") == [Trial(0, is_timed=False)] * 8


def test_times_without_a_late_rank_do_not_count():
    """It may be the slowest: what others measured before it met the site is measured again."""
    search = entered(3, table(0, 1))
    search.tell(
        len(search.batch()), Report({"s": {i: Times(1.0 + i, 2.0, n_owners=1) for i in range(3)}})
    )
    search.tell(0, Report({"s": {1: Times(3.0, 3.0, n_owners=2)}}))
    assert [replay["s"] for replay in search.batch()] == [
        Trial(0, is_timed=True),
        Trial(2, is_timed=True),
    ]


def test_the_last_candidate_of_a_cut_rung_is_tried_before_it_wins():
    """Long replays are reported one by one: when all others have failed, the last one has not run
    yet, and fails as well.
    """
    search = entered(3, Plan(0, search="exhaustive"))
    search.expect(1.0)
    world = World(search, 2, of(["no"] * 3), began_s=0.0)
    assert [world.batch() for _ in range(4)] == [1, 1, 1, 0]
    assert search["s"].best is None


def test_the_last_candidate_is_tried_also_after_the_budget():
    """Untimed runs have spent it, and the other has failed in them; or those that are left lost to
    an earlier winner, which fails now.
    """
    search, failure = (
        entered(2, Plan(budget_s=1.0)),
        CandidateFailure(FailureKind.LAUNCH, "rank 0: no"),
    )
    search.tell_warm_up(1, Report(failures={"s": {0: failure}}, elapsed_s=2.0))
    assert search.batch() == [{"s": Trial(1, is_timed=True)}]
    prior = PriorTimes({i: Times(1.0 + i, 2.0, n_replays=5) for i in range(3)}, winner=0)
    world = World(
        entered(4, Plan(0, budget_s=1.0), prior=prior), 2, of(["no"] * 4), began_s=2.0
    ).finish()
    assert (set(world.timed()), world.search["s"].best) == ({0, 1, 2, 3}, None)


# -- a race ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_warmup", [0, 3])
def test_all_are_timed_once_before_any_leaves(n_warmup: int):
    """After an untimed warm-up of one candidate; in an order of the site's own, the same for all
    ranks.
    """
    first, again, other = (
        searching(Plan(n_warmup), {site: 40}).batch() for site in ("s", "s", "t")
    )
    order = [replay["s"].candidate for replay in first[n_warmup:]]
    assert sorted(order) == list(range(40))
    assert first == again
    assert [replay["t"].candidate for replay in other[n_warmup:]] != order
    assert first[:n_warmup] == [{"s": Trial(0, is_timed=False)}] * n_warmup


def test_a_rung_keeps_fewer_each_time():
    """Of 80 that are all near the best, each rung keeps half of the one before or fewer, until the
    finalists are left.
    """
    world, rungs = (
        World(entered(80, Plan(0, 5)), 2, of([2.0 - i / 50 for i in range(80)])),
        list[int](),
    )
    while world.search.batch() and not world.search.is_final:
        rungs.append(world.batch())
    assert rungs[0] == 80
    assert all(
        FINALISTS <= later <= max(earlier / 2, FINALISTS) for earlier, later in pairwise(rungs)
    )
    assert len(rungs) <= 5
    # A round of finals that is clear is the last.
    assert [world.batch(), world.batch()] == [FINALISTS * 5, 0]
    assert world.search["s"].best == 79


@pytest.mark.parametrize("n_ranks", [1, 2, 5])
@pytest.mark.parametrize(
    "times_ms",
    [
        [2.0, 2.0, 1000.0],
        [2.0] + [1000.0] * 7,
        [1000.0, 400.0],
        [30.0, 61.0],
        [1.0, 1.02, 1.04, 1.06, *[9.0] * 40],
    ],
)
def test_a_slow_candidate_runs_once_however_few_there_are(times_ms: list[float], n_ranks: int):
    """Twice the best one's time and longer than a hiccup, or beside many others: one timed replay,
    and the record says that it left.
    """
    world = raced(times_ms, n_ranks=n_ranks)
    slow = [i for i, ms in enumerate(times_ms) if ms > 2 * min(times_ms)]
    assert {world.timed()[i] for i in slow} == {1}
    assert {world.search["s"].results()[i].left for i in slow} == {"left the race after round 1"}
    assert world.search["s"].best not in slow


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("base_ms", [0.1, 5.0])
def test_one_hiccup_does_not_lose_the_best(n_ranks: int, base_ms: float):
    """Whichever replay of the race takes one rank three times as long, the best of four wins."""
    times_ms = [base_ms * each for each in (1.3, 1.0, 1.2, 1.4)]
    for number in range(min(len(raced(times_ms, n_ranks=n_ranks).replays), 12)):

        def take(rank: int, site: str, i: int, replay: int, jolted: int = number) -> float:
            return times_ms[i] * (3.0 if (rank, replay) == (0, jolted) else 1.0)

        assert World(entered(4), n_ranks, take).finish().search["s"].best == 1


def test_long_samples_need_few_repeats():
    """Candidates of 30 s: those within a tenth of the best run a second time, the others once, and
    there are no finals.
    """
    world = raced([30e3, 31e3, 32e3, 40e3, 50e3, 90e3], Plan(n_warmup=0, n_repeat=10))
    assert world.timed() == {0: 2, 1: 2, 2: 2, 3: 1, 4: 1, 5: 1}
    assert world.search["s"].best == 0
    short = raced([200.0, 210.0, 220.0, 230.0], Plan(n_warmup=0, n_repeat=10))
    # A second of them in the race, and in each round of finals.
    assert max(short.timed().values()) <= 2 * 5 + 4


def test_a_site_without_a_choice_is_no_company():
    """Beside a site of one candidate the closure is believed after one replay each; beside a site
    of two it is not.
    """
    for n_other, winner in ((1, 1), (2, 0)):
        search = searching(Plan(0, 1), {"s": 2, "other": n_other})
        times = {0: Times(1.0, 3.0), 1: Times(1.1, 2.0)}
        search.tell(
            len(search.batch()),
            Report({"s": times, "other": {i: Times(1.0, 3.0) for i in range(n_other)}}),
        )
        assert search.batch() == []
        assert search["s"].best == winner


def test_what_there_was_to_choose_is_the_reason():
    """Of what had nothing to race, of what was never met, and of a winner that fails afterwards:
    what runs now was second.
    """
    known = PriorTimes({0: Times(1.0, 2.0), 1: Times(1.5, 2.0)}, winner=0)
    for search, reason in (
        (entered(1), "the only config"),
        (entered(3, failures={0: "no", 2: "no"}), "only one that runs"),
        (entered(2, equal={1: 0}), "only one that runs"),
        (entered(2, prior=known), "fastest by earlier times"),
    ):
        assert (search.batch(), search["s"].selection, search["s"].reason) == ([], None, reason)
    search = searching(Plan(0, 2), {"s": 3, "t": 3})
    World(search, 1, lambda rank, site, i, replay: None if site == "s" else 1.0 + i).finish()
    assert search["s"].reason in (
        "was not met in time to be measured",
        "nothing was measured: no replay met this site",
    )
    search["t"].drop({0: "rank 0: late"})
    assert (
        search["t"].reason == "fastest of the rest: candidate 0 was chosen, and failed afterwards"
    )


# -- warm-ups --------------------------------------------------------------------------------------


def test_a_rehearsal_runs_each_candidate_and_checks_it():
    """Untimed, those that run, as often as is asked; sites that are through, or are not rehearsed,
    do what they would do anyway.
    """
    search = searching(
        table(0, 1),
        {"f": 4, "g": 2, "other": 2},
        {"f": {1: "rank 0: no"}, "other": {0: "rank 1: no"}},
    )
    replays = search.warm_up({"f": 2, "g": 1}, {"f": range(4), "g": range(2)}, {"f": [], "g": []})
    assert [replay["f"] for replay in replays] == [
        Trial(i, is_timed=False, is_checked=True) for i in (0, 0, 2, 2, 3, 3)
    ]
    assert [replay["g"] for replay in replays] == [
        *(Trial(i, False, True) for i in (0, 1)),
        *[Trial(0, is_timed=False)] * 4,
    ]
    assert [replay["other"] for replay in replays] == [Trial(1, is_timed=False)] * 6
    assert (search.n_replays, search.warm_up({}, {}, {})) == (0, [])


def warmed(ms: Sequence[float], n_warmup: int = 0) -> Race:
    search = entered(len(ms), Plan(n_warmup))
    times = {i: Times(each, each) for i, each in enumerate(ms)}
    search.tell_warm_up(
        len(search.warm_up({"s": 1}, {"s": range(len(ms))}, {"s": []})), Report({"s": times})
    )
    search.end_warm_up(["s"])
    return search


def test_a_warm_up_may_have_compiled():
    """It drops nothing; with one sample that agrees, it does, and with one that does not, the next
    sample decides.
    """
    search = warmed([3000.0, 3000.0, 10.0])
    assert [each.left for each in search["s"].results()] == [None] * 3
    world = World(search, 1, of([3000.0, 12.0, 10.0])).finish()
    assert world.timed()[0] == 1
    assert world.timed()[1] > 3
    doubted = warmed([200.0, 100.0, 210.0])
    World(
        doubted, 1, lambda rank, site, i, k: 600.0 if i == 1 and k < 3 else (200.0, 100.0, 210.0)[i]
    ).finish()
    assert doubted["s"].best == 1


@pytest.mark.parametrize(("ms", "n_untimed"), [(10.0, 3), (400.0, 2), (3000.0, 0)])
def test_a_race_warms_up_for_a_second_at_most(ms: float, n_untimed: int):
    """Warm-ups of a function say how long a replay is."""
    world = World(warmed([ms, ms], n_warmup=3), 1, of([ms, ms])).finish()
    assert sum(not trial.is_timed for trial in world.trials() if trial) == n_untimed


# -- what earlier tunings found --------------------------------------------------------------------


def found(times_ms: Mapping[int, float], winner: int | None = None) -> PriorTimes:
    """The result of a tuning of the same closure: ten replays each."""
    return PriorTimes({i: Times(ms, ms + 1.0, n_replays=10) for i, ms in times_ms.items()}, winner)


def test_new_ones_have_the_old_winner_to_beat():
    """Six known ones and a new one that is twice as slow: only the two run, and the others keep
    their times.
    """
    times = [2.5, 1.0, 1.01, 1.02, 1.03, 1.04, 1.05]
    world = raced(times, Plan(n_warmup=1), prior=found(dict(enumerate(times[1:], 1)), winner=2))
    assert world.replays[:3] == [
        {"s": Trial(2, is_timed=False)},
        {"s": Trial(2, is_timed=True)},
        {"s": Trial(0, is_timed=True)},
    ]
    assert (world.search["s"].best, {trial.candidate for trial in world.trials() if trial}) == (
        2,
        {0, 2},
    )
    results, skipped = world.search["s"].results(), ["not raced: slower in an earlier tuning"] * 5
    assert [each.left for each in results] == [
        "left the race after round 2",
        *skipped[:1],
        None,
        *skipped[1:],
    ]
    assert [
        each.times.n_replays for i, each in enumerate(results) if each.times and i not in (0, 2)
    ] == [10] * 5


def test_an_old_winner_that_does_not_run_leaves_a_winner():
    """It fails at the vote: the others race.

    It fails later: what has run stands, or what was known.
    """
    known = found({0: 1.0, 1: 1.1, 2: 1.2}, winner=0)
    world = raced([1.0, 1.1, 1.2], prior=known, failures={0: "rank 1: no"})
    assert (world.search["s"].best, set(world.timed())) == (1, {1, 2})
    search = entered(3, prior=known)
    search["s"].drop({0: "rank 1: wrong"})
    assert (search.batch(), search["s"].best) == ([], 1)
    search = raced(["broke", 2.0, 2.0, 2.0], n_ranks=1, prior=known).search
    assert (search["s"].best, search["s"].results()[0].failure) == (3, "rank 0: broke")


def test_before_anything_is_measured_the_known_winner_comes_first():
    """It is what other sites' replays run beside, and not the first candidate."""
    known = found({0: 9.0, 2: 1.0}, winner=0), found({1: 9.0, 2: 1.0}), PriorTimes()
    assert [entered(3, prior=each)["s"].best for each in known] == [0, 2, 0]


# -- a budget of seconds ---------------------------------------------------------------------------


def test_a_budget_spent_before_the_race_still_tries_what_wins():
    """Compilation took it all: one timed replay of one candidate, which has run on all ranks then;
    of another one if that fails.
    """
    cases: list[tuple[list[float | str], int | None]] = [
        ([1.0] * 3, 0),
        (["no", 1.0, 1.0], 1),
        (["no"] * 3, None),
    ]
    for times, winner in cases:
        search = entered(3, Plan(budget_s=1.0))
        search.tell(0, Report(elapsed_s=10.0))
        world = World(search, 1, of(times), began_s=10.0).finish()
        assert list(world.timed()) == list(range(min(times.count("no") + 1, 3)))
        assert (len(world.replays), search["s"].best) == (world.timed().total(), winner)


def test_a_budget_spent_in_the_warm_up_ends_it():
    """Ten configs of 2 s, a budget of 5 s: three have run, the best of these wins unraced, and the
    rest are named.
    """
    search = entered(10, Plan(budget_s=5.0))
    replays, n_run = search.warm_up({"s": 1}, {"s": range(10)}, {"s": []}), 0
    while not search.is_enough({"s": 1}):
        n_next = search.n_next(replays)
        n_run, replays = n_run + n_next, replays[n_next:]
        times = {i: Times(2e3 - i, 2e3 - i) for i in range(n_run)}
        search.tell_warm_up(
            n_next, Report({"s": times}, elapsed_s=2.0 * n_run, batch_s=2.0 * n_next)
        )
    search.end_warm_up({"s": 1})
    assert (n_run, search.batch(), search["s"].best) == (3, [], 2)
    assert [each.left for each in search["s"].results()][3:] == [
        "not raced: the budget of 5 s was spent"
    ] * 7


def in_pieces(n_per_piece: int, dice: random.Random) -> tuple[int, int, int]:
    """Replays, starts and winner of an online race of 48 candidates; each start goes on from the
    times agreed on.
    """
    ms = [1.0 + 0.05 * i for i in range(48)]
    dice.shuffle(ms)
    kept: dict[int, Times] = {}
    n_replays = n_starts = 0
    while n_starts < 50:
        n_starts += 1
        race, n_left = Race(Plan(n_warmup=0), ONLINE), n_per_piece
        race.add("s", len(ms), {}, PriorTimes(dict(kept), attempt=dict(kept)))
        n_timed: Counter[int] = Counter()
        while batch := race.batch():
            taken = batch[:n_left]
            for replay in taken:
                n_timed[replay["s"].candidate] += 1
            found = {
                i: Times(ms[i] * dice.uniform(0.99, 1.01), 10.0 + ms[i], 0.005, 0.1, n_replays=n)
                for i, n in n_timed.items()
            }
            race.tell(len(taken), Report({"s": found}))
            kept.update(race["s"].times)
            n_replays += len(taken)
            n_left -= len(taken)
            if not n_left:
                break
        else:
            best = race["s"].best
            assert best is not None
            return n_replays, n_starts, sorted(ms).index(ms[best])
    raise AssertionError(f"no end in {n_starts} starts")


@given(st.integers(0, 50))
def test_a_job_in_short_pieces_ends_with_hardly_more_trials(seed: int):
    """In pieces of 40 trials: losers are not tried again, and rungs that were run are not run
    again.
    """
    whole, n_starts, rank = in_pieces(10_000, random.Random(seed))
    assert (n_starts, rank) == (1, 0)
    n_replays, n_starts, rank = in_pieces(40, random.Random(seed))
    assert n_starts > 1
    assert n_replays <= 1.3 * whole
    assert rank <= 1
