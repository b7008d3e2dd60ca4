"""Problems of a tuning script: their spaces, how they are searched, and how they end.

Values; job.py tunes them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal, get_args

import torch

from dist_tune.configs import describe, describe_all
from dist_tune.records import digest
from dist_tune.search import Plan
from dist_tune.validation import check_function, check_names, check_number, check_space, spelled

Run = Callable[[], Any]
MakeRun = Callable[[dict[str, Any]], tuple[Run, Any] | None]
"""From a config to a run and its expected result (None: not checked); None leaves the config out.
"""
SearchStrategy = Literal["racing", "exhaustive", "random", "guided"]
"""The first two try all configs: racing drops the hopeless after one timed run, exhaustive times
all alike.
"""
AMD_ONLY = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
"""Options of Triton's AMD backend, with which its NVIDIA backend refuses to launch."""
_SHARE, _LEAST = 0.05, 48
"""Share of a space that random and guided search try by default, but at least so many configs."""
_FULL: dict[str, tuple[int, ...]] = {
    "BLOCK_SIZE_M": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_N": (32, 64, 128, 256),
    "BLOCK_SIZE_K": (32, 64, 128),
    "GROUP_SIZE_M": (1, 8, 16, 32, 64),
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3, 4, 5),
    "waves_per_eu": (1, 2, 4, 6, 8),
    "matrix_instr_nonkdim": (16,),
}
_SMALL: dict[str, tuple[int, ...]] = {
    "BLOCK_SIZE_M": (16, 32),
    "BLOCK_SIZE_N": (32, 64),
    "BLOCK_SIZE_K": (64,),
    "GROUP_SIZE_M": (1,),
    "num_warps": (4,),
    "num_stages": (2, 3),
    "waves_per_eu": (2,),
    "matrix_instr_nonkdim": (16,),
}


def get_search_space(small: bool = False) -> list[dict[str, Any]]:
    """Configs of a matrix product: 22,500, or the 8 of a small space to try a script with.

    The values are those of aiter's tuning scripts. On NVIDIA the search leaves AMD's keys out, and
    so runs 4,500 of the 22,500.
    """
    values = _SMALL if small else _FULL
    return [dict(zip(values, row, strict=True)) for row in product(*values.values())]


def without_amd_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as it can be launched here: on NVIDIA without the options of AMD's backend."""
    return {
        name: value for name, value in config.items() if torch.version.hip or name not in AMD_ONLY
    }


