"""One problem of a tuning script, from its search space to its best config, in rounds.

A round is a tuning of its own (a ``Tuning``): some configs that the strategy proposes, against the best so far. Rounds take about
``_ROUND_S``, so that no more than that is lost when the process ends; the journal says what came of each. Knows the order of things; which
configs are tried is the strategy's, what a run is the script's, who decides the ranks'.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from dist_tune.compiler import Compiler, n_compile_threads
from dist_tune.configs import describe
from dist_tune.distributed import Ranks
from dist_tune.errors import CommunicatesError, NoValidConfigError, StuckDeviceError, reasons
from dist_tune.measure import is_interpreted, measure
from dist_tune.offline.journal import Journal, Progress, forget
from dist_tune.offline.lockstep import Lockstep
from dist_tune.offline.problem import Outcome, Problem, SearchOptions, journal_path
from dist_tune.offline.runs import RunLaunch, Runs
from dist_tune.offline.search_space import launchable
from dist_tune.offline.signals import raising_on_termination
from dist_tune.runtime import DryRun, TalkedError, compile_ahead, dry_run
from dist_tune.search import Plan, Strategy, make_strategy
from dist_tune.settings import Settings
from dist_tune.tuning import Tuning, TuningOptions, is_fatal, no_valid_config

if TYPE_CHECKING:
    import loguru

_ROUND_S = 10.0
"""Length of a round that is aimed at."""
_N_REPEAT = 3
"""Timed runs of the best few of a round, at most: the comparison at the end has as many as were asked for."""
_N_PLAYOFF = 8
"""Of all rounds, the best so many are compared at the end."""


class Tuner:
    """The tuning of one problem. Collective, if ``ranks`` is a group: every rank makes it and runs it."""

    def __init__(
        self, problem: Problem, compile_cost: SearchOptions, ranks: Ranks, settings: Settings, log: loguru.Logger, *, start: float = 0.0,
        watches: bool = False, keeps: bool = False, ordinal: int = 0,
    ) -> None:  # fmt: skip
        """``start``: where in its space this rank begins; ``watches``: no run may communicate; ``keeps`` the journal at the end."""
        self._keeps = keeps
        self._problem, self._compile_cost, self._ranks, self._settings, self._log = problem, compile_cost, ranks, settings, log
        self._configs, _ = launchable(problem.search_space)
        self.journal_path, self._identity = journal_path(problem, compile_cost, len(ranks.members), settings, ordinal)
        self._texts = [describe(config) for config in self._configs]
        self._runs = Runs(problem.make_run_and_gt_fn, self._configs, problem.config_callback)
        self._strategy: Strategy = make_strategy(compile_cost.search, self._configs, compile_cost.max_configs, compile_cost.seed, start)
        self._lockstep = Lockstep(problem.name, ranks)
        self._is_alone = ranks.is_alone
        self._watches = watches
        self._has_kernels: bool | None = None if self._is_alone and (watches or not is_interpreted()) else False
        """Whether runs launch Triton's kernels; None while that is not known."""
        self._progress = Progress()
        self._began = time.monotonic()
        self._n_resumed = 0
        self._last_error: Exception | None = None

    def tune(self) -> Outcome:
        """Search, and return the best.

        Raises:
            NoValidConfigError: nothing in the space runs and answers rightly.
            CommunicatesError: a run talks to other ranks, and must not.
            Exception: what a session raises.
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
            journal.close(delete=is_over and not self._keeps)
            self._runs.drop()
            self._problem.release()

    def _search(self, journal: Journal) -> int:
        told = self._progress
        self._strategy.tell(told.latencies_ms, {**told.failures, **told.quarantined})
        told.failures |= told.quarantined
        self._n_resumed = len(told.latencies_ms) + len(told.failures)
        if self._n_resumed:
            self._say(f"goes on with {self._n_resumed} of {self._strategy.n_planned} configs tried before")
        for i, reason in told.quarantined.items():
            self._log.warning(f'problem={self._problem.name} candidate={i} dropped: {reason} config="{self._texts[i]}"')
        suspects = [i for i in told.strikes if i not in told.failures and i not in told.latencies_ms]
        n = 2 if self._has_kernels is False else max(2, n_compile_threads(1))
        is_done = told.is_done and told.budget_s in (None, self._compile_cost.budget_s)
        budget_s = told.budget_s if is_done else None
        while not is_done:
            elapsed_s, n = self._lockstep.round(time.monotonic() - self._began, min(n, self._runs.capacity - 1))
            if self._compile_cost.budget_s is not None and elapsed_s > self._compile_cost.budget_s and told.incumbent is not None:
                self._say(f"stops after {elapsed_s:.0f} s, its budget")
                budget_s = self._compile_cost.budget_s
                break
            proposed = self._lockstep.proposal(self._strategy.propose(n))
            new = [i for i in proposed if i not in suspects and i != told.incumbent]
            if proposed and not new:
                continue
            # Suspects last, and one by one: should the process end again, it is known of which.
            new = new or suspects[:1]
            del suspects[: not proposed]
            if not new:
                break
            began = time.monotonic()
            self._round(new, journal)
            self._show()
            seconds = time.monotonic() - began
            n = round(len(new) * min(2.0, max(0.5, self._round_s(elapsed_s + seconds) / max(seconds, 1e-3)))) or 1
        if told.incumbent is None:
            raise NoValidConfigError(no_valid_config(self._problem.name, self._texts, told.failures, "here")) from self._last_error
        if not is_done and self._compile_cost.search != "exhaustive":
            self._play_off(journal)
        journal.finish(told.incumbent, budget_s)
        return told.incumbent

    def _round_s(self, elapsed_s: float) -> float:
        left_s = _ROUND_S if self._compile_cost.budget_s is None else self._compile_cost.budget_s - elapsed_s
        return max(0.5, min(_ROUND_S, left_s))

    def _round(self, new: list[int], journal: Journal) -> None:
        """Tune the champion and new configs."""
        told = self._progress
        journal.begin(new)
        failures = self._compile(new) if self._has_kernels is not False else {}
        alive = [i for i in new if i not in failures]
        for i, reason in failures.items():
            self._log.warning(f'problem={self._problem.name} candidate={i} dropped: {reason} config="{self._texts[i]}"')
        winner, latencies_ms = told.incumbent, dict[int, float]()
        if alive:
            rivals = alive if told.incumbent is None else [told.incumbent, *alive]
            winner, latencies_ms, more = self._compete(rivals, min(_N_REPEAT, self._compile_cost.num_iters))
            failures |= more
        self._note(journal, winner, latencies_ms, failures)
        self._strategy.tell({i: ms for i, ms in latencies_ms.items() if i in new}, failures)

    def _note(self, journal: Journal, winner: int | None, latencies_ms: dict[int, float], failures: dict[int, str]) -> None:
        """What came of a round, for now and for later."""
        told = self._progress
        told.latencies_ms |= latencies_ms
        told.failures |= failures
        if winner is None or winner in told.failures:  # it ran before, and does no more
            running = {i: ms for i, ms in told.latencies_ms.items() if i not in told.failures}
            winner = min(running, key=lambda i: (running[i], i), default=None)
        told.incumbent = winner
        journal.end(latencies_ms, failures, winner)

    def _play_off(self, journal: Journal) -> None:
        """Compare the best of all rounds, most of which were never in one."""
        told = self._progress
        times = {i: ms for i, ms in told.latencies_ms.items() if i not in told.failures}
        best = sorted(times, key=lambda i: (i != told.incumbent, times[i], i))[:_N_PLAYOFF]
        if len(best) > 1:
            self._note(journal, *self._compete(best, self._compile_cost.num_iters))

    def _compete(self, candidates: list[int], n_repeat: int) -> tuple[int | None, dict[int, float], dict[int, str]]:
        """One session: the winner, times and failures of these candidates; no winner if none runs."""
        is_table = self._compile_cost.search == "exhaustive"
        # Cold, also in the finals: times of all rounds are to be compared. The run is all there is, so its clock is the kernel's.
        plan = Plan(
            n_warmup=1, n_repeat=self._compile_cost.num_iters if is_table else n_repeat, objective="kernel", is_cold=True,
            search="exhaustive" if is_table else "racing",
        )  # fmt: skip
        tolerances = self._compile_cost.atol, self._compile_cost.rtol
        launch = RunLaunch(
            self._problem.name, self._runs, self._texts, candidates, *tolerances, is_alone=self._is_alone, is_watched=self._watches
        )
        quiet = self._settings.model_copy(update={"progress": False})
        tuning = Tuning(self._problem.name, self._ranks.next_call(self._problem.name), self._ranks, TuningOptions(plan), quiet)
        site = tuning.meet(launch)
        try:
            tuning.tune(partial(tuning.missed, launch))
        except NoValidConfigError:
            why = tuning.failures(site.label) or reasons(site.failures)  # of the very first run, before there is a search
            self._last_error = site.last_error
            return None, {}, {i: why.get(k, "did not run") for k, i in enumerate(candidates)}
        except TalkedError as error:
            raise CommunicatesError(self._refusal(str(error))) from error
        record = tuning.records[0]
        found = dict(zip(candidates, record.candidates, strict=True))
        failures = {i: each.failure for i, each in found.items() if each.failure is not None}
        times = {i: each.latency_ms for i, each in found.items() if each.latency_ms is not None}
        winner = candidates[record.winner]
        if winner not in times and self._is_alone:  # where one runs there is no race
            times[winner] = measure(self._runs.get(winner).run, num_iters=self._compile_cost.num_iters).median_us / 1e3
        return winner, times, failures

    def _compile(self, candidates: list[int]) -> dict[int, str]:
        """Compile what the runs of these will launch; returns those that cannot be launched, and why."""
        planned: list[tuple[int, DryRun]] = []
        for i in candidates:
            try:
                dry = dry_run(self._runs.get(i).run, is_watched=self._watches)
            except Exception as error:  # noqa: BLE001  # without results anything may go wrong; if it does with them, that will be a vote
                self._log.debug(f"problem={self._problem.name} candidate={i} is not compiled ahead: {type(error).__name__}: {error}")
                continue
            if dry.talks:
                raise CommunicatesError(self._refusal(dry.talks))
            if not dry.launches and self._has_kernels is None:
                self._has_kernels = False  # nothing to compile, and a dry run is a run
                return {}
            self._has_kernels = True
            planned.append((i, dry))
        compiler = Compiler(n_compile_threads(1), self._settings.deadline_s)
        try:
            return {i: failure.reason for i, failure in compile_ahead(planned, compiler)}
        finally:
            compiler.close()

    def _refusal(self, how: str) -> str:
        return (
            f"{self._problem.name}: its run communicates with other ranks ({how}), so one rank cannot tune it alone: the others would "
            f'not take part. Use mode="merge", in which all ranks tune one problem together.'
        )

    def _journal(self) -> Journal:
        """This problem's journal, kept by the first rank; what it says is known to all."""
        if self._lockstep.is_first and self._settings.always_tune:
            forget(self.journal_path)
        journal = Journal(self.journal_path if self._lockstep.is_first else None, self._identity)
        self._progress = self._lockstep.progress(self._problem.digest, journal.progress)
        return journal

    def _outcome(self, winner: int) -> Outcome:
        told = self._progress
        latencies_us = {i: ms * 1e3 for i, ms in told.latencies_ms.items() if i not in told.failures}
        outcome = Outcome(
            self._problem.name, winner, latencies_us.get(winner, float("nan")), latencies_us, dict(told.failures), len(self._configs),
            time.monotonic() - self._began, self._n_resumed,
        )  # fmt: skip
        self._say(f'{outcome.latency_us:.1f} us, {len(latencies_us)} measured, {len(told.failures)} dropped: "{self._texts[winner]}"')
        return outcome

    def _show(self) -> None:
        told, n_planned = self._progress, self._strategy.n_planned
        n_tried = min(n_planned, len(told.latencies_ms) + len(told.failures))
        elapsed_s = time.monotonic() - self._began
        left_s = elapsed_s / max(1, n_tried - self._n_resumed) * (n_planned - n_tried)
        if self._compile_cost.budget_s is not None:
            left_s = max(0.0, min(left_s, self._compile_cost.budget_s - elapsed_s))
        best = "" if told.incumbent not in told.latencies_ms else f", best {told.latencies_ms[told.incumbent] * 1e3:.1f} us"
        self._say(f"{n_tried} of {n_planned} configs{best}, {elapsed_s:.0f} s, about {left_s:.0f} s to go")

    def _say(self, text: str) -> None:
        self._log.bind(progress=True).info(f"{self._problem.name}: {text}")
