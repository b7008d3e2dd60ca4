"""The commands of ``dist-tune cache``, except explain: each takes the cache and the parsed arguments, and returns an answer.

Prints nothing but the question before deleting.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from glob import iglob
from pathlib import Path
from typing import Any

from rich.text import Text

from dist_tune.cache import BROKEN_SUFFIX, JOURNALS, LINES_SUFFIX, LOCK_NAME, LOCKS, QUARANTINE, TEMPORARY_SUFFIX, Cache
from dist_tune.cli import quarantine, transfer
from dist_tune.cli.record_page import dropped, record_list, record_page
from dist_tune.cli.selection import Listed, choose
from dist_tune.cli.tables import Answer, RefusedError, amount, grid, plain, size

_RECORD_FILE = re.compile(r"[0-9a-f]{12}(-[0-9a-f]{12}){2}\.json")


def path(cache: Cache, asked: Namespace) -> Answer:
    """The cache folder."""
    folder = cache.folder.absolute()
    return Answer({"path": str(folder), "exists": os.path.isdir(folder)}, [Text(str(folder))])


def ls(cache: Cache, asked: Namespace) -> Answer:
    """All records, one table for each environment; with ``--quarantine`` the configs that do not run any more."""
    if asked.quarantine:
        return quarantine.ls(cache)
    records = choose(cache, None)
    aside = [str(each) for each in set_aside(cache)]
    total = f"{amount(len(records), 'record')}, {size(_size(each.path for each in records))}" if records else "no records"
    return Answer(
        {"path": str(cache.folder.absolute()), "records": [_summary(each) for each in records], "set_aside": aside},
        [*record_list(records), Text(f"{total} in {cache.folder}", style="dim")],
        problems=[f"{amount(len(aside), 'file')} set aside: dist-tune cache explain says why"] if aside else [],
    )


def show(cache: Cache, asked: Namespace) -> Answer:
    """All of one record; of several, a list from which to choose one."""
    chosen = choose(cache, asked.key)
    values = {"records": [{**each.names, "record": each.record.model_dump(mode="json")} for each in chosen]}
    if len(chosen) == 1:
        return Answer(values, record_page(chosen[0]))
    question = f"{amount(len(chosen), 'record')} of {plain(asked.key)}: name one by its id"
    return Answer(values, [*record_list(chosen), Text(question)])


def export(cache: Cache, asked: Namespace) -> Answer:
    """Write records into one file."""
    records = [each.record for each in choose(cache, asked.name)]
    if not records:
        raise RefusedError(f"nothing to export: there are no records in {cache.folder}")
    try:
        is_inside = Path(os.path.realpath(cache.folder)) in Path(os.path.realpath(asked.file)).parents
        n_bytes = transfer.write_export(asked.file, records, cache.rights if is_inside else None)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None)
        raise RefusedError(f"{asked.file} is not written: {reason}" if reason else str(error)) from error
    values = {"path": str(asked.file.absolute()), "n_records": len(records), "bytes": n_bytes}
    return Answer(values, [Text(f"{amount(len(records), 'record')}, {size(n_bytes)} in {asked.file}")])


def merge(cache: Cache, asked: Namespace) -> Answer:
    """Take in the records of files and folders, with the outcome of each."""
    styles: dict[transfer.Outcome, str] = {"kept": "dim", "added": "green", "replaced": "green", "refused": "bold red"}
    # Refusals last, next to the prompt.
    arrivals = sorted(transfer.merge(cache, asked.files), key=lambda each: list(styles).index(each.outcome))
    table = grid("", "kernel", "key", "", "from")
    for each in arrivals:
        cells = (plain(each.kernel, 60), plain(each.key, 80), plain(each.reason), plain(each.source, 400))
        table.add_row(Text(each.outcome, style=styles[each.outcome]), *cells)
    counts = Counter(each.outcome for each in arrivals)
    total = ", ".join(f"{counts[name]} {name}" for name in styles if counts[name])
    return Answer(
        {**{name: counts[name] for name in styles}, "records": [asdict(each) for each in arrivals]},
        [table, "", Text(f"{total}; the cache is {cache.folder}")],
        exit_code=1 if counts["refused"] else 0,
    )


def clear(cache: Cache, asked: Namespace) -> Answer:
    """Delete the records of a KEY, or all that the cache has put into its folder; asks first without ``--yes``.

    With ``--quarantine`` the configs that do not run any more, which may run again then.
    """
    if asked.quarantine:
        return quarantine.clear(cache, asked)
    chosen = choose(cache, asked.key)
    if asked.key is None:
        doomed = _own_files(cache)
        n_others = len(doomed) - len(chosen)
        what = f"all {amount(len(chosen), 'record')}" + (f" and {amount(n_others, 'other file')}" if n_others > 0 else "")
    else:
        doomed = [each.path for each in chosen]
        what = f"{amount(len(chosen), 'record')} of {', '.join(sorted({plain(each.record.kernel) for each in chosen}))}"
    if not doomed:
        return Answer({"deleted": []}, [Text(f"nothing to delete in {cache.folder}")])
    if not asked.yes:
        _confirm(f"Delete {what} in {cache.folder} ({size(_size(doomed))})?")
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


def set_aside(cache: Cache) -> list[Path]:
    """Files that were found broken and renamed."""
    return [each for each in _own_files(cache) if each.name.endswith(BROKEN_SUFFIX)]


def _own_files(cache: Cache) -> list[Path]:
    """Files that the cache itself has written; the user's files in the same folders are not among them."""
    found = sorted(cache.folder / name for name in iglob("*/*", root_dir=cache.folder, include_hidden=True))
    return [
        each for each in found if _is_own(each) and not os.path.islink(each.parent) and (os.path.islink(each) or not os.path.isdir(each))
    ]


def _is_own(path: Path) -> bool:
    is_own = path.name == LOCK_NAME or (path.parent.name == LOCKS and path.suffix == LOCK_NAME)
    is_own |= path.parent.name in (JOURNALS, QUARANTINE) and path.suffix == LINES_SUFFIX
    return is_own or _RECORD_FILE.fullmatch(path.name) is not None or path.suffix in (BROKEN_SUFFIX, TEMPORARY_SUFFIX)


def _size(paths: Iterable[Path]) -> int:
    total = 0
    for each in paths:
        with suppress(OSError):  # gone meanwhile
            total += each.stat().st_size
    return total


def _summary(listed: Listed) -> dict[str, Any]:
    record, best = listed.record, listed.record.best
    return {
        **listed.names,
        "kernel": record.kernel,
        "key": record.key,
        "closure": record.closure,
        "winner": {"index": best.index, "config": best.config, "fields": best.fields},
        "latency_ms": best.latency_ms,
        "closure_ms": best.closure_ms,
        "n_candidates": len(record.candidates),
        "n_dropped": dropped(record),
        "n_samples": record.n_samples,
        "environment": record.environment.model_dump(mode="json"),
        "tuned_at": record.tuned_at.isoformat(),
        "seconds": record.seconds,
        "bytes": _size([listed.path]),
    }
