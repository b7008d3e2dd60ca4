"""Coupled kernels: those whose protocol between ranks depends on the config, so that all ranks must launch the same.

Ranks meet at the launch itself, before a candidate's first one and after it: a kernel that waits for its peers' is a meeting anyway. So a
candidate that cannot be launched on some rank is launched on none, and all go on to the same next one. A candidate that has run on all
ranks is launched without a meeting, and no other stands in for it on some ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from dist_tune.cache import digest
from dist_tune.distributed import Ranks, Reduction
from dist_tune.errors import AloneError, CandidateFailure, FailureKind, RankMismatchError
from dist_tune.replays.launched import Failed, Launched, NotAgreedError, NotMade, Returned
from dist_tune.replays.trials import Trials
from dist_tune.runtime import Launch, Tunable
from dist_tune.search import Trial
from dist_tune.sites import Site

if TYPE_CHECKING:
    from dist_tune.watch import Watchdog


_TOPIC = "launch of a coupled kernel"
_ADVICE = "All ranks must launch a coupled kernel in the same order, with equal keys: list arguments in key= that are equal on all ranks."
_agreed: WeakKeyDictionary[Any, dict[Hashable, tuple[ref[Any], frozenset[int]]]] = WeakKeyDictionary()
"""Kernel -> key -> the config that these ranks have agreed on."""


@dataclass(frozen=True, slots=True)
class Bid:
    """One rank's part of a meeting at a launch."""

    label: str
    candidates: str = ""
    """Digest of their list; empty for a launch with a known config."""
    known: str = ""
    """That config, described."""
    order: list[int] = field(default_factory=list)
    """Candidates that may run here, in turn."""
    failed: dict[int, str] = field(default_factory=dict)
    """Candidates that cannot -> why."""
    candidate: int = -1
    """The one that this rank is about to launch, or has launched; -1 for none."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What follows for all ranks."""

    is_agreed: bool = False
    """True if all ranks have the same candidate, or the same known config."""
    candidate: int = -1
    """To try next; -1 if none runs on all ranks."""
    failed: dict[int, str] = field(default_factory=dict)
    """Candidate -> "rank r: why" of the first rank."""
    has_known: bool = False
    """True if some rank had a config for this launch; where not all have the same, they forget it and bid again."""
    mismatch: str = ""
    """Difference between two ranks by which there is nothing to choose."""


@Reduction
def choose(bids: Mapping[int, Bid]) -> Choice:
    """The candidate that is earliest in the order of the rank where it is latest, of those that run on all ranks."""
    (first_rank, first), *others = bids.items()
    for rank, bid in others:
        if bid.label != first.label:
            return Choice(mismatch=f"rank {first_rank} is at {first.label}, rank {rank} at {bid.label}")
    failed: dict[int, str] = {}
    for rank, bid in bids.items():
        for i, why in bid.failed.items():
            failed.setdefault(i, f"rank {rank}: {why}")
    if any(bid.known for bid in bids.values()):
        return Choice(is_agreed=all(bid.known == first.known for bid in bids.values()), has_known=True)
    if any(bid.candidates != first.candidates for _, bid in others):
        return Choice(mismatch=f"ranks have different candidates for {first.label}")
    places = [{i: k for k, i in enumerate(bid.order) if i not in failed} for bid in bids.values()]
    running = set(places[0]).intersection(*places[1:])
    return Choice(
        is_agreed=first.candidate in running and all(bid.candidate == first.candidate for bid in bids.values()),
        candidate=min(running, key=lambda i: (max(each[i] for each in places), i), default=-1),
        failed=failed,
    )


