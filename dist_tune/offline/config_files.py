"""Files of tuned configs that are shipped with a kernel: JSON, one config for each class of sizes.

Knows the layouts of such files (small/medium/large, M_LEQ_n, any) and how to write them safely; nothing of tuning. The formats are those of
aiter's tuned GEMMs, so files may be exchanged.
"""

from __future__ import annotations

import functools
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from dist_tune.cache import Cache
from dist_tune.safe_files import RefusedFileError, read_regular, sweep, write_whole
from dist_tune.settings import Settings
from dist_tune.warn_once import callers_level

AMD_ONLY = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
"""Options of Triton's AMD backend, with which its NVIDIA backend refuses to launch."""
SMALL, MEDIUM = 256, 2048
"""Largest sizes of the classes small and medium."""
_MAX_SPELLED = 200
"""Characters of a file's content in a message."""
_NAMED = ("small", "medium", "large")
_BOUND = re.compile(r"M_(LEQ|GEQ)_([0-9]{1,18})")


def small_medium_large(suffix: str = "") -> Callable[[int], str]:
    """The classes "small" (up to 256), "medium" (up to 2048) and "large"; with ``suffix="_M"`` they read "small_M" and so on."""
    return lambda size: _NAMED[(size > SMALL) + (size > MEDIUM)] + suffix


def m_leq(*limits: int) -> Callable[[int], str]:
    """The classes "M_LEQ_<limit>", one for each limit, and "any" above the last.

    Raises:
        ValueError: no limits, or limits that are not positive and ascending.
    """
    if not limits or limits[0] <= 0 or any(low >= high for low, high in pairwise(limits)):
        raise ValueError(f"limits must be positive and ascending, got {limits}")
    return lambda size: next((f"M_LEQ_{limit}" for limit in limits if size <= limit), "any")


def without_amd_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as it can be launched here: on NVIDIA without the options of AMD's backend."""
    return {name: value for name, value in config.items() if torch.version.hip or name not in AMD_ONLY}


def save_configs_to_json(json_file_name: str, save_path: str | Path, configs: Mapping[str, Any]) -> None:
    """Write configs, by class, into ``save_path / json_file_name``; classes that are only in the file stay.

    The file is replaced at once, so that no reader sees a part of it, and writers with one ``DIST_TUNE_CACHE_DIR`` take turns: the lock is
    kept there. A file that is no JSON object is set aside as ``.broken`` with a warning. The folder is made if it is missing.

    Raises:
        ValueError: the name is no plain file name, or a config holds what JSON cannot (NaN, a dtype).
        OSError: the file cannot be written.
    """
    file_content(json_file_name, configs)
    folder = Path(save_path)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / json_file_name
    settings = Settings()
    with Cache(settings.cache_folders, is_shared=settings.cache_shared).locked(folder.resolve() / json_file_name):
        sweep(folder, time.time())
        write_whole(path, file_content(json_file_name, {**configs_there(path), **configs}))


def file_content(json_file_name: str, configs: Mapping[str, Any]) -> bytes:
    """Content of a file of configs by class.

    Raises:
        ValueError: the name is no plain file name, or JSON cannot hold a config.
    """
    if Path(json_file_name).name != json_file_name or json_file_name in ("", ".."):
        raise ValueError(f"json_file_name is {json_file_name!r}, need the name of a file; its folder is save_path")
    try:
        return (json.dumps(configs, indent=4, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"configs for {json_file_name} cannot be written as JSON: {error}") from error


def load_config(path: str | Path, M: int) -> dict[str, Any]:
    """The config for size ``M`` in a file of tuned configs, without AMD's own keys on other devices; a dict of your own.

    It is that of the first class which the file has: the smallest "M_LEQ_<n>" with n >= M; the largest "M_GEQ_<n>" with n <= M; the class
    of M among small, medium and large, with whatever suffix; "any"; then the nearest: the next larger named class, the next smaller one,
    the largest "M_LEQ_<n>". A file is read once, until it changes.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no JSON object of configs, no regular file, or larger than 64 MiB; or it has none of these classes.
        OSError: the system refuses to read it.
    """
    status = os.stat(path)
    configs = _read(os.fspath(path), status.st_mtime_ns, status.st_size, status.st_ino)
    for name in _preferred(configs, M):
        return without_amd_keys(configs[name])
    classes = str(list(configs))[:_MAX_SPELLED]
    raise ValueError(f"{path} has no config for M={M}: its classes are {classes}, need small/medium/large, M_LEQ_<n> or any")


def configs_there(path: Path) -> dict[str, Any]:
    """The configs of a file by class; none if it is missing. One that is no JSON object is set aside, with a warning."""
    try:
        configs = _parsed(path)
        if isinstance(configs, dict):
            return configs
        reason = f"holds a {type(configs).__name__}"
    except FileNotFoundError:
        return {}
    except ValueError as error:
        reason = str(error)
    aside = path.with_name(f"{path.name}.broken")
    os.replace(path, aside)
    warnings.warn(f"{path} {reason}; it is now {aside.name}, and a new file takes its place", stacklevel=callers_level())
    return {}


def _preferred(configs: Mapping[str, Any], size: int) -> list[str]:
    bounds = {name: (match[1], int(match[2])) for name in configs if (match := _BOUND.fullmatch(name))}
    leq = sorted((limit, name) for name, (kind, limit) in bounds.items() if kind == "LEQ")
    geq = sorted((limit, name) for name, (kind, limit) in bounds.items() if kind == "GEQ")
    wanted = _NAMED.index(small_medium_large()(size))
    steps = {name: _NAMED.index(stem) - wanted for name in configs if (stem := name.partition("_")[0]) in _NAMED}
    larger = sorted((step, name) for name, step in steps.items() if step >= 0)
    smaller = sorted((-step, name) for name, step in steps.items() if step < 0)
    return [
        *[name for limit, name in leq if limit >= size],
        *[name for limit, name in reversed(geq) if limit <= size],
        *[name for step, name in larger if step == 0],
        *[name for name in ("any",) if name in configs],
        *[name for _, name in [*larger, *smaller, *reversed(leq)]],
    ]


@functools.lru_cache(maxsize=256)
def _read(path: str, mtime_ns: int, n_bytes: int, inode: int) -> dict[str, dict[str, Any]]:
    try:
        configs = _parsed(path)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error
    if not isinstance(configs, dict) or not all(isinstance(each, dict) for each in configs.values()):
        raise ValueError(f"{path} is no JSON object of configs by class")
    return configs


def _parsed(path: str | Path) -> Any:
    """The JSON in a file.

    Raises:
        ValueError: it is none, or no regular file, or larger than 64 MiB. The message is a predicate.
        OSError: the system refuses to read it.
    """
    try:
        return json.loads(read_regular(path), parse_constant=_refuse)
    except RefusedFileError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON ({str(error)[:_MAX_SPELLED]})") from error


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} stands for a value")
