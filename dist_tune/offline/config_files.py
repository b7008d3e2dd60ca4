"""Files of tuned configs that are shipped with a kernel: JSON, one config for each class of sizes.

The classes are those of aiter's tuned GEMMs. A class gets the config with the least slowdown
against the best of each size: a config's slowdown at a size is its time over the best time there;
over several sizes it is their geometric mean, so that twice as slow at one size and twice as fast
at another cancel. Knows configs, outcomes and files as values; api.py has them measured.
"""

from __future__ import annotations

import functools
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dist_tune.files import RefusedFileError, callers_level, read_regular, write_whole
from dist_tune.offline.problem import Outcome, without_amd_keys

_N_NEAR = 8
"""Configs that are compared once more beside the best of each size."""
_SMALL, _MEDIUM = 256, 2048
"""Largest sizes of the classes small and medium."""
_NAMED = ("small", "medium", "large")
_BOUND = re.compile(r"M_(LEQ|GEQ)_([0-9]{1,18})")
_MEMBERS = TypeAdapter(dict[str, Any])
"""The content of a file: class -> config, and what else engines and people write beside, as
"triton_version".
"""
_MAX_SPELLED = 200
"""Characters of a file's content in a message."""


def small_medium_large(suffix: str = "") -> Callable[[int], str]:
    """The classes "small" (up to 256), "medium" (up to 2048) and "large"; with ``suffix="_M"`` they
    read "small_M" and so on.
    """
    return lambda size: _NAMED[(size > _SMALL) + (size > _MEDIUM)] + suffix


def m_leq(*limits: int) -> Callable[[int], str]:
    """The classes "M_LEQ_<limit>", one for each limit, and "any" above the last.

    Raises:
        ValueError: no limits, or limits that are not positive and ascending.
    """
    if not limits or limits[0] <= 0 or any(low >= high for low, high in pairwise(limits)):
        raise ValueError(f"limits must be positive and ascending, got {limits}")
    return lambda size: next((f"M_LEQ_{limit}" for limit in limits if size <= limit), "any")


# -- reading and writing ---------------------------------------------------------------------------


def load_config(path: str | Path, M: int) -> dict[str, Any]:
    """The config for size ``M`` in a file of tuned configs, without AMD's own keys on other
    devices; a dict of your own.

    It is that of the first class which the file has: the smallest "M_LEQ_<n>" with n >= M; the
    largest "M_GEQ_<n>" with n <= M; the class of M among small, medium and large, with any suffix;
    "any"; then the nearest: the next larger named class, the next smaller one, the largest
    "M_LEQ_<n>". What is no config in the file counts as absent. A file is read once, until it
    changes.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no JSON object, no regular file, or larger than 64 MiB; or it has
            none of these classes.
        OSError: the system refuses to read it.
    """
    status = os.stat(path)
    configs = _read(os.fspath(path), status.st_mtime_ns, status.st_size, status.st_ino)
    fits = [(fit, name) for name in configs if (fit := _fit(name, M)) is not None]
    if not fits:
        classes = str(list(configs))[:_MAX_SPELLED]
        raise ValueError(
            f"{path} has no config for M={M}: its classes are {classes}, need small/medium/large,"
            " M_LEQ_<n> or any"
        )
    return without_amd_keys(configs[min(fits)[1]])