class Coupling:
    """The meetings at launches of one tuning."""

    def __init__(self, ranks: Ranks, watchdog: Watchdog, enter: Callable[[], None], *, is_for_all: bool) -> None:
        """``enter``: come to the meetings of this call. ``is_for_all``: all kernels are coupled, and not those alone that say so."""
        self._ranks = ranks
        self._watchdog = watchdog
        self._enter = enter
        self._is_for_all = is_for_all
        self._has_entered = False

    def covers(self, launch: Tunable) -> bool:
        """True for a launch of a coupled kernel: the option says so, or the kernel's own attribute ``coupled``."""
        is_coupled = self._is_for_all or getattr(launch.owner, "coupled", False) is True
        return is_coupled and isinstance(launch, Launch) and len(self._ranks.members) > 1

    def is_known_to_all(self, launch: Launch, config: Any) -> bool:
        """True if all ranks launch this config, that they had before. Collective, until they have agreed on it once.

        Not after that, because for the other ranks this may be a call like those before, without a meeting.
        """
        known = _agreed.get(launch.owner, {}).get(launch.key)
        if known is not None and known[0]() is config and known[1].issuperset(self._ranks.members):
            return True
        is_agreed = self._meet(Bid(launch.name + launch.key_text, known=launch.describe(config))).is_agreed
        if is_agreed:
            self.note_agreed(launch.owner, launch.key, config)
        return is_agreed

    def note_agreed(self, owner: Any, key: Hashable, config: Any) -> None:
        """All ranks launch this config from now on."""
        _agreed.setdefault(owner, {})[key] = ref(config), frozenset(self._ranks.members)

    def launch(self, site: Site, name: str, candidate: int, make: Callable[[int, Callable[[], None]], Launched]) -> Returned | None:
        """Launch ``candidate`` if all ranks would and can, or the one that all agree on; None if none runs on all ranks. Collective.

        ``name``: kernel and key, as all ranks know them. ``make(candidate, ask)`` launches here, and calls ``ask()`` when nothing is
        left that may fail before.
        """
        choices: list[Choice] = []
        mine = candidate

        def ask() -> None:
            if not choices:  # once: a launch that the machine failed is made again, and the other ranks have made theirs
                choices.append(self._agree(site, name, mine, candidate))
            if not choices[-1].is_agreed:
                raise NotAgreedError

        while mine >= 0:
            choices.clear()
            made = make(mine, ask) if mine not in site.failures else Failed()
            if not choices or choices[-1].is_agreed:
                choices.append(self._agree(site, name, mine, candidate))
                if choices[-1].is_agreed:
                    site.run_by_all.add(mine)
                    assert isinstance(made, Returned)
                    return made
            if not choices[-1].has_known:
                mine = choices[-1].candidate
        return None

    def _agree(self, site: Site, name: str, candidate: int, first: int) -> Choice:
        """Bring the candidate that this rank would launch, or has launched; notes failures of peers."""
        failed = {i: each.reason for i, each in site.failures.items()}
        order = [i for i in site.order(first) if i not in failed]
        choice = self._meet(Bid(name, digest(site.texts), "", order, failed, candidate))
        for i, why in choice.failed.items():
            if i not in site.failures:
                site.failures[i] = CandidateFailure(FailureKind.LAUNCH, why)
                site.reported.add(i)  # by the rank that it failed on
        return choice

    def _meet(self, bid: Bid) -> Choice:
        """Raises ``RankMismatchError`` on all ranks if they are at different launches, or one has passed this call."""
        ranks, has_entered, self._has_entered = self._ranks, self._has_entered, True
        with self._watchdog.meeting(f"{_TOPIC}, {bid.label}"), ranks.interrupted():
            try:
                if has_entered:
                    choice = ranks.reduce(_TOPIC, bid, choose)
                else:
                    self._enter()
                    choice = ranks.gather(_TOPIC, bid, choose)
            except (AloneError, RankMismatchError) as error:
                raise RankMismatchError(f"{bid.label} is coupled, and not all ranks come to its launch: {error} {_ADVICE}") from error
        if choice.mismatch:
            raise RankMismatchError(f"coupled kernels: {choice.mismatch}. {_ADVICE}")
        return choice


class CoupledTrials(Trials):
    """The launches of one tuning. A ``Listener``."""

    coupling: Coupling
    """Set by the tuning, before the first launch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._coupled: dict[tuple[int, int], tuple[Site, Any, Hashable]] = {}
        """Sites of coupled kernels with their kernel and key, by identity."""

    def note_agreed(self) -> None:
        """At the end of a tuning of all ranks: they launch coupled kernels with their winners."""
        for site, owner, key in self._coupled.values():
            if site.winner is not None:
                self.coupling.note_agreed(owner, key, site.winner)

    def launching(self, launch: Tunable) -> None:
        """Before any launch outside scheduled replays; a known config that not all ranks have is forgotten, so that all miss it."""
        config = launch.known_config() if self.watchdog.phase != "last run" and self.coupling.covers(launch) else None
        if config is not None and isinstance(launch, Launch) and not self.coupling.is_known_to_all(launch, config):
            launch.slot.clear()
        super().launching(launch)

    def _launch_first(self, site: Site, launch: Tunable, trial: Trial) -> Any:
        if not self.coupling.covers(launch):
            return super()._launch_first(site, launch, trial)
        assert isinstance(launch, Launch)
        site.is_coupled = True
        self._coupled[id(site), id(launch.owner)] = site, launch.owner, launch.key
        index = trial.candidate
        if site.label in self._schedule and index in site.run_by_all:
            return self._launch_here(site, launch, trial)
        if self._is_timed:  # ranks meet in this replay
            self.samples.lose(self._replay)

        def make(i: int, ask: Callable[[], None]) -> Launched:
            if site.is_compiled and site.is_new and site.record is None and not self._sites.load(site, i):
                return Failed()
            asking = launch.asking(ask)
            launched = self._launch(site, asking, i, trial)
            is_refused = isinstance(launched, NotMade) and launched.is_refused
            return self._launch_loaded(site, asking, i, trial, only=True) if is_refused else launched

        made = self.coupling.launch(site, launch.name + launch.key_text, index, make)
        return made.value if made is not None else self._give_up(site)

    def _launch_here(self, site: Site, launch: Tunable, trial: Trial) -> Any:
        """Launch the candidate that the other ranks launch without a meeting; nothing in its place if it fails."""
        index = trial.candidate
        launched = self._launch(site, launch, index, trial) if index not in site.failures else Failed()
        if isinstance(launched, NotMade):
            launched = self._launch_loaded(site, launch, index, trial, only=True)
        return launched.value if isinstance(launched, Returned) else self._suspect(site, index)
