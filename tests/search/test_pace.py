"""The budget of online tuning: what trials take beyond what is in use stays below a share of the job's time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulator import Kernel, World, play
from benchmarks.worlds import many
from dist_tune.search import Pace, Plan, Race, Report, Times, Trial
from dist_tune.search.site_race import SiteRace
from tests.cases import further

PLAN = Plan(n_warmup=0)


def told(race: Race, pace: Pace, runs: list[dict[str, Trial]], n_taken: int, ms: dict[int, float], last: int) -> None:
    """The times of some calls, each site's the same."""
    labels = {label for each in runs for label in each}
    times = {label: {i: Times(ms[i], 10.0 + ms[i], n_replays=3) for i in {each[label].candidate for each in runs}} for label in labels}
    race.tell(n_taken, Report(times))
    pace.end(race, runs, last)


def test_nothing_is_tried_before_the_step_s_time_is_known():
    race, pace = Race(PLAN), Pace(0.05)
    race.add("a", 4, {})
    batch = race.batch()
    runs, n_taken = pace.plan(race, batch)
    assert (n_taken, {each["a"].candidate for each in runs}, pace.due(race, runs)) == (0, {0}, 0)


def test_a_trial_waits_until_the_job_has_earned_it():
    """A launch of 1 ms in a step of 11: a first trial may take twice as long."""
    for share in (0.5, 0.05, 0.01):
        race, pace = Race(PLAN), Pace(share)
        race.add("a", 4, {})
        runs, n_taken = pace.plan(race, race.batch())
        pace.begin(100)
        told(race, pace, [dict(each) for each in runs], n_taken, dict.fromkeys(range(4), 1.0), 102)
        runs, n_taken = pace.plan(race, race.batch())
        assert n_taken >= 1
        cost = sum(each["a"].candidate != race["a"].best for each in runs)
        assert pace.due(race, runs) == pytest.approx(100 + cost / (share * 11.0), abs=1), share


def test_a_long_step_of_a_rare_shape_earns_what_its_calls_do():
    """Nine calls of 10 ms with one shape, and one of 1010 ms with another: a call is 110 ms on average."""
    race, pace = Race(PLAN), Pace(0.05)
    race.add("often", 2, {})
    race.add("rare", 2, {})
    race.tell(0, Report({"often": {0: Times(1.0, 10.0, n_replays=9)}, "rare": {0: Times(1.0, 1010.0)}}))
    pace.end(race, [{label: Trial(0, is_timed=True) for label in ("often", "rare")}], 10)
    assert pace.step_ms == pytest.approx(110.0)


def test_what_a_trial_takes_is_looked_up_and_not_compared_anew(monkeypatch: pytest.MonkeyPatch):
    """Of a site with 100 timed candidates the best is asked for once: to find it compares all of them, in the thread beside the job."""
    race, pace, n_asked = Race(PLAN), Pace(0.05), 0
    race.add("a", 100, {})
    race.tell(0, Report({"a": {i: Times(1.0 + i, 10.0, n_replays=3) for i in range(100)}}))
    pace.end(race, [{"a": Trial(0, is_timed=True)}], 3)
    pace.begin(3)

    def best(site: SiteRace) -> int:
        nonlocal n_asked
        n_asked += 1
        return 0

    monkeypatch.setattr(SiteRace, "best", property(best))
    assert pace.due(race, [{"a": Trial(50, is_timed=True)}]) > 3
    assert n_asked == 1


@given(st.integers(0, 1000), st.sampled_from([0.02, 0.05, 0.2]), st.sampled_from([0.0, 1.0]))
def test_the_budget_is_kept_by_true_times(seed: int, share: float, other_ms: float):
    """Noise, hiccups and candidates up to six times slower; all ranks say the same, as one function of what they agreed on."""
    played = play(many(2, 12, seed=seed, other_ms=other_ms), PLAN, seed=seed, max_slowdown=share)
    assert played.slowdown <= share * 1.15
    assert played.regret <= 0.02


def test_a_hopeless_candidate_has_one_call():
    """Thirty times slower than what is in use: later calls earn what it took."""
    slow = Kernel([[1.0] * 2, [30.0] * 2, [0.9] * 2, [1.1] * 2])
    played = play(World({"a": slow}, n_ranks=2, other_ms=5.0, hiccups=0.0), PLAN, max_slowdown=0.05)
    assert played.winners == {"a": 2}
    assert sum(each["a"].candidate == 1 for each in played.schedule) == 1
    assert played.slowdown <= 0.06


@pytest.mark.parametrize("n_runs", [5, further(20)])
def test_64_candidates_at_3_sites_take_400_calls(n_runs: int):
    """Of a step that is half kernels: regret below 1 % in 95 % of runs."""
    runs = [play(many(3, 64, seed=seed, other_ms=1.0), PLAN, seed=seed, max_slowdown=0.05) for seed in range(n_runs)]
    assert max(each.n_calls for each in runs) <= 400
    assert sum(each.regret <= 0.01 for each in runs) >= 0.95 * n_runs
    assert max(each.slowdown for each in runs) <= 0.055
