"""Races and finals, fed with plain numbers: who runs, how often, what it costs at most, and who wins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest

from dist_tune.errors import CandidateFailure, FailureKind
from dist_tune.search import (
    Plan,
    PriorTimes,
    Race,
    Report,
    Times,
    Trial,
)
from dist_tune.search.selection import RacingOptions
from tests.search.playing import World, by_index, latencies_ms, searching, table, timed

pytestmark = pytest.mark.once


def test_every_candidate_gets_its_row_of_the_table():
    """One site: each candidate in order, n_warmup untimed and then n_repeat timed replays, and nothing after."""
    world = World(searching(table(1, 2), {"s": 3}), 2, by_index).finish()
    assert world.trials("s") == [Trial(i, is_timed) for i in range(3) for is_timed in (False, True, True)]


def test_a_single_candidate_needs_no_replay():
    """It wins without a time, and in the replays of other sites it is launched untimed."""
    alone = searching(Plan(), {"s": 1})
    assert alone.batch() == []
    assert (alone["s"].best, alone["s"].selection, latencies_ms(alone)) == (0, None, [None])
    world = World(searching(table(0, 1), {"single": 1, "other": 2}), 1, by_index).finish()
    assert world.trials("single") == [Trial(0, is_timed=False)] * 2


def test_a_failure_on_one_rank_drops_it_everywhere():
    """The fastest candidate fails on rank 1 in its second replay; nobody runs it again."""
    world = World(
        searching(table(0, 3), {"s": 2, "t": 9}), 2, lambda rank, site, i, k: "broke" if (rank, site, i) == (1, "s", 0) else 1.0 + i
    )
    world.finish()
    assert world.search["s"].best == 1
    standing = world.search["s"].results()[0]
    assert (standing.failure, standing.times) == ("rank 1: broke", None)
    assert all(trial is not None and trial.candidate == 1 for trial in world.trials("s")[6:])


def test_missed_replays_are_made_up():
    """A site met in every other replay on rank 1 is scheduled on until each candidate has n_repeat times there."""
    world = World(searching(table(1, 3), {"s": 2}), 2, lambda rank, s, i, k: None if rank and k % 2 else 1.0 + i).finish()
    assert all(len(times) >= 3 for times in world.samples["s"][1].values())
    assert 8 < len(world.replays) <= 6 * 6


def test_a_site_met_late_gets_its_whole_table():
    """A site entered after the first batch is measured in full, while the first one runs its incumbent."""
    search = searching(table(1, 1), {"early": 2})
    world = World(search, 2, by_index)
    world.batch()
    assert "late" not in search
    search.add("late", 3, {2: "rank 1: x"})
    assert "late" in search
    world.finish()
    assert world.trials("late")[4:] == [Trial(i, is_timed) for i in range(2) for is_timed in (False, True)]
    assert (search["late"].best, world.trials("early")[4:]) == (0, [Trial(0, is_timed=False)] * 4)


def test_a_rehearsal_runs_each_candidate_and_checks_it():
    """Untimed, those that run, as often as is asked; sites that are through, or are not rehearsed, do what they would do anyway."""
    search = searching(table(0, 1), {"f": 4, "g": 2, "other": 2}, {"f": {1: "rank 0: no"}, "other": {0: "rank 1: no"}})
    replays = search.warm_up({"f": 2, "g": 1})
    assert [replay["f"] for replay in replays] == [Trial(i, is_timed=False, is_checked=True) for i in (0, 0, 2, 2, 3, 3)]
    assert [replay["g"] for replay in replays] == [*(Trial(i, False, True) for i in (0, 1)), *[Trial(0, is_timed=False)] * 4]
    assert [replay["other"] for replay in replays] == [Trial(1, is_timed=False)] * 6
    assert (search.n_replays, search.warm_up({})) == (0, [])


FINALISTS = RacingOptions().max_finalists


def near(rank: int, site: str, candidate: int, replay: int) -> float:
    """One per cent between neighbours, the last one the fastest."""
    return 2.0 - candidate / 50


@pytest.mark.parametrize("n_warmup", [0, 3])
def test_all_are_timed_once_before_any_leaves(n_warmup: int):
    """After an untimed warm-up of one candidate; in an order of the site's own, the same for all ranks."""
    first, again, other = (searching(Plan(n_warmup), {site: 40}).batch() for site in ("s", "s", "t"))
    order = [replay["s"].candidate for replay in first[n_warmup:]]
    assert sorted(order) == list(range(40))
    assert first == again
    assert [replay["t"].candidate for replay in other[n_warmup:]] != order
    assert first[:n_warmup] == [{"s": Trial(0, is_timed=False)}] * n_warmup


