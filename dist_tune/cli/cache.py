"""The commands of ``dist-tune cache``: each takes the cache and what was typed, and gives an answer.

Prints nothing but the question whether to delete. What is in a record comes from records.py, where it lies from cache.py, how it looks
from tables.py.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from dist_tune.cache import BROKEN_SUFFIX, LOCK_NAME, LOCKS, TEMPORARY_SUFFIX, Cache, Entry, Environment
from dist_tune.cli import transfer
from dist_tune.cli.tables import Answer, amount, grid, plain, record_list, record_page, size, texts

MIN_PREFIX = 8
"""Characters of a file's name that are shown, or more where two begin alike."""
MIN_TYPED = 4
"""Characters of it that name a record, as in git."""
_RECORD_FILE = re.compile(r"[0-9a-f]{12}(-[0-9a-f]{12}){2}\.json")


class RefusedError(Exception):
    """The command cannot do what was asked. The message says why, and what can be done."""


# -- path, ls, show --------------------------------------------------------------------------------------------------


def path(cache: Cache, asked: Namespace) -> Answer:
    """The cache folder."""
    folder = cache.folder.absolute()
    return Answer({"path": str(folder), "exists": os.path.isdir(folder)}, [Text(str(folder))])


def ls(cache: Cache, asked: Namespace) -> Answer:
    """All records, those of one environment together, the environment of the newest record last: that is where the eye is."""
    entries = cache.entries()
    aside = set_aside(cache)
    ids = short_ids(entries)
    page: list[RenderableType] = []
    for where, group in by_environment(entries):
        page += record_list(where, [(ids[entry.path], entry.record) for entry in group])
    n_bytes = sum(_size(entry.path) for entry in entries)
    total = f"{amount(len(entries), 'record')}, {size(n_bytes)}" if entries else "no records"
    page.append(Text(f"{total} in {cache.folder}", style="dim"))
    problems = [f"{amount(len(aside), 'file')} set aside: dist-tune cache explain says why"] if aside else []
    values = {
        "path": str(cache.folder.absolute()),
        "records": [_summary(entry, ids[entry.path]) for entry in entries],
        "set_aside": [str(each) for each in aside],
    }
    return Answer(values, page, problems=problems)


def show(cache: Cache, asked: Namespace) -> Answer:
    """All that is known of one record; of several, a list from which to choose one."""
    entries = cache.entries()
    ids = short_ids(entries)
    chosen = choose(cache, entries, asked.key)
    values = {"records": [{**_names(entry, ids[entry.path]), "record": entry.record.model_dump(mode="json")} for entry in chosen]}
    if len(chosen) == 1:
        (entry,) = chosen
        return Answer(values, record_page(ids[entry.path], str(entry.path.absolute()), entry.record))
    page: list[RenderableType] = []
    for where, group in by_environment(chosen):
        page += record_list(where, [(ids[entry.path], entry.record) for entry in group])
    page.append(Text(f"{amount(len(chosen), 'record')} of {plain(asked.key)}: name one by its id"))
    return Answer(values, page)


def choose(cache: Cache, entries: Sequence[Entry], key: str) -> list[Entry]:
    """The records that ``key`` stands for: a file's name or the beginning of one, or a kernel's name with or without its module.

    Raises:
        RefusedError: it stands for none, or begins the names of several files.
    """
    stem = key.removesuffix(".json")
    names = {entry.record.kernel for entry in entries}
    rules = (
        lambda entry: entry.path.stem == stem,
        lambda entry: entry.record.kernel == key,
        lambda entry: entry.record.kernel.endswith(f".{key}"),
    )
    for rule in rules:
        if chosen := [entry for entry in entries if rule(entry)]:
            return chosen
    if len(stem) >= MIN_TYPED and (chosen := [entry for entry in entries if entry.path.stem.startswith(stem)]):
        if len(chosen) > 1:
            ids = short_ids(entries)
            raise RefusedError(f"{len(chosen)} ids begin with {stem}: {', '.join(ids[entry.path] for entry in chosen[:20])}")
        return chosen
    if not entries:
        raise RefusedError(f"nothing is called {plain(key)!r}: there are no records in {cache.folder}")
    near = [name for name in sorted(names) if key and key in name][:3]
    near = near or get_close_matches(key, sorted(names | {name.rpartition(".")[2] for name in names}), n=3)
    hint = f"did you mean {' or '.join(map(plain, near))}?" if near else "dist-tune cache ls lists what there is"
    raise RefusedError(f"nothing is called {plain(key)!r} in {cache.folder}: {hint}")


def short_ids(entries: Iterable[Entry]) -> dict[Path, str]:
    """The beginning of each file's name that no other one has, at least 8 characters."""
    ids: dict[Path, str] = {}
    ordered = sorted(entries, key=lambda entry: entry.path.stem)
    stems = ["", *(entry.path.stem for entry in ordered), ""]
    for before, entry, after in zip(stems, ordered, stems[2:], strict=False):
        in_common = max(_n_in_common(entry.path.stem, other) for other in (before, after))
        ids[entry.path] = entry.path.stem[: max(MIN_PREFIX, in_common + 1)]
    return ids


