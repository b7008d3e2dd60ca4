"""Whether the winners of a job's tuning are the fastest configs, all timed alone by CUDA graphs.

    python -m benchmarks.jobs.regret --records FOLDER --out FILE SCRIPT [its arguments]

Runs the script in this one process, as a group of one rank, with the first config of each kernel,
and keeps the latest launch of each kernel at each key. Then each config of a launch is captured in
a graph of ten launches and replayed: its time is the median of 20 replays, by ten. It is compared
with what the records of the tuning hold, found by kernel and key.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton.runtime.autotuner import Autotuner

from dist_tune.launches.kernel import Launch
from dist_tune.records import Cache, TuningRecord

N_LAUNCHES, N_REPLAYS, N_SITES = 10, 20, 10
NEAR_MS, NEAR_SHARE = 0.003, 0.05
"""A told time within either is near the graph's."""


def is_near(told_ms: float | None, graph_ms: float) -> bool:
    """Whether a kernel's time as it was told is that of a graph, within 3 us or 5 %."""
    if told_ms is None:
        return False
    return abs(told_ms - graph_ms) <= max(NEAR_MS, NEAR_SHARE * graph_ms)


def graph_ms(launch: Callable[[], object]) -> float:
    """Milliseconds of a launch: the median of 20 replays of a graph that holds ten of it."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(N_LAUNCHES):
            launch()
    graph.replay()
    spans = []
    for _ in range(N_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    spans_ms: list[float] = [begin.elapsed_time(end) for begin, end in spans]
    return statistics.median(spans_ms) / N_LAUNCHES


def kept_launches(script: Sequence[str]) -> dict[tuple[str, str], Launch]:
    """Runs the script, and keeps the latest launch of each kernel at each key."""
    kept: dict[tuple[str, str], Launch] = {}

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        launch = Launch(kernel, args, kwargs)
        kept[launch.name, launch.key_text] = launch
        config = launch.candidates()[0][0]
        return launch.run(config, None, is_trial=False)

    plain = Autotuner.run
    Autotuner.run = run
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(rank, MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    sys.argv[:] = script
    sys.path[0] = str(Path(script[0]).resolve().parent)
    try:
        runpy.run_path(script[0], run_name="__main__")
    finally:
        Autotuner.run = plain
    return kept


def timed(launch: Launch) -> tuple[dict[str, float], dict[str, str]]:
    """Config -> its milliseconds by a graph, and of those that cannot be timed -> the error."""
    configs, texts, _ = launch.candidates()
    found_ms: dict[str, float] = {}
    failed: dict[str, str] = {}
    for config, text in zip(configs, texts, strict=True):
        try:
            found_ms[text] = graph_ms(partial(launch.run, config, None, is_trial=False))
        except Exception as error:  # noqa: BLE001  # a kernel may raise anything: its config is left out
            failed[text] = f"{type(error).__name__}: {error}"[:200]
    return found_ms, failed


def beside(record: TuningRecord, found_ms: dict[str, float]) -> dict[str, Any] | None:
    """The winner of a record beside all configs; None if the winner has no time."""
    winner, told_ms = record.best.config, record.best.latency_ms
    if winner not in found_ms:
        return None
    best = min(found_ms, key=found_ms.__getitem__)
    return {
        "kernel": record.kernel,
        "key": record.key,
        "n_timed": len(found_ms),
        "winner": winner,
        "winner_ms": found_ms[winner],
        "best": best,
        "best_ms": found_ms[best],
        "regret": found_ms[winner] / found_ms[best] - 1,
        "told_ms": told_ms,
        "told_reason": record.reason,
        "is_near": is_near(told_ms, found_ms[winner]),
    }


def main() -> None:
    """Time up to ten kernels, those that were told to take longest first."""
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_is)
    parser.add_argument("--records", required=True, help="DIST_TUNE_CACHE_DIR of the tuning")
    parser.add_argument("--out", required=True, help="file of JSON")
    parser.add_argument("--limit-s", type=float, default=120, help="no kernel is begun after it")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    ends_s = time.monotonic() + options.limit_s
    launches = kept_launches(options.script)
    entries = Cache(Path(options.records)).entries()
    records = [each.record for each in entries]
    met = [each for each in records if (each.kernel, each.key) in launches]
    met.sort(key=lambda each: -(each.best.latency_ms or 0.0))
    print(f"{len(launches)} sites met, {len(records)} records, {len(met)} of them met", flush=True)
    rows: list[dict[str, Any]] = []
    for record in met:
        if len(rows) == N_SITES or time.monotonic() > ends_s:
            break
        found_ms, failed = timed(launches[record.kernel, record.key])
        row = beside(record, found_ms)
        print(json.dumps({"row": row, "failed": failed}), flush=True)
        if row is not None:
            rows.append(row)
            Path(options.out).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
