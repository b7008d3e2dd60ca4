"""Records of the cache for the command line: which ones a word stands for, and the commands
``show`` and ``cache``.

The only user of the cache here. Reads and deletes records, and carries them between caches; tunes
nothing. An exported file is a JSON list with one record a line. The place of a record follows from
the record alone, never from a name in a file.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any

import typer

from dist_tune.cli.render import Answer, RefusedError, facts, table, write_file
from dist_tune.files import read_regular
from dist_tune.log import amount, plain
from dist_tune.records import (
    LINES_SUFFIX,
    QUARANTINE,
    SOFTWARE,
    BrokenRecordError,
    Cache,
    Entry,
    QuarantinedConfig,
    TuningRecord,
    differences,
    environment,
    read_quarantine,
    record_bytes,
    record_in,
    words,
)
from dist_tune.records import explain as explain_miss
from dist_tune.settings import Settings

_MAX_EXPORT = 2**30
"""Bytes of a file that is merged."""
_COLOURS = {"kept": None, "added": "green", "replaced": "green", "refused": "red"}
"""Of the outcomes of ``merge``; refusals last, next to the prompt."""
_ASK_THE_PROGRAM = (
    "Its source, its candidates, its key and its ranks only the program knows: run it with"
    " DIST_TUNE_MODE=require, and instead of tuning it says which of them differs."
)


# -- records, and words that stand for them --------------------------------------------------------


def opened() -> Cache:
    """The cache that DIST_TUNE_CACHE_DIR names; an empty one where no folder is there yet.

    RefusedError if it cannot be read.
    """
    cache = Cache.of(Settings())
    try:
        with suppress(FileNotFoundError):
            os.listdir(cache.folder)
    except OSError as error:
        told = (
            f"{cache.folder} cannot be read ({error.strerror}): set DIST_TUNE_CACHE_DIR to the"
            " folder of the records"
        )
        raise RefusedError(told) from None
    return cache


def choose(cache: Cache, key: str | None) -> dict[str, Entry]:
    """The records of ``key``: a kernel's name with or without its module, a file's name or any
    unique beginning of it; None for all.

    By id, which is a beginning of the file's name that no other has.

    Raises:
        RefusedError: no record has this name, or several ids begin with it.
    """
    entries = cache.entries()
    n_chars = next(
        n for n in range(8, 100) if len({entry.path.stem[:n] for entry in entries}) == len(entries)
    )
    found = {entry.path.stem[:n_chars]: entry for entry in entries}
    if key is None:
        return found
    stem = key.removesuffix(".json")
    named = {number: each for number, each in found.items() if _is_named(each.record.kernel, key)}
    begun = {
        number: each for number, each in found.items() if stem and each.path.stem.startswith(stem)
    }
    if not named and len(begun) > 1:
        raise RefusedError(f"{len(begun)} ids begin with {stem}: {', '.join([*begun][:20])}")
    if not named and not begun:
        damaged = [
            f"{path} is damaged: {why}"
            for path, why in cache.unused.items()
            if stem and path.stem.startswith(stem)
        ]
        near = get_close_matches(
            key,
            {
                name
                for entry in entries
                for name in (entry.record.kernel, entry.record.kernel.rpartition(".")[2])
            },
        )
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else "dist-tune cache ls lists what there is"
        )
        raise RefusedError(
            damaged[0] if damaged else f"nothing is called {plain(key)!r} in {cache.folder}: {hint}"
        )
    return named or begun


def _names(number: str, each: Entry) -> dict[str, str]:
    """A record's names in a JSON document."""
    return {"id": number, "stem": each.path.stem, "path": str(each.path.absolute())}


def _is_named(kernel: str, key: str) -> bool:
    return key in (kernel, kernel.rpartition(".")[2])


def records_in(path: Path) -> Iterator[tuple[str, TuningRecord | BrokenRecordError]]:
    """The records of an export, of a record's file, or of all ``*.json`` below a folder, each with
    its place.

    An error for each that is broken, and for a file that cannot be read.
    """
    for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
        try:
            content = read_regular(file, _MAX_EXPORT)
        except OSError as error:
            yield str(file), BrokenRecordError(error.strerror)
            continue
        lines = (
            content[2:].removesuffix(b"\n]\n").split(b"\n")
            if content.startswith(b"[\n")
            else [content]
        )
        yield from (
            (f"{file}, record {number}", _found(line.removesuffix(b",")))
            for number, line in enumerate(lines, 1)
        )


