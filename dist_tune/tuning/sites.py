"""The sites of one closure as this rank sees them, and what each of its launches runs in the replay under way.

Hears launches, launches them with the candidate that the schedule says, times that, and lets another
candidate stand in for one that fails, so that a bad config never aborts a replay. Knows nothing of other ranks; what it
learns is told at the next meeting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dist_tune.cache import CacheLookup
from dist_tune.compiler import Compiler, Failure, Placement, Resources, partition_configs, quiet_terminal, reason_of
from dist_tune.distributed import is_secondary
from dist_tune.errors import CandidateFailure, DistTuneError, FailureKind, Failures, NoValidConfigError, reasons
from dist_tune.measure import Clock, Span
from dist_tune.runtime import LaunchRecorder, Slot, Tunable, Undo
from dist_tune.search import Replay, Samples, Trial
from dist_tune.tuning.site import Site, is_fatal, no_valid_config, take_failures

if TYPE_CHECKING:
    import loguru


@dataclass(frozen=True, slots=True)
class _Failed:
    """A launch that raised."""

    n_collectives: int
    """That it had issued before."""


class Sites:
    """All sites met in a tuning on this rank. A ``Listener``."""

    def __init__(self, clock: Clock, log: loguru.Logger, compiler: Compiler, placement: Placement, lookup: CacheLookup, where: str) -> None:
        self.is_watching = True
        self.met: dict[str, Site] = {}
        self.hits: dict[str, str] = {}
        """Label -> config, for launches that Triton had a config for."""
        self.samples = Samples()
        self.suspects: list[str] = []
        """Candidates that failed behind some of their collectives: if not behind all, other ranks wait for the rest."""
        self.recorder: LaunchRecorder | None = None
        """Writes down what functions launch."""
        self._clock = clock
        self._log = log
        self._compiler = compiler
        self._placement = placement
        self._lookup = lookup
        self._where = where
        self._labels: dict[str, list[tuple[Any, ...]]] = {}
        self._digests: dict[int, tuple[Any, str]] = {}
        self._hit_slots: dict[str, Slot] = {}
        self._refused: set[str] = set()
        self._schedule: Replay = {}
        self._times_launches = False
        self._replay = 0
        self._around: list[str] = []
        """Functions under way, the outermost first."""
        self._undo = Undo()
        self._spans: list[tuple[str, int, int, Span]] = []
        self._winners: dict[str, str] = {}
        self._to_reset: set[str] = set()

    # -- a replay ------------------------------------------------------------------------------------------------

    def prepare(self, schedule: Replay) -> None:
        """Let what the schedule asks for be made ready, before the clock is."""
        for site, trial in ((self.met[label], trial) for label, trial in schedule.items() if label in self.met):
            if site.prepare is not None:
                site.prepare(site.configs[trial.candidate])

    def begin_replay(self, number: int, schedule: Replay, *, times_launches: bool = False) -> None:
        """From here on, launches belong to replay ``number`` and run what ``schedule`` says."""
        self._replay, self._schedule, self._times_launches = number, schedule, times_launches
        # Launches that hit matter only where no schedule asks for speed: in discovery and in the final run.
        self.is_watching = not schedule

    def end_replay(self, *, counts: bool = False) -> None:
        """Put back what launches changed under ``restore_value``; not if that run was the one that counts."""
        self._undo.forget() if counts else self._undo.restore()

    def read_spans(self) -> None:
        """Move the times of finished replays to the ledger. The device must have gone past them."""
        for label, candidate, replay, span in self._spans:
            ms = span.ms()
            self.samples.add_launch(label, candidate, replay, ms)
            self._log.trace(
                f'site={label} candidate={candidate} replay={replay} kernel_ms={ms:.4f} config="{self.met[label].texts[candidate]}"'
            )
        self._spans.clear()

    # -- what a listener is told ---------------------------------------------------------------------------------

    def launching(self, launch: Tunable) -> None:
        """Before any launch outside scheduled replays: note hits; in the final run, zero once as vanilla Triton does."""
        config = launch.known_config()
        if config is None:
            return
        label = self._label_of(launch)
        self.hits[label] = launch.describe(config)
        self._hit_slots[label] = launch.slot
        if label in self._to_reset:
            self._to_reset.discard(label)
            launch.reset_only(config)

    def missed(self, launch: Tunable) -> Any:
        """Launch what has no config yet, with the candidate whose turn it is.

        Raises:
            NoValidConfigError: no candidate of the site can be launched on this rank.
        """
        site = self.meet(launch)
        for outer in self._around:
            self.samples.nest(outer, site.label)
        if site.winner is not None:  # a kernel object made anew in every replay
            launch.slot.fill(site.winner, [])
            return launch.run(site.winner, self._undo)
        trial = self._schedule.get(site.label, Trial(0 if site.standby is None else site.standby, is_timed=False))
        if site.checker is not None and trial.is_checked and trial.candidate in site.failures:
            # A reference may be collective: it is asked as often as on the ranks where this candidate runs.
            site.checker.begin(*launch.arguments)
            site.checker.restore()
        for index in site.order(trial.candidate):
            if index != trial.candidate and self._schedule:
                self.samples.disturb(self._replay)
            if site.is_compiled and site.is_new and site.recalled is None:
                if self._schedule and site.standby is None:  # compiled and loaded in the middle of what is timed at other sites
                    self.samples.disturb(self._replay)
                if not self.load(site, index):
                    continue
            launched = self._try(site, launch, index, trial)
            if isinstance(launched, tuple):
                return launched[0]
            # Its collectives are done, at least in part, and the closure needs no result: another run of them would find no peer.
            if launch.is_whole and launched.n_collectives > 0:
                self.samples.disturb(self._replay)
                self.suspects.append(f'candidate {index} "{site.texts[index]}" with {site.failures[index].reason}')
                return None
        raise NoValidConfigError(no_valid_config(site.label, site.texts, reasons(site.failures), self._where)) from site.last_error

    def _try(self, site: Site, launch: Tunable, index: int, trial: Trial) -> tuple[Any] | _Failed:
        """Launch one candidate, and time or check it if it is its turn."""
        is_turn = index == trial.candidate
        span = self._clock.span() if is_turn and trial.is_timed and self._times_launches else None
        checker = site.checker if is_turn and trial.is_checked and index not in site.failures else None
        if checker is not None:
            checker.begin(*launch.arguments)
        n_before = launch.n_collectives()  # the reference's among them
        try:
            with nullcontext() if site.is_compiled else self._running(site, index):
                result = launch.run(site.configs[index], self._undo, span, is_trial=site.recalled is None)
        # Whatever a launch raises becomes a vote: this candidate is out on all ranks after the next meeting. Raising
        # it here would leave the peers alone in the closure's collectives.
        except Exception as error:
            if checker is not None:
                with suppress(RuntimeError):  # of a device that is lost
                    checker.restore()
            if is_fatal(error) or isinstance(error, DistTuneError) or is_secondary(error):
                raise
            self.fail(site, index, FailureKind.LAUNCH, reason_of(error))
            site.last_error = error
            return _Failed(launch.n_collectives() - n_before)
        if checker is not None and (wrong := checker.verdict(result, *launch.arguments)):
            self.fail(site, index, FailureKind.WRONG_RESULT, f"the result is wrong: {wrong}")
            return (result,)
        site.standby = index
        if is_turn and trial.is_timed:
            self.samples.add_run(site.label, index, self._replay)
        if span is not None:
            self._spans.append((site.label, index, self._replay, span))
        return (result,)

    @contextmanager
    def _running(self, site: Site, index: int) -> Iterator[None]:
        """Meanwhile a function runs: what it launches is written down, and is a part of its time."""
        self._around.append(site.label)
        try:
            with nullcontext() if self.recorder is None else self.recorder.running(site.label, index):
                yield
        finally:
            self._around.pop()

    def load(self, site: Site, index: int) -> bool:
        """Load a candidate onto the device, waiting for its compilation; False if it cannot run here."""
        loaded = self._compiler.load(site.label, index)
        if isinstance(loaded, Resources):
            site.resources[index] = loaded
        if isinstance(loaded, Failure):
            self.reject(site, index, loaded)
        return not isinstance(loaded, Failure)

    def reject(self, site: Site, index: int, failure: Failure) -> None:
        """Note that a candidate does not compile or load here."""
        if failure.shared_bytes is not None:
            site.resources[index] = Resources(failure.shared_bytes, None, None)
        if index not in site.failures:
            self.fail(site, index, failure.kind, failure.reason, failure.output)

    def fail(self, site: Site, index: int, kind: FailureKind, reason: str, output: str = "") -> None:
        """Note that a candidate cannot run here."""
        site.failures[index] = CandidateFailure(kind, reason)
        self._log.warning(f'site={site.label} candidate={index} cannot run here: {reason} config="{site.texts[index]}"')
        if output.strip():
            self._log.debug(f"site={site.label} candidate={index} the compiler wrote:\n{output.rstrip()}")

    # -- between replays -----------------------------------------------------------------------------------------

    def take_failures(self) -> Failures:
        """Failures on this rank that are new since the last time. All ranks hear of each once."""
        return take_failures(self.met.values())

    def evict(self, labels: set[str]) -> None:
        """Forget the configs known for these sites, so that they are met as misses without a record; and all hits."""
        for label in labels & self._hit_slots.keys():
            self._hit_slots[label].clear()
            self._log.info(f"site={label} is tuned although this rank has a config: not all ranks have the same one")
        self.hits.clear()

    def refuse(self, labels: set[str]) -> None:
        """Use no records of these sites: not all ranks can. Those that one was found for are met anew."""
        for label in [label for label in labels & self.met.keys() if self.met[label].recalled is not None]:
            del self.met[label]
            self._log.info(f"site={label} is tuned although this rank has a record: not all ranks can use the same one")
        self._refused |= labels

    def settle(self, label: str, winner: str, timings_ms: Mapping[int, float]) -> None:
        """Use a config, described, from now on; at a site not met here yet as soon as it is met."""
        self._winners[label] = winner
        site = self.met.get(label)
        if site is None:
            return
        site.is_new = False
        site.winner = site.configs[site.texts.index(winner)]
        times = [(config, timings_ms.get(i, float("inf"))) for i, config in enumerate(site.configs)]
        for slot in site.slots.values():
            slot.fill(site.winner, times)

    def finish(self, labels: set[str]) -> None:
        """The run to come is the one that counts: kernels of these sites zero once as vanilla Triton does."""
        self._to_reset = labels

    def meet(self, launch: Tunable) -> Site:
        """The site of a launch; entered if it is new."""
        label = self._label_of(launch)
        site = self.met.get(label)
        if site is None:
            site = self.met[label] = self._enter(label, launch)
        site.slots.setdefault(id(launch.owner), launch.slot)
        return site

    def _enter(self, label: str, launch: Tunable) -> Site:
        configs = launch.candidates()
        texts = [launch.describe(config) for config in configs]
        site = Site(label, launch.name, launch.key_text, configs, texts, "", launch.is_compiled, launch.is_foreseen, launch.prepare)
        if self._winners.get(label) in texts:  # the others have tuned it; this rank comes to it in the final run
            site.winner, site.is_new = configs[texts.index(self._winners[label])], False
            return site
        record = self._lookup.look_up(label, launch, texts)
        site.source = self._lookup.source(label)
        if record is not None and label not in self._refused:
            site.recalled, site.standby = record, record.winner
            return site
        site.checker = launch.checker()
        if launch.is_compiled:
            positions = partition_configs(configs, self._placement.n_ranks)
            # Where there has to be a record only the first run needs anything.
            first = [i for i, position in enumerate(positions) if position == self._placement.position and not self._lookup.is_required]
            self._compiler.begin(label, launch, configs, first)
            self._log.debug(f"site={label} compiles; until it is loaded, file descriptor 2 leads to {quiet_terminal.kept_at}")
        return site

    def _label_of(self, launch: Tunable) -> str:
        base = launch.name + launch.key_text
        if id(launch.owner) not in self._digests:  # kept with the kernel, so that its id is not given to another one
            self._digests[id(launch.owner)] = (launch.owner, launch.all_configs_digest())
        _, digest = self._digests[id(launch.owner)]
        alike = self._labels.setdefault(base, [])
        identity = (*launch.identity, digest)
        if identity not in alike:
            alike.append(identity)
        # Two kernels of one name and key, told apart by the order in which the closure comes to them.
        number = alike.index(identity)
        return base if number == 0 else f"{base}#{number + 1}"
