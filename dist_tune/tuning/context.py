"""The parts that the phases of one tuning share, and the meeting in which ranks reduce what each
brings.

Made once and never changed: a part changes by its own verbs alone. Collective throughout.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dist_tune.compiler import Compiler
from dist_tune.errors import CandidateFailure, FailureKind, Failures, reasons
from dist_tune.files import Told
from dist_tune.launches import Buckets
from dist_tune.log import Story
from dist_tune.ranks import Part, Ranks, Reduction, Result
from dist_tune.records import CacheLookup, Seconds, TuningRecord
from dist_tune.search import Guide, Plan, Race, Report, reduce_reports
from dist_tune.settings import Settings
from dist_tune.sites import Sites, none_left
from dist_tune.watch import Kind, Releases, check_release

if TYPE_CHECKING:
    from dist_tune.replays import Replayer

Closure = Callable[[], Any]
"""The user's function with the arguments of its call."""

REPORTS = Reduction(reduce_reports)


@dataclass(frozen=True, slots=True)
class TuningOptions:
    """The options of a decorator or a script."""

    plan: Plan
    reset: Callable[[], object] | None = None
    """Called before each replay but the first."""
    uses_cache: bool = False
    is_verbose: bool = False
    """True: lines from level INFO on go to the terminal, too."""
    told: Told = field(default_factory=Told)
    """Of the decorated object so far."""
    release: Releases = ()
    """Ends what waits for ever in a replay."""
    max_slowdown: float = 0.0
    """Share of its time that a job may take longer for being tuned online; 0: it is not."""
    buckets: Buckets | None = None
    """Of sizes in the keys of kernels."""

    def __post_init__(self) -> None:
        check_release(self.release)


@dataclass(frozen=True, slots=True)
class Entry:
    """A site in the race, as all ranks know it."""

    texts: list[str]
    """The candidates, described."""
    guide: Guide | None = None
    """Of a search that does not try all candidates at once."""
    n_warm_ups: int = 0
    """Untimed runs of each candidate before the race, of a function."""
    writers: set[int] = field(default_factory=set)
    """Ranks that write its record into their caches: one for each folder and key."""

    @property
    def untried(self) -> set[int]:
        """Candidates that the search has not come to."""
        return self.guide.untried if self.guide is not None else set()

    @property
    def tried(self) -> set[int]:
        """The others."""
        return set(range(len(self.texts))) - self.untried


@dataclass
class Expenses:
    """Seconds of a tuning, by phase and meeting."""

    seconds: Seconds = field(default_factory=Seconds)
    """By phase."""
    meetings: list[float] = field(default_factory=list)
    """Seconds of each meeting on this rank, waiting for others included."""
    began: float = field(default_factory=time.monotonic)
    search_began: float = field(default_factory=time.monotonic)
    """Monotonic clock, in seconds, at which all ranks had come: a budget is not spent by waiting
    for one of them.
    """
    _phase_began: float = field(default_factory=time.monotonic)

    def end_phase(self, name: str) -> None:
        """Book the time since the last phase ended."""
        now = time.monotonic()
        setattr(self.seconds, name, getattr(self.seconds, name) + now - self._phase_began)
        self._phase_began = now

    def total(self) -> Seconds:
        """All phases, the meetings in them, and the sum so far."""
        self.seconds.meetings = sum(self.meetings)
        self.seconds.total = time.monotonic() - self.began
        return self.seconds


@dataclass(frozen=True, slots=True)
class TuningContext:
    """One tuning on one rank."""

    name: str
    """The closure's, the same on all ranks."""
    ranks: Ranks
    options: TuningOptions
    story: Story
    race: Race
    sites: Sites
    compiler: Compiler
    lookup: CacheLookup
    replays: Replayer
    settings: Settings
    expenses: Expenses = field(default_factory=Expenses)
    entries: dict[str, Entry] = field(default_factory=dict)
    """Sites in the race, by label; the same on all ranks."""
    machine: Failures = field(default_factory=dict)
    """Site -> candidates dropped for what was no doing of theirs; the same on all ranks."""
    records: list[TuningRecord] = field(default_factory=list)
    """One for each site that has its config: from the cache, or tuned."""

    def reduce(
        self,
        topic: str,
        part: Part,
        fn: Reduction[Part, Result],
        *,
        is_gathering: bool = False,
        is_optional: bool = False,
    ) -> Result:
        """Bring a part to a meeting and take ``fn`` of all parts away, as ``Ranks.reduce`` does;
        the log has a line of it.
        """
        began = time.monotonic()
        self.replays.watchdog.at(f"the meeting {topic!r}", Kind.UNLIMITED)
        with self.replays.idle():
            reduced = self.ranks.reduce(
                topic, part, fn, is_gathering=is_gathering, is_optional=is_optional
            )
        self.replays.watchdog.at(f"work after the meeting {topic!r}")
        seconds = time.monotonic() - began
        self.expenses.meetings.append(seconds)
        self.story.debug(f"meeting={topic!r} seconds={seconds:.4f}")
        return reduced

    def reduce_reports(self, topic: str, report: Report) -> Report:
        """Bring a report to a meeting, with the seconds of the latest batch and of the search on
        this rank.

        Candidates that failed on some rank leave the race. What is no config's doing is noted, so
        that it is not kept. Variants without an end on one rank end the tuning on all.
        """
        elapsed_s, variants = (
            round(time.monotonic() - self.expenses.search_began, 4),
            self.replays.trials.variants,
        )
        batch_s = round(self.replays.batch_s, 4)
        report = replace(
            report,
            elapsed_s=elapsed_s,
            batch_s=batch_s,
            job=self.replays.account(),
            endless=variants.endless,
        )
        reduced = self.reduce(topic, report, REPORTS)
        self.replays.agree_on(reduced.job)
        variants.endless = reduced.endless
        self.sites.journal.dropped(reduced.failures)
        for label, failures in reduced.failures.items():
            if label in self.race:
                self.race[label].drop(reasons(failures))
            if found := {
                i: failure
                for i, failure in failures.items()
                if failure.kind in (FailureKind.MACHINE, FailureKind.CLOCK)
            }:
                self.machine.setdefault(label, {}).update(found)
        return reduced

    def check_alive(self) -> None:
        """Go on only if every site has a candidate left, and no rank's machine has failed half of
        them.

        Raises:
            NoValidConfigError: on all ranks, with the reasons.
            MachineError: on all ranks, if it was for the machine of one.
        """
        for label, entry in self.entries.items():
            race, machine = self.race[label], self.machine.get(label, {})
            is_none_left = race.best is None and not race.is_barren
            # What is left of half a search would win as the only one that runs.
            is_for_machine = 2 * sum(
                each.kind is FailureKind.MACHINE for each in machine.values()
            ) >= len(entry.texts)
            if is_none_left or is_for_machine:
                failures = {
                    i: CandidateFailure(FailureKind.LAUNCH, result.failure)
                    for i, result in enumerate(race.results())
                    if result.failure
                }
                site = self.sites.met.get(label)
                raise none_left(label, entry.texts, failures | machine, "on all ranks") from (
                    site.last_error if site is not None else None
                )