def _found(content: bytes) -> TuningRecord | BrokenRecordError:
    try:
        return record_in(content)
    except BrokenRecordError as error:
        return error


# -- ls, show --------------------------------------------------------------------------------------


_ORDERS: dict[str, Callable[[TuningRecord], Any]] = {
    "kernel": lambda record: (record.kernel, record.key),
    "age": lambda record: record.tuned_at,
    "ms": lambda record: inf if record.best.latency_ms is None else record.best.latency_ms,
    "seconds": lambda record: record.seconds,
}


def ls(
    kernel: str = "", device: str = "", since: datetime | None = None, sort: str = "kernel"
) -> Answer:
    """The records of kernels and devices with these texts in their names, and damaged files."""
    cache = opened()
    found = choose(cache, None)
    chosen = {
        number: each
        for number, each in sorted(found.items(), key=lambda each: _ORDERS[sort](each[1].record))
        if (since is None or each.record.tuned_at >= since)
        and kernel.casefold() in each.record.kernel.casefold()
        and _is_made_on(each.record, device)
    }
    of_all = f" of {len(found)}" if len(chosen) < len(found) else ""
    number_told = amount(len(chosen), "record") if chosen else "no records"
    total = f"{number_told}{of_all} in {cache.folder}"
    rows = []
    for number, each in chosen.items():
        counts = {"n_candidates": len(each.record.candidates), "n_dropped": _n_dropped(each.record)}
        told = each.record.model_dump(mode="json", exclude={"candidates", "meeting_seconds"})
        rows.append(
            {
                **_names(number, each),
                **told,
                **counts,
                "winner": each.record.best.model_dump(mode="json"),
            }
        )
    damaged = [
        {"path": str(path), "reason": reason} for path, reason in sorted(cache.unused.items())
    ]
    values = {"path": str(cache.folder.absolute()), "records": rows, "damaged": damaged}
    # Each damaged file has its warning.
    return Answer(values, [*_list(chosen), total], 1 if damaged else 0)


def _list(chosen: Mapping[str, Entry]) -> list[str]:
    return table(
        [
            {
                "id": number,
                "age": _age(each.record.tuned_at.timestamp()),
                "kernel": plain(each.record.kernel, 60),
                "key": plain(each.record.key.replace("torch.", ""), 80),
                "ms": each.record.best.latency_ms,
                "candidates": len(each.record.candidates),
                "dropped": _n_dropped(each.record) or None,
                "made on": plain(words.made_on(each.record.environment), 60),
                "winner": words.short_config(each.record.best),
            }
            for number, each in chosen.items()
        ]
    )


def _is_made_on(record: TuningRecord, device: str) -> bool:
    return device.casefold() in record.environment.device.casefold()


def _n_dropped(record: TuningRecord) -> int:
    return sum(candidate.failure is not None for candidate in record.candidates)


def show(key: str) -> Answer:
    """All of one record; of several, a list from which to choose one."""
    chosen = choose(opened(), key)
    values = {
        "records": [
            {**_names(number, each), "record": each.record.model_dump(mode="json")}
            for number, each in chosen.items()
        ]
    }
    if len(chosen) > 1:
        return Answer(
            values,
            [
                *_list(chosen),
                f"{amount(len(chosen), 'record')} of {plain(key)}: name one by its id",
            ],
        )
    ((number, (path, record)),) = chosen.items()
    pairs = words.facts(record) | words.origin([record])
    pairs["tuned"] += f", {_age(record.tuned_at.timestamp())} ago"
    pairs |= {
        "took": f"{words.took(record.spent, record.n_replays)} of {record.closure}",
        "file": str(path.absolute()),
    }
    rows = words.candidate_rows(record)
    colours = ["red" if record.candidates[row["#"]].failure else None for row in rows]
    colours[[row["#"] for row in rows].index(record.winner)] = "green"
    return Answer(
        values,
        [
            f"{plain(record.kernel)} {plain(record.key)}  {number}",
            *facts(pairs),
            *table(rows, colours),
        ],
    )


# -- explain ---------------------------------------------------------------------------------------


