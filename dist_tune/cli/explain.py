"""``dist-tune cache explain``: whether a record would be used on this machine, and if not, which field stands in the way.

Compares environments, which a machine knows. Source, candidates and key are known to the running program alone, and so is with how
many ranks it runs.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from dist_tune.cache import HARDWARE, SOFTWARE, BrokenRecordError, Cache, Entry, Environment, environment, read_record
from dist_tune.cli.cache import by_environment, choose, set_aside, short_ids
from dist_tune.cli.tables import Answer, amount, grid, plain, texts
from dist_tune.settings import Settings

_ASK_THE_PROGRAM = (
    "Its source, its candidates, its key and its ranks only the program knows: run it with DIST_TUNE_REQUIRE_CACHE=1, "
    "and instead of tuning it says which of them differs."
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The environment of a record beside this machine's."""

    would_hit: bool
    """As far as the machine decides."""
    reason: str
    differing: tuple[str, ...]
    """Fields of the environment."""


def compare(recorded: Environment, here: Environment, settings: Settings) -> Comparison:
    """Whether a record made in one environment is used in another one. ``here`` has the recorded numbers of ranks: any job may."""
    differing = tuple(name for name in (*HARDWARE, *SOFTWARE) if getattr(recorded, name) != getattr(here, name))
    is_software_alone = set(differing) <= set(SOFTWARE)
    named = f"{', '.join(differing[:-1])} and {differing[-1]} differ" if len(differing) > 1 else f"{''.join(differing)} differs"
    if settings.always_tune:
        return Comparison(False, "DIST_TUNE_ALWAYS_TUNE is set: no record is used", differing)
    if not differing:
        return Comparison(True, "nothing differs that a machine knows", differing)
    if not is_software_alone:
        return Comparison(False, f"{named}", differing)
    if settings.version_check:
        return Comparison(False, f"{named}; DIST_TUNE_VERSION_CHECK=0 would accept that", differing)
    return Comparison(True, f"{named}, and DIST_TUNE_VERSION_CHECK=0 accepts that", differing)


def explain(cache: Cache, asked: Namespace) -> Answer:
    """Compare the environment of each record asked for with this machine, field by field; name what was set aside, and why."""
    entries = cache.entries()
    chosen = choose(cache, entries, asked.key) if asked.key is not None else entries
    settings = Settings()
    ids = short_ids(entries)
    page: list[RenderableType] = []
    values = []
    for recorded, group in by_environment(chosen):
        here = environment(world_size=recorded.world_size, ranks_per_host=recorded.ranks_per_host)
        comparison = compare(recorded, here, settings)
        page += _group_page(recorded, here, comparison, group, ids)
        values += [_values(entry, ids[entry.path], here, comparison) for entry in group]
    aside = [(each, _reason(each)) for each in set_aside(cache)] if asked.key is None else []
    if chosen:
        page.append(Text(_ASK_THE_PROGRAM, style="dim"))
    else:
        page.append(Text(f"No records in {cache.folder}: no tuning has anything to start from."))
    if aside:
        table = grid("set aside", "why")
        for each, reason in aside:
            table.add_row(*texts([str(each), reason]))
        page += ["", table]
    return Answer({"records": values, "set_aside": [{"path": str(each), "reason": reason} for each, reason in aside]}, page)


def _group_page(
    recorded: Environment, here: Environment, comparison: Comparison, group: Sequence[Entry], ids: dict[Path, str]
) -> list[RenderableType]:
    verdict = "would hit" if comparison.would_hit else "would miss"
    heading = Text.assemble(
        (f"{amount(len(group), 'record')} {verdict} here", "bold green" if comparison.would_hit else "bold red"), f": {comparison.reason}"
    )
    fields = grid("  field", "in the record", "here", "")
    for name in (*HARDWARE, *SOFTWARE):
        mine, theirs = (plain("none" if value is None else value) for value in (getattr(here, name), getattr(recorded, name)))
        is_program = name in ("world_size", "ranks_per_host")
        differs = name in comparison.differing
        remark = "differs" if differs else "as the job is started" if is_program else ""
        row = texts([f"  {name}", theirs, "?" if is_program else mine], "bold" if differs else "")
        fields.add_row(*row, Text(remark, style="bold red" if differs else "dim"))
    table = grid("  id", "kernel", "key", "source", "candidates")
    for entry in group:
        record = entry.record
        described = f"{record.cache_key.candidates} ({len(record.candidates)})"
        table.add_row(
            Text(f"  {ids[entry.path]}", style="cyan"),
            *texts([plain(record.kernel), plain(record.key), plain(record.source, 40), described]),
        )
    return [heading, fields, "", table, ""]


def _values(entry: Entry, short: str, here: Environment, comparison: Comparison) -> dict[str, Any]:
    recorded = entry.record.environment
    return {
        "id": short,
        "stem": entry.path.stem,
        "kernel": entry.record.kernel,
        "key": entry.record.key,
        "would_hit": comparison.would_hit,
        "reason": comparison.reason,
        "differing": {name: {"record": getattr(recorded, name), "here": getattr(here, name)} for name in comparison.differing},
        "needs": {
            "world_size": recorded.world_size,
            "ranks_per_host": recorded.ranks_per_host,
            "source": entry.record.source,
            "candidates": entry.record.cache_key.candidates,
        },
    }


def _reason(path: Path) -> str:
    try:
        record = read_record(path)
    except FileNotFoundError:
        return "gone meanwhile"
    except BrokenRecordError as error:
        return str(error)
    return f"a whole record of {plain(record.kernel)} {plain(record.key)}, under a name that is not its own"
