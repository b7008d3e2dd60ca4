"""From reduced times to choices: the candidates of a site that stay in the race, and the winner.

Pure.

Two times are compared: the kernel's, which is precise and sees nothing else, and the closure's,
which the user pays for and which holds the noise of everything else in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from math import hypot, sqrt

from dist_tune.search.plan import Objective, Times

N_ERRORS = 3.0
"""Standard errors of a time beyond which a candidate is slower than the best: the difference of two
has 1.4 of them.
"""
_SE_OF_MEDIAN = 1.4826 * 1.2533
"""Standard error of a median of n samples, times sqrt(n), per unit of their median absolute
deviation (normal noise).
"""
HOPELESS = 2.0
"""A candidate that takes this many times the best one's time runs no more."""
_COUNTS = 0.005
"""Weight of the step from which it is the reason of a choice: below, it is told as 0 %."""


@dataclass(frozen=True, slots=True)
class RacingOptions:
    """Constants of racing and finals, chosen on the tables under benchmarks/tables and on random
    ones (benchmarks/simulator.py).
    """

    margins: tuple[float, ...] = (0.5, 0.25, 0.15, 0.1)
    """A candidate is hopeless if it is slower than the best by more than this share of the kernel's
    time after the n-th rung.
    """
    max_finalists: int = 4
    min_rungs: int = 4
    """Rungs of every finalist before the finals: these may fall back on the kernel's time, and one
    sample of it is too noisy to decide.
    """
    n_final_rounds: int = 3
    """Finalists that are clearly slower leave after each round."""
    tie: float = 0.0075
    """Share of the kernel's time below which two candidates are as good as each other, where that
    is more than the clock's error.
    """
    insured_ms: float = 50.0
    """A finalist that looks hopeless by one sample gets a second one if that is no longer: the
    first may have had a hiccup.
    """
    clock_ms: float = 0.0005
    """Error of one reading of a device's clock, until repeats have shown it: CUDA events have half
    a microsecond.
    """
    spare_s: float = 0.375
    """Seconds of replays beyond those of a plain race, where candidates are as near as the clock's
    error.
    """
    enough_ms: float = 1000.0
    """Milliseconds of samples that are enough for a candidate in the race, and in a round of
    finals: long samples have little noise.
    """

    max_asked: int = 5
    """Times that trials are asked for again in which the site was not met."""
    first_quota: int = 3
    """Halvings of the candidates after the first rung."""
    step_errors: float = 2.0
    """Standard errors within which differences of the step are noise: of contenders that are few,
    these are a rough estimate.
    """
    goes_on: bool = False
    """True if times of an attempt before count as this race's own: a job in short pieces would
    begin anew in each.
    """
    has_even_steps: bool = True
    """True if one long replay tells of its candidate; a job's steps wait for loaders, checkpoints
    and late ranks as well.
    """

    def margin(self, rung: int) -> float:
        """The margin after this rung, counted from 0."""
        return self.margins[min(rung, len(self.margins) - 1)]

    def quota(self, n_candidates: int, rung: int) -> int:
        """Candidates that may stay after this rung: an eighth, a sixteenth, ..., but all
        finalists.
        """
        return max(self.max_finalists, n_candidates >> (rung + self.first_quota))


@dataclass(frozen=True, slots=True)
class Selection:
    """The choice among the contenders of a site."""

    winner: int
    worse: frozenset[int]
    """Slower than the winner beyond a tie and noise, and no faster by the kernel's time."""
    is_clear: bool
    """True if more replays would change nothing: each other contender is as good or worse, beyond
    noise.
    """
    closure_weight: float
    """Weight of the closure's time where it differs from the kernel's, from 0 (noise) to 1."""
    reason: str = ""
    """The reason of the choice in words."""