def explain(key: str | None) -> Answer:
    """For each chosen record whether it would be used here, and the fields that prevent it, as far
    as they are known here.
    """
    cache, settings, rows = opened(), Settings(), list[dict[str, Any]]()
    for number, each in choose(cache, key).items():
        record, recorded = each.record, each.record.environment
        # With the recorded numbers of ranks, because any job may be started with them.
        here = environment(world_size=recorded.world_size, ranks_per_host=recorded.ranks_per_host)
        wanted = record.cache_key.model_copy(update=here.keyed)
        found = differences(wanted, record.cache_key)
        is_accepted = found.keys() <= set(SOFTWARE) and not settings.version_check
        why = (
            "DIST_TUNE_ALWAYS_TUNE is set: no record is used"
            if settings.always_tune
            else explain_miss(wanted, [record])
        )
        values = {
            "would_hit": not settings.always_tune and (not found or is_accepted),
            "reason": why,
        }
        values["differing"] = {
            name: {"record": theirs, "here": ours} for name, (ours, theirs) in found.items()
        }
        rows.append(
            {
                **_names(number, each),
                "kernel": record.kernel,
                "key": record.key,
                **values,
            }
        )
    columns = ("id", "kernel", "key", "reason")
    shown = [
        {"": "hit" if row["would_hit"] else "miss", **{name: row[name] or None for name in columns}}
        for row in rows
    ]
    lines = [
        *table(shown),
        (
            _ASK_THE_PROGRAM
            if rows
            else f"No records in {cache.folder}: no tuning has anything to start from."
        ),
    ]
    return Answer({"records": rows}, lines, 1 if cache.unused and key is None else 0)


# -- path, export, merge, clear, quarantine --------------------------------------------------------


def path() -> Answer:
    """The cache folder; nothing is read."""
    folder = Cache.of(Settings()).folder
    return Answer({"path": str(folder), "exists": os.path.isdir(folder)}, [str(folder)])


def export(target: str, name: str | None = None, device: str = "") -> Answer:
    """Write records into one file, whole or not at all, in place of an earlier export; with "/" at
    its end into a folder, beside others.
    """
    cache, file = opened(), Path(target)
    records = [
        each.record for each in choose(cache, name).values() if _is_made_on(each.record, device)
    ]
    if not records:
        of_device = f" of {plain(device)!r}" if device else ""
        raise RefusedError(f"nothing to export: there are no records{of_device} in {cache.folder}")
    code = 1 if cache.unused and name is None else 0
    if target.endswith("/"):
        cache = Cache(file)
        # Not by ``store``: what is handed on has the rights that the umask leaves.
        for record in records:
            path = cache.path_of(record.cache_key)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(
                path, record_bytes(record) + b"\n", keeps_old=cache.find(record.cache_key) is None
            )
        return Answer(
            {"path": str(file.absolute()), "n_records": len(records)},
            [f"{amount(len(records), 'record')} in {file}/"],
            code,
        )
    if file.is_file() and not isinstance(next(records_in(file))[1], TuningRecord):
        raise RefusedError(f"{file} exists and is no export: it is left alone")
    write_file(file, packed(records))
    values = {"path": str(file.absolute()), "n_records": len(records), "bytes": file.stat().st_size}
    return Answer(values, [f"{amount(len(records), 'record')} in {file}"], code)


def packed(records: Sequence[TuningRecord]) -> bytes:
    """Many records as the content of one JSON file."""
    return b"[\n" + b",\n".join(map(record_bytes, records)) + b"\n]\n"


def merge(paths: Sequence[Path]) -> Answer:
    """Take in all records of files, and of all ``*.json`` in folders, with the outcome of each; of
    two with one key the better stays.
    """
    cache, rows = opened(), []
    for source, found in (each for path in paths for each in records_in(path)):
        row = {
            "outcome": "refused",
            "source": source,
            "kernel": "",
            "key": "",
            "reason": str(found),
        }
        if isinstance(found, TuningRecord):
            outcome, reason = _take_in(cache, found)
            row |= {"outcome": outcome, "kernel": found.kernel, "key": found.key, "reason": reason}
        rows.append(row)
    rows.sort(key=lambda row: [*_COLOURS].index(row["outcome"]))
    counts = {name: sum(row["outcome"] == name for row in rows) for name in _COLOURS}
    total = ", ".join(f"{n} {name}" for name, n in counts.items() if n) or "no .json file is there"
    lines = [
        *table(rows, [_COLOURS[row["outcome"]] for row in rows]),
        f"{total}; the cache is {cache.folder}",
    ]
    return Answer({**counts, "records": rows}, lines, 1 if counts["refused"] or not rows else 0)


