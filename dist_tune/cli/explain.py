"""``dist-tune cache explain``: the environment of each record beside this machine's, and the fields that prevent a hit.

Compares environments only: source, candidates, key and number of ranks are known to the running program alone.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from dist_tune.cache import HARDWARE, SOFTWARE, BrokenRecordError, Cache, Environment, environment, read_record
from dist_tune.cli.cache import set_aside
from dist_tune.cli.selection import Listed, by_environment, choose
from dist_tune.cli.tables import Answer, amount, grid, plain, texts
from dist_tune.settings import Settings

_FIELDS = (*HARDWARE, *SOFTWARE)
_OF_PROGRAM = ("world_size", "ranks_per_host")
_ASK_THE_PROGRAM = (
    "Its source, its candidates, its key and its ranks only the program knows: run it with DIST_TUNE_REQUIRE_CACHE=1, "
    "and instead of tuning it says which of them differs."
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The environment of a record beside this machine's."""

    recorded: Environment
    here: Environment
    differing: tuple[str, ...]
    would_hit: bool
    """As far as the machine decides."""
    reason: str


def explain(cache: Cache, asked: Namespace) -> Answer:
    """Compare the environments of the chosen records with this machine; without a KEY also list the files set aside, with the reason."""
    chosen = choose(cache, asked.key)
    settings = Settings()
    page: list[RenderableType] = []
    values = []
    for recorded, group in by_environment(chosen):
        comparison = _compare(recorded, settings)
        page += _group_page(comparison, group)
        values += [_values(comparison, each) for each in group]
    if chosen:
        page.append(Text(_ASK_THE_PROGRAM, style="dim"))
    else:
        page.append(Text(f"No records in {cache.folder}: no tuning has anything to start from."))
    aside = [{"path": str(each), "reason": _broken(each)} for each in set_aside(cache)] if asked.key is None else []
    if aside:
        table = grid("set aside", "why")
        for each in aside:
            table.add_row(*texts(list(each.values())))
        page += ["", table]
    return Answer({"records": values, "set_aside": aside}, page)


def _compare(recorded: Environment, settings: Settings) -> Comparison:
    # With the recorded numbers of ranks, because any job may be started with them.
    here = environment(world_size=recorded.world_size, ranks_per_host=recorded.ranks_per_host)
    differing = tuple(name for name in _FIELDS if getattr(recorded, name) != getattr(here, name))
    named = f"{', '.join(differing[:-1])} and {differing[-1]} differ" if len(differing) > 1 else f"{''.join(differing)} differs"
    would_hit, reason = False, named
    if settings.always_tune:
        reason = "DIST_TUNE_ALWAYS_TUNE is set: no record is used"
    elif not differing:
        would_hit, reason = True, "nothing differs that a machine knows"
    elif set(differing) <= set(SOFTWARE):
        would_hit = not settings.version_check
        accepts = ", and DIST_TUNE_VERSION_CHECK=0 accepts that" if would_hit else "; DIST_TUNE_VERSION_CHECK=0 would accept that"
        reason = f"{named}{accepts}"
    return Comparison(recorded, here, differing, would_hit, reason)


def _group_page(comparison: Comparison, group: Sequence[Listed]) -> list[RenderableType]:
    verdict, style = ("would hit", "bold green") if comparison.would_hit else ("would miss", "bold red")
    heading = Text.assemble((f"{amount(len(group), 'record')} {verdict} here", style), f": {comparison.reason}")
    fields = grid("  field", "in the record", "here", "")
    for name in _FIELDS:
        values = (getattr(comparison.recorded, name), getattr(comparison.here, name))
        recorded, here = (plain("none" if value is None else value) for value in values)
        differs = name in comparison.differing
        remark = "differs" if differs else "as the job is started" if name in _OF_PROGRAM else ""
        row = texts([f"  {name}", recorded, "?" if name in _OF_PROGRAM else here], "bold" if differs else "")
        fields.add_row(*row, Text(remark, style="bold red" if differs else "dim"))
    table = grid("  id", "kernel", "key", "source", "candidates")
    for each in group:
        record = each.record
        cells = [
            plain(record.kernel),
            plain(record.key),
            plain(record.source, 40),
            f"{record.cache_key.candidates} ({len(record.candidates)})",
        ]
        table.add_row(Text(f"  {each.id}", style="cyan"), *texts(cells))
    return [heading, fields, "", table, ""]


def _values(comparison: Comparison, listed: Listed) -> dict[str, Any]:
    record, recorded, here = listed.record, comparison.recorded, comparison.here
    return {
        "id": listed.id,
        "stem": listed.path.stem,
        "kernel": record.kernel,
        "key": record.key,
        "would_hit": comparison.would_hit,
        "reason": comparison.reason,
        "differing": {name: {"record": getattr(recorded, name), "here": getattr(here, name)} for name in comparison.differing},
        "needs": {
            **recorded.model_dump(include={*_OF_PROGRAM}),
            "source": record.source,
            "candidates": record.cache_key.candidates,
        },
    }


def _broken(path: Path) -> str:
    try:
        record = read_record(path)
    except FileNotFoundError:
        return "gone meanwhile"
    except BrokenRecordError as error:
        return str(error)
    return f"a whole record of {plain(record.kernel)} {plain(record.key)}, under a name that is not its own"