def hopeless(
    times: Mapping[int, Times],
    warm_ups: Mapping[int, Times],
    options: RacingOptions,
    objective: Objective,
    *,
    is_first: bool,
    is_alone: bool,
) -> set[int]:
    """Candidates that take ``HOPELESS`` times as long as the best: they run no more, however few
    there are.

    After the first rung (``is_first``) a median is one sample, and one that is short may be a
    hiccup; so may one of a single rank, or of a candidate that did better in its warm-up
    (``warm_ups``). By the closure's time, too, which sees hooks and the like; one sample of it
    tells only where the site ``is_alone``, because another site's candidate may have been the slow
    one, and only of even steps. What is slow by the host alone may be the fastest as a graph.
    """
    if not times:
        return set()
    best_ms, closure_ms = (
        min(measured.launches_ms for measured in times.values()),
        min(measured.closure_ms for measured in times.values()),
    )
    typical_ms = {
        i: (measured.typical_ms or measured.kernel_ms) * measured.n_launches
        for i, measured in times.items()
    }
    least_ms = options.insured_ms if is_first else 0.0
    slow = {
        i
        for i, measured in times.items()
        if measured.launches_ms > max(HOPELESS * best_ms, least_ms)
    }
    if objective != "kernel":
        # Else the rest is faster for it.
        slow = {i for i in slow if times[i].closure_ms > closure_ms + options.margin(0) * best_ms}
    if is_first:
        slow = {i for i in slow if typical_ms[i] > HOPELESS * min(typical_ms.values())}
    if (
        objective == "closure"
        and closure_ms > 0
        and (not is_first or (is_alone and options.has_even_steps))
    ):
        limit_ms = max(HOPELESS * closure_ms, closure_ms + options.insured_ms)
        slow |= {
            i
            for i, measured in times.items()
            if measured.closure_ms - is_first * (measured.launches_ms - typical_ms[i]) > limit_ms
        }
    return slow - {
        i
        for i, warm_up in warm_ups.items()
        if is_first and warm_up.launches_ms <= HOPELESS * best_ms
    }


def kept(
    times: Mapping[int, Times],
    quota: int,
    margin: float,
    objective: Objective,
    *,
    n_least: int = 1,
    by_typical: bool = False,
    error_ms: float = 0.0,
) -> list[int]:
    """Candidates that stay: not hopeless by both times, and among the ``quota`` best by one of
    them; ``n_least`` even if hopeless.

    ``by_typical``: by the middle rank's kernel, because with one sample a rank the slowest is often
    a hiccup. ``error_ms``: standard error of a kernel's time; beyond the quota those stay that it
    cannot tell from the best.
    """
    if not times:
        return []
    launches_ms = {
        i: (measured.typical_ms or measured.kernel_ms if by_typical else measured.kernel_ms)
        * measured.n_launches
        for i, measured in times.items()
    }
    # For the kernel's time alone both orders are the same, but for the slowest rank's kernel beside
    # the middle one's.
    closure_ms = {
        i: measured.closure_ms if objective != "kernel" else measured.launches_ms
        for i, measured in times.items()
    }
    allowed_ms = margin * min(launches_ms.values())
    limits_ms = min(launches_ms.values()) + allowed_ms, min(closure_ms.values()) + allowed_ms
    hopeful = {i for i in times if launches_ms[i] <= limits_ms[0] or closure_ms[i] <= limits_ms[1]}
    by_kernel, by_closure = (
        sorted(times, key=lambda i: (ms[i], i)) for ms in (launches_ms, closure_ms)
    )
    in_turn = list(
        dict.fromkeys(i for pair in zip(by_kernel, by_closure, strict=True) for i in pair)
    )
    chosen = [i for n, i in enumerate(in_turn) if i in hopeful or n < n_least][:quota]
    near = (
        {i for i in hopeful if launches_ms[i] <= min(launches_ms.values()) + N_ERRORS * error_ms}
        if error_ms
        else set()
    )
    return sorted({*chosen, *near})


