"""Files of tuned configs that are shipped with a kernel: JSON, one config for each class of sizes.

Knows the classes of such files (small/medium/large, M_LEQ_n, any), which are those of aiter's tuned GEMMs; nothing of tuning.
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
from pydantic import TypeAdapter, ValidationError

from dist_tune.safe_files import RefusedFileError, read_regular, sweep, write_whole
from dist_tune.warn_once import callers_level

AMD_ONLY = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
"""Options of Triton's AMD backend, with which its NVIDIA backend refuses to launch."""
SMALL, MEDIUM = 256, 2048
"""Largest sizes of the classes small and medium."""
_MAX_SPELLED = 200
"""Characters of a file's content in a message."""
_CONFIGS = TypeAdapter(dict[str, dict[str, Any]])
"""The content of a file: class -> config."""
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

    The file is replaced at once, so that no reader sees a part of it; of two writers at the same moment the last one's classes stay. A file
    that holds no configs is replaced with a warning. The folder is made if it is missing.

    Raises:
        ValueError: the name is no plain file name, or a config holds what JSON cannot (NaN, a dtype).
        OSError: the file cannot be written.
    """
    file_content(json_file_name, configs)
    folder = Path(save_path)
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder, time.time())
    path = folder / json_file_name
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
    fits = [(fit, name) for name in configs if (fit := _fit(name, M)) is not None]
    if not fits:
        classes = str(list(configs))[:_MAX_SPELLED]
        raise ValueError(f"{path} has no config for M={M}: its classes are {classes}, need small/medium/large, M_LEQ_<n> or any")
    return without_amd_keys(configs[min(fits)[1]])


def configs_there(path: Path) -> dict[str, dict[str, Any]]:
    """The configs of a file by class; none if it is missing, or with a warning if it holds none."""
    try:
        return _parsed(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        warnings.warn(f"{error}: a new file takes its place", stacklevel=callers_level())
        return {}


def _fit(name: str, size: int) -> tuple[int, int] | None:
    """How well the class of this name serves a size, the least is the best: the kind of fit, and the distance; None: not at all."""
    if match := _BOUND.fullmatch(name):
        distance = int(match[2]) - size
        if match[1] == "GEQ":
            return (1, -distance) if distance <= 0 else None
        return (0, distance) if distance >= 0 else (6, -distance)
    if name == "any":
        return 3, 0
    if (stem := name.partition("_")[0]) not in _NAMED:
        return None
    step = _NAMED.index(stem) - _NAMED.index(small_medium_large()(size))
    return (4, step) if step > 0 else (5, -step) if step < 0 else (2, 0)


@functools.lru_cache(maxsize=256)
def _read(path: str, mtime_ns: int, n_bytes: int, inode: int) -> dict[str, dict[str, Any]]:
    return _parsed(path)


def _parsed(path: str | Path) -> dict[str, dict[str, Any]]:
    """The configs in a file.

    Raises:
        ValueError: it holds none, or is no regular file, or larger than 64 MiB. The message begins with its path.
        OSError: the system refuses to read it.
    """
    try:
        configs = _CONFIGS.validate_json(read_regular(path))
        json.dumps(configs, allow_nan=False)  # pydantic takes NaN, which other readers of the file would not
    except RefusedFileError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise ValueError(f"{path} is no JSON object of configs by class ({reason[:_MAX_SPELLED]})") from error
    return configs
