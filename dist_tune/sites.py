"""The sites of one closure as this rank sees them, and what each of its launches runs in the replay under way.

Hears launches, launches them with the candidate that the schedule says, times that, and lets another
candidate stand in for one that fails, so that a bad config never aborts a replay. Knows nothing of other ranks; what it
learns is told at the next meeting.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dist_tune.compile import Failure, Resources, reason_of
from dist_tune.compiler import Compiler
from dist_tune.efforts import deal_configs
from dist_tune.errors import CaptureError, NoValidConfigError
from dist_tune.launch import Launch, Undo, adopt, evict
from dist_tune.ledger import Ledger
from dist_tune.plan import Replay, Trial
from dist_tune.shares import Bench
from dist_tune.space import describe
from dist_tune.terminal import quiet_terminal
from dist_tune.timing import Clock, Span, is_capturing

if TYPE_CHECKING:
    import loguru
    import triton

# After one of these the CUDA context is gone and every later call fails: nothing can stand in.
_FATAL = re.compile(
    r"illegal memory access|misaligned address|illegal instruction|illegal address|device-side assert|launch timed out|"
    r"unspecified launch failure|hardware stack error|invalid program counter|uncorrectable",
    re.IGNORECASE,
)


@dataclass(slots=True)
class Site:
    """One (kernel, key) of the closure."""

    label: str
    """Kernel and key, "module.kernel[4096,4096,torch.bfloat16]": what ranks match sites by."""
    kernel: str
    key: str
    configs: list[triton.Config]
    texts: list[str]
    """The configs described, in order."""
    is_new: bool = True
    """Whether it has yet to be told to the others and loaded."""
    holders: dict[int, tuple[Any, tuple[Any, ...]]] = field(default_factory=dict)
    """The decorated kernels, with their keys, that wait for the winner."""
    failures: dict[int, str] = field(default_factory=dict)
    """Candidate -> why it cannot run here."""
    told: set[int] = field(default_factory=set)
    """Failures that the other ranks have heard of."""
    resources: dict[int, Resources] = field(default_factory=dict)
    standby: int | None = None
    """A candidate that has run here."""
    winner: triton.Config | None = None

    def order(self, first: int | None) -> Iterator[int]:
        """Candidates to try for a launch: the one asked for, one known to run, then by index."""
        wanted = [index for index in (first, self.standby) if index is not None]
        return (index for index in dict.fromkeys([*wanted, *range(len(self.configs))]) if index not in self.failures)


class Sites:
    """All sites met in a tuning on this rank. A ``Listener``."""

    def __init__(self, clock: Clock, log: loguru.Logger, compiler: Compiler, bench: Bench, where: str) -> None:
        self.is_watching = True
        self.met: dict[str, Site] = {}
        self.hits: dict[str, str] = {}
        """Label -> config, for launches that Triton had a config for."""
        self.ledger = Ledger()
        self._clock = clock
        self._log = log
        self._compiler = compiler
        self._bench = bench
        self._where = where
        self._labels: dict[str, list[tuple[Any, ...]]] = {}
        self._digests: dict[int, tuple[Any, str]] = {}
        self._hit_holders: dict[str, tuple[Any, tuple[Any, ...]]] = {}
        self._schedule: Replay = {}
        self._times_launches = False
        self._replay = 0
        self._undo = Undo()
        self._spans: list[tuple[str, int, int, Span]] = []
        self._winners: dict[str, str] = {}
        self._to_reset: set[str] = set()

    # -- a replay ------------------------------------------------------------------------------------------------

    def begin_replay(self, number: int, schedule: Replay, *, times_launches: bool = False) -> None:
        """From here on, launches belong to replay ``number`` and run what ``schedule`` says."""
        self._replay, self._schedule, self._times_launches = number, schedule, times_launches
        # Launches that hit matter only where no schedule asks for speed: in discovery and in the final run.
        self.is_watching = not schedule

    def end_replay(self) -> None:
        """Put back what launches changed under ``restore_value``."""
        self._undo.restore()

    def read_spans(self) -> None:
        """Move the times of finished replays to the ledger. The device must have gone past them."""
        for label, candidate, replay, span in self._spans:
            ms = span.ms()
            self.ledger.add_launch(label, candidate, replay, ms)
            self._log.trace(
                f'site={label} candidate={candidate} replay={replay} kernel_ms={ms:.4f} config="{self.met[label].texts[candidate]}"'
            )
        self._spans.clear()

    # -- what a listener is told ---------------------------------------------------------------------------------

    def launching(self, launch: Launch) -> None:
        """Before any launch outside scheduled replays: note hits; in the final run, zero once as vanilla Triton does."""
        config = launch.known_config()
        if config is None:
            return
        label = self._label_of(launch)
        self.hits[label] = describe(config)
        self._hit_holders[label] = (launch.kernel, launch.key)
        if label in self._to_reset:
            self._to_reset.discard(label)
            launch.reset_only(config)

    def missed(self, launch: Launch) -> Any:
        """Launch a kernel that Triton has no config for, with the candidate whose turn it is.

        Raises:
            NoValidConfigError: no candidate of the site can be launched on this rank.
        """
        site = self._site_of(launch)
        if site.winner is not None:  # a kernel object made anew in every replay
            adopt(launch.kernel, launch.key, site.winner, {})
            return launch.run(site.winner, self._undo)
        trial = self._schedule.get(site.label, Trial(0 if site.standby is None else site.standby, is_timed=False))
        last: Exception | None = None
        for index in site.order(trial.candidate):
            if index != trial.candidate and self._schedule:
                self.ledger.disturb(self._replay)
            if site.is_new:
                if self._schedule:  # compiled and loaded in the middle of what is timed at other sites
                    self.ledger.disturb(self._replay)
                if not self.load(site, index):
                    continue
            is_trial = trial.is_timed and index == trial.candidate
            span = self._clock.span() if is_trial and self._times_launches else None
            try:
                result = launch.run(site.configs[index], self._undo, span)
            # Whatever a launch raises becomes a vote: this candidate is out on all ranks after the next meeting. Raising
            # it here would leave the peers alone in the closure's collectives.
            except Exception as error:
                if _FATAL.search(str(error)):
                    raise
                self.fail(site, index, reason_of(error))
                last = error
                continue
            site.standby = index
            if is_trial:
                self.ledger.add_run(site.label, index, self._replay)
            if span is not None:
                self._spans.append((site.label, index, self._replay, span))
            return result
        raise NoValidConfigError(no_valid_config(site.label, site.texts, site.failures, self._where)) from last

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
            self.fail(site, index, failure.reason, failure.output)

    def note_need(self, site: Site, index: int) -> None:
        """Note what a candidate would need that another rank found to need too much."""
        needed = self._compiler.known_need(site.label, index)
        if needed is not None:
            site.resources.setdefault(index, Resources(needed, None, None))

    def fail(self, site: Site, index: int, reason: str, output: str = "") -> None:
        """Note that a candidate cannot run here."""
        site.failures[index] = reason
        self._log.warning(f'site={site.label} candidate={index} cannot run here: {reason} config="{site.texts[index]}"')
        if output.strip():
            self._log.debug(f"site={site.label} candidate={index} the compiler wrote:\n{output.rstrip()}")

    # -- between replays -----------------------------------------------------------------------------------------

    def take_failures(self) -> dict[str, dict[int, str]]:
        """Site -> candidate -> why it cannot run here; what is new since the last time. All ranks hear of each once."""
        new = {
            label: {i: reason for i, reason in site.failures.items() if i not in site.told}
            for label, site in self.met.items()
            if site.failures
        }
        for label, failures in new.items():
            self.met[label].told |= failures.keys()
        return {label: failures for label, failures in new.items() if failures}

    def evict(self, labels: set[str]) -> None:
        """Forget the configs Triton has for these sites, so that they are met as misses; and all hits."""
        for label in labels & self._hit_holders.keys():
            evict(*self._hit_holders[label])
            self._log.info(f"site={label} is tuned although this rank has a config: not all ranks have the same one")
        self.hits.clear()

    def adopt(self, winners: Mapping[str, str], timings_ms: Mapping[str, Mapping[int, float]]) -> None:
        """Give the winners, described, to Triton; those of sites not met here yet when they are met."""
        self._winners = dict(winners)
        self._to_reset = set(winners)
        for label in winners.keys() & self.met.keys():
            site = self.met[label]
            site.winner = site.configs[site.texts.index(winners[label])]
            times = {config: timings_ms[label].get(i, float("inf")) for i, config in enumerate(site.configs)}
            for kernel, key in site.holders.values():
                adopt(kernel, key, site.winner, times)

    def _site_of(self, launch: Launch) -> Site:
        label = self._label_of(launch)
        site = self.met.get(label)
        if site is None:
            configs = launch.candidates()
            texts = [describe(config) for config in configs]
            site = self.met[label] = Site(label, launch.name, launch.key_text, configs, texts)
            if self._winners.get(label) in texts:  # the others have tuned it; this rank comes to it in the final run
                site.winner = configs[texts.index(self._winners[label])]
            else:
                positions = deal_configs(configs, self._bench.n_ranks)
                first = [i for i, position in enumerate(positions) if position == self._bench.position]
                self._compiler.begin(label, launch, configs, first)
                self._log.debug(f"site={label} compiles; until it is loaded, file descriptor 2 leads to {quiet_terminal.kept_at}")
        site.holders[id(launch.kernel)] = (launch.kernel, launch.key)
        return site

    def _label_of(self, launch: Launch) -> str:
        base = launch.name + launch.key_text
        if id(launch.kernel) not in self._digests:  # kept with the kernel, so that its id is not given to another one
            self._digests[id(launch.kernel)] = (launch.kernel, launch.all_configs_digest())
        _, digest = self._digests[id(launch.kernel)]
        alike = self._labels.setdefault(base, [])
        identity = (*launch.identity, digest)
        if identity not in alike:
            alike.append(identity)
        # Two kernels of one name and key, told apart by the order in which the closure comes to them.
        number = alike.index(identity)
        return base if number == 0 else f"{base}#{number + 1}"


def no_valid_config(label: str, texts: list[str], failures: Mapping[int, str], where: str) -> str:
    """The message of a ``NoValidConfigError``: the first reasons, and how many more there are."""
    shown = [f'  {index}: "{texts[index]}": {reason}' for index, reason in sorted(failures.items())[:5]]
    more = f"\n  and {len(failures) - len(shown)} more" if len(failures) > len(shown) else ""
    return (
        f"site {label}: none of its {len(texts)} configs runs {where}:\n" + "\n".join(shown) + more + "\n"
        "Add a config that fits the device; a reason that is the same for all configs is usually a mistake in the launch."
    )


def check_not_capturing(launch: Launch, closure: str) -> None:
    """Refuse to tune while a CUDA graph is being captured.

    Raises:
        CaptureError: it is.
    """
    if is_capturing():
        raise CaptureError(
            f"{launch.name}{launch.key_text} has no config yet and {closure} is being captured in a CUDA graph, where nothing can be "
            f"tuned. Call it once with these shapes before the capture."
        )
