"""Candidates that leave at once, and what one hiccup may cost; fed with plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from dist_tune.errors import CandidateFailure, FailureKind
from dist_tune.search import Plan, PriorTimes, Race, Report, Times
from tests.search.test_race import World, searching

pytestmark = pytest.mark.once


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


def test_a_slow_candidate_that_costs_next_to_nothing_runs_twice():
    """One sample of a millisecond may be a hiccup; two are none."""
    assert runs(raced([1.0, 1.0, 5.0]))[2] == 2


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("base_ms", [0.1, 5.0])
def test_one_hiccup_does_not_lose_the_best(n_ranks: int, base_ms: float):
    """Whichever replay of the race takes one rank three times as long, the best of four wins."""
    n_replays = len(raced([base_ms * each for each in (1.3, 1.0, 1.2, 1.4)], n_ranks=n_ranks).replays)
    for number in range(min(n_replays, 12)):

        def take(rank: int, site: str, i: int, replay: int, jolted: int = number) -> float:
            return base_ms * (1.3, 1.0, 1.2, 1.4)[i] * (3.0 if (rank, replay) == (0, jolted) else 1.0)

        assert World(searching(Plan(), {"s": 4}), n_ranks, take).finish().search["s"].best == 1


def test_a_long_hiccup_on_one_of_several_ranks_does_not_lose_the_best():
    """A launch of 100 ms that takes one of three ranks 300 ms: the middle rank says that it is none of the candidate's."""
    jolts: list[int] = []

    def take(rank: int, site: str, i: int, replay: int) -> float:
        if rank == 0 and i == 1 and len(jolts) < 1:
            jolts.append(replay)
            return 300.0
        return (130.0, 100.0, 120.0)[i]

    assert World(searching(Plan(0), {"s": 3}), 3, take).finish().search["s"].best == 1


def test_long_samples_need_few_repeats():
    """Candidates of 30 s: those within a tenth of the best run a second time, the others once, and there are no finals."""
    world = raced([30e3, 31e3, 32e3, 40e3, 50e3, 90e3], Plan(n_warmup=0, n_repeat=10))
    assert runs(world) == {0: 2, 1: 2, 2: 2, 3: 1, 4: 1, 5: 1}
    assert world.search["s"].best == 0
    short = raced([200.0, 210.0, 220.0, 230.0], Plan(n_warmup=0, n_repeat=10))
    assert max(runs(short).values()) <= 2 * 5 + 4  # a second of them in the race, and in each round of finals


def test_an_earlier_winner_that_is_slow_today_leaves_too():
    """It is spared one hiccup as all are, not a second run of a second."""
    search = Race(Plan(0))
    search.add("s", 2, {}, PriorTimes({0: Times(1.0, 1.0)}, winner=0))
    world = World(search, 1, lambda rank, site, i, k: (1000.0, 10.0)[i]).finish()
    assert (runs(world)[0], search["s"].best) == (1, 1)


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


def test_a_long_first_run_has_the_race_look_before_it_warms_up():
    """One untimed replay, of three seconds as the meeting says, and no more; a short one after a compiling first run, and all three."""
    for replay_s, n_untimed in ((3.0, 1), (0.001, 3)):
        search = searching(Plan(3), {"s": 3})
        search.expect(4.0)
        elapsed_s, kinds = 0.0, []
        while batch := search.batch():
            kinds += [replay["s"].is_timed for replay in batch]
            elapsed_s += replay_s * len(batch)
            times = {replay["s"].candidate: Times(1.0, 1.0 + 1e3 * replay_s, n_replays=9) for replay in batch if replay["s"].is_timed}
            search.tell(len(batch), Report({"s": times}, elapsed_s=60.0 + elapsed_s, batch_s=replay_s * len(batch)))
        assert kinds.count(False) == n_untimed


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


def test_a_rank_with_more_work_drops_nothing():
    """It takes a hundred times as long with all candidates: that is the step, and no fault of theirs."""
    times_ms = [[10.0, 1000.0], [11.0, 1100.0], [10.0, 3500.0]]
    search = World(searching(Plan(0), {"s": 3}), 2, lambda rank, site, i, k: times_ms[i][rank]).finish().search
    assert [each.failure for each in search["s"].results()] == [None, None, None]
    assert search["s"].best == 0


def test_the_last_candidate_of_a_cut_rung_is_tried_before_it_wins():
    """Long replays are reported one by one: when all others have failed, the last one has not run yet, and fails as well."""
    search = searching(Plan(0, search="exhaustive"), {"s": 3})
    search.expect(1.0)
    for number in range(3):
        (replay,) = search.batch()
        failure = CandidateFailure(FailureKind.LAUNCH, "rank 0: no")
        search.tell(1, Report(failures={"s": {replay["s"].candidate: failure}}, elapsed_s=number + 1.0))
    assert search["s"].best is None


def closures(closures_ms: Sequence[float], n_sites: int) -> tuple[Race, Counter[int]]:
    """Kernels of 1 ms whose hooks take the first site's replays so long; a second site's hooks take nothing."""
    search = searching(Plan(0), dict.fromkeys(("s", "t")[:n_sites], len(closures_ms)))
    seen = {site: Counter[int]() for site in ("s", "t")}
    samples: dict[str, dict[int, list[float]]] = {"s": {}, "t": {}}
    while batch := search.batch():
        for replay in batch:
            for site, trial in replay.items():
                seen[site][trial.candidate] += trial.is_timed
                if trial.is_timed:
                    samples[site].setdefault(trial.candidate, []).append(closures_ms[replay["s"].candidate])
        times = {
            site: {i: Times(1.0, sorted(ms)[(len(ms) - 1) // 2], n_replays=len(ms)) for i, ms in each.items()}
            for site, each in samples.items()
        }
        search.tell(len(batch), Report(times))
    return search, seen["s"]


def test_a_hook_that_takes_long_is_as_hopeless_as_a_slow_kernel():
    """The kernel's clock does not see it, the closure's does: one timed replay, or two where another site may have been the cause."""
    for n_sites in (1, 2):
        search, seen = closures([1000.0, 3.0, 3.1], n_sites)
        assert seen[0] == n_sites
        assert search["s"].best == 1
        if n_sites == 2:
            assert all(each.left is None or "rung 0" not in each.left for each in search["t"].results())
