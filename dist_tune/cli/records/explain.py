"""``dist-tune cache explain``: the environment of each record beside this machine's, and the fields that prevent a hit.

Compares environments only: source, candidates, key and number of ranks are known to the running program alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dist_tune.cache import HARDWARE, SOFTWARE, Cache, environment
from dist_tune.cli.records.cache import damage_list, damaged
from dist_tune.cli.records.record_page import not_followed
from dist_tune.cli.records.selection import Listed, by_environment, choose
from dist_tune.cli.tables import Answer, grid, plain
from dist_tune.output import amount
from dist_tune.settings import Settings

_FIELDS = (*HARDWARE, *SOFTWARE)
_OF_PROGRAM = ("world_size", "ranks_per_host")
_ASK_THE_PROGRAM = (
    "Its source, its candidates, its key and its ranks only the program knows: run it with DIST_TUNE_REQUIRE_CACHE=1, "
    "and instead of tuning it says which of them differs."
)


def explain(cache: Cache, key: str | None) -> Answer:
    """Compare the environments of the chosen records with this machine; without a KEY also list damaged files."""
    chosen = choose(cache, key)
    settings = Settings()
    page: list[RenderableType] = []
    records = []
    for recorded, group in by_environment(chosen):
        # With the recorded numbers of ranks, because any job may be started with them.
        here = environment(world_size=recorded.world_size, ranks_per_host=recorded.ranks_per_host)
        both = {name: {"record": getattr(recorded, name), "here": getattr(here, name)} for name in _FIELDS}
        differing = {name: values for name, values in both.items() if values["record"] != values["here"]}
        would_hit, reason = _verdict(list(differing), settings)
        verdict, style = ("would hit", "bold green") if would_hit else ("would miss", "bold red")
        heading = Text.assemble((f"{amount(len(group), 'record')} {verdict} here", style), f": {reason}")
        page += [heading, _field_table(both), "", _record_table(group), *_warnings(group), ""]
        records += [_values(each, would_hit, reason, differing) for each in group]
    nothing = f"No records in {cache.folder}: no tuning has anything to start from."
    page.append(Text(_ASK_THE_PROGRAM, style="dim") if chosen else nothing)
    if key is None and cache.unused:
        page += ["", *damage_list(cache)]
    values = {"records": records, "damaged": damaged(cache)}
    return Answer(values, page, 1 if key is None and cache.unused else 0)


def _verdict(differing: list[str], settings: Settings) -> tuple[bool, str]:
    """A hit or a miss as far as the environments decide, and the reason."""
    named = f"{', '.join(differing[:-1])} and {differing[-1]} differ" if len(differing) > 1 else f"{''.join(differing)} differs"
    if settings.always_tune:
        return False, "DIST_TUNE_ALWAYS_TUNE is set: no record is used"
    if not differing:
        return True, "nothing differs that a machine knows"
    if not set(differing) <= set(SOFTWARE):
        return False, named
    if settings.version_check:
        return False, f"{named}; DIST_TUNE_VERSION_CHECK=0 would accept that"
    return True, f"{named}, and DIST_TUNE_VERSION_CHECK=0 accepts that"


def _field_table(both: Mapping[str, Mapping[str, Any]]) -> Table:
    table = grid("  field", "in the record", "here", "")
    for name, values in both.items():
        recorded, here = (plain("none" if value is None else value) for value in values.values())
        differs = values["record"] != values["here"]
        remark = "differs" if differs else "as the job is started" if name in _OF_PROGRAM else ""
        cells = (f"  {name}", recorded, "?" if name in _OF_PROGRAM else here)
        table.add_row(*cells, Text(remark, style="bold red" if differs else "dim"), style="bold" if differs else None)
    return table


def _record_table(group: Sequence[Listed]) -> Table:
    table = grid("  id", "kernel", "key", "source", "candidates")
    for each in group:
        record = each.record
        n_equal = sum(one.equal_to is not None for one in record.candidates)
        equal = f", {n_equal} the same kernel as another" * bool(n_equal)
        candidates = f"{record.cache_key.candidates} ({len(record.candidates)}{equal})"
        table.add_row(Text(f"  {each.id}", style="cyan"), plain(record.kernel), plain(record.key), plain(record.source, 40), candidates)
    return table


def _warnings(group: Sequence[Listed]) -> list[RenderableType]:
    open_ended = [each for each in group if each.record.not_followed]
    return [Text(f"  {each.id}: its source is without {not_followed(each.record)}", style="yellow") for each in open_ended]


def _values(listed: Listed, would_hit: bool, reason: str, differing: Mapping[str, Any]) -> dict[str, Any]:
    record = listed.record
    needs = {"source": record.source, "not_followed": record.not_followed, "candidates": record.cache_key.candidates}
    return {
        "id": listed.id,
        "stem": listed.path.stem,
        "kernel": record.kernel,
        "key": record.key,
        "would_hit": would_hit,
        "reason": reason,
        "differing": differing,
        "needs": {**record.environment.model_dump(include={*_OF_PROGRAM}), **needs},
    }
