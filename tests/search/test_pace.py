"""The budget of online tuning: what calls take for it beyond plain ones stays below a share of the
job's time.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulator import play
from benchmarks.worlds import Kernel, World, many
from dist_tune.search import N_PLAIN, Account, Pace, Plan, Race, Report, Times, Trial
from dist_tune.search.site_race import SiteRace
from tests.worlds import further

PLAN = Plan(n_warmup=0)


def told(
    race: Race, pace: Pace, runs: list[dict[str, Trial]], n_taken: int, ms: dict[int, float]
) -> None:
    """The times of some calls, each site's the same."""
    labels = {label for each in runs for label in each}
    times = {
        label: {
            i: Times(ms[i], 10.0 + ms[i], n_replays=3)
            for i in {each[label].candidate for each in runs}
        }
        for label in labels
    }
    race.tell(n_taken, Report(times))
    pace.end(race, runs)


def based(share: float) -> tuple[Race, Pace]:
    """Four candidates, and a job whose config in use was timed: a launch of 1 ms."""
    race, pace = Race(PLAN), Pace(share)
    race.add("a", 4, {})
    runs, n_taken = pace.plan(race, race.batch())
    told(race, pace, [dict(each) for each in runs], n_taken, dict.fromkeys(range(4), 1.0))
    return race, pace


def test_nothing_is_tried_before_the_config_in_use_is_timed():
    race, pace = Race(PLAN), Pace(0.05)
    race.add("a", 4, {})
    batch = race.batch()
    runs, n_taken = pace.plan(race, batch)
    assert (n_taken, {each["a"].candidate for each in runs}, pace.n_wait(race, runs)) == (0, {0}, 0)


@pytest.mark.parametrize("share", [0.5, 0.05, 0.01])
def test_a_trial_waits_until_the_job_has_earned_it(share: float):
    """A launch of 1 ms in a call of 11: a first trial may take twice as long."""
    race, pace = based(share)
    pace.agreed = Account(job_s=0.0, call_s=0.011)
    runs, n_taken = pace.plan(race, race.batch())
    assert n_taken >= 1
    cost = sum(each["a"].candidate != race["a"].best for each in runs)
    assert pace.n_wait(race, runs) == pytest.approx(cost / (0.9 * share * 11.0), abs=1)


def test_what_a_trial_takes_is_looked_up_and_not_compared_anew(monkeypatch: pytest.MonkeyPatch):
    """Of a site with 100 timed candidates the best is asked for once: to find it compares all of
    them, in the thread beside the job.
    """
    race, pace, n_asked = Race(PLAN), Pace(0.05), 0
    race.add("a", 100, {})
    race.tell(0, Report({"a": {i: Times(1.0 + i, 10.0, n_replays=3) for i in range(100)}}))
    pace.end(race, [{"a": Trial(0, is_timed=True)}])
    pace.agreed = Account(call_s=0.01)

    def best(site: SiteRace) -> int:
        nonlocal n_asked
        n_asked += 1
        return 0

    monkeypatch.setattr(SiteRace, "best", property(best))
    assert pace.n_wait(race, [{"a": Trial(k, is_timed=True)} for k in range(50, 60)]) > 3
    assert n_asked <= 1


# -- the clock of the calls ------------------------------------------------------------------------


def job(
    pace: Pace,
    n_calls: int,
    ms: float = 10.0,
    ours_ms: float = 0.0,
    *,
    noise: float = 0.0,
    checkpoint: int = 0,
) -> float:
    """Calls of ``ms``, ours of ``ours_ms`` more where the budget allows; the true share of them
    that was ours.
    """
    dice, ours_s, job_s = random.Random(0), 0.0, 0.0
    pace.has_begun = True
    for call in range(n_calls):
        is_ours = pace.may_work(call)
        seconds = (ms + ours_ms * is_ours) * dice.lognormvariate(0, noise) / 1e3
        seconds += 50 * ms / 1e3 * bool(checkpoint and call % checkpoint == 0)
        pace.add(call, seconds, is_ours=is_ours)
        ours_s += ours_ms / 1e3 * is_ours
        job_s += seconds
    return ours_s / job_s


def test_nothing_is_at_work_before_there_is_a_plain_call():
    """There would be nothing to compare with."""
    pace = Pace(0.05)
    free = next(call for call in range(16) if not pace.is_quiet(call))
    assert not pace.may_work(free)
    pace.add(0, 0.01)
    assert pace.may_work(free)


@pytest.mark.parametrize("period", [2, 3, 4, 8, 10, 16, 24, 32, 64])
def test_what_a_job_does_every_so_many_calls_hides_nothing(period: int):
    """An optimizer's step that takes ten times as long as the calls between: the share is kept by
    true figures, wherever it falls.
    """
    for offset in {0, 1, period // 2, period - 1}:
        pace, ours_s, job_s = Pace(0.05), 0.0, 0.0
        pace.has_begun = True
        for call in range(6000):
            is_ours = pace.may_work(call)
            seconds = 0.01 + 0.005 * is_ours + 0.1 * (call % period == offset)
            pace.add(call, seconds, is_ours=is_ours)
            ours_s += 0.005 * is_ours
            job_s += seconds
        assert ours_s / job_s <= 0.08, (offset, ours_s / job_s)


def test_a_quarter_of_the_calls_is_plain_for_ever():
    pace = Pace(1.0)
    assert sum(pace.is_quiet(call) for call in range(1600)) == 400


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2])
def test_work_beside_calls_stays_within_the_share(share: float):
    """It lengthens a call by half: it runs in so many calls that the job takes the share longer,
    and that is told.
    """
    pace = Pace(share)
    true = job(pace, 2000, ours_ms=5.0)
    assert true <= share * 1.02
    assert true >= share * 0.8
    assert pace.slowdown == pytest.approx(true, abs=0.1 * share)