def select(
    times: Mapping[int, Times],
    objective: Objective,
    tie: float,
    *,
    is_alone: bool = False,
    step_errors: float = 2.0,
) -> Selection:
    """Choose among contenders; ties and noise go to the faster kernel, then to the lower index.

    With more noise than a tie: the best.

    A candidate's cost has two estimates: its launches, which are precise but blind to all else, and
    the closure, which holds the noise of all else. They are averaged with the weights of a best
    linear estimate. The bias of the launches is the difference of the rest of the closure between
    candidates, beyond noise: with none, launches alone decide. Without repeats, the closure alone
    decides if the site ``is_alone`` in it.
    """
    rest_ms = {i: measured.closure_ms - measured.launches_ms for i, measured in times.items()}
    middle_ms = statistics.median(rest_ms.values())
    launch_error_ms = (
        error_of_median_ms(
            [
                (measured.spread_ms * measured.n_launches, measured.n_timed)
                for measured in times.values()
            ]
        )
        or 0.0
    )
    rest_error_ms = error_of_median_ms(
        [(measured.rest_spread_ms, measured.n_replays) for measured in times.values()]
    )
    weight = 0.0
    if objective != "kernel" and rest_error_ms is None:
        weight = 1.0 if is_alone else 0.0
    elif objective != "kernel" and rest_error_ms is not None and len(times) > 1:
        bias = (
            max(0.0, statistics.variance(rest_ms.values()) - (step_errors * rest_error_ms) ** 2)
            + launch_error_ms**2
        )
        weight = bias / (bias + rest_error_ms**2) if bias > 0 else 0.0
    cost_ms = {
        i: measured.launches_ms + weight * (rest_ms[i] - middle_ms) for i, measured in times.items()
    }
    error_ms = sqrt(2) * hypot((1 - weight) * launch_error_ms, weight * (rest_error_ms or 0.0))

    leader = min(cost_ms, key=lambda i: (cost_ms[i], i))
    tie_ms = tie * times[leader].launches_ms
    behind_ms = {i: ms - cost_ms[leader] for i, ms in cost_ms.items() if i != leader}
    tied = [leader, *(i for i, ms in behind_ms.items() if ms <= max(tie_ms, error_ms))]
    least_ms = min(times[i].launches_ms for i in tied)
    winner = (
        leader
        if error_ms > tie_ms
        else min(i for i in tied if times[i].launches_ms <= least_ms + tie_ms)
    )
    # By both times: if they contradict each other, a GPU may have been slowed down for a while, and
    # more replays can tell.
    worse = frozenset(
        i
        for i, ms in behind_ms.items()
        if ms > tie_ms + 2 * error_ms and times[i].launches_ms >= times[leader].launches_ms
    )
    is_clear = all(i in worse or ms + error_ms <= tie_ms for i, ms in behind_ms.items())
    if len(times) == 1:
        reason = "fastest in the race"  # the others were hopeless beside it by both times
    elif len(tied) == 1:
        reason = "fastest step" if weight >= _COUNTS else "fastest kernel"
    elif times[winner].launches_ms <= least_ms:
        reason = "tied within noise, faster kernel"
    else:
        reason = "tied within noise"
    return Selection(winner, worse - {winner}, is_clear, weight, reason)


def error_of_median_ms(spreads_ms: list[tuple[float, int]]) -> float | None:
    """Standard error of a median from (MAD, samples) of each, pooled because a MAD of few samples
    is rough; None without repeats.
    """
    repeated = [(ms, n) for ms, n in spreads_ms if n > 1]
    if not repeated:
        return None
    return (
        _SE_OF_MEDIAN
        * statistics.median(ms for ms, _ in repeated)
        / sqrt(statistics.median(n for _, n in repeated))
    )


def clock_error_ms(times: Mapping[int, Times], options: RacingOptions, n_sites: int) -> float:
    """Standard error of the launches of a replay, as far as the clock makes it: by the spread of
    repeats, if there are some.

    0 where it is no matter: below a quarter of a tie of the site's part of the step, if all of
    ``n_sites`` had the same part.
    """
    if not times:
        return 0.0
    each_of = times.values()
    most_ms = options.clock_ms * sqrt(
        statistics.median(each.n_launches for each in each_of)
        / statistics.median(each.n_timed for each in each_of)
    )
    spread_ms = error_of_median_ms(
        [(each.spread_ms * sqrt(each.n_launches), each.n_timed) for each in each_of]
    )
    error_ms = most_ms if spread_ms is None else min(spread_ms, most_ms)
    part_ms = max(
        min(each.launches_ms for each in each_of),
        min(each.closure_ms for each in each_of) / n_sites,
    )
    return error_ms if error_ms > options.tie / 4 * part_ms else 0.0
