"""Records of the cache for the command line: which ones a word stands for, and the commands ``show`` and ``cache``.

The only user of the cache here. Reads and deletes records, and carries them between caches; tunes nothing. An exported file is a JSON
list with one record a line. The place of a record follows from the record alone, never from a name in a file.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from dist_tune.cache import (
    LINES_SUFFIX,
    QUARANTINE,
    SOFTWARE,
    BrokenRecordError,
    Cache,
    Environment,
    QuarantinedConfig,
    TuningRecord,
    differences,
    differing,
    environment,
    fates,
    from_fastest,
    read_quarantine,
    record_bytes,
    record_in,
    short_config,
    weighing,
    why_not,
)
from dist_tune.cache import explain as explain_miss
from dist_tune.cli.render import Answer, Page, RefusedError, ago, facts, milliseconds, plain, size, table, write_file
from dist_tune.output import amount
from dist_tune.safe_files import MAX_BYTES, read_regular
from dist_tune.settings import Settings

_MIN_ID = 8
"""Least characters of an id."""
_DOT = " \N{MIDDLE DOT} "
_STYLES = {"kept": "dim", "added": "green", "replaced": "green", "refused": "bold red"}
"""Of the outcomes of ``merge``; refusals last, next to the prompt."""
_PHASES = {"meetings": "of it in meetings", "compile_cpu": "CPU-seconds of compilation"}
_ASK_THE_PROGRAM = (
    "Its source, its candidates, its key and its ranks only the program knows: run it with DIST_TUNE_REQUIRE_CACHE=1, "
    "and instead of tuning it says which of them differs."
)


# -- records, and words that stand for them ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listed:
    """A record with its file, and the id by which the user names it: a beginning of the file's name that no other has."""

    id: str
    path: Path
    record: TuningRecord

    @property
    def names(self) -> dict[str, Any]:
        """The record's names in a JSON document."""
        return {"id": self.id, "stem": self.path.stem, "path": str(self.path.absolute())}


def opened() -> Cache:
    """The cache that DIST_TUNE_CACHE_DIR names; a folder that is not there yet is an empty one.

    Raises:
        RefusedError: it is no folder, or cannot be read.
    """
    settings = Settings()
    cache = Cache(settings.cache_folders, is_shared=settings.cache_shared)
    try:
        with suppress(FileNotFoundError), os.scandir(cache.folder):
            pass
    except OSError as error:
        raise RefusedError(
            f"{cache.folder} cannot be read ({error.strerror}): set DIST_TUNE_CACHE_DIR to the folder of the records"
        ) from None
    return cache


def listed(cache: Cache) -> list[Listed]:
    """All records, in the order of their kernels and keys."""
    entries = cache.entries()
    n_chars = next(n for n in range(_MIN_ID, 100) if len({entry.path.stem[:n] for entry in entries}) == len(entries))
    return [Listed(entry.path.stem[:n_chars], entry.path, entry.record) for entry in entries]


def choose(cache: Cache, key: str | None) -> list[Listed]:
    """The records of ``key``: a kernel's name with or without its module, a file's name or any unique beginning of it; None for all.

    Raises:
        RefusedError: no record has this name, or several ids begin with it.
    """
    found = listed(cache)
    if key is None:
        return found
    if named := [each for each in found if _is_named(each.record.kernel, key)]:
        return named
    stem = key.removesuffix(".json")
    begun = [each for each in found if stem and each.path.stem.startswith(stem)]
    if len(begun) > 1:
        raise RefusedError(f"{len(begun)} ids begin with {stem}: {', '.join(each.id for each in begun[:20])}")
    if not begun:
        for path, why in cache.unused.items():
            if stem and path.stem.startswith(stem):
                raise RefusedError(f"{path} is damaged: {why}")
        kernels = sorted({each.record.kernel for each in found})
        near = get_close_matches(key, [*kernels, *(name.rpartition(".")[2] for name in kernels)])
        hint = f"did you mean {' or '.join(map(plain, near))}?" if near else "dist-tune cache ls lists what there is"
        if not kernels:
            hint = f"there are no records{' that can be read' if cache.unused else ''}"
        raise RefusedError(f"nothing is called {plain(key)!r} in {cache.folder}: {hint}")
    return begun


