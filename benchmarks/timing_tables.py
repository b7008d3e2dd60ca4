"""Recorded tables of times: what an exhaustive search measured on real devices, read from its log and kept under benchmarks/tables.

python -m benchmarks.timing_tables .autotune_logs/rank-0.jsonl
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from pydantic import BaseModel

from dist_tune.cache import TuningRecord
from dist_tune.output.events import EVENT, Won

TABLES = Path(__file__).parent / "tables"


class Row(BaseModel):
    """One candidate of a recorded table. Times are milliseconds."""

    config: str
    ranks_ms: list[float] = []
    """Each rank's median launch."""
    closure_ms: float | None = None
    """MAX over ranks of the median replay."""
    failure: str | None = None


class Table(BaseModel):
    """What an exhaustive search measured of one site; rows in the order of candidates."""

    run: str
    site: str
    rows: list[Row]


_ROW = re.compile(
    r"site=(?P<site>\S+) candidate=(?P<index>\d+) (?:kernel_ms=\S+ .*?closure_ms=(?P<closure>\S+) .*?ranks_ms=\[(?P<ranks>[^]]*)]"
    r"|dropped: (?P<failure>.*?))(?: \w+=\d+)* config=\"(?P<config>.*)\"$"
)


def read_events(path: Path) -> list[Table]:
    """The table of each site of an exhaustive search, from the events of any of its ranks; of sites tuned again the last."""
    found: dict[str, list[Row]] = {}
    for line in path.read_text().splitlines():
        event = EVENT.validate_json(line)
        if isinstance(event, Won):
            record = TuningRecord.model_validate(event.record)
            found[record.kernel + record.key] = [
                Row(config=each.config, ranks_ms=list(each.rank_latencies_ms.values()), closure_ms=each.closure_ms, failure=each.failure)
                for each in record.candidates
            ]
    return [Table(run=path.parent.name, site=site, rows=rows) for site, rows in found.items()]


def read_log(log: Path) -> list[Table]:
    """The table of each site of an exhaustive search, from the events of any of its ranks, or from a log of version 0.1."""
    if log.suffix == ".jsonl":
        return read_events(log)
    found: dict[str, dict[int, Row]] = {}
    for match in filter(None, map(_ROW.search, log.read_text().splitlines())):
        ranks_ms = [float(each.partition(":")[2]) for each in (match["ranks"] or "").split()]
        row = Row(
            config=match["config"],
            ranks_ms=ranks_ms,
            closure_ms=float(match["closure"]) if match["closure"] else None,
            failure=match["failure"],
        )
        found.setdefault(match["site"], {})[int(match["index"])] = row
    for site, rows in found.items():
        if sorted(rows) != list(range(len(rows))):
            raise ValueError(f"{log}: site {site} has rows for candidates {sorted(rows)}; a table needs all of them")
    return [Table(run=log.parent.name, site=site, rows=[rows[i] for i in range(len(rows))]) for site, rows in found.items()]


def store_tables(log: Path, folder: Path) -> list[Path]:
    """Write the tables of a log, one file a site."""
    paths = []
    for table in read_log(log):
        shape = "x".join(part for part in table.site.partition("[")[2].rstrip("]").split(",") if part.isdigit())
        paths.append(folder / f"{table.run}-{shape}.json")
        rows = ",\n".join(json.dumps(row.model_dump()) for row in table.rows)
        paths[-1].write_text(f'{{"run": {json.dumps(table.run)}, "site": {json.dumps(table.site)}, "rows": [\n{rows}\n]}}\n')
    return paths


def load_tables() -> dict[str, Table]:
    """All tables that are kept, by name."""
    return {path.stem: Table.model_validate_json(path.read_text()) for path in sorted(TABLES.glob("*.json"))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("logs", nargs="+", type=Path, help="rank-<i>.jsonl of an exhaustive search, or rank-<i>.log of version 0.1")
    for log in parser.parse_args().logs:
        print(*store_tables(log, TABLES), sep="\n")