def test_noise_is_no_cost():
    """Calls vary by a third, with a long tail: work that costs nothing is not held up."""
    pace = Pace(0.05)
    job(pace, 4000, noise=0.3)
    assert pace.slowdown < 0.02


def test_checkpoints_are_no_cost():
    """Every hundredth call takes fifty times as long, whether or not something is at work beside
    it.
    """
    pace = Pace(0.05)
    job(pace, 20_000, checkpoint=97)
    assert pace.slowdown < 0.04


def test_a_slow_start_of_the_job_is_no_cost():
    """The first calls take three times as long by themselves, and half of them more for what is
    beside them.
    """
    pace = Pace(0.05)
    for call in range(8):
        pace.add(call, 0.03, is_ours=call >= 4)
    true = job(pace, 2000, ours_ms=5.0)
    assert pace.slowdown == pytest.approx(true, abs=0.01)


def test_the_first_calls_are_no_measure_of_later_ones():
    """They take three times as long; what is at work from the ninth call on is told by plain calls
    after the fourth.
    """
    pace, ours_s, job_s = Pace(0.05), 0.0, 0.0
    for call in range(400):
        if call == 8:
            pace.begin()
            assert [*pace.before_s] == [0.01] * 4
        is_ours = call >= 8 and not pace.is_quiet(call)
        seconds = 0.03 if call < 4 else 0.01 + 0.005 * is_ours
        pace.add(call, seconds, is_ours=is_ours)
        ours_s += 0.005 * is_ours
        job_s += seconds
    assert pace.slowdown == pytest.approx(ours_s / job_s, abs=0.01)
    assert max(pace.before_s) == pytest.approx(0.01)


def test_a_job_that_becomes_slower_pays_nothing_for_it():
    """Sequences grow: the last calls take twice as long as the first."""
    pace = Pace(0.05)
    for call in range(4000):
        pace.add(call, 0.01 * (1 + call / 4000), is_ours=not pace.is_quiet(call))
    assert abs(pace.account.spent_s) < 0.02 * pace.account.job_s


def test_trials_are_laid_around_the_plain_calls():
    pace = Pace(0.05)
    runs = [{"a": Trial(k, is_timed=True)} for k in range(40)]
    calls = pace.schedule(14, runs)
    assert list(calls.values()) == runs
    assert [call for call in range(14, max(calls) + 1) if not pace.is_quiet(call)] == [*calls]


def test_short_calls_have_long_cycles():
    """The plain quarter is longer than a thread takes to see that it has begun."""
    pace = Pace(0.05)
    job(pace, 8, ms=1.0)
    assert pace.wanted_cycle == 256
    job(pace, 64, ms=1000.0)
    assert pace.wanted_cycle == 4 * N_PLAIN


# -- jobs ------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.sampled_from([0.02, 0.05, 0.2]), st.sampled_from([0.0, 1.0]))
def test_the_budget_is_kept_by_true_times(seed: int, share: float, other_ms: float):
    """Noise, hiccups and candidates up to six times slower; all ranks say the same, as one function
    of what they agreed on.
    """
    played = play(many(2, 12, seed=seed, other_ms=other_ms), PLAN, seed=seed, max_slowdown=share)
    # The last batch may take some calls more than was foreseen.
    assert played.slowdown <= share * 1.15 + 2.5 / played.n_calls
    assert played.regret <= 0.02


def test_a_hopeless_candidate_has_one_call():
    """Thirty times slower than what is in use: later calls earn what it took."""
    slow = Kernel([[1.0] * 2, [30.0] * 2, [0.9] * 2, [1.1] * 2])
    played = play(World({"a": slow}, n_ranks=2, other_ms=5.0, hiccups=0.0), PLAN, max_slowdown=0.05)
    assert played.winners == {"a": 2}
    assert sum(each["a"].candidate == 1 for each in played.schedule) == 1
    assert played.slowdown <= 0.06


@pytest.mark.parametrize("n_runs", [5, further(20)])
def test_64_candidates_at_3_sites_take_600_calls(n_runs: int):
    """Of a step that is half kernels, a quarter of whose calls is plain: regret below 1 % in 95 %
    of runs.
    """
    runs = [
        play(many(3, 64, seed=seed, other_ms=1.0), PLAN, seed=seed, max_slowdown=0.05)
        for seed in range(n_runs)
    ]
    assert max(each.n_calls for each in runs) <= 600
    assert sum(each.regret <= 0.01 for each in runs) >= 0.95 * n_runs
    assert max(each.slowdown for each in runs) <= 0.055
