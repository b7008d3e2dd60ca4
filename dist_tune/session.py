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

from dist_tune.ballots import BALLOT, Ballot, check_lists, contested, votes
from dist_tune.compile import Failure, Resources, load
from dist_tune.engine import Plan, Report, Search
from dist_tune.errors import AbsentRanksError, DistTuneError, NestedTuningError, NoValidConfigError, RankMismatchError, StoreGoneError
from dist_tune.launch import Launch, is_interpreted
from dist_tune.log import tuning_log
from dist_tune.meetings import is_secondary
from dist_tune.outcome import log_table, make_record
from dist_tune.ranks import Ranks, Solo
from dist_tune.records import TuningRecord
from dist_tune.replayer import Replayer
from dist_tune.rng import RngState
from dist_tune.settings import Settings
from dist_tune.sites import Site, Sites, check_not_capturing, no_valid_config
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
        self._began = time.monotonic()
        self._meeting_s = 0.0
        self._exit = ExitStack()
        self._exit.enter_context(ranks.short_timeouts())
        self._log = self._exit.enter_context(
            tuning_log(settings, ranks.rank, ranks.rank == (0 if isinstance(ranks, Solo) else ranks.members[0]))
        )
        self._search = Search(plan)
        self._struck: set[int] = set()
        self._texts: dict[str, list[str]] = {}
        self._rng = RngState()
        clock = device_clock(is_interpreted())
        self.sites = Sites(clock, self._log, f"on rank {ranks.rank}")
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
            roll = Ballot(self._new_sites(), dict(self.sites.hits), is_watched)
            is_optional = not roll.sites and not self._texts
            try:
                ballots = self._meet("roll call", roll, is_optional=is_optional)
            except (AbsentRanksError, StoreGoneError) as error:
                if not is_optional:
                    raise
                # Ranks whose arguments were not new have made an ordinary call, and so does this one.
                self._log.warning(f"closure={self._name} goes on with the configs it has: {error}")
                self.is_waived = True
                return False
            check_lists(self._texts, ballots)
            disputed = contested(ballots, self._texts)
            if not disputed and all(ballot.is_watched for ballot in ballots.values()):
                break
            self.sites.evict(disputed)
            is_watched = True
            self._replayer.restart()
            self._replayer.run(closure, self, {})
            self.sites.end_replay()
        else:
            raise RankMismatchError(
                f"{self._name}: ranks still have different configs for {sorted(disputed)} after {_MAX_DISCOVERIES} runs. Does the closure "
                f"change the cache of its kernels?"
            )
        self._load(list(self._texts))
        return bool(self._texts)

    def _race(self, closure: Callable[[], Any]) -> None:
        """Replay what the engine asks for until every site is settled."""
        while batch := self._search.batch():
            self._replayer.run_batch(closure, self, batch)
            while True:
                ballots = self._meet("report", Ballot(self._new_sites(), report=self.sites.ledger.report(self.sites.failures())))
                disturbed = {replay for ballot in ballots.values() for replay in ballot.report.disturbed}
                if disturbed <= self._struck:
                    break
                # A stand-in on one rank makes its peers wait: nobody's times of that replay count.
                self.sites.ledger.strike(disturbed)
                self._struck |= disturbed
            self._search.tell(len(batch), {rank: ballot.report for rank, ballot in ballots.items()})
            check_lists(self._texts, ballots)
            self._load(list(dict.fromkeys(label for ballot in ballots.values() for label in ballot.sites)))
            self._check_alive()

    def _load(self, labels: list[str]) -> None:
        """Compile and load all candidates of these sites, and drop what any rank cannot run, before any is measured."""
        if not labels:
            return
        n_candidates = sum(len(self._texts[label]) for label in labels)
        self._log.bind(progress=True).info(
            f"tuning {self._name}: {len(labels)} sites, {n_candidates} candidates on {len(self._ranks.members)} ranks"
        )
        for label in labels:
            if label in self.sites.met:
                self._load_site(self.sites.met[label])
        ballots = self._meet("compiled", Ballot(report=Report(failures=self.sites.failures())))
        for label in labels:
            failures = votes(label, ballots)
            if label in self._search:  # met later on this rank than on others
                self._search.drop(label, failures)
            else:
                self._search.add(label, len(self._texts[label]), failures)
        self._check_alive()

    def _load_site(self, site: Site) -> None:
        if site.launch is None:
            return
        for index, config in enumerate(site.configs):
            self._ranks.beat(f"compiling candidate {index} of {site.label}")
            if index in site.failures:
                continue
            loaded = load(site.launch, config)
            if isinstance(loaded, Failure):
                self.sites.fail(site, index, loaded.reason, loaded.output)
            elif isinstance(loaded, Resources):
                site.resources[index] = loaded
        site.launch = None

    def _settle(self, closure: Callable[[], Any]) -> Any:
        """Hand the winners to Triton, write the account, and run the closure once more as the caller would."""
        winners = {label: best for label in self._texts if (best := self._search.best(label)) is not None}
        standings = {label: self._search.standings(label) for label in winners}
        times = {label: {i: s.latency_ms for i, s in enumerate(each) if s.latency_ms is not None} for label, each in standings.items()}
        self.sites.adopt({label: self._texts[label][winner] for label, winner in winners.items()}, times)
        self._replayer.restart()
        self._rng.restore()
        value = self._replayer.run(closure, self, {})
        with suppress(StoreGoneError):  # its host has come here before us, and its program is at its end
            self._meet("done", Ballot())
        seconds = time.monotonic() - self._began
        for label, winner in winners.items():
            record = make_record(
                self._name, label, self._texts[label], self.sites.met.get(label), standings[label], winner,
                n_replays=self._replayer.n_replays, seconds=seconds, world_size=len(self._ranks.members),
            )  # fmt: skip
            log_table(self._log, record)
            self.records.append(record)
        self._log.info(
            f"closure={self._name} done seconds={seconds:.3f} replays={self._replayer.n_replays} meetings_seconds={self._meeting_s:.4f} "
            f"sites={len(winners)}"
        )
        return value

    # -- agreement -----------------------------------------------------------------------------------------------

    def _meet(self, topic: str, ballot: Ballot, *, is_optional: bool = False) -> dict[int, Ballot]:
        began = time.monotonic()
        parts = self._ranks.meet(topic, BALLOT.dump_json(ballot).decode(), is_optional=is_optional)
        took_s = time.monotonic() - began
        self._meeting_s += took_s
        self._log.debug(f"meeting={topic!r} seconds={took_s:.4f}")
        return {rank: BALLOT.validate_json(part) for rank, part in zip(self._ranks.members, parts, strict=True)}

    def _new_sites(self) -> dict[str, list[str]]:
        return {label: site.texts for label, site in self.sites.met.items() if site.launch is not None}

    def _check_alive(self) -> None:
        for label, texts in self._texts.items():
            if self._search.best(label) is None:
                failures = {i: s.failure for i, s in enumerate(self._search.standings(label)) if s.failure is not None}
                raise NoValidConfigError(no_valid_config(label, texts, failures, "on all ranks"))

    def _end(self, error: BaseException) -> None:
        self._log.error(f"closure={self._name} ended by {type(error).__name__}: {error}")
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
