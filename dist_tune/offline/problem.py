"""Problems of a tuning script, the options of their search, their outcomes, and the place of a problem's journal.

Values; tuner.py tunes them.
"""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from dist_tune.cache import digest, environment, fingerprint, plain_values
from dist_tune.configs import describe
from dist_tune.offline.journal import other_values
from dist_tune.offline.runs import MakeRun
from dist_tune.offline.search_space import launchable
from dist_tune.search import STRATEGIES, SearchStrategy
from dist_tune.settings import Settings
from dist_tune.validation import check_function, spelled


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Extent of the search of one problem, and tolerances of its results. The arguments of ``tune_kernel``."""

    num_iters: int = 10
    """Timed runs of each finalist; of every config in an exhaustive search."""
    atol: float = 1e-2
    rtol: float = 1e-2
    search: SearchStrategy = "racing"
    max_configs: int | None = None
    """Configs tried at most; None: all, or 5 % of them where the search is random or guided."""
    budget_s: float | None = None
    """Seconds after which no new round begins; the last round and the finals may end later."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.search not in STRATEGIES:
            raise ValueError(f"search must be one of {STRATEGIES}, got {spelled(self.search)}")
        if isinstance(self.num_iters, bool) or not isinstance(self.num_iters, int) or self.num_iters < 1:
            raise ValueError(f"need num_iters as an int from 1, got {spelled(self.num_iters)}")
        for name, tolerance in (("atol", self.atol), ("rtol", self.rtol)):
            if not isinstance(tolerance, int | float):
                raise TypeError(f"{name} must be a number, got {spelled(tolerance)}")
        if self.max_configs is not None and (isinstance(self.max_configs, bool) or not isinstance(self.max_configs, int)):
            raise TypeError(f"max_configs must be an int, got {spelled(self.max_configs)}")
        if not (0 <= self.atol < math.inf and 0 <= self.rtol < math.inf):
            raise ValueError(f"need tolerances from 0, got atol={self.atol} and rtol={self.rtol}")
        if self.max_configs is not None and self.max_configs < 1:
            raise ValueError(f"need max_configs >= 1, got {self.max_configs}")
        if self.budget_s is not None and not self.budget_s > 0:
            raise ValueError(f"need budget_s > 0, got {self.budget_s}")


@dataclass(frozen=True)
class Problem:
    """One kernel at one size, to be tuned."""

    name: str
    """Name in logs, in journals and among shared-out problems: unique, and the same on all ranks."""
    search_space: Sequence[Mapping[str, Any]]
    """Configs: dicts of values by name."""
    make_run_and_gt_fn: MakeRun
    """From a config to a run and its expected output, as ``tune_kernel`` takes it."""
    config_callback: Callable[[dict[str, Any]], object] | None = None
    """Called with a copy of each config before it is used, to change it in place."""
    source: object = None
    """Object whose code and values the measurements depend on, beside the factory's: that of a factory made on demand."""
    release: Callable[[], None] = lambda: None
    """Called when the problem is tuned, to free its inputs."""

    def __post_init__(self) -> None:
        check_function("make_run_and_gt_fn", self.make_run_and_gt_fn, "make_run_and_gt_fn(config)", is_needed=True)
        check_function("config_callback", self.config_callback, "config_callback(config)")

    @property
    def digest(self) -> str:
        """Identity of name and configs."""
        return digest([self.name, *(describe(each) if isinstance(each, Mapping) else repr(each) for each in self.search_space)])

    def config_of(self, winner: int) -> dict[str, Any]:
        """Config by its index among those that run here, as the callback leaves it, with the keys that only other devices know."""
        own, originals = launchable(self.search_space)
        config = dict(own[winner])
        if self.config_callback is not None:
            self.config_callback(config)
        kept = {name: value for name, value in originals[winner].items() if name not in own[winner]}
        return {name: {**kept, **config}[name] for name in [*originals[winner], *config] if name in config or name in kept}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a tuned problem. Indices count the configs that run here, without repeats, in the order of the space."""

    name: str
    """Name of the problem."""
    winner: int
    """Index of the best config; ``Problem.config_of`` has it."""
    latency_us: float
    """Time of the winner; NaN where ranks tune together and only one config runs, because then there is no race."""
    latencies_us: dict[int, float] = field(default_factory=dict)
    """Median on the slowest rank, of every measured config."""
    failures: dict[int, str] = field(default_factory=dict)
    """Reason, of every dropped config."""
    n_configs: int = 0
    """Configs in the space, without repeats."""
    seconds: float = 0.0
    """Seconds of this process on this problem."""
    n_resumed: int = 0
    """Configs that an earlier process had tried."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A problem that could not be tuned."""

    name: str
    """Name of the problem."""
    error: str
    """"Type: message"."""


Ended = Outcome | Failed


class JournalPlace(NamedTuple):
    """The place of a problem's journal, and all that its measurements depend on."""

    path: Path
    identity: str
    """Digest of ``values``."""
    values: dict[str, str]
    """Name -> digest, of code, values that it sees, machine and options."""

    def differences(self) -> list[str] | None:
        """Names of what differs from the newest other journal of this problem; None if there is none."""
        others = other_values(self.path, f"{glob.escape(self.path.name.rpartition('-')[0])}-{'[0-9a-f]' * 8}.jsonl")
        if others is None:
            return None
        return sorted(name for name in {*self.values, *others} if self.values.get(name) != others.get(name))


def journal_place(problem: Problem, options: SearchOptions, n_ranks: int, settings: Settings, ordinal: int) -> JournalPlace:
    """Place of a problem's journal.

    To be called before the factory, which may keep what it makes and so change the digest. ``ordinal`` distinguishes problems of one name
    that a process tunes one after the other.
    """
    functions = {"make_run_and_gt_fn": problem.make_run_and_gt_fn, "config_callback": problem.config_callback, "source": problem.source}
    seen = [text.partition("=") for each in functions.values() for text in plain_values(each)]
    known = {
        "configs": problem.digest,
        **{f"code of {name}": fingerprint(each) for name, each in functions.items()},
        **{name: text for name, _, text in seen},
        "machine and versions": environment(n_ranks, 1).model_dump_json(),
        "options": str(replace(options, budget_s=None)),
        "number of the tuning in its process": str(ordinal),
    }
    values = {name: digest([text])[:12] for name, text in known.items()}
    identity = digest([*values, *values.values(), *("".join(each) for each in seen)])
    name = re.sub(r"[^\w.=-]+", "_", problem.name)[:80]
    return JournalPlace(settings.log_dir / "journal" / f"{name}-{identity[:8]}.jsonl", identity, values)
