"""The launches of a replay: each runs the candidate that the schedule says, timed or checked if it
is its turn.

Another candidate stands in for one that fails, so that a bad config never aborts a replay. Knows
nothing of other ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from threading import get_ident
from typing import Any

from dist_tune.compiler import NotLoaded, Refusal, reason_of, refused
from dist_tune.errors import (
    CandidateFailure,
    DistTuneError,
    FailureKind,
    free_frames,
    is_machine_failure,
    kind_of,
)
from dist_tune.launches import Buckets, Tunable, around_launches, interception
from dist_tune.measure import Clock, Inputs, Snapshot, Span, is_capturing, written
from dist_tune.ranks import Ranks, is_secondary, n_collectives
from dist_tune.replays.turns import Turn
from dist_tune.replays.variants import Variants
from dist_tune.search import Replay, Samples, Trial
from dist_tune.sites import Site, Sites, check_not_capturing, is_fatal, none_left
from dist_tune.watch import Watchdog


@dataclass(frozen=True, slots=True)
class Returned:
    """A launch that returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """A launch that raised, or could not be made."""

    n_collectives: int = 0
    """Collectives that it had issued before, if it is the whole closure."""


class NotMade:
    """A launch that was not made, because it would have compiled its kernel."""


Launched = Returned | Failed | NotMade


