"""The search over all sites of a closure. Pure.

Racing: all candidates are timed once, the hopeless ones leave, and the rest run on in rungs until a
few finalists are left. Finals compare these in replays that give every site one of its finalists.
All sites advance in the same replays, and a rung or a round of finals costs one meeting. Exhaustive
search: each candidate gets ``n_warmup`` untimed and ``n_repeat`` timed replays, and a site that is
done runs its winner.

Functions that take a config, and the kernels that they launch, take turns, because the times of one
depend on the config of the other. First what is inside races, beside one fixed config of the
functions around it; then the functions race, beside the winners inside; at last what the winning
configs launch races once more with its best few, if it has raced beside other configs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf

from dist_tune.errors import reasons
from dist_tune.search.guided import Guide
from dist_tune.search.plan import Plan, PriorTimes, Replay, Trial
from dist_tune.search.selection import RacingOptions
from dist_tune.search.site_race import SiteRace
from dist_tune.search.times import Report

LONG_S = 0.25
"""Replays from this length on are asked for in batches of about ``BATCH_S``."""
BATCH_S = 1.0
BUDGET_BATCH_S = 0.1
"""Length of batches where there is a budget: a candidate may be far slower than those before it,
and a meeting takes some ms at most.
"""
_HALF_SPENT = "not raced: the rest of the budget is for the function around it"


class Race:
    """All sites of one closure, by label.

    Fed with the same calls on every rank, it answers the same on every rank.
    """

    def __init__(self, plan: Plan, options: RacingOptions | None = None) -> None:
        self.n_replays = 0
        """Replays so far."""
        self.begun_anew: set[str] = set()
        """Sites that race anew: their samples so far are of an earlier race, and the caller forgets
        them.
        """
        self._plan, self._options = plan, options or RacingOptions()
        self._sites: dict[str, SiteRace] = {}
        self._nesting: dict[str, dict[str, set[int]]] = {}
        """Site -> function around it -> the function's candidates that launch the site."""
        self._turn: Collection[str] = self._sites.keys()
        """Sites that race now."""
        self._running: Collection[str] = ()
        """Those of them whose queues the batch takes from."""
        self._fixed: dict[str, int] = {}
        """Function -> the candidate that it runs while it waits for what is inside."""
        self._beside: dict[str, dict[str, int]] = {}
        """Site -> function around it -> the candidate beside which the site has raced."""
        self._elapsed_s = self._replays_s = 0.0
        self._began_s: float | None = None
        # Of a replay; endless if it may be long.
        self._latest_s = inf if plan.budget_s is not None else 0.0

    def add(
        self,
        site: str,
        n_candidates: int,
        failures: Mapping[int, str],
        prior: PriorTimes | None = None,
        equal: Mapping[int, int] | None = None,
        guide: Guide | None = None,
    ) -> None:
        """Enter a site after the vote.

        ``failures``: candidates that cannot run, with rank and reason.

        ``equal``: candidate -> the one of lower index with the same kernel, which races for both.
        ``guide``: None if all race at once.
        """
        rules = self._plan, self._options
        self._sites[site] = SiteRace(
            site, rules, n_candidates, failures, prior or PriorTimes(), equal or {}, guide
        )
        n_open = sum(each.n_racing > 0 for each in self._sites.values())
        for each in self._sites.values():
            each.n_open = n_open

    def __contains__(self, site: str) -> bool:
        return site in self._sites

    def __getitem__(self, site: str) -> SiteRace:
        return self._sites[site]

    @property
    def is_final(self) -> bool:
        """True if all sites whose turn it is have reached the finals."""
        return all(self._sites[name].stage in ("finals", "done") for name in self._turn)

    @property
    def n_left(self) -> int:
        """Replays that are still to come at most, if every site is met in every replay."""
        left = [site.n_left for site in self._sites.values()]
        return sum(left) if self._nesting else max(left, default=0)

    @property
    def spare_s(self) -> float:
        """Seconds of replays beyond ``n_left``, for kernels so short that the clock cannot tell
        them apart.
        """
        return self._options.spare_s if self._plan.n_repeat > 1 else 0.0

    @property
    def is_spent(self) -> bool:
        """True if the search has used up its budget."""
        return self._plan.budget_s is not None and self._elapsed_s >= self._plan.budget_s

    def kernel_times_ms(self) -> dict[str, dict[int, float]]:
        """Site -> candidate -> reduced time of its launches in a replay, so far."""
        return {
            name: {i: measured.launches_ms for i, measured in site.times.items()}
            for name, site in self._sites.items()
        }

    # -- guided searches and warm-ups --------------------------------------------------------------

    def waves(self) -> dict[str, list[int]]:
        """Candidates that guided searches come to next: site -> candidates to compile, or to warm
        up for a function, and to ``join``.
        """
        before: Collection[str] | None = None
        while True:
            turn = () if self.is_spent else self._next_turn()
            # Each replay may launch these.
            asked = [name for name, site in self._sites.items() if name in turn or site.is_barren]
            waves = {name: wave for name in asked if (wave := self._sites[name].wave())}
            if waves or self.is_spent or turn == before:
                return waves
            before = turn
            # A turn without trials ends here, and the next one may begin with a wave
            self._advance()

    def join(self, waves: Mapping[str, Collection[int]]) -> None:
        """Let the candidates of waves race: site -> candidates."""
        for name, wave in waves.items():
            self._sites[name].join(wave)

    def warm_up(
        self,
        sites: Mapping[str, int],
        waves: Mapping[str, Collection[int]],
        early: Mapping[str, Collection[int]],
    ) -> list[Replay]:
        """Untimed and checked runs of the candidates in ``waves`` of these sites: site -> runs of
        each. The ``early`` ones come first.
        """
        orders: dict[str, list[int]] = {}
        for name, n_runs in sites.items():
            # An earlier winner first: where time runs out it has had its turn.
            site = self._sites[name]
            alive = sorted(
                site.alive(), key=lambda i: (i != site.prior_winner, i not in early[name])
            )
            orders[name] = [i for i in alive if i in waves[name] for _ in range(n_runs)]
        others = {
            name: Trial(best, is_timed=False)
            for name, site in self._sites.items()
            if (best := site.best) is not None
        }
        return [
            others
            | {
                name: Trial(order[k], is_timed=False, is_checked=True)
                for name, order in orders.items()
                if k < len(order)
            }
            for k in range(max(map(len, orders.values()), default=0))
        ]

    def tell_warm_up(self, n_replays: int, report: Report) -> None:
        """Take in the times of untimed runs so far, and who failed in them."""
        self._add_report(n_replays, report)
        for name, site in self._sites.items():
            site.warm_ups.update(report.times.get(name, {}))
            site.drop(reasons(report.failures.get(name, {})))

    def is_enough(self, sites: Collection[str]) -> bool:
        """True if the budget is spent and each of these sites has a candidate that has had its
        warm-up.
        """
        return self.is_spent and all(
            set(self._sites[name].alive()) & self._sites[name].warm_ups.keys() for name in sites
        )

    def end_warm_up(self, sites: Collection[str]) -> None:
        """Go on to the race of these sites, with the candidates whose warm-ups took no multiple of
        the best one's.
        """
        for name in sites:
            self._sites[name].end_warm_up(self._why_spent if self.is_spent else "")

    # -- the race ----------------------------------------------------------------------------------

    def batch(self) -> list[Replay]:
        """The next replays; none if all sites have a winner.

        Nothing is decided within a batch, so it costs one meeting.
        """
        self._began_s = self._elapsed_s if self._began_s is None else self._began_s
        if self.is_spent:
            for site in self._sites.values():
                if not site.is_barren:
                    site.stop(self._why_spent)
        self._advance()
        replays = self._queued()
        return replays[: self.n_next(replays)]

    def tell(self, n_replays: int, report: Report) -> None:
        """Take in the reduced report of a batch. Times are totals and replace older ones."""
        self.n_replays += n_replays
        self._replays_s += report.batch_s
        self._add_report(n_replays, report)
        n_spare = int(self.spare_s * self.n_replays / self._replays_s) if self._replays_s > 0 else 0
        for name, site in self._sites.items():
            site.n_spare = n_spare
            site.is_unclear |= name in report.unclear
            site.tell(n_replays if name in self._running else 0, report.times.get(name, {}))
            site.drop(reasons(report.failures.get(name, {})))

    def _add_report(self, n_replays: int, report: Report) -> None:
        """Take in seconds, and who is launched inside whom."""
        if n_replays and report.batch_s > 0:
            self._latest_s = report.batch_s / n_replays
        self._elapsed_s = max(self._elapsed_s, report.elapsed_s)
        for site, functions in report.nesting.items():
            for function, candidates in functions.items():
                if function != site:
                    self._nesting.setdefault(site, {}).setdefault(function, set()).update(
                        candidates
                    )

    def _advance(self) -> None:
        """Let the sites whose turn it is come to their next replays, and then the next ones, until
        some have replays to run.
        """
        before: Collection[str] | None = None
        while (turn := self._next_turn()) != before:
            before = turn
            for name in turn:
                self._sites[name].advance()
                if self._is_half_spent and any(
                    self._sites[function].stage != "done" for function in self._around(name)
                ):
                    self._sites[name].end(_HALF_SPENT)
            if self.is_final:
                self._begin_round()
            if any(self._sites[name].queue for name in turn):
                return

    def _queued(self) -> list[Replay]:
        queues = {name: queue for name in self._turn if (queue := self._sites[name].queue)}
        doubtful = [
            name
            for name, queue in queues.items()
            if queue[0].candidate in self._sites[name].suspects
        ]
        # Suspects wait until no other site has trials left, and then for their turn.
        for name in doubtful if len(doubtful) < len(queues) else doubtful[1:]:
            del queues[name]
        self._running = queues.keys()
        # A rung lasts as long as its longest site; an exhaustive search goes on with the winner of
        # the site that is through.
        n_replays = (min if self._plan.search == "exhaustive" else max)(
            map(len, queues.values()), default=0
        )
        others = {
            name: Trial(best, is_timed=False)
            for name, site in self._sites.items()
            if (best := site.best) is not None
        }
        others |= {name: Trial(i, is_timed=False) for name, i in self._fixed.items()}
        return [
            others | {name: queue[k] for name, queue in queues.items() if k < len(queue)}
            for k in range(n_replays)
        ]

    def _begin_round(self) -> None:
        waiting = [
            each
            for name in self._turn
            if (each := self._sites[name]).stage == "finals" and not each.queue
        ]
        lengths = [site.round_length() for site in waiting]
        for site, own in zip(waiting, lengths, strict=True):
            site.begin_round(max(lengths) if own else 0)

    # -- turns -------------------------------------------------------------------------------------

    def _next_turn(self) -> Collection[str]:
        """Find out whose turn it is.

        A site waits for what is launched inside it; a launch that no config makes any more is none.
        """
        around = {name: self._around(name) for name in self._sites}
        racing = [name for name, site in self._sites.items() if site.stage != "done"]
        ready = [name for name in racing if not any(name in around[other] for other in racing)]
        latest, self._fixed = self._fixed, {}
        if nested := [name for name in ready if around[name]]:
            # What is under way goes on.
            first = min(nested, key=lambda name: name not in self._beside)
            latest |= self._beside.get(first, {})
            runs = {
                name: best for name, site in self._sites.items() if (best := site.best) is not None
            }
            runs |= {
                function: self._fixed_one(function, launching, latest.get(function))
                for function, launching in around[first].items()
            }
            for name in nested:
                if any(runs[function] in launching for function, launching in around[name].items()):
                    setting = {function: runs[function] for function in around[name]}
                    self._fixed |= setting
                    self._begins_anew(name, setting)  # where what was fixed has failed
                else:
                    ready.remove(name)
        elif not racing and not self.is_spent:  # inside once more, from the outermost
            for n_around in sorted({len(functions) for functions in around.values() if functions}):
                settings = {
                    name: {f: i for f, (i, *_) in each.items()}
                    for name, each in around.items()
                    if len(each) == n_around
                }
                if ready := [
                    name for name, setting in settings.items() if self._begins_anew(name, setting)
                ]:
                    break
        self._turn = ready
        return ready

    def _around(self, name: str) -> dict[str, list[int]]:
        """Functions around a site -> those of their candidates that launch it, and may run: once a
        function is done, its winner alone.
        """
        found = {}
        for function, launching in self._nesting.get(name, {}).items():
            if (site := self._sites.get(function)) is not None:
                candidates = site.alive() if site.stage != "done" else [site.best]
                found[function] = [i for i in candidates if i in launching and i is not None]
        return {function: candidates for function, candidates in found.items() if candidates}

    def _fixed_one(self, function: str, candidates: Sequence[int], latest: int | None) -> int:
        """The one beside which the rest races: the latest again, or the fastest by its warm-up, a
        suspect last.
        """
        site = self._sites[function]
        ms = {i: times.kernel_ms for i, times in site.warm_ups.items()}
        return min(candidates, key=lambda i: (i != latest, i in site.suspects, ms.get(i, inf), i))

    def _begins_anew(self, name: str, setting: dict[str, int]) -> bool:
        """Note what runs around a site from now on; true if it has raced beside something else, and
        races anew.
        """
        before, self._beside[name] = self._beside.get(name, setting), setting
        is_other = any(setting.get(function, i) != i for function, i in before.items())
        if is_other and self._sites[name].begin_anew():
            self.begun_anew.add(name)
            return True
        return False

    # -- seconds -----------------------------------------------------------------------------------

    def expect(self, run_s: float) -> None:
        """Take in the time of a run that may have compiled: replays may be as long, until one has
        been timed.
        """
        if self._latest_s == 0.0 and run_s >= LONG_S:
            self._latest_s = inf

    def n_next(self, replays: Sequence[Replay]) -> int:
        """Replays of a list to run before the next meeting: all if they are short, so many that a
        budget is kept otherwise.
        """
        # Up to the first that runs a suspect; that one alone, because the next one needs a meeting
        # before it.
        doubtful = (
            k
            for k, replay in enumerate(replays)
            if any(t.candidate in self._sites[name].suspects for name, t in replay.items())
        )
        expected_s = [
            self._expected_s(replay) for replay in replays[: max(1, next(doubtful, len(replays)))]
        ]
        budget_s = self._plan.budget_s
        if budget_s is None and sum(expected_s) < LONG_S * len(expected_s):
            return len(expected_s)
        allowed_s = BATCH_S if budget_s is None else min(BUDGET_BATCH_S, budget_s - self._elapsed_s)
        n_next = 0
        while n_next < len(expected_s) and (allowed_s := allowed_s - expected_s[n_next]) >= 0:
            n_next += 1
        return min(max(1, n_next), len(expected_s))

    def _expected_s(self, replay: Replay) -> float:
        """Seconds of a replay by what is known of its candidates, or of the replays before."""
        known_ms = [self._sites[name].known_ms(trial.candidate) for name, trial in replay.items()]
        return max(self._latest_s if ms is None else ms / 1e3 for ms in known_ms)

    @property
    def _is_half_spent(self) -> bool:
        """True if half of the budget that the race had at its beginning is spent: the other half is
        for functions that wait.
        """
        began_s = self._began_s or 0.0
        return (
            self._plan.budget_s is not None
            and self._elapsed_s - began_s >= (self._plan.budget_s - began_s) / 2
        )

    @property
    def _why_spent(self) -> str:
        return f"not raced: the budget of {self._plan.budget_s:g} s was spent"
