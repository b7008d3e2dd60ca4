"""Samples of a rank, its reports of them, and what follows from the reports of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from dist_tune.errors import CandidateFailure, FailureKind, Failures, reasons
from dist_tune.search import Replay, Report, Samples, Times, Trial, reduce_reports
from dist_tune.search.times import MAX_RANKS_LISTED

times = st.floats(0.001, 1e6)
measured = st.tuples(times, times, times, times, st.integers(1, 99), st.integers(1, 9)).map(
    lambda each: Times(*each)
)
sites = st.sampled_from(["a", "b", "é[1,2]"])
index = st.integers(0, 6)
failures = st.builds(CandidateFailure, st.sampled_from(FailureKind), st.text(max_size=8))
reports = st.builds(
    Report,
    st.dictionaries(sites, st.dictionaries(index, measured, max_size=5), max_size=3),
    st.dictionaries(sites, st.dictionaries(index, failures, max_size=3), max_size=3),
    st.lists(index, max_size=3),
    st.booleans(),
)


@given(st.lists(reports, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_what_is_agreed_is_a_maximum_over_owners(told: list[Report], dice: Any):
    """No rank's time is above it, one rank's is it, and every owner has measured the candidate; in
    any order of sites and candidates.

    A report travels as JSON: indices are ints again, times are bit for bit the same, and entries
    are in the same order.
    """

    def shuffled(entries: dict[Any, Any]) -> dict[Any, Any]:
        return {
            key: shuffled(value) if isinstance(value, dict) else value
            for key, value in dice.sample(list(entries.items()), len(entries))
        }

    agreed = reduce_reports(dict(enumerate(told)))
    for site, candidates in agreed.times.items():
        owners = [each.times[site] for each in told if site in each.times]
        assert set(candidates) == set.intersection(*map(set, owners))
        for i, each in candidates.items():
            assert each.kernel_ms == max(row[i].kernel_ms for row in owners)
            assert each.closure_ms == max(row[i].closure_ms for row in owners)
            assert each.n_replays == min(row[i].n_replays for row in owners)
    mixed = [
        Report(
            shuffled(each.times), shuffled(each.failures), each.disturbed[::-1], each.has_new_sites
        )
        for each in told
    ]
    assert reduce_reports(dict(enumerate(mixed))) == agreed
    json = TypeAdapter(Report)
    for report in (*told, agreed):
        read = json.validate_json(json.dump_json(report))
        assert (read, list(read.times)) == (report, list(report.times))


@pytest.mark.parametrize("ms", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_an_impossible_time_is_a_failure(ms: float):
    """Of a launch.

    A closure's time may be negative, being less what other sites added to it, but must be a number.
    """
    told = reduce_reports(
        {0: Report({"s": {0: Times(1.0, 1.0)}}), 1: Report({"s": {0: Times(ms, 1.0)}})}
    )
    assert told.failures["s"][0].reason.startswith("rank 1: the clock gave")
    closure = reduce_reports({3: Report({"s": {0: Times(1.0, ms)}})}).failures
    assert closure == (
        {}
        if math.isfinite(ms)
        else {"s": {0: CandidateFailure(FailureKind.CLOCK, "rank 3: the clock gave 1.0 ms")}}
    )


def test_the_first_rank_to_fail_gives_the_reason():
    """By candidate, in the order of ranks; and the kind."""
    no, never = (
        CandidateFailure(FailureKind.WRONG_RESULT, "no"),
        CandidateFailure(FailureKind.LAUNCH, "never"),
    )
    memory, x = (
        CandidateFailure(FailureKind.LOAD, "shared memory"),
        CandidateFailure(FailureKind.COMPILE, "x"),
    )
    against: list[Failures] = [{"s": {1: no}}, {}, {"s": {1: never, 0: memory}, "t": {5: x}}]
    told = reduce_reports(
        {rank: Report(failures=each) for rank, each in enumerate(against)}
    ).failures
    assert {i: each.kind for i, each in told["s"].items()} == {
        1: FailureKind.WRONG_RESULT,
        0: FailureKind.LOAD,
    }
    assert (reasons(told["s"]), reasons(told["t"])) == (
        {1: "rank 0: no", 0: "rank 2: shared memory"},
        {5: "rank 2: x"},
    )


def test_a_disturbed_replay_is_disturbed_for_all():
    """In order and once each, as a lost one; one rank with new sites is enough for a roll call of
    all.
    """
    told = reduce_reports(
        {
            0: Report(disturbed=[7, 3], lost=[7]),
            1: Report(disturbed=[3, 1], has_new_sites=True, lost=[1]),
            2: Report(),
        }
    )
    assert (told.disturbed, told.has_new_sites, told.lost) == ([1, 3, 7], True, [1, 7])
    assert reduce_reports({0: Report(), 1: Report()}).has_new_sites is False


@pytest.mark.parametrize("n_ranks", [MAX_RANKS_LISTED, MAX_RANKS_LISTED + 1, 200])
def test_an_account_does_not_grow_with_the_group(n_ranks: int):
    """All ranks of a small group are listed, of a larger one the slowest and the fastest."""
    ms = {rank: 2.0 + math.sin(rank) for rank in range(n_ranks)}
    listed = (
        reduce_reports({rank: Report({"s": {0: Times(each, 1.0)}}) for rank, each in ms.items()})
        .times["s"][0]
        .rank_latencies_ms
    )
    assert {min(ms.values()), max(ms.values())} <= set(listed.values())
    assert len(listed) == (n_ranks if n_ranks <= MAX_RANKS_LISTED else 2)
    assert listed.items() <= ms.items()


# -- samples of one rank ---------------------------------------------------------------------------


def ledger_of(
    *launches: tuple[str, int, int, float],
    replays: dict[int, float],
    ran: dict[int, Replay] | None = None,
) -> Samples:
    """A ledger that heard of (site, candidate, replay, ms) and of whole replays; ``ran`` says what
    sites ran in them.
    """
    ledger = Samples()
    for site, candidate, replay, ms in launches:
        ledger.add_run(site, candidate, replay)
        ledger.add_launch(site, candidate, replay, ms)
    for replay, ms in replays.items():
        ledger.add_replay(replay, ms, (ran or {}).get(replay, {}))
    return ledger


def told_by(
    ledger: Samples,
    failures: Failures | None = None,
    known_ms: Mapping[str, Mapping[int, float]] = {},
) -> Report:
    """Of a batch that times candidates 0 to 3 of two sites."""
    return ledger.report(
        failures or {},
        [{site: Trial(i, is_timed=True)} for site in "ab" for i in range(4)],
        known_ms,
    )


def test_a_report_holds_medians_by_site_and_candidate():
    """Of the launches, with their median distance, and of the replays, with that of what is beside
    the launches.
    """
    launches = [
        ("a", 0, 1, 1.0),
        ("a", 0, 2, 2.0),
        ("a", 0, 3, 9.0),
        ("a", 1, 4, 5.0),
        ("b", 0, 4, 7.0),
    ]
    assert told_by(ledger_of(*launches, replays={1: 10.0, 2: 30.0, 3: 20.0, 4: 40.0})).times == {
        "a": {0: Times(2.0, 20.0, 1.0, 2.0, 3, 1, 3), 1: Times(5.0, 40.0, 0.0, 0.0, 1, 1)},
        "b": {0: Times(7.0, 40.0, 0.0, 0.0, 1, 1)},
    }
    # A kernel in a loop: every launch is a sample, the replay is counted once and its time weighs
    # once.
    looped = [("a", 0, 1, 1.0), ("a", 0, 1, 3.0), ("a", 0, 2, 2.0), ("a", 0, 2, 4.0)]
    assert told_by(ledger_of(*looped, replays={1: 10.0, 2: 20.0})).times == {
        "a": {0: Times(2.0, 10.0, 1.0, 4.0, 2, 2, 2)}
    }


def test_what_other_sites_ran_is_taken_off_a_replay():
    """By the reduced times of their candidates above the fastest of theirs, so that the slow ones
    do not count against this site.
    """
    ran: dict[int, Replay] = {
        1: {"a": Trial(0, True), "b": Trial(3, False)},
        2: {"a": Trial(1, True), "b": Trial(4, True)},
    }
    ledger = ledger_of(("a", 0, 1, 1.0), ("a", 1, 2, 1.0), replays={1: 13.0, 2: 10.0}, ran=ran)
    told = told_by(ledger, known_ms={"a": {0: 1.0, 1: 7.0}, "b": {3: 5.0, 4: 2.0}}).times["a"]
    assert [told[i].closure_ms for i in (0, 1)] == [10.0, 10.0]
    assert told_by(ledger).times["a"][0].closure_ms == 13.0  # nothing is known of b yet


def test_struck_replays_are_forgotten():
    """A time that was measured beside a stand-in counts for no site, and a candidate without any
    other time is not reported.
    """
    ledger = ledger_of(
        ("a", 0, 1, 1.0),
        ("a", 0, 2, 3.0),
        ("a", 1, 2, 5.0),
        ("b", 0, 2, 7.0),
        replays={1: 10.0, 2: 20.0},
    )
    assert (ledger.strike({2, 99}), ledger.strike({2})) == (True, False)
    assert told_by(ledger).times == {"a": {0: Times(1.0, 10.0)}, "b": {}}


@pytest.mark.parametrize("ms", [math.nan, math.inf, 0.0, -1.0])
def test_what_is_no_time_is_a_failure(ms: float):
    """Of a launch or of the replay: told as why the candidate is out, beside the times of the
    others; a known reason stays.
    """
    ledger = ledger_of(
        ("a", 0, 1, ms),
        ("a", 1, 2, 1.0),
        ("a", 2, 3, 1.0),
        ("a", 3, 4, 1.0),
        replays={1: 10.0, 2: 20.0, 3: ms, 4: ms},
    )
    broke, absurd = (
        CandidateFailure(FailureKind.LAUNCH, "broke"),
        CandidateFailure(FailureKind.CLOCK, f"the clock gave {ms} ms"),
    )
    report = told_by(ledger, {"a": {2: broke}})
    assert report.times == {"a": {1: Times(1.0, 20.0)}}
    assert report.failures == {"a": {0: absurd, 2: broke, 3: absurd}}


def test_a_restarted_ledger_has_launches_and_no_replays():
    """Replays that follow are timed as a whole; the launches of those before are all there is to
    say of the kernel.
    """
    ledger = ledger_of(("a", 0, 1, 1.0), replays={1: 10.0})
    ledger.disturb(1)
    ledger.restart()
    assert told_by(ledger) == Report({"a": {}}, disturbed=[1])
    ledger.add_run("a", 0, 2)
    ledger.add_replay(2, 30.0, {})
    assert told_by(ledger).times == {"a": {0: Times(1.0, 30.0)}}


def test_a_rank_owns_a_site_whose_times_are_forgotten():
    """Another rank's new times of it do not count until this one has some: a MAX over some ranks
    may hide the slowest.
    """
    ledger, other = (
        ledger_of(("a", 0, 0, 9.0), replays={0: 10.0}),
        ledger_of(("a", 0, 1, 1.0), replays={1: 2.0}),
    )
    ledger.forget("a")
    assert told_by(ledger).times == {"a": {}}
    assert reduce_reports({0: told_by(ledger), 1: told_by(other)}).times == {"a": {}}


def test_the_shortest_of_untimed_runs_counts() -> None:
    """The first one compiles and allocates."""
    samples = Samples()
    for ms in (80.0, 3.0, 4.0):
        samples.add_warm_up("f", 1, ms)
    assert samples.report_warm_ups({}).times == {"f": {1: Times(3.0, 3.0)}}