def test_the_hopeless_run_once():
    """Twice as slow as the best: one timed replay each, and the log can say when they left."""
    world = World(searching(Plan(), {"s": 40}), 2, lambda rank, site, i, k: 1.0 + i / 50 if i < 6 else 2.0 + i).finish()
    runs = Counter(timed(world))
    assert {runs[i] for i in range(6, 40)} == {1}
    assert all(runs[i] > 1 for i in range(FINALISTS))
    assert [s.left for s in world.search["s"].results()][6:] == ["left the race after rung 0"] * 34
    assert world.search["s"].best == 0


def rungs_of(world: World) -> list[int]:
    """Replay all rungs; returns their lengths. The next batch is the finals'."""
    lengths = []
    while world.search.batch() and not world.search.is_final:
        lengths.append(world.batch())
    return lengths


def test_a_rung_keeps_fewer_each_time():
    """Of 80 that are all near the best, each rung keeps half of the one before or fewer, until the finalists are left."""
    world = World(searching(Plan(0, 5), {"s": 80}), 2, near)
    rungs = rungs_of(world)
    assert rungs[0] == 80
    assert all(FINALISTS <= later <= max(earlier / 2, FINALISTS) for earlier, later in pairwise(rungs))
    assert len(rungs) <= 5
    assert [world.batch(), world.batch()] == [FINALISTS * 5, 0]  # a round of finals that is clear is the last
    assert world.search["s"].best == 79


def test_twenty_sites_take_no_more_replays_than_one_and_its_finals():
    """All race in the same replays, and finals are as long for all as for one; at most three rounds of five replays a finalist."""
    one = World(searching(Plan(), {"s0": 8}), 2, near).finish()
    twenty = World(searching(Plan(), {f"s{i}": 8 for i in range(20)}), 2, near).finish()
    assert len(twenty.replays) <= len(one.replays) + RacingOptions().n_final_rounds * FINALISTS * Plan().n_repeat
    assert [twenty.search[f"s{i}"].best for i in range(20)] == [7] * 20


def test_a_site_without_a_choice_is_no_company():
    """Beside a site of one candidate the closure is believed after one replay each; beside a site of two it is not."""
    for n_other, winner in ((1, 1), (2, 0)):
        search = searching(Plan(0, 1), {"s": 2, "other": n_other})
        times = {0: Times(1.0, 3.0), 1: Times(1.1, 2.0)}
        search.tell(len(search.batch()), Report({"s": times, "other": {i: Times(1.0, 3.0) for i in range(n_other)}}))
        assert search.batch() == []
        assert search["s"].best == winner


def runs(world: World, site: str = "s") -> Counter[int]:
    """Candidate -> replays that time it."""
    return Counter(trial.candidate for trial in world.trials(site) if trial is not None and trial.is_timed)


def raced(times_ms: Sequence[float], plan: Plan | None = None, n_ranks: int = 2) -> World:
    """To its end; all ranks take the same times in every replay."""
    return World(searching(plan or Plan(), {"s": len(times_ms)}), n_ranks, lambda rank, site, i, k: times_ms[i]).finish()


