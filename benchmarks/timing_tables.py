"""Recorded tables of times: what an exhaustive search measured on real devices, read from its
records and kept under benchmarks/tables.

python -m benchmarks.timing_tables --run contextual-4xH200 cache/model.gemm/*.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pydantic import BaseModel

from dist_tune.records import TuningRecord, record_in

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


def table_of(record: TuningRecord, run: str) -> Table:
    """The table of an exhaustive search of a site."""
    rows = [
        Row(
            config=each.config,
            ranks_ms=list(each.rank_latencies_ms.values()),
            closure_ms=each.closure_ms,
            failure=each.failure,
        )
        for each in record.candidates
    ]
    return Table(run=run, site=record.kernel + record.key, rows=rows)


def store_table(path: Path, run: str, folder: Path) -> Path:
    """Write the table of a record's file."""
    table = table_of(record_in(path.read_bytes()), run)
    parts = table.site.partition("[")[2].rstrip("]").split(",")
    target = folder / f"{run}-{'x'.join(part for part in parts if part.isdigit())}.json"
    rows = ",\n".join(json.dumps(row.model_dump()) for row in table.rows)
    head = f'{{"run": {json.dumps(run)}, "site": {json.dumps(table.site)}, "rows": ['
    target.write_text(f"{head}\n{rows}\n]}}\n")
    return target


def load_tables() -> dict[str, Table]:
    """All tables that are kept, by name."""
    return {
        path.stem: Table.model_validate_json(path.read_text())
        for path in sorted(TABLES.glob("*.json"))
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("records", nargs="+", type=Path, help="files of an exhaustive search")
    parser.add_argument("--run", required=True, help="the name of the run")
    options = parser.parse_args()
    for path in options.records:
        print(store_table(path, options.run, TABLES))