class Trials:
    """The launches of one tuning on this rank. A ``Listener``."""

    def __init__(
        self,
        closure: str,
        ranks: Ranks,
        sites: Sites,
        variants: Variants,
        clock: Clock,
        watchdog: Watchdog,
    ) -> None:
        self.is_watching = True
        self.watchdog = watchdog
        self.members = frozenset() if ranks.is_alone else frozenset(ranks.members)
        self.samples = Samples()
        self.suspects: list[str] = []
        """Candidates that raised after issuing a collective; peers may wait in the rest."""
        self.functions: list[tuple[str, int]] = []
        """Functions under way and their candidates, the outermost first."""
        self.wrong: dict[str, str] = {}
        """Sites whose config from the cache has answered wrongly -> how."""
        self.inputs = Inputs()
        """Arguments of the function that is tuned, if it is the whole closure."""
        self.changed: Callable[[], str] | None = None
        """In the first run of a function: names of what it has changed so far."""
        self.failed: Exception | None = None
        """The error of a function's run that gave no value, because its collectives were made."""
        self.buckets: Buckets | None = None
        """Of sizes in keys, as the step's options say."""
        self.in_use: Callable[[Tunable], Any] | None = None
        """Of calls that are the user's own, which nothing is undone in: the config that a launch
        would have otherwise.
        """
        self.is_captured = False
        """True while a graph of the closure is captured for the finals."""
        self._closure = closure
        self._rank = ranks.rank
        self._sites = sites
        self._clock = clock
        self._log = watchdog.log
        self.variants = variants
        self._schedule: Replay = {}
        self._repeated: set[str] = set()
        """Sites that do the same as in the replay before."""
        self._times_launches, self._is_timed, self._replay = False, False, 0
        self.launched: set[str] = set()
        """Sites launched in this run."""
        self._zeroes = True
        self._undo = Snapshot()
        self._spans = deque[tuple[str, int, int, Span | None]]()
        """Site, candidate, replay, and the clock of a launch; None where the device has waited for
        the host.
        """
        self._turns: dict[tuple[str, int], Turn] = {}
        self.refusing, self.refused = set[int](), set[int]()
        """Threads whose launch, a ``Turn``, may not compile its kernel; and those that would have.
        """
        self._warm_ups: list[tuple[str, int, Span]] = []
        """Function, candidate, and the clock of an untimed run."""

    # -- a replay ----------------------------------------------------------------------------------

    def prepare(self, schedule: Replay) -> None:
        """Let the scheduled candidates be made ready, before the clock is."""
        for label, trial in schedule.items():
            site = self._sites.met.get(label)
            if site is not None and site.prepare is not None:
                site.prepare(site.configs[trial.candidate])

    def begin_replay(self, number: int, schedule: Replay, *, times_launches: bool = False) -> None:
        """From here on, launches belong to replay ``number`` and run the candidates of
        ``schedule``.
        """
        self._repeated = {
            label for label, trial in schedule.items() if self._schedule.get(label) == trial
        }
        self._replay, self._schedule, self._times_launches = number, schedule, times_launches
        # Launches that hit matter where no schedule asks for speed: in discovery, in warm-ups of
        # functions and in the final run.
        self.is_watching = not schedule or any(trial.is_checked for trial in schedule.values())
        self._is_timed = any(trial.is_timed for trial in schedule.values())
        self.launched.clear()

    def take_undo(self) -> Snapshot:
        """The tensors that the last run changed; it is put back or forgotten by the caller."""
        undo, self._undo = self._undo, Snapshot()
        return undo

    def repeat(self, graph: Any, launched: set[str], undo: Snapshot) -> None:
        """Make this run by a graph, which launches these sites and changes what is in ``undo``."""
        graph.replay()
        self._undo = undo
        for label, trial in self._schedule.items():
            if trial.is_timed and label in launched:
                self.samples.add_run(label, trial.candidate, self._replay)

    def read_spans(self, last: int | None = None) -> None:
        """Move the times of replays to the samples, up to the ``last``.

        The device must have gone past them.
        """
        while self._spans and (last is None or self._spans[0][2] <= last):
            label, candidate, replay, span = self._spans.popleft()
            ms = None if span is None else self._clock.launch_ms(span)
            self.samples.add_launch(label, candidate, replay, ms)
            if self._log.is_tracing:
                took = "waited for the host" if ms is None else f"kernel_ms={ms:.4f}"
                config = self._sites.met[label].texts[candidate]
                self._log.trace(
                    f'site={label} candidate={candidate} replay={replay} {took} config="{config}"'
                )
        for label, candidate, span in self._warm_ups:
            self.samples.add_warm_up(label, candidate, span.ms())
        self._warm_ups.clear()

    def on_compilation(self, kernel: Any) -> None:
        """Before Triton compiles a kernel inside a launch: a replay of this thread does not count
        then.
        """
        if (thread := get_ident()) in self.refusing:
            self.refused.add(thread)
            raise NotLoaded
        if interception.listener_here() is not self or not self._is_timed:
            return
        around = [
            f"{label} {self._schedule[label].candidate}"
            for label, _ in self.functions
            if label in self._schedule
        ]
        self.samples.lose(self._replay)
        self._log.info(
            f"replay={self._replay} does not count: it compiled"
            f" {self.variants.on_compilation(kernel, around)}"
        )

    # -- calls that count --------------------------------------------------------------------------

    def turns(self, schedule: Replay) -> dict[str, Turn]:
        """Begin a call: the turns of those of its trials that can be made the short way."""
        found = {}
        for label, trial in schedule.items():
            site = self._sites.met.get(label)
            if site is None or trial.is_checked or not self._is_plain(site, trial.candidate):
                continue
            key = label, trial.candidate
            turn = self._turns.get(key) or self._turns.setdefault(
                key, Turn(self, self._clock, site, trial.candidate)
            )
            turn.begin(is_timed=trial.is_timed and self._times_launches)
            found[label] = turn
        return found

    def _is_plain(self, site: Site, index: int) -> bool:
        """True of a candidate that a launch with a known config can make as it is."""
        is_ready = (
            site.is_compiled
            and index not in site.failures
            and any(index in variant.loaded for variant in site.variants)
        )
        is_open = site.winner is None and site.record is None and not site.is_given_up
        return is_ready and is_open and site.configs[index].pre_hook is None

    def end_turns(self, turns: Mapping[str, Turn]) -> None:
        """The call has ended: keep the times of its launches."""
        for label, turn in turns.items():
            if not turn.n_launches:
                continue
            self.launched.add(label)
            turn.site.is_replayed = True
            if self._schedule[label].is_timed:
                self.samples.add_run(label, turn.index, self._replay)
            if turn.is_timed:
                turn.spans += [None] * (turn.n_launches - len(turn.spans))
                self._spans.extend((label, turn.index, self._replay, span) for span in turn.spans)

    def nest(self, label: str) -> None:
        """A launch of this site is part of the functions under way."""
        for outer, candidate in self.functions:
            self.samples.nest(outer, candidate, label)

    def launch_in_use(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A launch that is no trial though its kernel has one: of another thread, of a capture, of
        a compilation.
        """
        assert self.in_use is not None
        launch = interception.launch_of(kernel, args, kwargs)
        return launch.run_known(self.in_use(launch))

    def launch_otherwise(
        self,
        site: Site,
        index: int,
        call: tuple[Any, tuple[Any, ...], dict[str, Any]],
        error: BaseException,
    ) -> Any:
        """Make a launch that did not return the long way, as all launches of the site in the rest
        of this call.
        """
        is_inner = (thread := get_ident()) in self.refusing
        self.refusing.discard(thread)
        launch = interception.launch_of(*call)
        for slot in site.slots.values():
            slot.clear()
        if isinstance(error, Exception) and not is_machine_failure(error):
            if self._tells_of_more(error):
                raise error
            self._fail(site, index, error, launch)
            site.last_error = free_frames(error)
        try:
            return self.missed(launch)
        finally:
            if is_inner:
                self.refusing.add(thread)

    def _fail(self, site: Site, index: int, error: Exception, launch: Tunable) -> None:
        """A launch of a candidate has failed: a vote."""
        self._sites.fail(
            site, index, CandidateFailure(kind_of(error, FailureKind.LAUNCH), reason_of(error))
        )
        # The next config runs on what it has left, as a lock that is held: this may be the cause of
        # all that follows.
        if site.last_error is None and (names := launch.unrestored(error)):
            left = (
                f"what it may have written to {', '.join(names)} stays, because restore_value does"
                " not name it"
            )
            self._log.warning(
                f'site={site.label} config="{site.texts[index]}" failed in its launch:'
                f" {reason_of(error)}; {left}",
                shown=True,
            )

    def _tells_of_more(self, error: Exception) -> bool:
        """True of an error that is not the doing of the config it was launched with."""
        return (
            self.is_captured
            or is_fatal(error)
            or isinstance(error, DistTuneError)
            or is_secondary(error)
        )

    # -- a listener's part -------------------------------------------------------------------------

    def launching(self, launch: Tunable) -> None:
        """Before any launch outside scheduled replays; in them before one that is to be undone
        though its config is known.
        """
        if self.in_use is not None:
            return
        if self.is_watching:
            self._sites.remember_hit(launch)
        launch.keep(self._undo)

    def missed(self, launch: Tunable) -> Any:
        """Launch a kernel or function without a config, with the candidate whose turn it is.

        Raises:
            CaptureError: the closure captures a CUDA graph.
            NoValidConfigError: no candidate of the site can be launched on this rank.
        """
        if self.in_use is not None and is_capturing():
            return launch.run_known(self.in_use(launch))
        if self._sites.lookup.may_tune and not self.is_captured:
            check_not_capturing(launch, self._closure)
        site = self._sites.meet(launch)
        site.is_replayed |= bool(self._schedule)
        if self.in_use is not None and site.stand_in is None:
            text = launch.describe(self.in_use(launch))
            site.stand_in = site.texts.index(text) if text in site.texts else 0
        self.nest(site.label)
        if site.winner is not None:  # a kernel object made anew in every replay
            launch.slot.fill(site.winner, site.timings)
            if not launch.keeps(site.winner):
                return launch.run_known(site.winner)
            return (
                self._run_recalled(site, launch)
                if site.is_unchecked
                else self._run(launch, site.winner)
            )
        # As in Triton, where the first launch tunes and the next ones add to what it leaves.
        self._zeroes = self.in_use is None and (
            bool(self._schedule) or site.label not in self.launched
        )
        self.launched.add(site.label)
        trial = self._schedule.get(site.label, Trial(site.first_guess, is_timed=False))
        if site.checker is not None and trial.is_checked and trial.candidate in site.failures:
            # A reference may be collective: it is asked as often as on the ranks where this
            # candidate runs.
            site.checker.begin(*launch.arguments, is_repeated=site.label in self._repeated)
            site.checker.restore()
        return self._launch_first(site, launch, trial)

    def _launch_first(self, site: Site, launch: Tunable, trial: Trial) -> Any:
        """Launch the candidate whose turn it is, or the first one that can stand in for it."""
        # Else another one runs at this size whenever the candidate is in use.
        is_kept = launch.keeps(site.configs[trial.candidate])
        if not is_kept and not any(map(launch.keeps, site.configs)):
            assert launch.slot.fits is not None
            return launch.slot.fits.run(launch)
        for index in site.order(trial.candidate):
            if not launch.keeps(site.configs[index]):
                continue
            if index != trial.candidate and self._schedule and is_kept:
                self.samples.disturb(self._replay)
            if site.is_compiled and site.is_new and site.record is None:
                # Compiled and loaded in the middle of what is timed at other sites.
                if self._schedule and site.stand_in is None:
                    self.samples.disturb(self._replay)
                if not self._sites.load(site, index):
                    continue
            launched = self._launch(site, launch, index, trial)
            if isinstance(launched, NotMade):
                launched = self._launch_loaded(site, launch, index, trial)
            if isinstance(launched, Returned):
                return launched.value
            assert isinstance(launched, Failed)
            # Its collectives are done, at least in part, and the closure needs no result: another
            # run of them would find no peer.
            if launched.n_collectives > 0:
                if self.in_use is not None and site.last_error is not None:
                    raise site.last_error
                self.samples.disturb(self._replay)
                self.failed = site.last_error
                self.suspects.append(
                    f'candidate {index} "{site.texts[index]}" with {site.failures[index].reason}'
                )
                return None
        site.is_given_up = True
        raise none_left(
            site.label, site.texts, site.failures, f"on rank {self._rank}"
        ) from site.last_error

    def _launch_loaded(self, site: Site, launch: Tunable, index: int, trial: Trial) -> Launched:
        """Launch what is loaded for these arguments, in a replay that does not count unless it is
        the candidate that was asked for.
        """
        ready, is_asked = self.variants.ready(site, launch, index)
        if not is_asked and self._is_timed:
            self.samples.lose(self._replay)
        return (
            Failed()
            if ready is None
            else self._launch(site, launch, ready, trial, may_compile=True)
        )

    def _launch(
        self, site: Site, launch: Tunable, index: int, trial: Trial, *, may_compile: bool = False
    ) -> Launched:
        """Launch one candidate, and time or check it if it is its turn; only if it is loaded, or
        ``may_compile``.
        """
        is_turn = index == trial.candidate
        # Around all launches of a timed replay: events take time, and the replay shall not look
        # faster where fewer are timed.
        is_covered = launch.is_compiled and site.has_gaps
        span = (
            self._clock.span(is_covered=is_covered)
            if is_turn and self._is_timed and self._times_launches
            else None
        )
        warm_up = self._clock.span() if is_turn and trial.is_checked else None
        counts = self.in_use is not None
        is_checked = (
            is_turn
            and (trial.is_checked or site.is_unchecked)
            and index not in site.failures
            and not counts
        )
        checker = site.checker if is_checked else None
        site.is_unchecked &= not is_checked
        # Of a launch inside a closure only while it is judged.
        inputs = self.inputs if launch.is_whole else Inputs()
        if (
            not (launch.is_whole or trial.is_timed or counts)
            and site.record is None
            and (trial.is_checked or site.checker is not None)
        ):
            inputs.keep(launch.function, *launch.arguments)
        if checker is not None:
            checker.begin(*launch.arguments, is_repeated=site.label in self._repeated)
        n_before = n_collectives() if launch.is_whole else 0  # the reference's among them
        versions, made = (
            _written(launch) if counts and launch.is_whole and trial.is_checked else None,
            list[Any](),
        )

        def noting(run: Any, kernel: Any, args: Any, kwargs: Any) -> Any:
            value = run(kernel, *args, **kwargs)
            made.append(kernel)
            return value

        is_refused = site.is_compiled and site.record is None and not may_compile
        noted = self._sites.launching(site.label, index, is_scheduled=bool(self._schedule))
        try:
            inside = around_launches(noting) if versions is not None else nullcontext()
            with (
                noted,
                inside,
                (
                    refused()
                    if is_refused
                    else nullcontext()
                    if site.is_compiled
                    else self._running(site, index)
                ) as refusal,
            ):
                if warm_up is not None:
                    warm_up.begin()
                with self.watchdog.launching(
                    site.label, index, is_known=site.record is not None or counts
                ):
                    value = self._run(
                        launch,
                        site.configs[index],
                        span,
                        is_trial=site.record is None and self._zeroes,
                    )
                if warm_up is not None:
                    warm_up.end()
            # A wrapper around the kernel has caught it.
            if isinstance(refusal, Refusal) and refusal.is_raised:
                return NotMade()
        except NotLoaded:
            return NotMade()
        # Any error of a launch becomes a vote on all ranks; raising it would leave the peers alone
        # in the closure's collectives.
        except Exception as error:
            if checker is not None:
                with suppress(RuntimeError):  # of a device that is lost
                    checker.restore()
            if self._tells_of_more(error):
                raise
            if launch.is_whole and self.changed is not None and (names := self.changed()):
                error.add_note(
                    f"{site.label} has changed {names} before, so that no other config can be tried"
                )
                raise
            # All of it: a comparison would wait for a device that may wait for this rank's next
            # launch
            inputs.put_back()
            self._fail(site, index, error, launch)
            if (
                counts
                and launch.is_whole
                and (versions is None or made or versions != _written(launch))
            ):
                error.add_note(
                    f"{site.label} may have changed something, so that the call is not made again:"
                    f' config="{site.texts[index]}"'
                )
                raise
            # They hold the memory that the next candidate needs.
            site.last_error = free_frames(error)
            return Failed(n_collectives() - n_before if launch.is_whole else 0)
        if checker is not None and not self._is_right(site, index, value, launch, inputs):
            return Returned(value)
        # The run of a stand-in.
        if checker is None and site.checker is not None and not launch.is_whole and not counts:
            self._undo.take(inputs.values, inputs.changed())
        # Else what is in use.
        if not counts or site.stand_in is None or site.stand_in in site.failures:
            site.stand_in = index
        if is_turn and trial.is_timed:
            self.samples.add_run(site.label, index, self._replay)
        if warm_up is not None:
            self._warm_ups.append((site.label, index, warm_up))
        if span is not None and trial.is_timed:
            if launch.is_compiled and self._clock.has_gap(span):
                site.has_gaps, span = True, None
            self._spans.append((site.label, index, self._replay, span))
        return Returned(value)

    def _run(
        self, launch: Tunable, config: Any, span: Span | None = None, *, is_trial: bool = True
    ) -> Any:
        """Launch; once more if the machine failed."""
        n_before, undo = (
            0 if launch.is_compiled else n_collectives(),
            self._undo if self.in_use is None else None,
        )
        try:
            return launch.run(config, undo, span, is_trial=is_trial)
        except Exception as error:
            if not is_machine_failure(error) or not (
                launch.is_compiled or n_collectives() == n_before
            ):
                raise
            self.inputs.put_back()
            self.samples.lose(self._replay)
        return launch.run(config, undo, span, is_trial=is_trial)

    def _run_recalled(self, site: Site, launch: Tunable) -> Any:
        """Launch a config from the cache, and judge its result once."""
        assert site.checker is not None
        site.is_unchecked = False
        site.checker.begin(*launch.arguments, is_repeated=False)
        try:
            value = self._run(launch, site.winner)
        except BaseException:
            site.checker.restore()
            raise
        if wrong := site.checker.judge(value, *launch.arguments):
            self.wrong[site.label] = wrong
        return value

    def _is_right(
        self, site: Site, index: int, value: Any, launch: Tunable, inputs: Inputs
    ) -> bool:
        """Judge a result, and note which arguments were changed though they are no outputs."""
        assert site.checker is not None
        wrong = site.checker.judge(value, *launch.arguments)
        changed = inputs.changed() - (set() if wrong else site.checker.outputs)
        if not launch.is_whole:  # nothing else puts back what a closure holds
            self._undo.take(inputs.values, changed)
        if wrong:
            self._sites.fail(
                site,
                index,
                CandidateFailure(FailureKind.WRONG_RESULT, f"the result is wrong: {wrong}"),
            )
        else:
            site.changes.setdefault(index, set()).update(inputs.harmed(changed))
        return not wrong

    @contextmanager
    def _running(self, site: Site, index: int) -> Iterator[None]:
        """A function runs meanwhile: launches inside are a part of its time."""
        self.functions.append((site.label, index))
        try:
            yield
        finally:
            self.functions.pop()


def _written(launch: Tunable) -> dict[int, int | None]:
    """What tells whether a run of a whole function has written to anything that it can reach."""
    return written(launch.function, *launch.arguments)