@pytest.mark.parametrize("n_ranks", [1, 2, 5])
@pytest.mark.parametrize("times_ms", [[2.0, 2.0, 1000.0], [2.0] + [1000.0] * 7, [1000.0, 400.0], [30.0, 61.0]])
def test_a_slow_candidate_runs_once_however_few_there_are(times_ms: list[float], n_ranks: int):
    """Twice the best one's time and longer than a hiccup: one timed replay, and the record says that it left."""
    world = raced(times_ms, n_ranks=n_ranks)
    slow = [i for i, ms in enumerate(times_ms) if ms > 2 * min(times_ms)]
    assert {runs(world)[i] for i in slow} == {1}
    assert {world.search["s"].results()[i].left for i in slow} == {"left the race after rung 0"}
    assert world.search["s"].best not in slow


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("base_ms", [0.1, 5.0])
def test_one_hiccup_does_not_lose_the_best(n_ranks: int, base_ms: float):
    """Whichever replay of the race takes one rank three times as long, the best of four wins."""
    n_replays = len(raced([base_ms * each for each in (1.3, 1.0, 1.2, 1.4)], n_ranks=n_ranks).replays)
    for number in range(min(n_replays, 12)):

        def take(rank: int, site: str, i: int, replay: int, jolted: int = number) -> float:
            return base_ms * (1.3, 1.0, 1.2, 1.4)[i] * (3.0 if (rank, replay) == (0, jolted) else 1.0)

        assert World(searching(Plan(), {"s": 4}), n_ranks, take).finish().search["s"].best == 1


def test_long_samples_need_few_repeats():
    """Candidates of 30 s: those within a tenth of the best run a second time, the others once, and there are no finals."""
    world = raced([30e3, 31e3, 32e3, 40e3, 50e3, 90e3], Plan(n_warmup=0, n_repeat=10))
    assert runs(world) == {0: 2, 1: 2, 2: 2, 3: 1, 4: 1, 5: 1}
    assert world.search["s"].best == 0
    short = raced([200.0, 210.0, 220.0, 230.0], Plan(n_warmup=0, n_repeat=10))
    assert max(runs(short).values()) <= 2 * 5 + 4  # a second of them in the race, and in each round of finals


def warmed(search: Race, ms: Sequence[float], n_runs: int) -> None:
    times = {i: Times(each, each, n_timed=n_runs) for i, each in enumerate(ms)}
    search.tell_warm_up(len(search.warm_up({"s": n_runs})), Report({"s": times}))
    search.end_warm_up(["s"])


def test_a_candidate_that_was_slow_in_two_warm_ups_does_not_race():
    """The shorter of two runs has compiled nothing. What is no longer than 100 ms races all the same."""
    search = searching(Plan(2), {"s": 4})
    warmed(search, [230.0, 100.0, 90.0, 120.0], 2)
    assert [each.left for each in search["s"].results()] == ["not raced: 2.6 x slower in its warm-up", None, None, None]
    batch = search.batch()
    assert [replay["s"].candidate for replay in batch[:2]] == [2, 2]  # the race warms up with the fastest
    assert {replay["s"].candidate for replay in batch} == {1, 2, 3}
    quick = searching(Plan(2), {"s": 2})
    warmed(quick, [50.0, 1.0], 2)
    assert {replay["s"].candidate for replay in quick.batch()} == {0, 1}


def test_one_warm_up_may_have_compiled():
    """It drops nothing; with one sample that agrees, it does, and with one that does not, the next sample decides."""
    search = searching(Plan(0), {"s": 3})
    warmed(search, [3000.0, 3000.0, 10.0], 1)
    assert [each.left for each in search["s"].results()] == [None] * 3
    times_ms = {0: 3000.0, 1: 12.0, 2: 10.0}
    world = World(search, 1, lambda rank, site, i, k: times_ms[i]).finish()
    assert runs(world)[0] == 1
    assert runs(world)[1] > 3
    doubted = searching(Plan(0), {"s": 3})
    warmed(doubted, [200.0, 100.0, 210.0], 1)
    world = World(doubted, 1, lambda rank, site, i, k: 600.0 if i == 1 and k < 3 else (200.0, 100.0, 210.0)[i]).finish()
    assert doubted["s"].best == 1


