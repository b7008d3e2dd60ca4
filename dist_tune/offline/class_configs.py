"""Files of tuned configs to be: which sizes a class has, what is measured again for it, and which config it gets.

Knows configs, outcomes and files as values; what is measured, others measure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dist_tune.offline.bucket_choice import choose, gain, shortlist
from dist_tune.offline.config_files import check_file_name, small_medium_large, to_json, without_amd_keys
from dist_tune.offline.jobs import Ended, Failed
from dist_tune.offline.problem import Outcome, Problem
from dist_tune.offline.runs import MakeRun
from dist_tune.offline.search_space import launchable


@dataclass(frozen=True)
class ConfigFile:
    """A file of tuned configs to be: one config for each class of sizes."""

    json_file_name: str
    sizes: Sequence[int]
    make_for_size: Callable[[int], MakeRun]
    """From a size to its ``make_run_and_gt_fn``."""
    search_space: Sequence[Mapping[str, Any]]
    classes: Callable[[int], str] = field(default_factory=small_medium_large)
    """From a size to the name of its class."""
    config_callback: Callable[[dict[str, Any]], object] | None = None

    def problem(self, size: int, name: str = "", search_space: Sequence[Mapping[str, Any]] | None = None) -> Problem:
        """The problem at one size; ``search_space`` in place of the file's, under a longer name."""
        make = _MadeWhenNeeded(self.make_for_size, size)
        space = self.search_space if search_space is None else search_space
        called = f"{Path(self.json_file_name).stem} M={size}{name}"
        return Problem(called, space, make, self.config_callback, source=self.make_for_size, release=make.release)

    def check(self) -> None:
        """Refuse what would fail only when the file is written.

        Raises:
            ValueError: no sizes, or one twice; no name of a file; configs that JSON cannot hold.
        """
        if not self.sizes or len(set(self.sizes)) < len(self.sizes):
            raise ValueError(f"{self.json_file_name}: need sizes, and each once, got {list(self.sizes)}")
        check_file_name(self.json_file_name)
        for config in self.search_space:
            to_json(config, self.json_file_name)


class _MadeWhenNeeded:
    """A factory for one size that holds no inputs before it is asked for a run, nor after its problem is tuned."""

    def __init__(self, make_for_size: Callable[[int], MakeRun], size: int) -> None:
        self._make_for_size = make_for_size
        self._size = size
        self._make: MakeRun | None = None

    def __call__(self, config: dict[str, Any]) -> Any:
        if self._make is None:
            self._make = self._make_for_size(self._size)
        return self._make(config)

    def release(self) -> None:
        """Let the inputs go."""
        self._make = None


@dataclass(frozen=True)
class Settled:
    """What was chosen for one class of a file."""

    json_file_name: str
    size_class: str
    config: dict[str, Any]
    latencies_us: dict[int, float]
    """Size -> time of the new config."""
    old_config: dict[str, Any] | None = None
    """What the file had, if that was compared."""
    old_latencies_us: dict[int, float] = field(default_factory=dict)
    gain: float | None = None
    """By which share the new one is faster than the old: 0.03 is 3 %. None where nothing was compared."""
    is_saved: bool = True
    """Whether it is in the file now; not if the old one is as good."""


@dataclass(frozen=True)
class SizeClass:
    """One class of a file, with what came of its sizes. Candidates are indices into the space; the old config may be one more."""

    file: ConfigFile
    name: str
    found: Mapping[int, Outcome]
    """Size -> outcome, of sizes that could be tuned."""
    old: dict[str, Any] | None
    """To be compared with."""

    @cached_property
    def _space(self) -> list[dict[str, Any]]:
        """The configs to run, and the old one if it is none of them."""
        own, originals = launchable(self.file.search_space)
        is_new = self.old is not None and without_amd_keys(self.old) not in own
        return [*originals, self.old] if is_new and self.old is not None else originals

    @cached_property
    def _old_index(self) -> int | None:
        if self.old is None:
            return None
        old = without_amd_keys(self.old)
        return next(i for i, config in enumerate(self._space) if without_amd_keys(config) == old)

    @cached_property
    def shortlisted(self) -> list[int]:
        """Candidates to measure once more at all sizes; one, if there is nothing to compare."""
        winners = {outcome.winner for outcome in self.found.values()}
        failed = {i for outcome in self.found.values() for i in outcome.failures}
        by_size = [outcome.latencies_us for outcome in self.found.values()]
        chosen = shortlist(by_size, winners, failed) if len(self.found) > 1 else sorted(winners)
        return chosen if self._old_index is None else sorted({*chosen, self._old_index})

    def finals(self) -> list[tuple[int, Problem]]:
        """What is to be measured again, size by size."""
        if len(self.shortlisted) < 2 and all({*self.shortlisted} <= {each.winner, *each.latencies_us} for each in self.found.values()):
            return []
        space = [self._space[i] for i in self.shortlisted]
        return [(size, self.file.problem(size, f", {self.name} compared", space)) for size in self.found]

    def settle(self, measured: Mapping[int, Ended], min_gain: float | None) -> Settled | Failed:
        """The choice, with ``measured``: size -> outcome of its final."""
        none = Failed(
            f"{self.file.json_file_name} {self.name}",
            f"no config runs at all of the sizes {sorted(self.found)}: split the class, or add configs that do",
        )
        by_size = {
            size: {self.shortlisted[k]: us for k, us in each.latencies_us.items()}
            for size, each in measured.items()
            if isinstance(each, Outcome)
        }
        if len(by_size) < len(measured):
            return none
        if not measured:  # nothing to compare
            by_size = {
                size: {i: outcome.latencies_us.get(i, outcome.latency_us) for i in self.shortlisted} for size, outcome in self.found.items()
            }
        winner = choose(list(by_size.values()))
        if winner is None:
            return none
        old = self._old_index
        by_how_much = (
            gain(list(by_size.values()), winner, old) if old is not None and all(old in each for each in by_size.values()) else None
        )
        return Settled(
            self.file.json_file_name,
            self.name,
            self._config_of(winner),
            {size: each[winner] for size, each in by_size.items()},
            self.old,
            {size: each[old] for size, each in by_size.items() if old is not None and old in each},
            by_how_much,
            is_saved=winner != old and (by_how_much is None or min_gain is None or by_how_much >= min_gain),
        )

    def _config_of(self, index: int) -> dict[str, Any]:
        return Problem("", self._space, lambda config: (lambda: None, None), self.file.config_callback).config_of(index)


def classes_of(file: ConfigFile, ended: Mapping[int, Ended], there: Mapping[str, Any]) -> list[SizeClass]:
    """The classes of a file's sizes that could be tuned at any. ``ended``: size -> what came of it; ``there``: configs to compare with."""
    classes: dict[str, dict[int, Outcome]] = {}
    for size in file.sizes:
        each = ended[size]
        known = classes.setdefault(file.classes(size), {})
        if isinstance(each, Outcome):
            known[size] = each
    return [SizeClass(file, name, found, there.get(name)) for name, found in classes.items() if found]
