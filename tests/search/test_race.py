"""The search, fed with plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import median

import pytest

from dist_tune.errors import CandidateFailure, FailureKind
from dist_tune.search.plan import Plan, PriorTimes, Replay, Times, Trial
from dist_tune.search.race import Race
from dist_tune.search.site_race import MAX_OVERTIME
from dist_tune.search.times import Report, reduce_reports

pytestmark = pytest.mark.once

Take = Callable[[int, str, int, int], "float | str | None"]
"""(rank, site, candidate, replay) -> milliseconds, why it failed, or None where the site was not met."""


def table(n_warmup: int, n_repeat: int) -> Plan:
    """Each candidate in turn, as the seed did it."""
    return Plan(n_warmup, n_repeat, search="exhaustive", objective="kernel")


class World:
    """Ranks that replay what a search asks for and report medians of what ``take`` says, for the kernel and the closure."""

    def __init__(self, search: Race, n_ranks: int, take: Take) -> None:
        self.search = search
        self.n_ranks = n_ranks
        self.take = take
        self.replays: list[Replay] = []
        self.samples: dict[str, dict[int, dict[int, list[float]]]] = {}
        """Site -> rank -> candidate -> times."""
        self.failures: dict[str, dict[int, dict[int, CandidateFailure]]] = {}

    def batch(self) -> int:
        """Replay one batch and tell the search; returns how many replays that was."""
        batch = self.search.batch()
        for replay in batch:
            self.replays.append(replay)
            for rank in range(self.n_ranks):
                for site, trial in replay.items():
                    self._run(rank, site, trial, len(self.replays) - 1)
        self.search.tell(len(batch), self.reduced())
        return len(batch)

    def finish(self, at_most: int = 10_000) -> World:
        """Replay until the search asks for nothing more."""
        while self.batch():
            assert len(self.replays) <= at_most, f"no end after {at_most} replays"
        return self

    def trials(self, site: str) -> list[Trial | None]:
        return [replay.get(site) for replay in self.replays]

    def reduced(self) -> Report:
        return reduce_reports({rank: self.report(rank) for rank in range(self.n_ranks)})

    def report(self, rank: int) -> Report:
        measured = {
            site: {i: Times(median(each), median(each) + 1.0, n_replays=len(each)) for i, each in ranks[rank].items()}
            for site, ranks in self.samples.items()
            if rank in ranks
        }
        return Report(measured, {site: dict(ranks[rank]) for site, ranks in self.failures.items() if rank in ranks})

    def _run(self, rank: int, site: str, trial: Trial, number: int) -> None:
        ms = self.take(rank, site, trial.candidate, number)
        if isinstance(ms, str):
            self.failures.setdefault(site, {}).setdefault(rank, {})[trial.candidate] = CandidateFailure(FailureKind.LAUNCH, ms)
        elif ms is not None and trial.is_timed:
            self.samples.setdefault(site, {}).setdefault(rank, {}).setdefault(trial.candidate, []).append(ms)


def searching(plan: Plan, sites: Mapping[str, int], failures: Mapping[str, Mapping[int, str]] | None = None) -> Race:
    search = Race(plan)
    for site, n_candidates in sites.items():
        search.add(site, n_candidates, (failures or {}).get(site, {}))
    return search


def latencies_ms(search: Race, site: str = "s") -> list[float | None]:
    return [each.times.kernel_ms if each.times else None for each in search[site].results()]


def told(times: list[list[float]]) -> Race:
    """An exhaustive search of one site that has heard ``times[rank][candidate]``."""
    search = searching(table(0, 1), {"s": len(times[0])})
    reports = {r: Report({"s": {i: Times(ms, 1.0) for i, ms in enumerate(row)}}) for r, row in enumerate(times)}
    search.tell(len(search.batch()), reduce_reports(reports))
    return search


def by_index(rank: int, site: str, candidate: int, replay: int) -> float:
    return 1.0 + candidate


def test_every_candidate_gets_its_row_of_the_table():
    """One site: each candidate in order, n_warmup untimed and then n_repeat timed replays, and nothing after."""
    world = World(searching(table(1, 2), {"s": 3}), 2, by_index).finish()
    assert world.trials("s") == [Trial(i, is_timed) for i in range(3) for is_timed in (False, True, True)]


def test_sites_advance_together_and_a_finished_one_runs_its_incumbent():
    """The longest site gives the number of replays; the shorter one goes on untimed with the best it has found."""
    world = World(searching(table(1, 2), {"short": 2, "long": 3}), 2, lambda rank, site, i, replay: 5.0 - i).finish()
    assert len(world.replays) == max(2, 3) * (1 + 2)
    assert world.trials("short")[6:] == [Trial(1, is_timed=False)] * 3
    assert world.trials("long") == [Trial(i, is_timed) for i in range(3) for is_timed in (False, True, True)]


def test_a_batch_ends_where_the_first_site_is_through():
    """Sites of 4, 8 and 6 replays: nobody replays a finished site's last candidate while its incumbent is known."""
    world = World(searching(table(0, 2), {"a": 2, "b": 4, "c": 3}), 1, by_index)
    assert [world.batch() for _ in range(4)] == [4, 2, 2, 0]