def _is_named(kernel: str, key: str) -> bool:
    return key in (kernel, kernel.rpartition(".")[2])


def records_of(source: str) -> list[TuningRecord]:
    """The records that a word of the command line stands for: a file, an export, a folder, an id, a kernel. At least one.

    Files of a folder that hold no record cost a warning each.

    Raises:
        RefusedError: there is none.
    """
    path = Path(source)
    if path.is_dir():
        found = [entry.record for entry in Cache(path).entries()]
        for file in sorted(path.glob("*.json")):
            try:
                found += _unpacked(file)
            except RefusedError as error:
                warnings.warn(str(error), stacklevel=2)
        if not found:
            raise RefusedError(f"there are no events in {source}, and no records that can be read")
        return found
    if path.suffix in (".jsonl", ".log") and path.is_file():
        raise RefusedError(f"{source} is the log of one rank: name its folder, {path.parent}")
    if path.exists():
        return _unpacked(path)
    if "/" in source or path.suffix == ".json":
        raise RefusedError(f"{source}: no such file or folder")
    return [each.record for each in choose(opened(), source)]


def _unpacked(path: Path) -> list[TuningRecord]:
    found = list(records_in(path))
    if broken := next((each for each in found if isinstance(each, BrokenRecordError)), None):
        raise RefusedError(f"{path} holds no record that can be read: {broken}")
    return [each for each in found if isinstance(each, TuningRecord)]


def records_in(path: Path, *, follows_links: bool = True) -> Iterator[TuningRecord | BrokenRecordError]:
    """The records in an export or in a record's file; an error for each that is broken, and for a file that cannot be read."""
    try:
        content = read_regular(path, MAX_BYTES, follows_links=follows_links)
    except OSError as error:
        yield BrokenRecordError(error.strerror)
        return
    lines = content[2:].removesuffix(b"\n]\n").split(b"\n") if content.startswith(b"[\n") else [content]
    for line in lines:
        try:
            yield record_in(line.removesuffix(b","))
        except BrokenRecordError as error:
            yield error


# -- ls, show ----------------------------------------------------------------------------------------------------------


def ls(kernel: str = "", device: str = "", since: datetime | None = None, sort: str = "kernel") -> Answer:
    """The records of kernels and devices with these texts in their names, one table for each environment, and damaged files.

    ``sort``: "kernel" and key, "age" with the newest last, "ms" of the winner with the fastest first, or "seconds" of the tuning.
    """
    cache = opened()
    found = listed(cache)
    chosen = [each for each in found if since is None or each.record.tuned_at >= since]
    chosen = [each for each in chosen if kernel.casefold() in each.record.kernel.casefold()]
    chosen = [each for each in chosen if device.casefold() in each.record.environment.device.casefold()]
    if sort == "ms":
        chosen.sort(key=lambda each: inf if each.record.best.latency_ms is None else each.record.best.latency_ms)
    elif sort != "kernel":
        chosen.sort(key=lambda each: each.record.tuned_at if sort == "age" else each.record.seconds)
    of_all = f" of {len(found)}" if len(chosen) < len(found) else ""
    total = f"{amount(len(chosen), 'record')}{of_all}, {_size(each.path for each in chosen)}" if chosen else f"no records{of_all}"
    fields = {"kernel", "key", "closure", "environment", "tuned_at", "seconds"}
    rows = [
        {
            **each.names,
            **each.record.model_dump(mode="json", include=fields),
            "winner": each.record.best.model_dump(mode="json", include={"index", "config", "fields"}),
            **each.record.best.model_dump(include={"latency_ms", "closure_ms"}),
            "n_candidates": len(each.record.candidates),
            "n_dropped": fates(each.record).failures.total(),
            "n_samples": each.record.n_samples,
        }
        for each in chosen
    ]
    values = {"path": str(cache.folder.absolute()), "records": rows, "damaged": _damaged(cache)}
    return Answer(values, [*_record_list(chosen), table(_damaged(cache)), f"{total} in {cache.folder}"], 1 if cache.unused else 0)


