"""Problems of a tuning script: their spaces, how they are searched, and how they end.

Values; api.py has them tuned.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
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


def distinct(search_space: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The configs of a space without repeats: of those that are one here, the first.

    On NVIDIA configs that differ in AMD's keys alone are one.

    Raises:
        ValueError: the space is empty.
        TypeError: a config is no mapping, or has a name that is no string.
    """
    space = check_space("search_space", search_space)
    for config in space:
        if not isinstance(config, Mapping):
            raise TypeError(f"a search space holds dicts of values by name, got {spelled(config)}")
        check_names("search_space", config)
    if not space:
        raise ValueError("the search space is empty: there is nothing to choose from")
    first: dict[str, dict[str, Any]] = {}
    for text, config in zip(describe_all([*map(without_amd_keys, space)]), space, strict=True):
        first.setdefault(text, dict(config))
    return list(first.values())


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
        if self.max_configs is not None:
            check_number("max_configs", self.max_configs, 1)
        check_number("atol", self.atol, 0, (int, float))
        check_number("rtol", self.rtol, 0, (int, float))
        self.plan(1)  # checks the budget

    def chosen(self, configs: Sequence[Mapping[str, Any]]) -> list[int]:
        """Indices of the configs that may be tried, in the order in which racing tries them.

        Racing tries all blocks in random order, and those that differ in warps and stages alone one
        after the other, because they share Triton's front end.
        """
        indices = range(len(configs))
        if self.search == "guided":
            return list(indices)
        dice = random.Random(0)
        if self.search == "random":
            return dice.sample(indices, self.n_tried(len(configs)))
        groups = defaultdict[str, list[int]](list)
        for i in indices:
            own = configs[i].items()
            block = {name: value for name, value in own if name not in ("num_warps", "num_stages")}
            groups[describe(block)].append(i)
        order = list(groups.values())
        dice.shuffle(order)
        return list(chain(*order))[: self.n_tried(len(configs))]

    def n_tried(self, n_configs: int) -> int:
        """Of so many configs those that are tried at most."""
        n_most = self.max_configs or n_configs
        if self.max_configs is None and self.search in ("random", "guided"):
            n_most = max(_LEAST, math.ceil(_SHARE * n_configs))
        return min(n_configs, n_most)

    def plan(self, n_configs: int) -> Plan:
        """The plan of a tuning with so many configs."""
        # Cold also in finals, because times of all are compared. The closure is the run: the
        # kernel's clock is enough.
        return Plan(
            1,
            self.num_iters,
            "racing" if self.search == "random" else self.search,
            "kernel",
            self.budget_s,
            is_cold=True,
            n_tried=self.n_tried(n_configs) if self.search == "guided" else None,
            in_waves=self.search in ("racing", "random"),
        )


@dataclass(frozen=True)
class Problem:
    """One kernel at one size, to be tuned."""

    name: str
    """Name in logs, in records and among shared-out problems: unique, and the same on all ranks."""
    search_space: Sequence[Mapping[str, Any]]
    """Configs without repeats."""
    make_run_and_gt_fn: Callable[[Any], Any]
    """From a config to a run and its expected output, as ``tune_kernel`` takes it; with a ``size``,
    from that to such a function.
    """
    config_callback: Callable[[dict[str, Any]], object] | None = None
    """Called with a copy of each config before it is used, to change it in place."""
    size: Any = None
    """Given, inputs are made when the first run is, and freed when the problem is tuned."""

    def __post_init__(self) -> None:
        make, callback = self.make_run_and_gt_fn, self.config_callback
        check_function("make_run_and_gt_fn", make, "make_run_and_gt_fn(config)", is_needed=True)
        check_function("config_callback", callback, "config_callback(config)")

    @property
    def digest(self) -> str:
        """Identity of name and configs, the same on all ranks."""
        return digest([self.name, *map(describe, self.search_space)])

    def config_of(self, winner: int) -> dict[str, Any]:
        """Config by its index, as the callback leaves it, with the keys that only other devices
        know.
        """
        config = dict(self.search_space[winner])
        if self.config_callback is not None:
            self.config_callback(config)
        return config


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a tuned problem. Indices count the problem's configs."""

    winner: int
    """Index of the best config."""
    latencies_ms: dict[int, float]
    """Median on the slowest rank, of each config that was measured and not dropped."""
    failed: list[int]
    """Indices of the configs that were dropped."""