def test_a_single_candidate_needs_no_replay():
    """It wins without a time, and in the replays of other sites it is launched untimed."""
    alone = searching(Plan(), {"s": 1})
    assert alone.batch() == []
    assert (alone["s"].best, alone["s"].selection, latencies_ms(alone)) == (0, None, [None])
    world = World(searching(table(0, 1), {"single": 1, "other": 2}), 1, by_index).finish()
    assert world.trials("single") == [Trial(0, is_timed=False)] * 2


def test_slowest_rank_decides():
    """Candidate 0 is fastest on rank 0 only, and on average; rank 1 makes it the slower one."""
    search = told([[1.0, 4.0], [6.0, 4.0]])
    assert search["s"].best == 1
    assert latencies_ms(search) == [6.0, 4.0]
    assert search["s"].results()[0].times == Times(6.0, 1.0, n_owners=2, typical_ms=1.0, rank_latencies_ms={0: 1.0, 1: 6.0})


def test_a_tie_goes_to_the_lower_index():
    """Three equal reduced times, made of different ranks' medians."""
    assert told([[9.0, 2.0, 1.0, 2.0], [9.0, 1.0, 2.0, 2.0]])["s"].best == 1


def test_an_impossible_time_is_a_failure():
    """It drops the candidate, on all ranks and with the rank's name."""
    search = told([[3.0, 2.0], [3.0, math.nan]])
    assert (search["s"].best, str(search["s"].results()[1].failure)[:17]) == (0, "rank 1: the clock")


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


def test_a_failure_keeps_its_first_reason():
    """Whatever comes later; and a candidate that failed before its turn gets none."""
    search = searching(table(0, 1), {"s": 4}, {"s": {1: "rank 0: no memory"}})
    search.tell(
        0,
        Report(failures={"s": {1: CandidateFailure(FailureKind.LAUNCH, "other"), 0: CandidateFailure(FailureKind.LAUNCH, "mine")}}),
    )
    search.tell(0, Report(failures={"s": {0: CandidateFailure(FailureKind.LAUNCH, "late")}}))
    assert [s.failure for s in search["s"].results()] == ["mine", "rank 0: no memory", None, None]
    assert [replay["s"].candidate for replay in search.batch()] == [2, 3]


def test_all_dropped_is_nobody():
    """No winner, no replay, and no trial in the replays of other sites."""
    search = searching(table(0, 1), {"dead": 2, "live": 2}, {"dead": {0: "rank 0: x", 1: "rank 1: y"}})
    world = World(search, 2, by_index).finish()
    assert search["dead"].best is None
    assert [set(replay) for replay in world.replays] == [{"live"}] * 2


def test_a_dropped_candidate_is_not_scheduled():
    """A vote that comes between batches takes the candidate off the table at once."""
    search = searching(table(1, 2), {"s": 3})
    search["s"].drop({1: "rank 1: out of resources"})
    assert {replay["s"].candidate for replay in search.batch()} == {0, 2}
    search["s"].drop({0: "rank 0: out of resources"})
    assert search.batch() == []


def test_missed_replays_are_made_up():
    """A site met in every other replay on rank 1 is scheduled on until each candidate has n_repeat times there."""
    world = World(searching(table(1, 3), {"s": 2}), 2, lambda rank, s, i, k: None if rank and k % 2 else 1.0 + i).finish()
    assert all(len(times) >= 3 for times in world.samples["s"][1].values())
    assert 8 < len(world.replays) <= MAX_OVERTIME * 8


def test_overtime_ends():
    """A site met once and never again gets MAX_OVERTIME times its nominal replays, and its one time decides."""
    world = World(searching(table(1, 3), {"s": 2}), 1, lambda rank, s, i, k: 1.0 if k == 1 else None).finish()
    assert len(world.replays) == MAX_OVERTIME * 2 * (1 + 3)
    assert world.search["s"].best == 0


def test_a_site_met_by_nobody_gets_no_overtime():
    """It was scheduled once; its first candidate that runs is taken."""
    world = World(searching(table(0, 2), {"s": 3}, {"s": {0: "rank 0: x"}}), 2, lambda *_: None).finish()
    assert (len(world.replays), world.search["s"].best) == (4, 1)


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


def test_those_that_lost_before_are_not_rehearsed():
    """Only the earlier winner and the new ones are; all of them have their times in the standings."""
    search = Race(table(0, 1))
    search.add("f", 4, {}, PriorTimes({i: Times(1.0 + i, 2.0) for i in (0, 1, 2)}, winner=1))
    assert [replay["f"].candidate for replay in search.warm_up({"f": 2})] == [1, 1, 3, 3]
    assert latencies_ms(search, "f") == [1.0, 2.0, 3.0, None]
    search["f"].drop({0: "rank 0: wrong"})
    assert latencies_ms(search, "f") == [None, 2.0, 3.0, None]
