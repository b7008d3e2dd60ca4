"""Files of tuned configs that are shipped with a kernel: JSON, one config for each class of sizes.

The classes are those of aiter's tuned GEMMs. A class gets the config with the least slowdown
against the best of each size: a config's slowdown at a size is its time over the best time there;
over several sizes it is their geometric mean, so that twice as slow at one size and twice as fast
at another cancel. Knows configs, outcomes and files as values; api.py has them measured.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dist_tune.files import RefusedFileError, callers_level, read_regular, write_whole
from dist_tune.offline.problem import (
    Ended,
    Failed,
    MakeRun,
    Outcome,
    Problem,
    launchable,
    without_amd_keys,
)
from dist_tune.validation import check_function, check_space

N_SHORTLISTED = 8
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
    _content(json_file_name, configs)
    path = Path(save_path) / json_file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    there, wrong = dict[str, Any](), ""
    try:
        there = _members(path)
    except FileNotFoundError:
        pass
    except ValueError as error:
        wrong = str(error)
    if odd := [name for name in configs if not isinstance(there.get(name, {}), dict)]:
        wrong = f"{path} has no config in {odd[0]!r}"
    copy = write_whole(path, _content(json_file_name, {**there, **configs}), keeps_old=bool(wrong))
    if wrong:
        warnings.warn(
            f"{wrong}: a new file takes its place, and the old one is {copy}",
            stacklevel=callers_level(),
        )


def configs_there(path: Path) -> dict[str, dict[str, Any]]:
    """The configs of a file by class; none if it is missing, or no JSON object, of which
    ``save_configs_to_json`` warns.
    """
    with suppress(FileNotFoundError, ValueError):
        return _configs(path)
    return {}


def _content(json_file_name: str, configs: Mapping[str, Any]) -> bytes:
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
    return _configs(path)


def _configs(path: str | Path) -> dict[str, dict[str, Any]]:
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

    def __post_init__(self) -> None:
        check_function("make_for_size", self.make_for_size, "make_for_size(size)", is_needed=True)
        check_function("classes", self.classes, "classes(size)", is_needed=True)
        object.__setattr__(self, "sizes", [*self.sizes])  # as what can be gone through once
        object.__setattr__(self, "search_space", check_space("search_space", self.search_space))
        if not self.sizes or len(set(self.sizes)) < len(self.sizes):
            raise ValueError(
                f"{self.json_file_name}: need sizes, and each once, got {list(self.sizes)}"
            )
        _content(
            self.json_file_name, {str(i): config for i, config in enumerate(self.search_space)}
        )

    def problem(self, size: int) -> Problem:
        """The problem at one size.

        Its inputs are made when the first run is, and freed when the problem is tuned.
        """
        name = f"{Path(self.json_file_name).stem} M={size}"
        return Problem(name, self.search_space, self.make_for_size, self.config_callback, size)


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
    """Share by which it is slower than the best config of each size, over all sizes of the class:
    0.03 is 3 %.
    """
    old_latencies_us: dict[int, float] = field(default_factory=dict)
    """Size -> time of the config that the file had, if they were compared."""
    gain: float | None = None
    """Share by which the new config is faster than the old one: 0.03 is 3 %.

    None where they were not compared.
    """
    is_saved: bool = True
    """The new config is in the file now; False where the old one is as good."""


class SizeClass:
    """One class of a file, with the outcomes at its sizes.

    Candidates are indices into the space; the old config may be one more.
    """

    def __init__(
        self, file: ConfigFile, name: str, found: Mapping[int, Outcome], old: dict[str, Any] | None
    ) -> None:
        """``found``: size -> outcome, of sizes that could be tuned; ``old``: config to compare
        with.
        """
        self.file, self.name, self._found, self._old = file, name, found, None
        own, self._space = launchable(file.search_space)
        failed = {i for each in found.values() for i in each.failures}
        known = slowdowns(
            [
                {i: us for i, us in each.latencies_us.items() if i not in failed}
                for each in found.values()
            ]
        )
        near = sorted(known, key=lambda i: (known[i], i))[: N_SHORTLISTED if len(found) > 1 else 0]
        shortlisted = {
            *near,
            *(each.winner for each in found.values() if each.winner not in failed),
        }
        if old is not None:
            same = without_amd_keys(old)
            self._old = own.index(same) if same in own else len(own)
            self._space = [*self._space, old]
            shortlisted.add(self._old)
        self.shortlisted = sorted(shortlisted)
        """Candidates to measure once more at all sizes: the best of each size, the best over all so
        far, and the old one.
        """

    def finals(self) -> dict[int, Problem]:
        """Size -> problem of the measurement to make once more; none if there is nothing to
        compare.
        """
        if len(self.shortlisted) == len(self._found) == 1:
            return {}
        finalists = [self._space[i] for i in self.shortlisted]
        problems = {size: self.file.problem(size) for size in self._found}
        return {
            size: replace(each, name=f"{each.name}, {self.name} compared", search_space=finalists)
            for size, each in problems.items()
        }

    def settle(self, measured: Mapping[int, Ended], min_gain: float | None) -> Settled | Failed:
        """The choice.

        ``measured``: size -> result of its final; empty where there was nothing to compare.
        """
        us = {
            size: each.latencies_us if isinstance(each, Outcome) else {}
            for size, each in measured.items()
        }
        times = {
            size: {self.shortlisted[k]: t for k, t in each.items()} for size, each in us.items()
        }
        times = times or {
            size: {each.winner: each.latency_us} for size, each in self._found.items()
        }
        known, old = slowdowns(list(times.values())), self._old
        if not known:
            reason = (
                f"no config runs at all of the sizes {sorted(self._found)}: split the class, or add"
                " configs that do"
            )
            return Failed(f"{self.file.json_file_name} {self.name}", reason)
        winner = min(known, key=lambda i: (known[i], i))
        gain = known[old] / known[winner] - 1 if old is not None and old in known else None
        return Settled(
            self.file.json_file_name,
            self.name,
            replace(self.file.problem(0), search_space=self._space).config_of(winner),
            {size: each[winner] for size, each in times.items()},
            regret=known[winner] - 1,
            old_latencies_us={
                size: each[old] for size, each in times.items() if old is not None and old in each
            },
            gain=gain,
            is_saved=winner != old and (gain is None or min_gain is None or gain >= min_gain),
        )


def classes_of(
    file: ConfigFile, ended: Mapping[int, Ended], there: Mapping[str, Any]
) -> list[SizeClass]:
    """The classes with a size that could be tuned.

    ``ended``: size -> result; ``there``: class -> config to compare with.
    """
    found: dict[str, dict[int, Outcome]] = {}
    for size, each in ended.items():
        if isinstance(each, Outcome):
            found.setdefault(file.classes(size), {})[size] = each
    return [SizeClass(file, name, outcomes, there.get(name)) for name, outcomes in found.items()]


def slowdowns(by_size: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Config -> geometric mean over sizes of its slowdown, for configs that were measured at every
    size.
    """
    common = set.intersection(*map(set, by_size)) if by_size else set()
    pairs = [(each, min(each.values(), default=1.0)) for each in by_size]
    return {
        i: math.exp(math.fsum(math.log(each[i] / best) for each, best in pairs) / len(pairs))
        for i in common
    }


def save(settled: Sequence[Settled], save_path: str | Path) -> None:
    """Write the files. Raises as ``save_configs_to_json``, with the configs in a note."""
    for name in dict.fromkeys(each.json_file_name for each in settled if each.is_saved):
        configs = {
            each.size_class: each.config
            for each in settled
            if each.json_file_name == name and each.is_saved
        }
        try:
            save_configs_to_json(name, save_path, configs)
        except OSError as error:
            error.add_note(
                f"{name} is not written: {json.dumps(configs)}. Times that are in the cache are not"
                " measured again"
            )
            raise