def show(key: str) -> Answer:
    """All of one record; of several, a list from which to choose one."""
    chosen = choose(opened(), key)
    values = {"records": [{**each.names, "record": each.record.model_dump(mode="json")} for each in chosen]}
    if len(chosen) == 1:
        return Answer(values, _record_page(chosen[0]))
    return Answer(values, [*_record_list(chosen), f"{amount(len(chosen), 'record')} of {plain(key)}: name one by its id"])


def _record_list(chosen: Sequence[Listed]) -> Page:
    """One table of records for each environment; the one with the newest record comes last, next to the prompt."""
    groups: dict[Environment, list[Listed]] = defaultdict(list)
    for each in chosen:
        groups[each.record.environment].append(each)
    page: list[Any] = []
    for where, group in sorted(groups.items(), key=lambda group: max(each.record.recency for each in group[1])):
        rows = [
            {
                "id": each.id,
                "age": ago(each.record.tuned_at),
                "kernel": plain(each.record.kernel, 60),
                "key": plain(each.record.key.replace("torch.", ""), 80),
                "ms": each.record.best.latency_ms,
                "candidates": len(each.record.candidates),
                "dropped": fates(each.record).failures.total() or None,
                "winner": short_config(each.record.best),
            }
            for each in group
        ]
        hardware, software = _made_on(where)
        page += [Text.assemble((hardware, "bold"), (_DOT + software, "dim")), table(rows)]
    return page


def _record_page(listed: Listed) -> Page:
    """All of one record, its candidates from fastest to slowest."""
    record, best, ranks_ms = listed.record, listed.record.best, listed.record.best.rank_latencies_ms
    measured = [f"{milliseconds(best.latency_ms)} ms" if best.latency_ms is not None else "not measured"]
    if best.closure_ms is not None:
        measured.append(f"step {milliseconds(best.closure_ms)} ms")
    if len(ranks_ms) > 1:
        measured.append(f"slowest rank {max(ranks_ms, key=ranks_ms.__getitem__)}, fastest {milliseconds(min(ranks_ms.values()))} ms")
    missed = plain(", ".join(record.not_followed), 300)
    pairs = {
        "winner": f"{record.winner}: {plain(best.config, 400)}",
        "chosen": "; ".join(filter(None, [plain(record.reason), weighing(record)])),
        "measured": _DOT.join(measured),
        "tuned": f"{record.tuned_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC, {ago(record.tuned_at)} ago",
        "took": f"{record.seconds:.1f} s ({_phases(record)}), {amount(record.n_replays, 'replay')} of {plain(record.closure)}",
        "on": _DOT.join(_made_on(record.environment)),
        "source": plain(record.source) + (f", without {missed}: if these change, the record still counts" if missed else ""),
        "file": plain(listed.path.absolute(), 1000),
        "candidates": fates(record).text,
    }
    title = Text.assemble((plain(record.kernel, 400), "bold"), f" {plain(record.key, 1000)}  ", (listed.id, "cyan"))
    return [title, facts(pairs), _candidate_table(record)]


