"""``dist-tune cache ls --quarantine`` and ``clear --quarantine``: configs that ended their process twice, and that do not run any more."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from rich.text import Text

from dist_tune.cache import LINES_SUFFIX, QUARANTINE, Cache, QuarantinedConfig, read_quarantine
from dist_tune.cli.tables import Answer, RefusedError, ago, grid, plain
from dist_tune.output import amount

Found = list[tuple[Path, QuarantinedConfig]]


def in_quarantine(cache: Cache, key: str | None = None) -> Found:
    """The configs in quarantine, with their files.

    ``key``: of this kernel, by its name with or without the module, or of the only file whose name begins so.

    Raises:
        RefusedError: there are none of ``key``.
    """
    paths = sorted((cache.folder / QUARANTINE).glob(f"*{LINES_SUFFIX}"))
    found = [(path, each) for path in paths for each in read_quarantine(path)]
    if key is None:
        return found
    begun = {path for path, _ in found if key and path.stem.startswith(key)}
    ids = begun if len(begun) == 1 else set()
    chosen = [(path, each) for path, each in found if path in ids or key in (each.kernel, each.kernel.rpartition(".")[2])]
    if not chosen:
        raise RefusedError(f"no config of {plain(key)} is in quarantine: dist-tune cache ls --quarantine lists all")
    return chosen


def ls(cache: Cache) -> Answer:
    """All configs in quarantine."""
    found = in_quarantine(cache)
    table = grid("kernel", "key", "config", "rank", "since", "id")
    for path, each in found:
        since = ago(datetime.fromtimestamp(min(each.since, 1e11), UTC))
        table.add_row(*(plain(text) for text in (each.kernel, each.key, each.config, each.rank, since, path.stem)))
    total = f"{amount(len(found), 'config')} in quarantine: the process ended twice while it ran" if found else "no config is in quarantine"
    values = [{"id": path.stem, **each.model_dump()} for path, each in found]
    return Answer({"path": str(cache.folder.absolute()), "quarantine": values}, [*([table] if found else []), Text(total, style="dim")])


def clear(cache: Cache, key: str | None) -> Answer:
    """Let configs run again: those of a KEY, or all."""
    found = in_quarantine(cache, key)
    problems = delete(cache, sorted({path for path, _ in found}))
    told = f"{amount(len(found), 'config')} may run again" if found else "no config is in quarantine"
    return Answer({"cleared": [each.model_dump() for _, each in found]}, [Text(told)], 1 if problems else 0, [*problems.values()])


def delete(cache: Cache, paths: Iterable[Path]) -> dict[Path, str]:
    """Delete files of the cache; those that cannot be deleted -> the reason."""
    problems = {}
    for each in paths:
        try:
            cache.remove(each)
        except (OSError, ValueError) as error:
            problems[each] = f"{each} is not deleted: {getattr(error, 'strerror', None) or error}"
    return problems
