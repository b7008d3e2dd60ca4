"""Recorded tables of times: what an exhaustive search measured on real devices, read from its
events and kept under benchmarks/tables.

python -m benchmarks.timing_tables .autotune_logs/rank-0.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pydantic import BaseModel

from dist_tune.log.events import EVENT, Won
from dist_tune.records import TuningRecord

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


def read_events(path: Path) -> list[Table]:
    """The table of each site of an exhaustive search, from the events of any of its ranks; of sites
    tuned again the last.
    """
    found: dict[str, list[Row]] = {}
    for line in path.read_text().splitlines():
        event = EVENT.validate_json(line)
        if isinstance(event, Won):
            record = TuningRecord.model_validate(event.record)
            found[record.kernel + record.key] = [
                Row(
                    config=each.config,
                    ranks_ms=list(each.rank_latencies_ms.values()),
                    closure_ms=each.closure_ms,
                    failure=each.failure,
                )
                for each in record.candidates
            ]
    return [Table(run=path.parent.name, site=site, rows=rows) for site, rows in found.items()]


def store_tables(events: Path, folder: Path) -> list[Path]:
    """Write the tables of the events of a rank, one file a site."""
    paths = []
    for table in read_events(events):
        shape = "x".join(
            part for part in table.site.partition("[")[2].rstrip("]").split(",") if part.isdigit()
        )
        paths.append(folder / f"{table.run}-{shape}.json")
        rows = ",\n".join(json.dumps(row.model_dump()) for row in table.rows)
        paths[-1].write_text(
            f'{{"run": {json.dumps(table.run)}, "site": {json.dumps(table.site)}, "rows":'
            f" [\n{rows}\n]}}\n"
        )
    return paths


def load_tables() -> dict[str, Table]:
    """All tables that are kept, by name."""
    return {
        path.stem: Table.model_validate_json(path.read_text())
        for path in sorted(TABLES.glob("*.json"))
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "events", nargs="+", type=Path, help="rank-<i>.jsonl of an exhaustive search"
    )
    for events in parser.parse_args().events:
        print(*store_tables(events, TABLES), sep="\n")