def _candidate_table(record: TuningRecord) -> Table:
    """Every candidate, fastest first, the dropped ones last with the reason."""
    fields = differing(record.candidates)
    best, best_ms = record.best, record.best.latency_ms
    ordered = from_fastest(record)
    rows = [
        {
            " ": ">" * (each is best),
            "#": each.index,
            "kernel\nms": each.latency_ms,
            "behind": f"{each.latency_ms / best_ms - 1:+.1%}" if each is not best and each.latency_ms is not None and best_ms else None,
            "+/- ms": each.known_spread_ms,
            "step\nms": each.closure_ms,
            # The slowest rank's is the kernel's time.
            "fastest\nrank ms": min(each.rank_latencies_ms.values()) if len(each.rank_latencies_ms) > 1 else None,
            "replays": each.n_replays or None,
            "shared": None if each.shared_bytes is None else size(each.shared_bytes),
            "regs": each.n_regs,
            "spills": each.n_spills,
            # Stacked, because the numbers beneath are narrow.
            **{plain(name, 40).replace("_", "_\n"): str(each.fields.get(name, "")) for name in fields},
            **({} if fields else {"config": each.config}),
            "": "winner" if each is best else why_not(each, record),
        }
        for each in ordered
    ]
    return table(rows, ["bold green" if each is best else "red" if each.failure is not None else "" for each in ordered])


def _phases(record: TuningRecord) -> str:
    """Seconds of each phase, then what lies within and beside them: "discover 0.9, compile 1.2, of it in meetings 0.3"."""
    spent = record.spent.model_dump(exclude={"total"})
    told = sorted((name for name in spent if spent[name] >= 0.05), key=lambda name: name in _PHASES)
    return ", ".join(f"{_PHASES.get(name, name)} {spent[name]:.1f}" for name in told) or "no phase took 0.1 s"


def _made_on(where: Environment) -> tuple[str, str]:
    """Ranks and devices, and versions: "4 ranks on 4 x NVIDIA H200", "Python 3.11 - torch 2.11.0 - triton 3.6.0 - CUDA 13.0"."""
    per_host = f", {where.ranks_per_host} per host," if where.ranks_per_host != where.world_size else ""
    devices = f"{where.device_count} x {where.device}" if where.device_count else f"{where.device} without a GPU"
    versions = f"Python {where.python}", f"torch {where.torch}", f"triton {where.triton}", f"CUDA {where.cuda}" if where.cuda else "no CUDA"
    return plain(f"{amount(where.world_size, 'rank')}{per_host} on {devices}"), plain(_DOT.join(versions))


def _damaged(cache: Cache) -> list[dict[str, str]]:
    """Path and reason of the files that are no records; call it after they were read."""
    return [{"path": str(each), "reason": reason} for each, reason in sorted(cache.unused.items())]


# -- explain -----------------------------------------------------------------------------------------------------------


def explain(key: str | None) -> Answer:
    """For each chosen record whether it would be used here, and the fields that prevent it; without a KEY also damaged files.

    Source, candidates, key and number of ranks are known to the running program alone.
    """
    cache, settings = opened(), Settings()
    rows = []
    for each in choose(cache, key):
        record, recorded = each.record, each.record.environment
        # With the recorded numbers of ranks, because any job may be started with them.
        here = environment(world_size=recorded.world_size, ranks_per_host=recorded.ranks_per_host)
        wanted = record.cache_key.model_copy(update=here.keyed)
        found = differences(wanted, record.cache_key)
        is_accepted = found.keys() <= set(SOFTWARE) and not settings.version_check
        why = "DIST_TUNE_ALWAYS_TUNE is set: no record is used" if settings.always_tune else explain_miss(wanted, [record])
        values = {"would_hit": not settings.always_tune and (not found or is_accepted), "reason": why}
        values["differing"] = {name: {"record": theirs, "here": ours} for name, (ours, theirs) in found.items()}
        rows.append({**each.names, "kernel": record.kernel, "key": record.key, "not_followed": record.not_followed, **values})
    shown = [
        {"": "hit" if row["would_hit"] else "miss", "id": row["id"], "kernel": plain(row["kernel"], 60), "key": plain(row["key"], 80)}
        | {"not followed": ", ".join(row["not_followed"]), "reason": row["reason"]}
        for row in rows
    ]
    page: Page = [table(shown), _ASK_THE_PROGRAM if rows else f"No records in {cache.folder}: no tuning has anything to start from."]
    damaged = _damaged(cache) if key is None else []
    return Answer({"records": rows, "damaged": _damaged(cache)}, [*page, table(damaged)], 1 if damaged else 0)


