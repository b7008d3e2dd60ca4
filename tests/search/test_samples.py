"""Reports of a rank about the times it was told."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from dist_tune.errors import CandidateFailure, FailureKind
from dist_tune.search.plan import Replay, Times, Trial
from dist_tune.search.times import Report, Samples, reduce_reports

pytestmark = pytest.mark.once

BROKE = CandidateFailure(FailureKind.LAUNCH, "broke")


def ledger_of(*launches: tuple[str, int, int, float], replays: dict[int, float], ran: dict[int, Replay] | None = None) -> Samples:
    """A ledger that heard of (site, candidate, replay, ms) and of whole replays; ``ran`` says what sites ran in them."""
    ledger = Samples()
    for site, candidate, replay, ms in launches:
        ledger.add_run(site, candidate, replay)
        ledger.add_launch(site, candidate, replay, ms)
    for replay, ms in replays.items():
        ledger.add_replay(replay, ms, (ran or {}).get(replay, {}))
    return ledger


def batch_of(**candidates: list[int]) -> list[Replay]:
    """A batch that times these candidates, a replay for each."""
    return [{site: Trial(i, is_timed=True)} for site, each in candidates.items() for i in each]


def test_a_report_holds_medians_by_site_and_candidate():
    """Of the launches, with their median distance, and of the replays, with that of what is beside the launches."""
    launches = [("a", 0, 1, 1.0), ("a", 0, 2, 2.0), ("a", 0, 3, 9.0), ("a", 1, 4, 5.0), ("b", 0, 4, 7.0)]
    ledger = ledger_of(*launches, replays={1: 10.0, 2: 30.0, 3: 20.0, 4: 40.0})
    assert ledger.report({}, batch_of(a=[0, 1], b=[0]), {}).times == {
        "a": {0: Times(2.0, 20.0, 1.0, 2.0, 3, 1, 3), 1: Times(5.0, 40.0, 0.0, 0.0, 1, 1)},
        "b": {0: Times(7.0, 40.0, 0.0, 0.0, 1, 1)},
    }


def test_a_report_is_of_the_candidates_of_the_batch():
    """Not of those that are asked about no more, nor of a trial that was not timed."""
    ledger = ledger_of(("a", 0, 1, 1.0), ("a", 1, 2, 5.0), ("a", 2, 3, 5.0), replays={1: 10.0, 2: 20.0, 3: 10.0})
    batch: list[Replay] = [{"a": Trial(1, is_timed=True)}, {"a": Trial(2, is_timed=False)}]
    assert set(ledger.report({}, batch, {}).times["a"]) == {1}


def test_launches_of_one_replay_count_as_one_replay():
    """A kernel in a loop: every launch is a sample, the replay is counted once and its time weighs once."""
    ledger = ledger_of(("a", 0, 1, 1.0), ("a", 0, 1, 3.0), ("a", 0, 2, 2.0), ("a", 0, 2, 4.0), replays={1: 10.0, 2: 20.0})
    assert ledger.report({}, batch_of(a=[0]), {}).times["a"][0] == Times(2.0, 10.0, 1.0, 4.0, 2, 2, 2)


def test_one_hiccup_of_many_samples_is_left_out():
    """It moves the median of the launches not even to the next sample; it was a replay all the same."""
    launches = [("a", 0, k, ms) for k, ms in enumerate([1.0, 1.0, 1.02, 1.02, 50.0])]
    ledger = ledger_of(*launches, replays=dict.fromkeys(range(5), 3.0))
    told = ledger.report({}, batch_of(a=[0]), {}).times["a"][0]
    assert (told.kernel_ms, told.spread_ms, told.n_replays) == (1.0, 0.01, 5)


def test_what_other_sites_ran_is_taken_off_a_replay():
    """By the reduced times of their candidates above the fastest of theirs, so that the slow ones do not count against this site."""
    ran: dict[int, Replay] = {1: {"a": Trial(0, True), "b": Trial(3, False)}, 2: {"a": Trial(1, True), "b": Trial(4, True)}}
    ledger = ledger_of(("a", 0, 1, 1.0), ("a", 1, 2, 1.0), replays={1: 13.0, 2: 10.0}, ran=ran)
    known = {"a": {0: 1.0, 1: 7.0}, "b": {3: 5.0, 4: 2.0}}
    told = ledger.report({}, batch_of(a=[0, 1]), known).times["a"]
    assert [told[i].closure_ms for i in (0, 1)] == [10.0, 10.0]
    assert ledger.report({}, batch_of(a=[0]), {}).times["a"][0].closure_ms == 13.0  # nothing is known of b yet


def test_struck_replays_are_forgotten():
    """A time that was measured beside a stand-in counts for no site, and a candidate without any other time is not reported."""
    ledger = ledger_of(("a", 0, 1, 1.0), ("a", 0, 2, 3.0), ("a", 1, 2, 5.0), ("b", 0, 2, 7.0), replays={1: 10.0, 2: 20.0})
    ledger.strike({2, 99})
    assert ledger.report({}, batch_of(a=[0, 1], b=[0]), {}).times == {"a": {0: Times(1.0, 10.0)}, "b": {}}


def test_a_report_is_of_all_so_far():
    """Totals, not what is new since the last report: after a strike, ranks report again and nothing is counted twice."""
    ledger = ledger_of(("a", 0, 1, 1.0), replays={1: 10.0})
    ledger.report({}, batch_of(a=[0]), {})
    ledger.add_run("a", 0, 2)
    ledger.add_launch("a", 0, 2, 3.0)
    ledger.add_replay(2, 10.0, {})
    assert ledger.report({}, batch_of(a=[0]), {}).times["a"][0].n_replays == 2


def test_disturbed_replays_and_failures_are_told():
    """In order, once each; the failures are those that the caller knows."""
    ledger = Samples()
    for replay in (7, 3, 7):
        ledger.disturb(replay)
    assert ledger.report({"a": {2: BROKE}}, [], {}, has_new_sites=True) == Report({}, {"a": {2: BROKE}}, [3, 7], True)


def test_nothing_measured_is_an_empty_report():
    assert Samples().report({}, [], {}) == Report()


@pytest.mark.parametrize("ms", [math.nan, math.inf, 0.0, -1.0])
def test_what_is_no_time_is_a_failure(ms: float):
    """Of a launch or of the replay: told as why the candidate is out, beside the times of the others; a known reason stays."""
    ledger = ledger_of(("a", 0, 1, ms), ("a", 1, 2, 1.0), ("a", 2, 3, 1.0), ("a", 3, 4, 1.0), replays={1: 10.0, 2: 20.0, 3: ms, 4: ms})
    report = ledger.report({"a": {2: BROKE}}, batch_of(a=[0, 1, 2, 3]), {})
    assert report.times == {"a": {1: Times(1.0, 20.0)}}
    absurd = CandidateFailure(FailureKind.CLOCK, f"the clock gave {ms} ms")
    assert report.failures == {"a": {0: absurd, 2: BROKE, 3: absurd}}


@example([3.0, 2.0, math.inf, math.nan, 3.0])  # the median is a number, the distance from it is not
@given(st.lists(st.sampled_from([1.0, 2.0, 3.0, math.nan, math.inf]), min_size=1, max_size=6))
def test_a_report_can_be_sent_whatever_the_clock_gives(samples: list[float]):
    """It travels as JSON, which has no NaN and no infinity."""
    ledger = ledger_of(*[("a", 0, replay, ms) for replay, ms in enumerate(samples)], replays=dict.fromkeys(range(6), 10.0))
    report, adapter = ledger.report({}, batch_of(a=[0]), {}), TypeAdapter(Report)
    assert adapter.validate_json(adapter.dump_json(report)) == report


def test_a_restarted_ledger_has_launches_and_no_replays():
    """Replays that follow are timed as a whole; the launches of those before are all there is to say of the kernel."""
    ledger = ledger_of(("a", 0, 1, 1.0), replays={1: 10.0})
    ledger.disturb(1)
    ledger.restart()
    assert ledger.report({}, batch_of(a=[0]), {}) == Report({"a": {}}, disturbed=[1])
    ledger.add_run("a", 0, 2)
    ledger.add_replay(2, 30.0, {})
    assert ledger.report({}, batch_of(a=[0]), {}).times == {"a": {0: Times(1.0, 30.0)}}


def test_warm_ups_are_reported_by_the_shortest_run():
    """A first run compiles, a hiccup adds; the number of runs says whether there was more than a first. The race does not see them."""
    samples = Samples()
    for candidate, ms in ((0, 900.0), (0, 30.0), (1, 40.0)):
        samples.add_warm_up("f", candidate, ms)
    told = samples.report_warm_ups({})
    assert {i: (each.kernel_ms, each.n_timed) for i, each in told.times["f"].items()} == {0: (30.0, 2), 1: (40.0, 1)}
    assert samples.report({}, [{"f": Trial(0, is_timed=True)}], {}).times == {}


def test_a_rank_owns_a_site_whose_times_are_forgotten():
    """Another rank's new times of it do not count until this one has some: a MAX over some ranks may hide the slowest."""
    ledger = ledger_of(("s", 0, 0, 9.0), replays={0: 10.0})
    ledger.forget("s")
    other = ledger_of(("s", 0, 1, 1.0), replays={1: 2.0})
    batch = [{"s": Trial(0, is_timed=True)}]
    assert ledger.report({}, batch, {}).times == {"s": {}}
    reports = {0: ledger.report({}, batch, {}), 1: other.report({}, batch, {})}
    assert reduce_reports(reports).times == {"s": {}}
