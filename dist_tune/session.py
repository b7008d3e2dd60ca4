"""One tuning from the first miss to the settled winners: discover, compile, race, settle, and the meetings between.

Knows what happens in which order and nothing of how: launches are the sites', agreement is the ranks', choice is the
engine's. Ranks talk only between replays; what goes wrong inside a replay on this rank alone is told at the next meeting,
or posted as the end of the tuning.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import get_ident
from typing import Any

from dist_tune.agreement import Agreement
from dist_tune.ballots import Roll, RollCall
from dist_tune.compiler import Compiler, host_of_cache, n_compile_threads
from dist_tune.engine import Search
from dist_tune.errors import AbsentRanksError, DistTuneError, NestedTuningError, NoValidConfigError, RankMismatchError, StoreGoneError
from dist_tune.launch import Launch, is_interpreted
from dist_tune.loading import Loader
from dist_tune.log import tuning_log
from dist_tune.meetings import is_secondary
from dist_tune.outcome import log_table, make_record
from dist_tune.plan import Plan
from dist_tune.ranks import Ranks, Solo
from dist_tune.records import Seconds, TuningRecord
from dist_tune.replayer import FINALS, KERNEL_FINALS, RACE, Replayer
from dist_tune.rng import RngState
from dist_tune.settings import Settings
from dist_tune.shares import Bench
from dist_tune.sites import Sites, check_not_capturing, no_valid_config
from dist_tune.space import digest
from dist_tune.timing import device_clock

_MAX_DISCOVERIES = 4
_one_at_a_time = threading.Lock()
_tuning_thread: int | None = None


class Session:
    """The tuning of one call of a closure. Made where a call may tune, between replays or at the first miss."""

    def __init__(self, name: str, call: int, ranks: Ranks, plan: Plan, reset: Callable[[], object] | None, settings: Settings) -> None:
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
            tuning_log(settings, ranks.rank, ranks.rank == (0 if isinstance(ranks, Solo) else ranks.members[0]))
        )
        self._search = Search(plan)
        self._struck: set[int] = set()
        self._in_finals = False
        self._texts: dict[str, list[str]] = {}
        self._rng = RngState()
        self._bench = Bench(host_of_cache(), *ranks.neighbours)
        self._compiler = Compiler(n_compile_threads(self._bench.n_ranks), settings.deadline_s)
        self._exit.callback(self._compiler.close)
        clock = device_clock(is_interpreted())
        self.sites = Sites(clock, self._log, self._compiler, self._bench, f"on rank {ranks.rank}")
        self._agreement = Agreement(ranks, self._log)
        self._loader = Loader(ranks, self._agreement, self.sites, self._compiler)
        self._replayer = Replayer(ranks, self.sites, clock, reset, settings.deadline_s)

    @property
    def is_watching(self) -> bool:
        """Whether launches are announced before they are made: in replays that are not timed."""
        return self.sites.is_watching

    @property
    def members(self) -> frozenset[int]:
        """Global ranks that decide; empty for a process that asks nobody."""
        return frozenset() if isinstance(self._ranks, Solo) else frozenset(self._ranks.members)

    def launching(self, launch: Launch) -> None:
        """A launch in the closure."""
        self.sites.launching(launch)

    def missed(self, launch: Launch) -> Any:
        """A launch in the closure that Triton has no config for.

        Raises:
            CaptureError: the closure captures a CUDA graph.
        """
        check_not_capturing(launch, self._name)
        return self.sites.missed(launch)

    def tune(self, closure: Callable[[], Any], value: Any, *, is_watched: bool) -> Any:
        """Tune what the first run of ``closure`` met, and return the value of a clean run; ``value`` if there is nothing to tune.

        Collective. ``is_watched``: whether the first run was heard from its beginning, so that hits are known, too.

        Raises:
            DistTuneError: on all ranks, for a reason that is the same on all.
            Exception: what the closure or ``reset`` raises on this rank; the other ranks are told.
        """
        with self._exit, self._exclusively():
            after = RngState()
            try:
                self._ranks.enter(f"{self._name} ({self._plan})", self._call)
                self.sites.end_replay()
                if not self._discover(closure, is_watched):
                    self._log.debug(f"closure={self._name} nothing to tune in {len(self.sites.hits)} autotuned launches with known configs")
                    return value
                self._race(closure)
                value = self._settle(closure)
            except BaseException as error:
                self._end(error)
                raise
            after.restore()
            return value

    def leave(self, error: BaseException) -> None:
        """The first run of the closure raised: tell the others, or say who raised first.

        Raises:
            DistTuneError: another rank is the cause.
        """
        with self._exit, self._exclusively():
            try:
                self._ranks.enter(f"{self._name} ({self._plan})", self._call)
            except DistTuneError as told:
                if is_secondary(error):
                    raise told from error
                error.add_note(f"before this, the others had been told: {told}")
                return
            self._end(error)

    # -- the phases ----------------------------------------------------------------------------------------------

    def _discover(self, closure: Callable[[], Any], is_watched: bool) -> bool:
        """Learn which sites there are on any rank, and replay until no rank has a config that another one lacks."""
        for _ in range(_MAX_DISCOVERIES):
            try:
                called = self._roll_call(is_watched, is_optional=not self._new_sites() and not self._texts)
            except (AbsentRanksError, StoreGoneError) as error:
                if self._new_sites() or self._texts:
                    raise
                # Ranks whose arguments were not new have made an ordinary call, and so does this one.
                self._log.warning(f"closure={self._name} goes on with the configs it has: {error}")
                self.is_waived = True
                return False
            if not called.disputed and called.is_watched:
                break
            self.sites.evict(set(called.disputed))
            is_watched = True
            self._replayer.restart()
            self._replayer.run(closure, self, {})
            self.sites.end_replay()
        else:
            raise RankMismatchError(
                f"{self._name}: ranks still have different configs for {called.disputed} after {_MAX_DISCOVERIES} runs. Does the closure "
                f"change the cache of its kernels?"
            )
        self._end_phase("discover")
        self._load(called)
        return bool(self._texts)

    def _roll_call(self, is_watched: bool, *, is_optional: bool = False) -> Roll:
        """Tell the sites that are new here, and hear what is new anywhere, with the candidates of all that is new."""
        spelled: set[str] = set(self._new_sites()) if self._ranks.rank == self._ranks.members[0] else set()
        while True:
            sites = {label: self.sites.met[label] for label in {*self._new_sites(), *(spelled & self.sites.met.keys())}}
            call = RollCall(
                self._bench,
                {label: digest(site.texts) for label, site in sites.items()},
                {label: site.texts for label, site in sites.items() if label in spelled},
                {label: self._compiler.keys(label) for label, site in sites.items() if site.is_new},
                dict(self.sites.hits),
                is_watched,
            )
            called = self._agreement.roll_call(call, is_optional=is_optional)
            if called.mismatch:
                raise RankMismatchError(called.mismatch)
            if not called.unlisted:
                return called
            spelled |= set(called.unlisted)

    def _race(self, closure: Callable[[], Any]) -> None:
        """Replay what the engine asks for until every site is settled."""
        while batch := self._search.batch():
            is_final = self._search.is_final
            if is_final and not self._in_finals:
                self.sites.ledger.restart()
            self._in_finals = is_final
            finals = FINALS if self._plan.objective == "closure" else KERNEL_FINALS
            self._replayer.run_batch(closure, self, batch, finals if is_final else RACE)
            failures = self.sites.take_failures()
            while True:
                report = self.sites.ledger.report(failures, batch, self._search.kernel_times_ms(), bool(self._new_sites()))
                told = self._agreement.report(report)
                if set(told.disturbed) <= self._struck:
                    break
                # A stand-in on one rank makes its peers wait: nobody's times of that replay count.
                self.sites.ledger.strike(told.disturbed)
                self._struck |= set(told.disturbed)
            self._search.tell(len(batch), told.tally)
            self._end_phase("finals" if is_final else "race")
            if told.has_new_sites:
                called = self._roll_call(is_watched=True)
                self._load(called)
            self._check_alive()

    def _load(self, called: Roll) -> None:
        """Compile and load all candidates of new sites, and drop what any rank cannot run, before any is measured."""
        if not called.sites:
            return
        for label in called.sites:
            self._texts.setdefault(label, called.lists[label] if label in called.lists else self.sites.met[label].texts)
        n_candidates = sum(len(self._texts[label]) for label in called.sites)
        self._log.bind(progress=True).info(
            f"tuning {self._name}: {len(called.sites)} sites, {n_candidates} candidates on {len(self._ranks.members)} ranks"
        )
        failed = self._loader.load(called.keysets)
        for label in called.sites:
            if label in self._search:  # met later on this rank than on others
                self._search.drop(label, failed.get(label, {}))
            else:
                self._search.add(label, len(self._texts[label]), failed.get(label, {}))
        self._log.info(f"closure={self._name} searches in at most {self._search.bound} replays")
        self._end_phase("compile")
        self._check_alive()

    def _settle(self, closure: Callable[[], Any]) -> Any:
        """Hand the winners to Triton, write the account, and run the closure once more as the caller would."""
        winners = {label: best for label in self._texts if (best := self._search.best(label)) is not None}
        standings = {label: self._search.standings(label) for label in winners}
        times = {label: {i: s.agreed.kernel_ms for i, s in enumerate(each) if s.agreed is not None} for label, each in standings.items()}
        self.sites.adopt({label: self._texts[label][winner] for label, winner in winners.items()}, times)
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
                self._name, label, self._texts[label], self.sites.met.get(label), standings[label], winner,
                verdict=self._search.verdict(label), n_replays=self._replayer.n_replays, seconds=self._seconds,
                meeting_seconds=self._agreement.seconds, world_size=len(self._ranks.members),
            )  # fmt: skip
            log_table(self._log, record)
            self.records.append(record)
        spent = " ".join(f"{name}={value:.3f}" for name, value in self._seconds)
        self._log.info(f"closure={self._name} done replays={self._replayer.n_replays} sites={len(winners)} seconds: {spent}")
        return value

    # -- agreement -----------------------------------------------------------------------------------------------

    def _new_sites(self) -> list[str]:
        return [label for label, site in self.sites.met.items() if site.is_new]

    def _check_alive(self) -> None:
        for label, texts in self._texts.items():
            if label in self._search and self._search.best(label) is None:
                failures = {i: s.failure for i, s in enumerate(self._search.standings(label)) if s.failure is not None}
                raise NoValidConfigError(no_valid_config(label, texts, failures, "on all ranks"))

    def _end_phase(self, name: str) -> None:
        now = time.monotonic()
        setattr(self._seconds, name, getattr(self._seconds, name) + now - self._phase_began)
        self._phase_began = now

    def _end(self, error: BaseException) -> None:
        self._log.error(f"closure={self._name} ended by {type(error).__name__}: {error}")
        with suppress(RuntimeError):  # of a device that is lost
            self.sites.end_replay()
        self._ranks.abort(error)

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        global _tuning_thread
        wait_s = 0.0 if _tuning_thread == get_ident() else self._settings.deadline_s
        if not _one_at_a_time.acquire(timeout=wait_s):
            raise NestedTuningError(
                f"{self._name} waited {wait_s:g} s for another tuning of this process to end. One process tunes one closure at a time: "
                f"call closures once from one thread before using them in several, and do not call them from reset=."
            )
        _tuning_thread = get_ident()
        try:
            yield
        finally:
            _tuning_thread = None
            _one_at_a_time.release()
