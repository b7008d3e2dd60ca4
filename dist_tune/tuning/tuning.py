"""One tuning from the first miss to the settled winners: discover, compile, race, settle, and the meetings between.

Knows what happens in which order and nothing of how: launches are the sites', agreement is the ranks', choice is the
engine's. Ranks talk only between replays; what goes wrong inside a replay on this rank alone is told at the next meeting,
or posted as the end of the tuning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from dist_tune.cache import CacheLookup, Seconds, TuningRecord, environment
from dist_tune.compiler import Compiler, Placement, host_of_cache, n_compile_threads
from dist_tune.distributed import Ranks, Solo, is_secondary
from dist_tune.errors import DistTuneError, FailureKind, StoreGoneError, reasons
from dist_tune.log import tuning_log
from dist_tune.measure import RngState, device_clock, is_interpreted
from dist_tune.runtime import Tunable
from dist_tune.search import Plan, Race
from dist_tune.settings import Settings
from dist_tune.tuning.agreement import Agreement
from dist_tune.tuning.discovery import Discovery
from dist_tune.tuning.exclusive import one_at_a_time
from dist_tune.tuning.loading import Loader
from dist_tune.tuning.manifest import SiteManifest
from dist_tune.tuning.replays import RACE, Replayer, finals_of
from dist_tune.tuning.results import log_table, make_record
from dist_tune.tuning.site import check_alive, check_not_capturing
from dist_tune.tuning.sites import Sites
from dist_tune.tuning.warm_up import warm_up

NOT_RUN = object()
"""In place of a value, where the closure has not run yet."""


class Tuning:
    """The tuning of one call of a closure. Made where a call may tune, between replays or at the first miss."""

    def __init__(
        self, name: str, call: int, ranks: Ranks, plan: Plan, reset: Callable[[], object] | None, settings: Settings,
        *, uses_cache: bool = False, is_verbose: bool = False,
    ) -> None:  # fmt: skip
        self.records: list[TuningRecord] = []
        self.is_waived = False
        """Whether other ranks did not come although this one had nothing to tune: their calls differ from this rank's."""
        self._name = name
        self._call = call
        self._ranks = ranks
        self._plan = plan
        self._settings = settings
        self._seconds = Seconds()
        self._began = self._phase_began = time.monotonic()
        self._exit = ExitStack()
        self._exit.enter_context(ranks.short_timeouts())
        self._log = self._exit.enter_context(
            tuning_log(settings, ranks.rank, ranks.rank == (0 if isinstance(ranks, Solo) else ranks.members[0]), is_verbose=is_verbose)
        )
        self._search = Race(plan)
        self._struck: set[int] = set()
        self._in_finals = False
        self._texts: dict[str, list[str]] = {}
        self._keepers: dict[str, list[int]] = {}
        self._rng = RngState()
        self._placement = Placement(host_of_cache(), *ranks.neighbours)
        self._compiler = Compiler(n_compile_threads(self._placement.n_ranks), settings.deadline_s)
        self._exit.callback(self._compiler.close)
        clock = device_clock(is_interpreted())
        lookup = CacheLookup(settings, self._log, is_used=uses_cache, world_size=len(ranks.members), ranks_per_host=self._placement.n_ranks)
        self.sites = Sites(clock, self._log, self._compiler, self._placement, lookup, f"on rank {ranks.rank}")
        self._agreement = Agreement(ranks, self._log)
        self._loader = Loader(ranks, self._agreement, self.sites, self._compiler, self._placement)
        self._replayer = Replayer(ranks, self.sites, clock, reset, settings.deadline_s)
        self._discovery = Discovery(
            name, ranks, self._agreement, self._log, self.sites, lookup, self._compiler, self._placement, self._replayer
        )

    @property
    def is_watching(self) -> bool:
        """Whether launches are announced before they are made: in replays that are not timed."""
        return self.sites.is_watching

    @property
    def members(self) -> frozenset[int]:
        """Global ranks that decide; empty for a process that asks nobody."""
        return frozenset() if isinstance(self._ranks, Solo) else frozenset(self._ranks.members)

    def launching(self, launch: Tunable) -> None:
        """A launch in the closure."""
        self.sites.launching(launch)

    def missed(self, launch: Tunable) -> Any:
        """A launch in the closure that Triton has no config for.

        Raises:
            CaptureError: the closure captures a CUDA graph.
        """
        check_not_capturing(launch, self._name)
        return self.sites.missed(launch)

    def tune(self, closure: Callable[[], Any], value: Any = NOT_RUN, *, is_watched: bool = True) -> Any:
        """Tune what the first run of ``closure`` met, and return the value of a clean run; ``value`` if there is nothing to tune.

        Collective. ``is_watched``: whether the first run was heard from its beginning, so that hits are known, too. Without a value
        there was no such run, and the sites that this rank knows of were met without one.

        Raises:
            DistTuneError: on all ranks, for a reason that is the same on all.
            Exception: what the closure or ``reset`` raises on this rank; the other ranks are told.
        """
        with self._exit, one_at_a_time(self._name, self._settings.deadline_s):
            after = RngState()
            try:
                self._ranks.enter(f"{self._name} ({self._plan})", self._call)
                self._replayer.n_replays += value is not NOT_RUN
                is_settled = not self._discover(closure, is_watched=is_watched)
                if is_settled and value is NOT_RUN:
                    value = self._replayer.run(closure, self, {})
                    after = RngState()
                    is_settled = not self._discover(closure, is_watched=True)  # what this run has met inside the function
                if is_settled:
                    self.sites.end_replay(counts=True)
                    if self._replayer.n_replays > 1:
                        after.restore()
                    self._log.debug(f"closure={self._name} nothing to tune in {len(self.sites.hits)} autotuned launches with known configs")
                    return value
                self._race(closure)
                if value is not NOT_RUN:
                    self._exit.callback(after.restore)  # the last run leaves the generators as one run would, but from the beginning
                return self._settle(closure)
            except BaseException as error:
                self._end(error)
                raise

    def failures(self, label: str) -> dict[int, str]:
        """Why candidates of a site were dropped, on whichever rank."""
        return {i: each.failure for i, each in enumerate(self._search.results(label)) if each.failure is not None}

    def leave(self, error: BaseException) -> None:
        """The first run of the closure raised: tell the others, or say who raised first.

        Raises:
            DistTuneError: another rank is the cause.
        """
        with self._exit, one_at_a_time(self._name, self._settings.deadline_s):
            try:
                self._ranks.enter(f"{self._name} ({self._plan})", self._call)
            except DistTuneError as told:
                if is_secondary(error):
                    raise told from error
                error.add_note(f"before this, the others had been told: {told}")
                return
            self._end(error)

    def _discover(self, closure: Callable[[], Any], *, is_watched: bool) -> bool:
        """Learn what there is to tune on any rank, and bring it to where it can be measured; False if there is nothing."""
        called = self._discovery.discover(closure, self, is_watched=is_watched, is_under_way=bool(self._texts))
        self.is_waived = called is None
        self._end_phase("discover")
        if called is not None:
            self._lookup(called)
            if called.recalled.keys() < set(called.sites):  # that run was not the one that counts
                self.sites.end_replay()
            self._load(closure, called)
        return bool(self._texts)

    def _lookup(self, called: SiteManifest) -> None:
        """Use what all ranks have found in the cache."""
        records = self._discovery.lookup(called)
        for label, record in records.items():
            times = {each.index: each.latency_ms for each in record.candidates if each.latency_ms is not None}
            self.sites.settle(label, record.best.config, times)
            self.records.append(record.model_copy(update={"is_recalled": True}))
            self._log.info(
                f'site={label} winner={record.winner} (from the cache, tuned {record.tuned_at:%Y-%m-%d}) config="{record.best.config}"'
            )
        for label in called.recalled.keys() - records.keys():  # of other ranks: this one may come to it later
            self.sites.settle(label, called.recalled[label].winner, {})

    def _race(self, closure: Callable[[], Any]) -> None:
        """Replay what the engine asks for until every site is settled."""
        while batch := self._search.batch():
            is_final = self._search.is_final
            if is_final and not self._in_finals:
                self.sites.samples.restart()
            self._in_finals = is_final
            self._replayer.run_batch(closure, self, batch, finals_of(self._plan) if is_final else RACE)
            failures = self.sites.take_failures()
            while True:
                has_new_sites = bool(self._discovery.new_sites())
                report = self.sites.samples.report(failures, batch, self._search.kernel_times_ms(), has_new_sites)
                told = self._agreement.report(report)
                if set(told.disturbed) <= self._struck:
                    break
                # A stand-in on one rank makes its peers wait: nobody's times of that replay count.
                self.sites.samples.strike(told.disturbed)
                self._struck |= set(told.disturbed)
            self._search.tell(len(batch), told.tally)
            self._end_phase("finals" if is_final else "race")
            if told.has_new_sites:
                called = self._discovery.discover(closure, self, is_watched=True, is_under_way=True)
                assert called is not None  # optional only where nothing is under way
                self.sites.end_replay()
                self._lookup(called)
                self._load(closure, called)
            self._check_alive()

    def _load(self, closure: Callable[[], Any], called: SiteManifest) -> None:
        """Bring all candidates of new sites to where they can be measured, and drop what any rank cannot run."""
        labels = [label for label in called.sites if label not in called.recalled]
        if not labels:
            return
        for label in labels:
            self._texts.setdefault(label, called.lists[label] if label in called.lists else self.sites.met[label].texts)
            self._keepers[label] = sorted({*self._keepers.get(label, ()), *called.keepers[label]})
        self.sites.refuse(set(labels))  # a rank that comes to one of them later shall not find a record of it
        told = f"{len(labels)} sites, {sum(len(self._texts[each]) for each in labels)} candidates on {len(self._ranks.members)} ranks"
        self._log.bind(progress=True).info(f"tuning {self._name}: {told}")
        failed = self._loader.load(called.compile_keys)
        for label in labels:
            if label in self._search:  # met later on this rank than on others
                self._search.drop(label, reasons(failed.get(label, {})))
            else:
                self._search.add(label, len(self._texts[label]), reasons(failed.get(label, {})), called.known.get(label))
        self._check_alive()
        if called.warmed_up:
            self._warm_up(closure, called.warmed_up)
            # What functions launch inside was met there. It is compiled before anything is timed, and tuned where nothing else is.
            inner = self._discovery.discover(closure, self, is_watched=False, is_under_way=True)
            assert inner is not None
            self._lookup(inner)
            self._load(closure, inner)
        self._log.info(f"closure={self._name} searches in at most {self._search.bound} replays")
        self._end_phase("compile")

    def _warm_up(self, closure: Callable[[], Any], sites: Mapping[str, int]) -> None:
        """Run each candidate of functions untimed, and drop what fails or answers wrongly on any rank."""
        warm_up(closure, self, sites, search=self._search, sites=self.sites, loader=self._loader, replayer=self._replayer)
        for label, failures in self._agreement.vote("rehearsed", self.sites.take_failures()).items():
            self._search.drop(label, reasons(failures))
            for i, (kind, reason) in failures.items():  # a config that computes something else is worth a look
                log = self._log.bind(progress=kind is FailureKind.WRONG_RESULT)
                log.warning(f'site={label} candidate={i} {reason} config="{self._texts[label][i]}"')
        self._check_alive()

    def _settle(self, closure: Callable[[], Any]) -> Any:
        """Put the winners to use, write the account, and run the closure once more as the caller would."""
        winners = {label: best for label in self._texts if (best := self._search.best(label)) is not None}
        results = {label: self._search.results(label) for label in winners}
        for label, winner in winners.items():
            times = {i: each.agreed.kernel_ms for i, each in enumerate(results[label]) if each.agreed is not None}
            self.sites.settle(label, self._texts[label][winner], times)
        self.sites.finish(set(winners))
        self._replayer.restart()
        self._rng.restore()
        value = self._replayer.run(closure, self, {})
        with suppress(StoreGoneError):  # its host has come here before us, and its program is at its end
            self._agreement.part()
        self._end_phase("settle")
        self._seconds.meetings = sum(self._agreement.seconds)
        self._seconds.total = time.monotonic() - self._began
        for label, winner in winners.items():
            record = make_record(
                self._name, label, self._texts[label], self.sites.met.get(label), results[label], winner,
                verdict=self._search.verdict(label), n_replays=self._replayer.n_replays, seconds=self._seconds,
                meeting_seconds=self._agreement.seconds, where=environment(len(self._ranks.members), self._placement.n_ranks),
            )  # fmt: skip
            log_table(self._log, record)
            self.records.append(record)
            self._discovery.keep(label, record, self._keepers)
        spent = f"sites={len(winners)} seconds: " + " ".join(f"{name}={value:.3f}" for name, value in self._seconds)
        self._log.info(f"closure={self._name} done replays={self._replayer.n_replays} {spent}")
        return value

    def _check_alive(self) -> None:
        for label, texts in self._texts.items():
            if label in self._search:
                check_alive(label, texts, self._search, self.sites.met.get(label))

    def _end_phase(self, name: str) -> None:
        now = time.monotonic()
        setattr(self._seconds, name, getattr(self._seconds, name) + now - self._phase_began)
        self._phase_began = now

    def _end(self, error: BaseException) -> None:
        for each in self.sites.suspects:
            error.add_note(f"rank {self._ranks.rank} left {each}, behind a collective; if there were more behind it, ranks are out of step")
        self._log.error(f"closure={self._name} ended by {type(error).__name__}: {error}")
        with suppress(RuntimeError):  # of a device that is lost
            self.sites.end_replay()
        self._ranks.abort(error)
