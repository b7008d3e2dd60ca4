"""The end of a rung of a race at one site: who stays. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dist_tune.search.plan import Plan
from dist_tune.search.repeats import Repeats
from dist_tune.search.selection import RacingOptions, hopeless, kept
from dist_tune.search.standings import Standings


@dataclass(frozen=True, slots=True)
class EndOfRung:
    """Candidates that stay after a rung, and what they were judged by."""

    staying: list[int]
    """An earlier winner among them, unless that costs real time."""
    prior: list[int]
    """The earlier winner, if it stays for that."""
    n_plain: int
    """Those that would stay if the clock had no error."""
    margin: float
    """Share of the kernel's time by which a candidate may be slower."""
    n_enough: int
    """Samples of a candidate that are enough."""


def end_of_rung(standings: Standings, plan: Plan, options: RacingOptions, repeats: Repeats, *, rung: int, n_open: int) -> EndOfRung:
    """Judge the candidates that are alive by their times after rung ``rung``, counted from 0, at one of ``n_open`` sites."""
    alive, objective = standings.alive(), plan.objective
    is_long = (n_enough := standings.n_enough(options.enough_ms, plan.n_repeat)) < 2  # one sample says as much as many short ones
    margin, quota = options.margins[-1] if is_long else options.margin(rung), options.quota(standings.n_runnable, rung)
    is_first, measured = rung == 0, standings.measured(alive)
    no_more = hopeless(measured, standings.warm_ups, options, objective, is_first=is_first, is_alone=n_open < 2)
    # Beaten in the finals or not at all, unless that costs real time.
    prior = [i for i in alive if i == standings.prior_winner and not (i in no_more and measured[i].launches_ms > options.insured_ms)]
    # The best few of the others always reach the finals: one hiccup of the leader's rivals shall not end the race.
    n_least = 1 if is_long else options.max_finalists
    hopeful = {i: each for i, each in measured.items() if i not in no_more}
    plain = best = kept(hopeful, quota, margin, objective, n_least=n_least, by_typical=is_first)
    repeats.judge(measured, n_open, options)
    if repeats.is_noisy:
        near = kept(hopeful, quota, margin, objective, n_least=n_least, by_typical=is_first, error_ms=repeats.error_ms)
        best = near if len(near) - len(plain) <= repeats.n_left else plain
    return EndOfRung([*prior, *best], prior, len({*prior, *plain}), margin, n_enough)
