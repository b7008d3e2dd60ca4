"""One config for each class of sizes: the config with the least slowdown against the best of each size.

A config's slowdown at a size is its time over the best time there; over several sizes it is their geometric mean, so that twice as slow at
one size and twice as fast at another cancel. Knows configs, outcomes and files as values; api.py has them measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dist_tune.offline.config_files import file_content, small_medium_large, without_amd_keys
from dist_tune.offline.problem import Ended, Failed, Outcome, Problem, launchable
from dist_tune.offline.runs import MakeRun
from dist_tune.validation import check_function

Latencies = Mapping[int, float]
"""Config, by its index in a space -> time at one size."""
N_SHORTLISTED = 8


@dataclass(frozen=True)
class ConfigFile:
    """A file of tuned configs to be: one config for each class of sizes."""

    json_file_name: str
    """Name of the file, without a folder."""
    sizes: Sequence[int]
    """Sizes to tune at, each once."""
    make_for_size: Callable[[int], MakeRun]
    """From a size to its ``make_run_and_gt_fn``."""
    search_space: Sequence[Mapping[str, Any]]
    """Configs: dicts of values by name."""
    classes: Callable[[int], str] = field(default_factory=small_medium_large)
    """From a size to the name of its class."""
    config_callback: Callable[[dict[str, Any]], object] | None = None
    """Called with a copy of each config before it is used, to change it in place."""

    def problem(self, size: int, name: str = "", search_space: Sequence[Mapping[str, Any]] | None = None) -> Problem:
        """The problem at one size; ``search_space`` in place of the file's, under a longer name.

        Its inputs are made when the first run is, and freed when the problem is tuned.
        """
        make_for_size, made = self.make_for_size, list[MakeRun]()

        def make(config: dict[str, Any]) -> Any:
            if not made:
                made.append(make_for_size(size))
            return made[0](config)

        space = self.search_space if search_space is None else search_space
        called = f"{Path(self.json_file_name).stem} M={size}{name}"
        return Problem(called, space, make, self.config_callback, source=make_for_size, release=made.clear)

    def check(self) -> None:
        """Refuse before the tuning what would fail when the file is written.

        Raises:
            ValueError: no sizes, or one twice; no name of a file; configs that JSON cannot hold.
            TypeError: what must be a function is none.
        """
        check_function("make_for_size", self.make_for_size, "make_for_size(size)", is_needed=True)
        check_function("classes", self.classes, "classes(size)", is_needed=True)
        check_function("config_callback", self.config_callback, "config_callback(config)")
        if not self.sizes or len(set(self.sizes)) < len(self.sizes):
            raise ValueError(f"{self.json_file_name}: need sizes, and each once, got {list(self.sizes)}")
        file_content(self.json_file_name, {str(i): config for i, config in enumerate(self.search_space)})


@dataclass(frozen=True)
class Settled:
    """The choice for one class of a file."""

    json_file_name: str
    """Name of the file."""
    size_class: str
    """Name of the class, as "small"."""
    config: dict[str, Any]
    """The new config."""
    latencies_us: dict[int, float]
    """Size -> time of the new config."""
    regret: float
    """Share by which it is slower than the best config of each size, over all sizes of the class: 0.03 is 3 %."""
    old_config: dict[str, Any] | None = None
    """Config of the file before, if it was compared."""
    old_latencies_us: dict[int, float] = field(default_factory=dict)
    """Size -> time of the old config."""
    gain: float | None = None
    """Share by which the new config is faster than the old one: 0.03 is 3 %. None where they were not compared."""
    is_saved: bool = True
    """The new config is in the file now; False where the old one is as good, or the disk is full."""
    error: str = ""
    """Why the new config is not in the file, where the disk is full. The records stay: started again, the script measures nothing anew."""


class SizeClass:
    """One class of a file, with the outcomes at its sizes. Candidates are indices into the space; the old config may be one more."""

    def __init__(self, file: ConfigFile, name: str, found: Mapping[int, Outcome], old: dict[str, Any] | None) -> None:
        """``found``: size -> outcome, of sizes that could be tuned; ``old``: config to compare with."""
        self.file, self.name, self.found, self.old = file, name, found, old
        own, self._space = launchable(file.search_space)
        self._old: int | None = None
        if old is not None:
            same = without_amd_keys(old)
            self._old = own.index(same) if same in own else len(own)
            self._space = [*self._space, old]
        winners = {each.winner for each in found.values()}
        failed = {i for each in found.values() for i in each.failures}
        known = slowdowns([{i: us for i, us in each.latencies_us.items() if i not in failed} for each in found.values()])
        near = sorted(known, key=lambda i: (known[i], i))[:N_SHORTLISTED] if len(found) > 1 else []
        self.shortlisted = sorted({*(winners - failed), *near, *([] if self._old is None else [self._old])})
        """Candidates to measure once more at all sizes: the best of each size, the best over all so far, and the old one."""

    def finals(self) -> list[tuple[int, Problem]]:
        """(size, problem) of the measurements to make once more; none if there is nothing to compare."""
        if len(self.shortlisted) < 2 and all({*self.shortlisted} <= {each.winner, *each.latencies_us} for each in self.found.values()):
            return []
        finalists = [self._space[i] for i in self.shortlisted]
        return [(size, self.file.problem(size, f", {self.name} compared", finalists)) for size in self.found]

    def settle(self, measured: Mapping[int, Ended], min_gain: float | None) -> Settled | Failed:
        """The choice. ``measured``: size -> result of its final; empty where there was nothing to compare."""
        times = {size: {i: each.latencies_us.get(i, each.latency_us) for i in self.shortlisted} for size, each in self.found.items()}
        if measured:
            us = {size: each.latencies_us if isinstance(each, Outcome) else {} for size, each in measured.items()}
            times = {size: {self.shortlisted[k]: t for k, t in each.items()} for size, each in us.items()}
        known, old = slowdowns(list(times.values())), self._old
        if not known:
            reason = f"no config runs at all of the sizes {sorted(self.found)}: split the class, or add configs that do"
            return Failed(f"{self.file.json_file_name} {self.name}", reason)
        winner = min(known, key=lambda i: (known[i], i))
        gain = known[old] / known[winner] - 1 if old is not None and old in known else None
        return Settled(
            self.file.json_file_name,
            self.name,
            Problem("", self._space, lambda config: (lambda: None, None), self.file.config_callback).config_of(winner),
            {size: each[winner] for size, each in times.items()},
            regret=known[winner] - 1,
            old_config=self.old,
            old_latencies_us={size: each[old] for size, each in times.items() if old is not None and old in each},
            gain=gain,
            is_saved=winner != old and (gain is None or min_gain is None or gain >= min_gain),
        )


def classes_of(file: ConfigFile, ended: Mapping[int, Ended], there: Mapping[str, Any]) -> list[SizeClass]:
    """The classes with a size that could be tuned. ``ended``: size -> result; ``there``: class -> config to compare with."""
    classes: dict[str, dict[int, Outcome]] = {}
    for size in file.sizes:
        if isinstance(each := ended[size], Outcome):
            classes.setdefault(file.classes(size), {})[size] = each
    return [SizeClass(file, name, found, there.get(name)) for name, found in classes.items()]


def slowdowns(by_size: Sequence[Latencies]) -> dict[int, float]:
    """Config -> geometric mean over sizes of its slowdown, for configs that were measured at every size."""
    common = set.intersection(*map(set, by_size)) if by_size else set()
    pairs = [(each, min(each.values(), default=1.0)) for each in by_size]
    return {i: math.exp(math.fsum(math.log(each[i] / best) for each, best in pairs) / len(pairs)) for i in common}