def _n_in_common(one: str, other: str) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def by_environment(entries: Iterable[Entry]) -> list[tuple[Environment, list[Entry]]]:
    """Records of one environment together; the environment that was tuned in last comes last."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.record.environment.model_dump_json(), []).append(entry)
    ordered = sorted(groups.values(), key=lambda group: max(entry.record.tuned_at for entry in group))
    return [(group[0].record.environment, group) for group in ordered]


# -- export, merge, clear --------------------------------------------------------------------------------------------


def export(cache: Cache, asked: Namespace) -> Answer:
    """Write records into one file."""
    entries = cache.entries()
    chosen = choose(cache, entries, asked.name) if asked.name is not None else entries
    if not chosen:
        raise RefusedError(f"nothing to export: there are no records in {cache.folder}")
    try:
        n_bytes = transfer.write_export(asked.file, [entry.record for entry in chosen])
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None)
        raise RefusedError(f"{asked.file} is not written: {reason}" if reason else str(error)) from error
    values = {"path": str(asked.file.absolute()), "n_records": len(chosen), "bytes": n_bytes}
    return Answer(values, [Text(f"{amount(len(chosen), 'record')}, {size(n_bytes)} in {asked.file}")])


def merge(cache: Cache, asked: Namespace) -> Answer:
    """Take in the records of files and folders, and say what became of each."""
    arrivals = list(transfer.merge(cache, asked.files))
    counts = Counter(each.outcome for each in arrivals)
    styles: dict[transfer.Outcome, str] = {"kept": "dim", "added": "green", "replaced": "green", "refused": "bold red"}
    table = grid("", "kernel", "key", "", "from")
    values = []
    for each in sorted(arrivals, key=lambda each: list(styles).index(each.outcome)):  # bad news last, where the eye is
        kernel, key = (each.record.kernel, each.record.key) if each.record else ("", "")
        values.append({"source": each.source, "kernel": kernel, "key": key, "outcome": each.outcome, "reason": each.reason})
        cells = [plain(kernel, 60), plain(key, 80), plain(each.reason), plain(each.source, 400)]
        table.add_row(Text(each.outcome, style=styles[each.outcome]), *texts(cells))
    total = ", ".join(f"{counts[name]} {name}" for name in styles if counts[name])
    return Answer(
        {**{name: counts[name] for name in styles}, "records": values},
        [table, "", Text(f"{total}; the cache is {cache.folder}")],
        exit_code=1 if counts["refused"] else 0,
    )


def clear(cache: Cache, asked: Namespace) -> Answer:
    """Delete the records asked for, or all that the cache has put into its folder; asks first unless told not to."""
    entries = cache.entries()
    if asked.key is None:
        doomed = _own_files(cache)
        what = f"all {amount(len(entries), 'record')}" + f" and {amount(len(doomed) - len(entries), 'other file')}" * (
            len(doomed) > len(entries)
        )
    else:
        chosen = choose(cache, entries, asked.key)
        doomed = [entry.path for entry in chosen]
        kernels = sorted({plain(entry.record.kernel) for entry in chosen})
        what = f"{amount(len(chosen), 'record')} of {', '.join(kernels)}"
    if not doomed:
        return Answer({"deleted": []}, [Text(f"nothing to delete in {cache.folder}")])
    if not asked.yes:
        _confirm(f"Delete {what} in {cache.folder} ({size(sum(map(_size, doomed)))})?")
    deleted, problems = [], []
    for each in doomed:
        try:
            cache.remove(each)
            deleted.append(str(each.absolute()))
        except (OSError, ValueError) as error:
            problems.append(f"{each} is not deleted: {getattr(error, 'strerror', None) or error}")
    for folder in {each.parent for each in doomed}:
        with suppress(OSError):  # still in use
            folder.rmdir()
    return Answer({"deleted": deleted}, [Text(f"deleted {what}")] if deleted else [], 1 if problems else 0, problems)


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise RefusedError(f"{question} There is no terminal to ask: say --yes")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RefusedError("nothing is deleted")


# -- the folder ------------------------------------------------------------------------------------------------------


def set_aside(cache: Cache) -> list[Path]:
    """Files that were found broken and renamed."""
    return [each for each in _own_files(cache) if each.name.endswith(BROKEN_SUFFIX)]


def _own_files(cache: Cache) -> list[Path]:
    """What the cache has put into its folder, and no more: people keep all kinds of things in places."""
    folders = [each for each in _inside(cache.folder) if os.path.isdir(each) and not os.path.islink(each)]
    return [each for folder in folders for each in _inside(folder) if _is_own(each) and (os.path.islink(each) or not os.path.isdir(each))]


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # none, or not for us to see: the cache warns of it where that matters
        return []


def _is_own(path: Path) -> bool:
    is_lock = path.name == LOCK_NAME or (path.parent.name == LOCKS and path.suffix == LOCK_NAME)
    return is_lock or _RECORD_FILE.fullmatch(path.name) is not None or path.suffix in (BROKEN_SUFFIX, TEMPORARY_SUFFIX)


def _names(entry: Entry, short: str) -> dict[str, Any]:
    return {"id": short, "stem": entry.path.stem, "path": str(entry.path.absolute())}


def _summary(entry: Entry, short: str) -> dict[str, Any]:
    record, best = entry.record, entry.record.best
    return {
        **_names(entry, short),
        "kernel": record.kernel,
        "key": record.key,
        "closure": record.closure,
        "winner": {"index": best.index, "config": best.config, "fields": best.fields},
        "latency_ms": best.latency_ms,
        "closure_ms": best.closure_ms,
        "n_candidates": len(record.candidates),
        "n_dropped": sum(each.failure is not None for each in record.candidates),
        "n_samples": record.n_samples,
        "environment": record.environment.model_dump(mode="json"),
        "tuned_at": record.tuned_at.isoformat(),
        "seconds": record.seconds,
        "bytes": _size(entry.path),
    }


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # gone meanwhile
        return 0