def _take_in(cache: Cache, record: TuningRecord) -> tuple[str, str]:
    """Outcome and reason."""
    before = cache.find(record.cache_key)
    if before == record:
        return "kept", "the same record is there"
    reason = ""
    if before is not None:
        reason = (
            f"{record.n_samples} timed replays against the {before.n_samples} of the one before; of"
            " equals the newer stays"
        )
        if (before.n_samples, before.tuned_at) >= (record.n_samples, record.tuned_at):
            return "kept", reason
    if cache.store(record) is None:
        return "refused", f"{cache.folder} cannot be written"
    return "added" if before is None else "replaced", reason


def clear(key: str | None, *, is_sure: bool = False) -> Answer:
    """Delete the records of a KEY, or all that the cache has put into its folder; asks first unless
    ``is_sure``.
    """
    cache = opened()
    chosen = [*choose(cache, key).values()]
    if key is None:
        doomed = cache.own_files()  # the other folders are only read
        what = (
            f"all {amount(sum(each.path in doomed for each in chosen), 'record')},"
            f" {amount(len(doomed), 'file')}"
        )
    else:
        doomed = [each.path for each in chosen]
        what = (
            f"{amount(len(chosen), 'record')} of"
            f" {', '.join(sorted({plain(each.record.kernel) for each in chosen}))}"
        )
    if not doomed:
        return Answer({"deleted": []}, [f"nothing to delete in {cache.folder}"])
    if not is_sure and not sys.stdin.isatty():
        raise RefusedError(
            f"Delete {what} in {cache.folder}? There is no terminal to ask: say --yes"
        )
    if not is_sure:
        typer.confirm(f"Delete {what} in {cache.folder}?", abort=True, err=True)
    problems = _delete(cache, doomed)
    deleted = [str(each.absolute()) for each in doomed if not os.path.lexists(each)]
    lines = [f"deleted {what}"] if deleted else []
    return Answer({"deleted": deleted}, lines, 1 if problems else 0, problems)


def _delete(cache: Cache, paths: Iterable[Path]) -> list[str]:
    """Delete files of the cache, and folders that are empty then; a sentence for each file that
    cannot be deleted.
    """
    problems = []
    for each in paths:
        try:
            cache.remove(each)
        except (OSError, ValueError) as error:
            problems.append(f"{each} is not deleted: {getattr(error, 'strerror', None) or error}")
        with suppress(OSError):  # still in use
            each.parent.rmdir()
    return problems


def ls_quarantine() -> Answer:
    """All configs that ended their process twice, and that do not run any more."""
    cache = opened()
    rows = [{"id": path.stem, **each.model_dump()} for path, each in _in_quarantine(cache)]
    total = (
        f"{amount(len(rows), 'config')} in quarantine: the process ended twice while it ran"
        if rows
        else "no config is in quarantine"
    )
    values = {"path": str(cache.folder.absolute()), "quarantine": rows}
    told = [{**row, "since": f"{_age(row['since'])} ago"} for row in rows]
    return Answer(values, [*table(told), total])


def clear_quarantine(key: str | None) -> Answer:
    """Let configs run again: all, or those of a kernel's name with or without its module."""
    cache = opened()
    found = [
        (path, each)
        for path, each in _in_quarantine(cache)
        if key is None or _is_named(each.kernel, key)
    ]
    if not found and key is not None:
        raise RefusedError(
            f"no config of {plain(key)} is in quarantine: dist-tune cache ls --quarantine lists all"
        )
    problems = _delete(cache, {path for path, _ in found})
    values = {"cleared": [each.model_dump() for _, each in found]}
    return Answer(
        values, [f"{amount(len(found), 'config')} may run again"], 1 if problems else 0, problems
    )


def _in_quarantine(cache: Cache) -> list[tuple[Path, QuarantinedConfig]]:
    paths = sorted((cache.folder / QUARANTINE).glob(f"*{LINES_SUFFIX}"))
    return [(path, each) for path in paths for each in read_quarantine(path)]


def _age(since: float) -> str:
    """The time since a moment, in the largest unit of which there are five: "43 s", "266 d"."""
    seconds = time.time() - since
    units = ("d", 86400), ("h", 3600), ("min", 60)
    unit, length_s = next((each for each in units if seconds >= 5 * each[1]), ("s", 1))
    return f"{max(0.0, seconds) / length_s:.0f} {unit}"
