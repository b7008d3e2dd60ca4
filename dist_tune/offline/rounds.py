"""One round of a problem: its candidates are compiled ahead and then raced.

Each round is a ``Tuning`` of its own, not a step of one race with prior times: a ``Tuning`` exchanges, hashes and logs every candidate of
its list, which would make each round O(space), up to 22,500 configs. Prior times would not shorten the list, because untried candidates
have none. Indices of a round are translated to those of the space in ``Rounds.race`` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dist_tune.compiler import Compiler, n_compile_threads
from dist_tune.distributed import Ranks
from dist_tune.errors import CommunicatesError, NoValidConfigError, reasons
from dist_tune.measure import is_interpreted, measure
from dist_tune.offline.journal import Progress
from dist_tune.offline.problem import Problem, SearchOptions
from dist_tune.offline.runs import RunLaunch, Runs
from dist_tune.runtime import RecordedLaunch, TalkedError, compile_ahead, dry_run
from dist_tune.search import Plan
from dist_tune.settings import Settings
from dist_tune.tuning import Tuning, TuningOptions
from dist_tune.watch import limited

if TYPE_CHECKING:
    from dist_tune.output import Logger

_N_REPEAT = 3
"""Timed runs of each finalist of a round, at most; the finals over all rounds have as many as were asked for."""


@dataclass(frozen=True, slots=True)
class TunerContext:
    """Ranks, settings and log of a tuner, and its part in the job."""

    ranks: Ranks
    settings: Settings
    log: Logger
    start: float = 0.0
    """Place in the order of configs at which this rank begins, from 0 to 1."""
    refuses_talk: bool = False
    """Runs that communicate with other ranks are an error."""
    keeps_journal: bool = False
    """The journal stays when the problem is tuned: the job deletes it."""
    ordinal: int = 0
    """Number among tunings of one name in this process."""

    def say(self, text: str) -> None:
        """Log a line that is also shown as progress."""
        self.log.bind(progress=True).info(text)


class Rounds:
    """The rounds of one problem. Collective, if the ranks are a group. Results are by index in the space."""

    def __init__(self, problem: Problem, options: SearchOptions, context: TunerContext, runs: Runs) -> None:
        self.last_error: Exception | None = None
        self._name, self._options, self._context, self._runs = problem.name, options, context, runs
        self._is_alone = context.ranks.is_alone
        self._has_kernels: bool | None = None if self._is_alone and (context.refuses_talk or not is_interpreted()) else False
        """Runs launch Triton's kernels, to be compiled ahead; None while that is not known."""

    @property
    def n_first(self) -> int:
        """Candidates of a first round."""
        return 2 if self._has_kernels is False else max(2, n_compile_threads(1))

    def run(self, new: list[int], incumbent: int | None) -> Progress:
        """Race new candidates against the incumbent; the result has the new one, None if none of them runs."""
        failures = self._compile(new) if self._has_kernels is not False else {}
        for i, reason in failures.items():
            self.log_drop(i, reason)
        alive = [i for i in new if i not in failures]
        if not alive:
            return Progress(failures=failures, incumbent=incumbent)
        result = self.race(alive if incumbent is None else [incumbent, *alive], min(_N_REPEAT, self._options.num_iters))
        result.failures |= failures
        return result

    def race(self, indices: list[int], n_repeat: int) -> Progress:
        """Race these candidates."""
        options, context = self._options, self._context
        is_table = options.search == "exhaustive"
        # Cold also in finals, because times of all rounds are compared. The closure is the run: the kernel's clock is enough.
        plan = Plan(
            n_warmup=1, n_repeat=options.num_iters if is_table else n_repeat, search="exhaustive" if is_table else "racing",
            objective="kernel", is_cold=True,
        )  # fmt: skip
        launch = RunLaunch(
            self._name, self._runs, indices, (options.atol, options.rtol), is_alone=self._is_alone, is_watched=context.refuses_talk
        )
        quiet = context.settings.model_copy(update={"verbosity": "quiet"})
        tuning = Tuning(self._name, context.ranks, TuningOptions(plan), quiet)
        site = tuning.meet(launch)
        try:
            tuning.tune(partial(tuning.missed, launch), None)
        except NoValidConfigError:
            why = tuning.failures(site.label) or reasons(site.failures)  # of the very first run, before there is a race
            self.last_error = site.last_error
            return Progress(failures={i: why.get(k, "did not run") for k, i in enumerate(indices)})
        except TalkedError as error:
            raise self._refusal(str(error)) from error
        record = tuning.records[0]
        found = dict(zip(indices, record.candidates, strict=True))
        times = {i: each.latency_ms for i, each in found.items() if each.latency_ms is not None}
        winner = indices[record.winner]
        if winner not in times and self._is_alone:  # there is no race where one candidate runs
            times[winner] = measure(self._runs.get(winner).run, num_iters=options.num_iters).median_us / 1e3
        return Progress(times, {i: each.failure for i, each in found.items() if each.failure is not None}, winner)

    def log_drop(self, index: int, reason: str) -> None:
        """Log why a candidate is dropped before it runs."""
        text = self._runs.candidates[index].text
        self._context.log.warning(f'problem={self._name} candidate={index} dropped: {reason} config="{text}"')

    def _compile(self, indices: list[int]) -> dict[int, str]:
        """Compile what runs of these candidates will launch; returns those that cannot be launched, with the reason."""
        context, texts = self._context, self._runs.candidates
        launches: list[RecordedLaunch] = []
        for i in indices:
            try:
                run = self._runs.get(i).run
                with limited(
                    context.ranks, context.settings, context.log, f'the dry run of candidate {i} "{texts[i].text}" of {self._name}'
                ):
                    found = dry_run(run, i, is_watched=context.refuses_talk)
            except TalkedError as error:
                raise self._refusal(str(error)) from error
            except Exception as error:  # noqa: BLE001  # no vote: without results a run may fail; where it fails with them, that is one
                self._context.log.debug(f"problem={self._name} candidate={i} is not compiled ahead: {type(error).__name__}: {error}")
                continue
            if not found and self._has_kernels is None:
                self._has_kernels = False  # nothing to compile, and a dry run takes as long as a run
                return {}
            self._has_kernels = True
            launches += found
        compiler = Compiler(n_compile_threads(1), self._context.settings.deadline_s)
        try:
            return {i: failure.reason for i, failure in compile_ahead(launches, compiler)}
        finally:
            compiler.close()

    def _refusal(self, how: str) -> CommunicatesError:
        return CommunicatesError(
            f"{self._name}: its run communicates with other ranks ({how}), so one rank cannot tune it alone: the others would not take "
            f'part. Use mode="merge", in which all ranks tune one problem together.'
        )
