"""Records of tunings as tables: many as a list, one as a page with all its candidates."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dist_tune.cache import CandidateRecord, Environment, TuningRecord, fates, weighing, why_not
from dist_tune.cli.records.selection import Listed, by_environment
from dist_tune.cli.tables import ago, facts, grid, milliseconds, plain, size
from dist_tune.output import amount

_MAX_CONFIG = 400
_MAX_FIELDS = 12
"""Fields with a column each; with more differing ones there is one column of whole configs."""
_SEPARATOR = " \N{MIDDLE DOT} "


def record_list(chosen: Sequence[Listed]) -> list[RenderableType]:
    """One table of records for each environment."""
    page: list[RenderableType] = []
    for where, group in by_environment(chosen):
        table = grid("id", "age", "kernel", "key", "ms", "candidates", "winner", right=("age", "ms"))
        for each in group:
            record, n_dropped = each.record, dropped(each.record)
            key = plain(record.key.replace("torch.", ""), 80)
            candidates = f"{len(record.candidates)}{f', {n_dropped} dropped' * bool(n_dropped)}"
            cells = [ago(record.tuned_at), plain(record.kernel, 60), key, milliseconds(record.best.latency_ms), candidates]
            table.add_row(Text(each.id, style="cyan"), *cells, plain(without_hook(record.best.config), _MAX_CONFIG))
        page += [Text.assemble((hardware(where), "bold"), (_SEPARATOR + software(where), "dim")), table, ""]
    return page


def without_hook(config: str) -> str:
    """A config without its hook, whose name says nothing of its speed."""
    return " ".join(word for word in config.split(" ") if "pre_hook=" not in word)


def hardware(where: Environment) -> str:
    """Ranks and devices: "4 ranks on 4 x NVIDIA H200"."""
    ranks = amount(where.world_size, "rank")
    if where.ranks_per_host != where.world_size:
        ranks += f", {where.ranks_per_host} per host,"
    device = plain(where.device, 60)
    return f"{ranks} on {where.device_count} x {device}" if where.device_count else f"{ranks} on {device} without a GPU"


def software(where: Environment) -> str:
    """Versions: "Python 3.11 - torch 2.11.0 - triton 3.6.0 - CUDA 13.0"."""
    cuda = f"CUDA {plain(where.cuda, 30)}" if where.cuda else "no CUDA"
    versions = (f"Python {plain(where.python, 30)}", f"torch {plain(where.torch, 40)}", f"triton {plain(where.triton, 40)}", cuda)
    return _SEPARATOR.join(versions)


def dropped(record: TuningRecord) -> int:
    """Number of candidates that failed."""
    return sum(each.failure is not None for each in record.candidates)


def record_page(listed: Listed) -> list[RenderableType]:
    """All of one record, its candidates from fastest to slowest."""
    record = listed.record
    title = Text.assemble((plain(record.kernel, 400), "bold"), f" {plain(record.key, 1000)}  ", (listed.id, "cyan"))
    shared = " ".join(f"{name}={value!r}" for name, value in shared_fields(record).items())
    pairs = {
        "winner": f"{record.winner}: {plain(record.best.config, _MAX_CONFIG)}",
        "chosen": "; ".join(filter(None, [plain(record.reason), weighing(record)])),
        "measured": _SEPARATOR.join(_measured(record.best)),
        "tuned": f"{record.tuned_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC, {ago(record.tuned_at)} ago",
        "took": f"{record.seconds:.1f} s ({phases(record)}), {amount(record.n_replays, 'replay')} of {plain(record.closure)}",
        "on": hardware(record.environment),
        "with": software(record.environment),
        "source": plain(record.source) + (f", without {not_followed(record)}" if record.not_followed else ""),
        "file": plain(listed.path.absolute(), 1000),
        "candidates": plain(fates(record).text, 1000) + (f"; all with {plain(shared, 1000)}" if shared else ""),
    }
    return [title, facts(pairs), "", candidate_table(record)]


def not_followed(record: TuningRecord) -> str:
    """Imports that its digest leaves out, on one line."""
    return f"{plain(', '.join(record.not_followed), 400)}: if these change, the record still counts"


def _measured(best: CandidateRecord) -> list[str]:
    measured = [f"{milliseconds(best.latency_ms)} ms" if best.latency_ms is not None else "not measured"]
    if best.closure_ms is not None:
        measured.append(f"step {milliseconds(best.closure_ms)} ms")
    ranks_ms = best.rank_latencies_ms
    if len(ranks_ms) > 1:
        measured.append(f"slowest rank {max(ranks_ms, key=ranks_ms.__getitem__)}, fastest {milliseconds(min(ranks_ms.values()))} ms")
    return measured


def phases(record: TuningRecord) -> str:
    """Seconds of each phase, then what lies within and beside them: "discover 0.9, compile 1.2; 0.3 s of it in meetings"."""
    spent = record.spent
    named = spent.model_dump(exclude={"total", "meetings", "compile_cpu"})
    told = [", ".join(f"{name} {seconds:.1f}" for name, seconds in named.items() if seconds >= 0.05) or "no phase took 0.1 s"]
    told += [f"{spent.meetings:.1f} s of it in meetings"] * (spent.meetings >= 0.05)
    told += [f"{spent.compile_cpu:.1f} CPU-seconds of compilation"] * (spent.compile_cpu >= 0.05)
    return "; ".join(told)


def shared_fields(record: TuningRecord) -> dict[str, Any]:
    """Fields with one value for all candidates; empty for a single candidate."""
    first, *others = (each.fields for each in record.candidates)
    return {name: value for name, value in first.items() if all((name, value) in other.items() for other in others)} if others else {}


def candidate_table(record: TuningRecord) -> Table:
    """Every candidate, fastest first, the dropped ones last with the reason; without columns that would be empty."""
    ordered = sorted(record.candidates, key=lambda each: (each.failure is not None, each.latency_ms is None, each.latency_ms or 0.0))
    numbers = [_numbers(each, record.best) for each in ordered]
    columns = [name for name in numbers[0] if any(row[name] for row in numbers)]
    fields = _differing_fields(record)
    # Stacked, because the numbers beneath are narrow.
    stacked = [plain(name, 40).replace("_", "_\n") for name in fields] or ["config"]
    table = grid("", "#", *columns, *stacked, "", right=("#", *columns, *(stacked if len(stacked) > 1 else ())))
    for each, row in zip(ordered, numbers, strict=True):
        is_best = each.index == record.winner
        style = "bold green" if is_best else "red" if each.failure is not None else ""
        config = [plain(each.fields.get(name, "")) for name in fields] or [plain(each.config)]
        fate = "winner" if is_best else plain(why_not(each, record))
        cells = [">" * is_best, str(each.index), *(row[name] for name in columns), *config]
        table.add_row(*cells, Text(fate, style=style or "dim"), style=style if is_best else None)
    return table


def _differing_fields(record: TuningRecord) -> list[str]:
    """Fields that differ between candidates; empty where there are too many, or the fields of a candidate are not known."""
    shared = shared_fields(record)
    names = list(dict.fromkeys(name for each in record.candidates for name in each.fields if name not in shared))
    return names if len(names) <= _MAX_FIELDS and all(each.fields for each in record.candidates) else []


def _numbers(each: CandidateRecord, best: CandidateRecord) -> dict[str, str]:
    ranks_ms = each.rank_latencies_ms.values()
    is_behind = each.index != best.index and each.latency_ms is not None and bool(best.latency_ms)
    behind = (each.latency_ms or 0.0) / (best.latency_ms or 1.0) - 1.0
    return {
        "kernel\nms": milliseconds(each.latency_ms),
        "behind": f"{behind:+.1%}" if is_behind else "",
        "+/- ms": milliseconds(each.known_spread_ms),
        "step\nms": milliseconds(each.closure_ms),
        "fastest\nrank ms": milliseconds(min(ranks_ms)) if len(ranks_ms) > 1 else "",  # the slowest rank's is the kernel's time
        "replays": str(each.n_replays or ""),
        "shared": size(each.shared_bytes) if each.shared_bytes is not None else "",
        "regs": "" if each.n_regs is None else str(each.n_regs),
        "spills": "" if each.n_spills is None else str(each.n_spills),
    }