def save_configs_to_json(
    json_file_name: str, save_path: str | Path, configs: Mapping[str, Any]
) -> None:
    """Write configs, by class, into ``save_path / json_file_name``; all else that is in the file
    stays, other classes and other fields.

    The file is replaced at once, so that no reader sees a part of it; of two writers at the same
    moment the last one's classes stay. A file that is no JSON object, or has no config where one is
    written, is kept as a copy, which a warning names. The folder is made if it is missing.

    Raises:
        ValueError: the name is no plain file name, or a config holds what JSON cannot (NaN, a
            dtype).
        OSError: the file cannot be written.
    """
    content(json_file_name, configs)
    path = Path(save_path) / json_file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    there, wrong = dict[str, Any](), ""
    try:
        there = _members(path)
    except FileNotFoundError:
        pass
    except ValueError as error:
        wrong = str(error)
    odd = [name for name in configs if not isinstance(there.get(name, {}), dict)]
    if odd:
        wrong = f"{path} has no config in {odd[0]!r}"
    copy = write_whole(path, content(json_file_name, {**there, **configs}), keeps_old=bool(wrong))
    if wrong:
        warnings.warn(
            f"{wrong}: a new file takes its place, and the old one is {copy}",
            stacklevel=callers_level(),
        )


def save_files(files: Mapping[str, Mapping[str, Any]], save_path: str | Path) -> None:
    """Write files: name -> class -> config.

    Raises as ``save_configs_to_json``, with the configs in a note.
    """
    for name, configs in files.items():
        try:
            save_configs_to_json(name, save_path, configs)
        except OSError as error:
            error.add_note(
                f"{name} is not written: {json.dumps(configs)}. Times that are in the cache are not"
                " measured again"
            )
            raise


def content(json_file_name: str, configs: Mapping[str, Any]) -> bytes:
    """The bytes of a file. Raises ValueError as ``save_configs_to_json``."""
    if Path(json_file_name).name != json_file_name or json_file_name in ("", ".."):
        raise ValueError(
            f"json_file_name is {json_file_name!r}, need the name of a file; its folder is"
            " save_path"
        )
    try:
        return (json.dumps(configs, indent=4, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"configs for {json_file_name} cannot be written as JSON: {error}"
        ) from error


def _fit(name: str, size: int) -> tuple[int, int] | None:
    """How well the class of this name serves a size, the least is the best: the kind of fit, and
    the distance; None: not at all.
    """
    match = _BOUND.fullmatch(name)
    if match is not None:
        distance = int(match[2]) - size
        if match[1] == "GEQ":
            return (1, -distance) if distance <= 0 else None
        return (0, distance) if distance >= 0 else (6, -distance)
    if name == "any":
        return 3, 0
    stem = name.partition("_")[0]
    if stem not in _NAMED:
        return None
    step = _NAMED.index(stem) - _NAMED.index(small_medium_large()(size))
    if step == 0:
        return 2, 0
    return (4, step) if step > 0 else (5, -step)


@functools.lru_cache(maxsize=256)
def _read(path: str, mtime_ns: int, n_bytes: int, inode: int) -> dict[str, dict[str, Any]]:
    return {name: config for name, config in _members(path).items() if isinstance(config, dict)}


def _members(path: str | Path) -> dict[str, Any]:
    """All that is in a file. Raises as ``load_config``, with messages that begin with its path."""
    try:
        members = _MEMBERS.validate_json(read_regular(path))
        # Pydantic takes NaN, which other readers of the file would not.
        json.dumps(members, allow_nan=False)
    except RefusedFileError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise ValueError(
            f"{path} is no JSON object of configs by class ({reason[:_MAX_SPELLED]})"
        ) from error
    return members


# -- one config for several sizes ------------------------------------------------------------------


def finalists(found: Sequence[Outcome]) -> list[int]:
    """Configs of a class to be compared at all its sizes: the best of each size, and those with the
    least slowdowns so far; none that was dropped at a size.
    """
    known = slowdowns([each.latencies_ms for each in found])
    near = sorted(known, key=known.__getitem__)[:_N_NEAR]
    best = {*near, *(each.winner for each in found)}
    return sorted(best.difference(*(each.failed for each in found)))


def slowdowns(by_size: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Config -> geometric mean over sizes of its slowdown, for configs that were measured at every
    size.

    ``by_size``: config -> time.
    """
    common = set.intersection(*map(set, by_size))
    return {
        i: geometric_mean(times[i] / min(times.values()) for times in by_size)
        for i in sorted(common)
    }