@pytest.mark.parametrize(("ms", "n_untimed"), [(10.0, 3), (400.0, 2), (3000.0, 0)])
def test_a_race_warms_up_for_a_second_at_most(ms: float, n_untimed: int):
    """Warm-ups of a function say how long a replay is."""
    search = searching(Plan(3), {"s": 2})
    warmed(search, [ms, ms], 1)
    world = World(search, 1, lambda rank, site, i, k: ms).finish()
    assert sum(not trial.is_timed for trial in world.trials("s") if trial) == n_untimed


def one_rank(slow_ms: float, others: Sequence[float] = (10.0, 11.0)) -> World:
    """Candidate 0 is slow on rank 1 alone."""
    times_ms = [[10.0, slow_ms], *[[ms, ms] for ms in others]]
    return World(searching(Plan(0), {"s": len(times_ms)}), 2, lambda rank, site, i, k: times_ms[i][rank]).finish()


def test_a_candidate_that_takes_one_rank_beyond_measure_is_dropped_by_name():
    """After one sample, with the ranks and their times as the reason; half a second is no interrupt."""
    world = one_rank(3010.0)
    assert (runs(world)[0], world.search["s"].best) == (1, 1)
    assert world.search["s"].results()[0].failure == "rank 1: 3.01 s a launch, where rank 0 needs 0.01 s"
    assert one_rank(400.0).search["s"].results()[0].failure is None


def test_the_last_candidate_of_a_cut_rung_is_tried_before_it_wins():
    """Long replays are reported one by one: when all others have failed, the last one has not run yet, and fails as well."""
    search = searching(Plan(0, search="exhaustive"), {"s": 3})
    search.expect(1.0)
    for number in range(3):
        (replay,) = search.batch()
        failure = CandidateFailure(FailureKind.LAUNCH, "rank 0: no")
        search.tell(1, Report(failures={"s": {replay["s"].candidate: failure}}, elapsed_s=number + 1.0))
    assert search["s"].best is None


def test_a_single_finalist_is_tied_with_none():
    """The others were hopeless and left: no candidate that left the race is a tie, however its one replay turned out."""
    world = World(searching(Plan(0, 5), {"s": 6}), 1, lambda rank, site, i, replay: 1.0 if i == 3 else 9.0).finish()
    assert (world.search["s"].best, world.search["s"].reason) == (3, "fastest in the race")


def race_of(n_candidates: int, failures: dict[int, str], prior: PriorTimes | None = None, equal: dict[int, int] | None = None) -> Race:
    search = Race(Plan(0, 2))
    search.add("s", n_candidates, failures, prior, equal)
    return search


@pytest.mark.parametrize(
    ("search", "reason"),
    [
        (race_of(1, {}), "the only config"),
        (race_of(3, {0: "no", 2: "no"}), "only one that runs"),
        (race_of(2, {}, equal={1: 0}), "only one that runs"),
        (race_of(2, {}, PriorTimes({0: Times(1.0, 2.0), 1: Times(1.5, 2.0)}, winner=0)), "fastest by earlier times"),
    ],
)
def test_what_had_nothing_to_race_says_why(search: Race, reason: str):
    assert search.batch() == []
    assert search["s"].reason == reason


def test_what_was_never_met_says_so():
    """Its replays have passed, and no launch was seen."""
    world = World(searching(Plan(0, 2), {"s": 3, "t": 3}), 1, lambda rank, site, i, replay: None if site == "s" else 1.0 + i).finish()
    assert world.search["s"].reason in ("was not met in time to be measured", "nothing was measured: no replay met this site")


def test_a_winner_that_fails_afterwards_is_not_the_reason():
    """As where another site's replay makes it fail: what runs now was second."""
    world = World(searching(Plan(0, 2), {"s": 3}), 1, lambda rank, site, i, replay: 1.0 + i).finish()
    world.search["s"].drop({0: "rank 0: late"})
    assert world.search["s"].reason == "fastest of the rest: candidate 0 was chosen, and failed afterwards"
