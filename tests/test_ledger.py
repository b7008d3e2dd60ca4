"""What a rank reports of the times it was told."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dist_tune.ballots import BALLOT, Ballot
from dist_tune.engine import Measured, Report
from dist_tune.ledger import Ledger


def ledger_of(*launches: tuple[str, int, int, float], replays: dict[int, float]) -> Ledger:
    ledger = Ledger()
    for site, candidate, replay, ms in launches:
        ledger.add_launch(site, candidate, replay, ms)
    for replay, ms in replays.items():
        ledger.add_replay(replay, ms)
    return ledger


def test_a_report_holds_medians_by_site_and_candidate():
    """Median and median distance of the launches, median of the replays in which they were."""
    launches = [("a", 0, 1, 1.0), ("a", 0, 2, 2.0), ("a", 0, 3, 9.0), ("a", 1, 4, 5.0), ("b", 0, 4, 7.0)]
    ledger = ledger_of(*launches, replays={1: 10.0, 2: 30.0, 3: 20.0, 4: 40.0})
    assert ledger.report({}).measured == {
        "a": {0: Measured(2.0, 1.0, 20.0, 3), 1: Measured(5.0, 0.0, 40.0, 1)},
        "b": {0: Measured(7.0, 0.0, 40.0, 1)},
    }


def test_launches_of_one_replay_count_as_one_replay():
    """A kernel in a loop: every launch is a sample, the replay is counted once and its time weighs once."""
    ledger = ledger_of(("a", 0, 1, 1.0), ("a", 0, 1, 3.0), ("a", 0, 1, 2.0), ("a", 0, 2, 4.0), replays={1: 10.0, 2: 20.0})
    assert ledger.report({}).measured["a"][0] == Measured(2.5, 1.0, 15.0, 2)


def test_struck_replays_are_forgotten():
    """What was measured beside a stand-in counts for no site, and a candidate without any other time is not reported."""
    ledger = ledger_of(("a", 0, 1, 1.0), ("a", 0, 2, 3.0), ("a", 1, 2, 5.0), ("b", 0, 2, 7.0), replays={1: 10.0, 2: 20.0})
    ledger.strike({2, 99})
    assert ledger.report({}).measured == {"a": {0: Measured(1.0, 0.0, 10.0, 1)}, "b": {}}


def test_a_report_is_of_all_so_far():
    """Totals, not what is new since the last report: after a strike, ranks report again and nothing is counted twice."""
    ledger = ledger_of(("a", 0, 1, 1.0), replays={1: 10.0})
    ledger.report({})
    ledger.add_launch("a", 0, 2, 3.0)
    ledger.add_replay(2, 10.0)
    assert ledger.report({}).measured["a"][0].n_replays == 2


def test_disturbed_replays_and_failures_are_told():
    """In order, once each; the failures are those that the caller knows."""
    ledger = Ledger()
    for replay in (7, 3, 7):
        ledger.disturb(replay)
    assert ledger.report({"a": {2: "broke"}}) == Report({}, {"a": {2: "broke"}}, [3, 7])


def test_nothing_measured_is_an_empty_report():
    assert Ledger().report({}) == Report()


@pytest.mark.parametrize("ms", [math.nan, math.inf])
def test_what_is_no_number_is_a_failure(ms: float):
    """Of a launch or of the replay: told as why the candidate is out, beside the times of the others; a known reason stays."""
    ledger = ledger_of(("a", 0, 1, ms), ("a", 1, 2, 1.0), ("a", 2, 3, 1.0), replays={1: 10.0, 2: 20.0, 3: ms})
    report = ledger.report({"a": {2: "broke"}})
    assert report.measured == {"a": {1: Measured(1.0, 0.0, 20.0, 1)}}
    assert report.failures == {"a": {0: f"the clock gave {ms} ms", 2: "broke"}}


@example([3.0, 2.0, math.inf, math.nan, 3.0])  # the median is a number, the distance from it is not
@given(st.lists(st.sampled_from([1.0, 2.0, 3.0, math.nan, math.inf]), min_size=1, max_size=6))
def test_a_report_can_be_sent_whatever_the_clock_gives(samples: list[float]):
    """A ballot is JSON, which has no NaN and no infinity."""
    ledger = ledger_of(*[("a", 0, replay, ms) for replay, ms in enumerate(samples)], replays=dict.fromkeys(range(6), 10.0))
    ballot = Ballot(report=ledger.report({}))
    assert BALLOT.validate_json(BALLOT.dump_json(ballot)) == ballot
