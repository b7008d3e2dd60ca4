"""One problem of a tuning script, from its search space to its best config, in rounds.

A round races some configs, which the strategy proposes, against the incumbent. Rounds take about ``_ROUND_S``, so that no more than that is
lost when the process ends; the journal holds their results. Knows the order of rounds, on which ranks agree between them; the strategy
chooses configs, rounds.py runs them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from dist_tune.distributed import Part, Reduction, Result
from dist_tune.errors import NoValidConfigError, RankMismatchError, StuckDeviceError
from dist_tune.offline.journal import Journal, Progress, forget, raising_on_termination
from dist_tune.offline.problem import Outcome, Problem, SearchOptions, journal_place
from dist_tune.offline.rounds import Rounds, TunerContext
from dist_tune.offline.runs import Runs
from dist_tune.offline.search_space import launchable
from dist_tune.output import printable
from dist_tune.search import make_strategy
from dist_tune.sites import is_fatal, no_valid_config
from dist_tune.warn_once import warn_once

_ROUND_S = 10.0
"""Aimed length of a round."""
_N_FINALISTS = 8
"""Best configs of all rounds that are compared at the end."""


class Tuner:
    """The tuning of one problem. Collective, if the ranks of ``context`` are a group: every rank makes it and runs it."""

    def __init__(self, problem: Problem, options: SearchOptions, context: TunerContext) -> None:
        self._problem, self._options, self._context = problem, options, context
        configs, _ = launchable(problem.search_space)
        n_ranks = len(context.ranks.members)
        self._place = journal_place(problem, options, n_ranks, context.settings, context.ordinal)
        self.journal_path = self._place.path
        if not context.ranks.is_first:  # for deaths of this rank
            self.journal_path = self.journal_path.with_name(f"{self.journal_path.stem}-rank-{context.ranks.rank}.jsonl")
        self._strategy = make_strategy(options.search, configs, options.max_configs, options.seed, context.start)
        self._runs = Runs(problem.make_run_and_gt_fn, configs, problem.config_callback)
        self._rounds = Rounds(problem, options, context, self._runs)
        self._progress = Progress()
        self._began = time.monotonic()
        self._n_resumed = 0

    def tune(self) -> Outcome:
        """Search, and return the result.

        Raises:
            NoValidConfigError: no config of the space runs and gives the right result.
            CommunicatesError: a run talks to other ranks, and must not.
            RankMismatchError: ranks have different configs.
        """
        journal = self._journal()
        is_over = False
        try:
            with raising_on_termination():
                outcome = self._outcome(self._search(journal))
            is_over = True
            return outcome
        except BaseException as error:
            if not (isinstance(error, StuckDeviceError) or is_fatal(error)):
                journal.stop()
            is_over = isinstance(error, NoValidConfigError)
            raise
        finally:
            journal.close(delete=is_over and not self._context.keeps_journal)
            self._runs.drop()
            self._problem.release()

    def _journal(self) -> Journal:
        """This problem's journal on this rank; all ranks get the progress of the first one's, and the deaths of all."""
        is_first = self._context.ranks.is_first
        if self._context.settings.always_tune:
            forget(self.journal_path)
        n_candidates = len(self._runs.candidates)
        journal = Journal(self.journal_path, self._place.identity, n_candidates, self._place.values)
        if is_first and journal.is_new and not self._context.settings.always_tune and (names := self._place.differences()) is not None:
            warn_once(
                f"{printable(self._problem.name)} is tuned anew: its journal in {self.journal_path.parent} is of other measurements, and "
                f"differs in {printable(', '.join(names[:5]) or 'its first line')}. For an interrupted tuning to go on, the functions of a "
                f"problem must see no value that differs between ranks or attempts, such as a rank"
            )
        mine = journal.progress.to_json() if is_first else ""
        strikes = dict(journal.progress.strikes)
        differing, progress, strikes = self._reduce("journal", (self._problem.digest, mine, strikes), _same)
        if differing:
            raise RankMismatchError(
                f"{self._problem.name}: ranks {differing} have other configs for it than rank {self._context.ranks.members[0]}. Build the "
                f"search space from values that are equal on all ranks."
            )
        self._progress = Progress.from_json(progress)
        self._progress.strikes = Counter(strikes)
        journal.note_strikes(strikes)
        return journal

    def _reduce(self, topic: str, part: Part, fn: Reduction[Part, Result]) -> Result:
        """A meeting between rounds, so that all ranks make the same ones. Collective."""
        ranks, name = self._context.ranks, self._problem.name
        with ranks.meeting(f"{name}: {topic}"):
            return ranks.reduce(topic, part, fn)

    def _search(self, journal: Journal) -> int:
        progress, options = self._progress, self._options
        quarantined = progress.quarantined
        self._strategy.tell(progress.latencies_ms, {**progress.failures, **quarantined})
        progress.failures |= quarantined
        self._n_resumed = progress.n_tried
        if self._n_resumed:
            self._say(f"goes on with {self._n_resumed} of {self._strategy.n_planned} configs tried before")
        for i, reason in quarantined.items():
            self._rounds.log_drop(i, reason)
        if progress.is_done and progress.budget_s in (None, options.budget_s):
            budget_s = progress.budget_s
        else:
            budget_s = self._run_rounds(journal)
            if options.search != "exhaustive":
                self._finals(journal)
        if progress.incumbent is None:
            texts = [each.text for each in self._runs.candidates]
            raise NoValidConfigError(no_valid_config(self._problem.name, texts, progress.failures, "here")) from self._rounds.last_error
        journal.finish(progress.incumbent, budget_s)
        return progress.incumbent

    def _run_rounds(self, journal: Journal) -> float | None:
        """Race the configs that the strategy proposes, and then the suspects; returns the budget, if that ended the search."""
        progress, budget_s, n = self._progress, self._options.budget_s, self._rounds.n_first
        suspects = [i for i in progress.strikes if i not in progress.failures and i not in progress.latencies_ms]
        while True:
            elapsed_s, n = self._reduce("round", (time.monotonic() - self._began, min(n, self._runs.capacity - 1)), _slowest)
            if budget_s is not None and elapsed_s > budget_s and progress.incumbent is not None:
                self._say(f"stops after {elapsed_s:.0f} s, its budget")
                return budget_s
            proposed = self._reduce("proposal", self._strategy.propose(n), _first)  # a model's answer may depend on a machine's last bit
            new = [i for i in proposed if i not in suspects and i != progress.incumbent]
            if proposed and not new:
                continue
            if not proposed:  # suspects last, and one by one: if the process ends again, the cause is known
                new, suspects = suspects[:1], suspects[1:]
            if not new:
                return None
            began = time.monotonic()
            journal.begin(new)
            result = self._rounds.run(new, progress.incumbent)
            self._progress.add(result)
            journal.end(result.latencies_ms, result.failures, self._progress.incumbent)
            self._strategy.tell({i: ms for i, ms in result.latencies_ms.items() if i in new}, result.failures)
            self._show()
            seconds = time.monotonic() - began
            left_s = _ROUND_S if budget_s is None else budget_s - elapsed_s - seconds
            n = round(len(new) * min(2.0, max(0.5, max(0.5, min(_ROUND_S, left_s)) / max(seconds, 1e-3)))) or 1

    def _finals(self, journal: Journal) -> None:
        """Race the best of all rounds, most of which never met in one."""
        times = self._progress.valid_ms
        best = sorted(times, key=lambda i: (i != self._progress.incumbent, times[i], i))[:_N_FINALISTS]
        if len(best) > 1:
            result = self._rounds.race(best, self._options.num_iters)
            self._progress.add(result)
            journal.end(result.latencies_ms, result.failures, self._progress.incumbent)

    def _outcome(self, winner: int) -> Outcome:
        progress = self._progress
        latencies_us = {i: ms * 1e3 for i, ms in progress.valid_ms.items()}
        best = self._runs.candidates[winner].text
        outcome = Outcome(
            self._problem.name, winner, latencies_us.get(winner, float("nan")), latencies_us, dict(progress.failures),
            n_configs=len(self._runs.candidates), seconds=time.monotonic() - self._began, n_resumed=self._n_resumed,
        )  # fmt: skip
        self._say(f'{outcome.latency_us:.1f} us, {len(latencies_us)} measured, {len(progress.failures)} dropped: "{best}"')
        return outcome

    def _show(self) -> None:
        progress, n_planned = self._progress, self._strategy.n_planned
        n_tried = min(n_planned, progress.n_tried)
        elapsed_s = time.monotonic() - self._began
        left_s = elapsed_s / max(1, n_tried - self._n_resumed) * (n_planned - n_tried)
        if self._options.budget_s is not None:
            left_s = max(0.0, min(left_s, self._options.budget_s - elapsed_s))
        best = "" if progress.incumbent not in progress.latencies_ms else f", best {progress.latencies_ms[progress.incumbent] * 1e3:.1f} us"
        self._say(f"{n_tried} of {n_planned} configs{best}, {elapsed_s:.0f} s, about {left_s:.0f} s to go")

    def _say(self, text: str) -> None:
        self._context.say(f"{self._problem.name}: {text}")


@Reduction
def _slowest(parts: Mapping[int, tuple[float, int]]) -> tuple[float, int]:
    """Seconds on the slowest rank, and configs of the next round on the rank that can hold fewest."""
    return max(elapsed_s for elapsed_s, _ in parts.values()), min(n for _, n in parts.values())


@Reduction
def _first(parts: Mapping[int, list[int]]) -> list[int]:
    return next(iter(parts.values()))


@Reduction
def _same(parts: Mapping[int, tuple[str, str, dict[int, int]]]) -> tuple[list[int], str, dict[int, int]]:
    """Ranks with another digest than the first, the progress of the rank that has one, and deaths by candidate, the most of any rank."""
    (first, *_), *_ = parts.values()
    strikes: dict[int, int] = {}
    for _, _, mine in parts.values():
        strikes |= {i: max(n, strikes.get(i, 0)) for i, n in mine.items()}
    return (
        [rank for rank, (digest, *_) in parts.items() if digest != first],
        next((each for _, each, _ in parts.values() if each), ""),
        strikes,
    )
