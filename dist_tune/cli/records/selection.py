"""Records that a KEY on the command line stands for, and those that a list's options choose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dist_tune.cache import Cache, Environment, TuningRecord
from dist_tune.cli.tables import RefusedError, plain

_MIN_SHOWN = 8
"""Least characters of an id."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A record with its file, and the id by which the user names it: the shortest beginning of the file's name that is unique."""

    id: str
    path: Path
    record: TuningRecord

    @property
    def names(self) -> dict[str, Any]:
        """The record's names in a JSON document."""
        return {"id": self.id, "stem": self.path.stem, "path": str(self.path.absolute())}


@dataclass(frozen=True, slots=True)
class Filter:
    """The records that a list is to show; an empty text takes all."""

    kernel: str = ""
    """Part of the kernel's name, in any case."""
    device: str = ""
    since: datetime | None = None

    def takes(self, each: Listed) -> bool:
        """True for a record to show."""
        record = each.record
        is_named = self.kernel.casefold() in record.kernel.casefold() and self.device.casefold() in record.environment.device.casefold()
        return is_named and (self.since is None or record.tuned_at >= self.since)


def ordered(records: Iterable[Listed], sort: str) -> list[Listed]:
    """Sorted by "kernel" and key, "age" with the newest last, "ms" of the winner with the fastest first, or "seconds" of the tuning."""
    if sort == "kernel":
        return list(records)  # as ``listed`` gives them
    measures: dict[str, Callable[[TuningRecord], Any]] = {
        "age": lambda record: record.tuned_at,
        "ms": lambda record: (record.best.latency_ms is None, record.best.latency_ms),
        "seconds": lambda record: record.seconds,
    }
    return sorted(records, key=lambda each: measures[sort](each.record))


def listed(cache: Cache) -> list[Listed]:
    """All records, in the order of their kernels and keys."""
    entries = cache.entries()
    stems = ["", *sorted(entry.path.stem for entry in entries), ""]
    ids = {}
    for before, stem, after in zip(stems, stems[1:], stems[2:], strict=False):
        begins = (stem[:length] for length in range(_MIN_SHOWN, len(stem)))
        ids[stem] = next((begin for begin in begins if not before.startswith(begin) and not after.startswith(begin)), stem)
    return [Listed(ids[entry.path.stem], entry.path, entry.record) for entry in entries]


def choose(cache: Cache, key: str | None) -> list[Listed]:
    """The records of ``key``: a file's name or any unique beginning, or a kernel's name with or without its module; None for all.

    Raises:
        RefusedError: no record has this name, or several ids begin with it.
    """
    found = listed(cache)
    if key is None:
        return found
    stem = key.removesuffix(".json")
    rules = (
        lambda each: each.path.stem == stem,
        lambda each: each.record.kernel == key,
        lambda each: each.record.kernel.endswith(f".{key}"),
    )
    for rule in rules:
        if chosen := [each for each in found if rule(each)]:
            return chosen
    begun = [each for each in found if stem and each.path.stem.startswith(stem)]
    if len(begun) > 1:
        raise RefusedError(f"{len(begun)} ids begin with {stem}: {', '.join(each.id for each in begun[:20])}")
    broken = [path for path in cache.unused if stem and path.stem.startswith(stem)]
    if not begun and broken:
        raise RefusedError(f"{broken[0]} is damaged: {cache.unused[broken[0]]}")
    if not begun:
        raise RefusedError(f"nothing is called {plain(key)!r}{_hint(cache, key, sorted({each.record.kernel for each in found}))}")
    return begun


def _hint(cache: Cache, key: str, kernels: list[str]) -> str:
    if not kernels:
        return f": there are no records{' that can be read' if cache.unused else ''} in {cache.folder}"
    near = [name for name in kernels if key and key in name][:3]
    near = near or get_close_matches(key, sorted({*kernels, *(name.rpartition(".")[2] for name in kernels)}), n=3)
    hint = f"did you mean {' or '.join(map(plain, near))}?" if near else "dist-tune cache ls lists what there is"
    return f" in {cache.folder}: {hint}"


def by_environment(chosen: Iterable[Listed]) -> list[tuple[Environment, list[Listed]]]:
    """Records of one environment together; the environment with the newest record comes last, next to the prompt."""
    groups: dict[Environment, list[Listed]] = defaultdict(list)
    for each in chosen:
        groups[each.record.environment].append(each)
    return sorted(groups.items(), key=lambda group: max(each.record.recency for each in group[1]))
