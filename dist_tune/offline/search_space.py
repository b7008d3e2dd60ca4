"""Spaces of configs for tuning scripts: dicts of plain values, as they stand in files of tuned configs.

Knows the usual options of matrix products and which of them a device has; nothing of searches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from dist_tune.configs import describe_all
from dist_tune.offline.config_files import without_amd_keys
from dist_tune.validation import check_names, spelled

_FULL: dict[str, tuple[int, ...]] = {
    "num_stages": (1, 2, 3, 4, 5), "BLOCK_SIZE_M": (16, 32, 64, 128, 256), "BLOCK_SIZE_K": (32, 64, 128),
    "BLOCK_SIZE_N": (32, 64, 128, 256), "num_warps": (2, 4, 8), "GROUP_SIZE_M": (1, 8, 16, 32, 64),
    "waves_per_eu": (1, 2, 4, 6, 8), "matrix_instr_nonkdim": (16,),
}  # fmt: skip
_SMALL: dict[str, tuple[int, ...]] = {
    "num_stages": (2, 3), "BLOCK_SIZE_M": (16, 32), "BLOCK_SIZE_K": (64,), "BLOCK_SIZE_N": (32, 64), "num_warps": (4,),
    "GROUP_SIZE_M": (1,), "waves_per_eu": (2,), "matrix_instr_nonkdim": (16,),
}  # fmt: skip
_ORDER = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim")


def get_search_space(small: bool = False) -> list[dict[str, Any]]:
    """Configs of a matrix product: 22,500, or the 8 of a small space to try a script with.

    Each has BLOCK_SIZE_M, _N and _K, GROUP_SIZE_M, num_warps, num_stages, and AMD's waves_per_eu and matrix_instr_nonkdim. The values are
    those of aiter's tuning scripts. On NVIDIA the search leaves AMD's keys out, and so runs 4,500 of the 22,500.
    """
    return products(_SMALL if small else _FULL, _ORDER)


def products(values: Mapping[str, Iterable[Any]], order: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """All combinations of values by name, the last name changing fastest; the keys of each dict in ``order``, if given."""
    names = list(order or values)
    return [{name: each[name] for name in names} for each in (dict(zip(values, row, strict=True)) for row in product(*values.values()))]


def launchable(search_space: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The configs to run here, without repeats, and for each the first of the space that it stands for.

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
    own = [without_amd_keys(config) for config in space]
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for text, config, original in zip(describe_all(own), own, space, strict=True):
        found.setdefault(text, (config, dict(original)))
    if not found:
        raise ValueError("the search space is empty: there is nothing to choose from")
    return [own for own, _ in found.values()], [config for _, config in found.values()]
