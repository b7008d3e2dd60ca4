"""The commands of ``dist-tune cache``, except explain: each takes the cache and what was asked, and returns an answer.

Prints nothing but the question before deleting.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from glob import iglob
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from dist_tune.cache import JOURNALS, LINES_SUFFIX, LOCKS, QUARANTINE, Cache
from dist_tune.cli.records import quarantine, transfer
from dist_tune.cli.records.record_page import dropped, record_list, record_page
from dist_tune.cli.records.selection import Filter, Listed, choose, ordered
from dist_tune.cli.tables import Answer, RefusedError, grid, plain, size
from dist_tune.output import amount
from dist_tune.settings import Settings

_RECORD_FILE = re.compile(r"[0-9a-f]{12}(-[0-9a-f]{12}){1,2}\.json")


def opened() -> Cache:
    """The cache that DIST_TUNE_CACHE_DIR names; a folder that is not there yet is an empty one.

    Raises:
        RefusedError: it is no folder, or cannot be read.
    """
    cache = _configured()
    try:
        with os.scandir(cache.folder):
            return cache
    except FileNotFoundError:
        return cache
    except NotADirectoryError:
        raise RefusedError(f"{cache.folder} is not a folder: set DIST_TUNE_CACHE_DIR to the folder of the records") from None
    except OSError as error:
        raise RefusedError(f"{cache.folder} cannot be read ({error.strerror}): set DIST_TUNE_CACHE_DIR to another folder") from None


def _configured() -> Cache:
    settings = Settings()
    return Cache(settings.cache_folders, is_shared=settings.cache_shared)


def path() -> Answer:
    """The cache folder; nothing is read."""
    folder = _configured().folder.absolute()
    return Answer({"path": str(folder), "exists": os.path.isdir(folder)}, [Text(str(folder))])


def ls(cache: Cache, wanted: Filter, *, sort: str = "kernel", is_quarantine: bool = False) -> Answer:
    """The wanted records, one table for each environment, and damaged files; or the configs that do not run any more."""
    if is_quarantine:
        return quarantine.ls(cache)
    found = choose(cache, None)
    records = ordered(filter(wanted.takes, found), sort)
    of_all = f" of {len(found)}" if len(records) < len(found) else ""
    total = f"{amount(len(records), 'record')}{of_all}, {size(_size(each.path for each in records))}" if records else f"no records{of_all}"
    return Answer(
        {
            "path": str(cache.folder.absolute()),
            "records": [_summary(each) for each in records],
            "damaged": damaged(cache),
        },
        [*record_list(records), *damage_list(cache), Text(f"{total} in {cache.folder}", style="dim")],
        exit_code=1 if cache.unused else 0,
    )


def show(cache: Cache, key: str) -> Answer:
    """All of one record; of several, a list from which to choose one."""
    chosen = choose(cache, key)
    values = {"records": [{**each.names, "record": each.record.model_dump(mode="json")} for each in chosen]}
    if len(chosen) == 1:
        return Answer(values, record_page(chosen[0]))
    question = f"{amount(len(chosen), 'record')} of {plain(key)}: name one by its id"
    return Answer(values, [*record_list(chosen), Text(question)])


def export(cache: Cache, file: Path, name: str | None = None) -> Answer:
    """Write records into one file."""
    records = [each.record for each in choose(cache, name)]
    if not records:
        raise RefusedError(f"nothing to export: there are no records in {cache.folder}")
    try:
        is_inside = Path(os.path.realpath(cache.folder)) in Path(os.path.realpath(file)).parents
        n_bytes = transfer.write_export(file, records, cache.rights if is_inside else None)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None)
        raise RefusedError(f"{file} is not written: {reason}" if reason else str(error)) from error
    values = {"path": str(file.absolute()), "n_records": len(records), "bytes": n_bytes}
    return Answer(values, [Text(f"{amount(len(records), 'record')}, {size(n_bytes)} in {file}")], 1 if cache.unused and name is None else 0)


def merge(cache: Cache, files: Sequence[Path]) -> Answer:
    """Take in the records of files and folders, with the outcome of each."""
    styles: dict[transfer.Outcome, str] = {"kept": "dim", "added": "green", "replaced": "green", "refused": "bold red"}
    # Refusals last, next to the prompt.
    arrivals = sorted(transfer.merge(cache, files), key=lambda each: list(styles).index(each.outcome))
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


def clear(cache: Cache, key: str | None, *, is_quarantine: bool = False, is_sure: bool = False) -> Answer:
    """Delete the records of a KEY, or all that the cache has put into its folder; asks first unless ``is_sure``.

    With ``is_quarantine`` the configs that do not run any more, which may run again then.
    """
    if is_quarantine:
        return quarantine.clear(cache, key)
    chosen = choose(cache, key)
    if key is None:
        doomed = _own_files(cache)
        n_others = len(doomed) - len(chosen)
        what = f"all {amount(len(chosen), 'record')}" + (f" and {amount(n_others, 'other file')}" if n_others > 0 else "")
    else:
        doomed = [each.path for each in chosen]
        what = f"{amount(len(chosen), 'record')} of {', '.join(sorted({plain(each.record.kernel) for each in chosen}))}"
    if not doomed:
        return Answer({"deleted": []}, [Text(f"nothing to delete in {cache.folder}")])
    if not is_sure:
        _confirm(f"Delete {what} in {cache.folder} ({size(_size(doomed))})?")
    problems = quarantine.delete(cache, doomed)
    deleted = [str(each.absolute()) for each in doomed if each not in problems]
    for folder in {each.parent for each in doomed}:
        with suppress(OSError):  # still in use
            folder.rmdir()
    return Answer({"deleted": deleted}, [Text(f"deleted {what}")] if deleted else [], 1 if problems else 0, [*problems.values()])


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise RefusedError(f"{question} There is no terminal to ask: say --yes")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RefusedError("nothing is deleted")


def damaged(cache: Cache) -> list[dict[str, str]]:
    """Path and reason of the files that were to be records of the cache and are not used; call it after they were read."""
    return [{"path": str(each), "reason": reason} for each, reason in sorted(cache.unused.items())]


def damage_list(cache: Cache) -> list[RenderableType]:
    """A table of the damaged files; empty if there are none."""
    table = grid("damaged", "why")
    for each in damaged(cache):
        table.add_row(plain(each["path"], 400), Text(plain(each["reason"]), style="bold red"))
    return [table, ""] if table.row_count else []


def _own_files(cache: Cache) -> list[Path]:
    """Files that the cache itself has written; the user's files in the same folders are not among them."""
    found = sorted(cache.folder / name for name in iglob("*/*", root_dir=cache.folder, include_hidden=True))
    return [
        each for each in found if _is_own(each) and not os.path.islink(each.parent) and (os.path.islink(each) or not os.path.isdir(each))
    ]


def _is_own(path: Path) -> bool:
    is_own = path.name == ".lock" or (path.parent.name == LOCKS and path.suffix == ".lock")
    is_own |= path.parent.name in (JOURNALS, QUARANTINE) and path.suffix == LINES_SUFFIX
    return is_own or _RECORD_FILE.fullmatch(path.name) is not None or path.suffix in (".tmp", ".broken")  # .broken: of older versions


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