def launchable(
    search_space: Iterable[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The configs to run here, without repeats, and for each the first of the space that it stands
    for.

    On NVIDIA configs that differ in AMD's keys alone are one, and run without them.

    Raises:
        ValueError: the space is empty.
        TypeError: a config is no mapping, or has a name that is no string.
    """
    space = list(search_space)
    for config in space:
        if not isinstance(config, Mapping):
            raise TypeError(f"a search space holds dicts of values by name, got {spelled(config)}")
        check_names("search_space", config)
    if not space:
        raise ValueError("the search space is empty: there is nothing to choose from")
    own = [without_amd_keys(config) for config in space]
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for text, config, original in zip(describe_all(own), own, space, strict=True):
        found.setdefault(text, (config, dict(original)))
    return [config for config, _ in found.values()], [original for _, original in found.values()]


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The arguments of ``tune_kernel`` that say how a problem is searched, and how its results are
    compared.
    """

    num_iters: int = 10
    atol: float = 1e-2
    rtol: float = 1e-2
    search: SearchStrategy = "racing"
    max_configs: int | None = None
    budget_s: float | None = None
    judges_all: bool = False
    """True: at the end the results of all configs that are left are checked again and again, and
    not the winner's alone.
    """

    def __post_init__(self) -> None:
        if self.search not in get_args(SearchStrategy):
            raise ValueError(
                f"search must be one of {get_args(SearchStrategy)}, got {spelled(self.search)}"
            )
        check_number("num_iters", self.num_iters, 1)
        check_number("max_configs", 1 if self.max_configs is None else self.max_configs, 1)
        check_number("atol", self.atol, 0, (int, float))
        check_number("rtol", self.rtol, 0, (int, float))
        self.plan(1)  # checks the budget

    def chosen(self, configs: Sequence[Mapping[str, Any]]) -> list[int]:
        """Indices of the configs that may be tried, in the order in which racing tries them.

        Racing tries all blocks in random order, and those that differ in warps and stages alone one
        after the other, because they share Triton's front end.
        """
        n_most, dice = self.n_tried(len(configs)), random.Random(0)
        if self.search == "guided":
            return list(range(len(configs)))
        if self.search == "random":
            return dice.sample(range(len(configs)), n_most)
        groups: dict[str, list[int]] = {}
        for i, config in enumerate(configs):
            groups.setdefault(
                describe({k: v for k, v in config.items() if k not in ("num_warps", "num_stages")}),
                [],
            ).append(i)
        order = list(groups.values())
        dice.shuffle(order)
        return [i for group in order for i in group][:n_most]

    def n_tried(self, n_configs: int) -> int:
        """Of so many configs those that are tried at most."""
        few = (
            max(_LEAST, math.ceil(_SHARE * n_configs))
            if self.search in ("random", "guided")
            else n_configs
        )
        return min(n_configs, few if self.max_configs is None else self.max_configs)

    def plan(self, n_configs: int) -> Plan:
        """The plan of a tuning with so many configs."""
        search = "racing" if self.search == "random" else self.search
        # Cold also in finals, because times of all are compared. The closure is the run: the
        # kernel's clock is enough.
        return Plan(
            1,
            self.num_iters,
            search,
            "kernel",
            self.budget_s,
            is_cold=True,
            n_tried=self.n_tried(n_configs) if search == "guided" else None,
            in_waves=search == "racing",
        )


@dataclass(frozen=True)
class Problem:
    """One kernel at one size, to be tuned."""

    name: str
    """Name in logs, in records and among shared-out problems: unique, and the same on all ranks."""
    search_space: Sequence[Mapping[str, Any]]
    """Configs: dicts of values by name."""
    make_run_and_gt_fn: Callable[[Any], Any]
    """From a config to a run and its expected output, as ``tune_kernel`` takes it; with a ``size``,
    from that to such a function.
    """
    config_callback: Callable[[dict[str, Any]], object] | None = None
    """Called with a copy of each config before it is used, to change it in place."""
    size: int | None = None
    """Given, inputs are made when the first run is, and freed when the problem is tuned."""

    def __post_init__(self) -> None:
        # As what can be gone through once.
        object.__setattr__(self, "search_space", check_space("search_space", self.search_space))
        check_function(
            "make_run_and_gt_fn",
            self.make_run_and_gt_fn,
            "make_run_and_gt_fn(config)",
            is_needed=True,
        )
        check_function("config_callback", self.config_callback, "config_callback(config)")

    @property
    def digest(self) -> str:
        """Identity of name and configs, the same on all ranks."""
        return digest(
            [
                self.name,
                *(
                    describe(each) if isinstance(each, Mapping) else repr(each)
                    for each in self.search_space
                ),
            ]
        )

    def config_of(self, winner: int) -> dict[str, Any]:
        """Config by its index among those that run here, as the callback leaves it, with the keys
        that only other devices know.
        """
        own, originals = launchable(self.search_space)
        config = dict(own[winner])
        if self.config_callback is not None:
            self.config_callback(config)
        both = {**originals[winner], **config}
        return {
            name: value for name, value in both.items() if name in config or name not in own[winner]
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a tuned problem.

    Indices count the configs that run here, without repeats, in the order of the space.
    """

    name: str
    """Name of the problem."""
    winner: int
    """Index of the best config; ``Problem.config_of`` has it."""
    latencies_us: dict[int, float]
    """Median on the slowest rank, of every measured config; NaN where ranks tune together and only
    one runs, so that there is no race.
    """
    failures: dict[int, str] = field(default_factory=dict)
    """Reason, of every dropped config."""

    @property
    def latency_us(self) -> float:
        """Time of the winner."""
        return self.latencies_us[self.winner]


@dataclass(frozen=True, slots=True)
class Failed:
    """A problem that could not be tuned."""

    name: str
    """Name of the problem."""
    error: str
    """"Type: message"."""


Ended = Outcome | Failed
