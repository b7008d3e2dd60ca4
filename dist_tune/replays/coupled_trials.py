"""Launches of kernels of which some are coupled: no stand-in with another config on some ranks. See ``coupled``."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from dist_tune.replays.coupled import Coupling
from dist_tune.replays.launched import Failed, Launched, NotMade, Returned
from dist_tune.replays.trials import Trials
from dist_tune.runtime import Launch, Tunable
from dist_tune.search import Trial
from dist_tune.sites import Site


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
        if isinstance(launched, Returned):
            return launched.value
        self.samples.disturb(self._replay)
        self.suspects.append(f'candidate {index} "{site.texts[index]}" with {site.failures[index].reason}')
        return None