# -- path, export, merge, clear, quarantine ----------------------------------------------------------------------------


def path() -> Answer:
    """The cache folder; nothing is read."""
    folder = Cache(Settings().cache_folders).folder.absolute()
    return Answer({"path": str(folder), "exists": os.path.isdir(folder)}, [str(folder)])


def export(file: Path, name: str | None = None) -> Answer:
    """Write records into one file, whole or not at all, in place of an earlier export."""
    cache = opened()
    records = [each.record for each in choose(cache, name)]
    if not records:
        raise RefusedError(f"nothing to export: there are no records in {cache.folder}")
    content = packed(records)
    if len(content) > MAX_BYTES:
        raise RefusedError(f"{len(records)} records take {size(len(content))}, and an export holds {size(MAX_BYTES)}: export by --name")
    if os.path.lexists(os.path.realpath(file)) and not isinstance(next(records_in(file)), TuningRecord):
        raise RefusedError(f"{file} exists and is no export: it is left alone")
    is_inside = Path(os.path.realpath(cache.folder)) in Path(os.path.realpath(file)).parents
    write_file(file, content, cache.rights if is_inside else None)
    values = {"path": str(file.absolute()), "n_records": len(records), "bytes": len(content)}
    told = f"{amount(len(records), 'record')}, {size(len(content))} in {file}"
    return Answer(values, [told], 1 if cache.unused and name is None else 0)


def packed(records: Sequence[TuningRecord]) -> bytes:
    """Many records as the content of one JSON file."""
    return b"[\n" + b",\n".join(map(record_bytes, records)) + b"\n]\n"


def merge(paths: Sequence[Path]) -> Answer:
    """Take in all records of files, and of all ``*.json`` in folders, with the outcome of each; of two with one key the better stays."""
    cache = opened()
    rows = []
    for path in paths:
        files = [path]
        if os.path.isdir(path):  # unlike Path.is_dir no error where access is denied
            files = sorted(Path(folder, name) for folder, _, names in os.walk(path) for name in names if name.endswith(".json"))
        if not files:
            rows.append({"outcome": "refused", "source": str(path), "kernel": "", "key": "", "reason": "no .json file is in this folder"})
        for file in files:
            # Of a folder its own files: a link in it may lead anywhere.
            for number, found in enumerate(records_in(file, follows_links=file is path), 1):
                row = {"outcome": "refused", "source": f"{file}, record {number}", "kernel": "", "key": "", "reason": str(found)}
                if isinstance(found, TuningRecord):
                    outcome, reason = _take_in(cache, found)
                    row = {"outcome": outcome, "source": str(file), "kernel": found.kernel, "key": found.key, "reason": reason}
                rows.append(row)
    rows.sort(key=lambda row: [*_STYLES].index(row["outcome"]))
    counts = Counter(row["outcome"] for row in rows)
    total = ", ".join(f"{counts[name]} {name}" for name in _STYLES if counts[name])
    page = (table(rows, [_STYLES[row["outcome"]] for row in rows]), f"{total}; the cache is {cache.folder}")
    return Answer({**{name: counts[name] for name in _STYLES}, "records": rows}, page, 1 if counts["refused"] else 0)


def _take_in(cache: Cache, record: TuningRecord) -> tuple[str, str]:
    """Outcome and reason."""
    before = cache.find(record.cache_key)
    if before == record:
        return "kept", "the same record is there"
    if cache.store(record, is_import=True) is None:
        return "refused", f"{cache.folder} cannot be written"
    if before is None:
        return "added", ""
    outcome = "replaced" if cache.find(record.cache_key) == record else "kept"
    return outcome, f"{record.n_samples} timed replays against the {before.n_samples} of the one before; of equals the newer stays"


def clear(key: str | None, *, is_sure: bool = False) -> Answer:
    """Delete the records of a KEY, or all that the cache has put into its folder; asks first unless ``is_sure``."""
    cache = opened()
    chosen = choose(cache, key)
    if key is None:
        chosen = [each for each in chosen if each.path.is_relative_to(cache.folder)]  # the other folders are only read
        doomed = cache.own_files()
        others = f" and {amount(len(doomed) - len(chosen), 'other file')}" if len(doomed) > len(chosen) else ""
        what = f"all {amount(len(chosen), 'record')}{others}"
    else:
        doomed = [each.path for each in chosen]
        what = f"{amount(len(chosen), 'record')} of {', '.join(sorted({plain(each.record.kernel) for each in chosen}))}"
    if not doomed:
        return Answer({"deleted": []}, [f"nothing to delete in {cache.folder}"])
    question = f"Delete {what} in {cache.folder} ({_size(doomed)})?"
    if not is_sure and not sys.stdin.isatty():
        raise RefusedError(f"{question} There is no terminal to ask: say --yes")
    if not is_sure and not typer.confirm(question, err=True):
        raise RefusedError("nothing is deleted")
    problems = _delete(cache, doomed)
    for folder in {each.parent for each in doomed}:
        with suppress(OSError):  # still in use
            folder.rmdir()
    deleted = [str(each.absolute()) for each in doomed if not os.path.lexists(each)]
    return Answer({"deleted": deleted}, [f"deleted {what}"] if deleted else [], 1 if problems else 0, problems)


def _delete(cache: Cache, paths: Iterable[Path]) -> list[str]:
    """Delete files of the cache; a sentence for each that cannot be deleted."""
    problems = []
    for each in paths:
        try:
            cache.remove(each)
        except (OSError, ValueError) as error:
            problems.append(f"{each} is not deleted: {getattr(error, 'strerror', None) or error}")
    return problems


def _size(paths: Iterable[Path]) -> str:
    return size(sum(each.lstat().st_size for each in paths))


def ls_quarantine() -> Answer:
    """All configs that ended their process twice, and that do not run any more."""
    cache = opened()
    found = _in_quarantine(cache)
    rows = [{"id": path.stem, **each.model_dump()} for path, each in found]
    shown = [{**row, "since": ago(datetime.fromtimestamp(min(each.since, 1e11), UTC))} for row, (_, each) in zip(rows, found, strict=True)]
    total = f"{amount(len(found), 'config')} in quarantine: the process ended twice while it ran" if found else "no config is in quarantine"
    return Answer({"path": str(cache.folder.absolute()), "quarantine": rows}, [table(shown), total])


def clear_quarantine(key: str | None) -> Answer:
    """Let configs run again: those of a kernel's name with or without its module, or of the only file whose name begins so."""
    cache = opened()
    found = _in_quarantine(cache)
    if key is not None:
        begun = {path for path, _ in found if key and path.stem.startswith(key)}
        found = [(path, each) for path, each in found if {path} == begun or _is_named(each.kernel, key)]
        if not found:
            raise RefusedError(f"no config of {plain(key)} is in quarantine: dist-tune cache ls --quarantine lists all")
    problems = _delete(cache, {path for path, _ in found})
    told = f"{amount(len(found), 'config')} may run again" if found else "no config is in quarantine"
    return Answer({"cleared": [each.model_dump() for _, each in found]}, [told], 1 if problems else 0, problems)


def _in_quarantine(cache: Cache) -> list[tuple[Path, QuarantinedConfig]]:
    paths = sorted((cache.folder / QUARANTINE).glob(f"*{LINES_SUFFIX}"))
    return [(path, each) for path in paths for each in read_quarantine(path)]
