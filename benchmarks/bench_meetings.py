"""Milliseconds of one meeting by the number of ranks, with real processes, and a model of larger groups fitted to that.

    .venv/bin/python -m benchmarks.bench_meetings --json meetings.json

Knows the meetings and the store, and nothing of tunings. Ranks are forked from a server that has imported torch, and meet over TCPStore on
loopback; the store has a process of its own, whose CPU time is what a job with a core for each process waits for.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dist_tune.distributed import Reduction
from dist_tune.distributed.meetings import Meetings
from dist_tune.testing import fork_context

RANKS = (2, 4, 8, 16, 32, 64)
N_MEETINGS = 40
PART_BYTES = 1000
"""Of a report on some ten candidates."""
COLD_TUNING_S = 20.0
"""The first call of chunk_gla, 18 to 21 s at 2 ranks (logs/side-effects-2xH200)."""
N_TUNING_MEETINGS = 10
"""Of that tuning, after its first one."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Meetings of one number of ranks."""

    n_ranks: int
    ms: float
    """Median of a meeting, on the first rank."""
    calls: float
    """Of the job's store, per rank and meeting."""
    store_us: float
    """CPU time of the job's store, per rank and meeting."""


@Reduction
def largest(parts: Mapping[int, str]) -> int:
    """As small a result as that of most reductions."""
    return max(map(len, parts.values()))


def serve(pipe: Connection) -> None:
    """The job's store, in a process of its own; answers with its CPU seconds."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    pipe.send(store.port)
    while pipe.recv():
        pipe.send(time.process_time())


def meet(pipe: Connection, rank: int, n_ranks: int, port: int) -> None:
    """One rank: meets some times, and says what that took."""
    n_calls = [0]

    class Counting:
        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> Any:
                n_calls[0] += 1
                return getattr(store, name)(*args)

            return call

    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    group = Meetings(store, rank, tuple(range(n_ranks)), 30.0)
    group.enter(group.calling("bench").__enter__())
    vars(group)["_store"] = Counting()
    part = "x" * PART_BYTES
    for _ in range(4):
        group.reduce("warm-up", part, largest)
    store.set(f"ready/{rank}", "")
    store.wait([f"ready/{each}" for each in range(n_ranks)])
    pipe.send(None)
    pipe.recv()
    n_calls[0], times_ms = 0, []
    for _ in range(N_MEETINGS):
        began = time.perf_counter()
        group.reduce("bench", part, largest)
        times_ms.append(1e3 * (time.perf_counter() - began))
    pipe.send((times_ms, n_calls[0] / N_MEETINGS))
    pipe.recv()
    with suppress(dist.DistError):
        group.close()
    os._exit(0)


def measure(n_ranks: int) -> Measured:
    """Let this many ranks meet."""
    context = fork_context()
    here, there = context.Pipe()
    host = context.Process(target=serve, args=(there,), daemon=True)
    host.start()
    port = here.recv()
    pipes, ranks = [], []
    for rank in range(n_ranks):
        mine, theirs = context.Pipe()
        ranks.append(context.Process(target=meet, args=(theirs, rank, n_ranks, port), daemon=True))
        ranks[-1].start()
        pipes.append(mine)
    for pipe in pipes:
        pipe.recv()
    here.send(True)
    before_s = here.recv()
    for pipe in pipes:
        pipe.send(None)
    answers = [pipe.recv() for pipe in pipes]
    here.send(True)
    store_s = here.recv() - before_s
    for pipe in pipes:
        pipe.send(None)
    for each in ranks:
        each.join(10)
    here.send(False)
    host.join(10)
    calls = statistics.mean(each[1] for each in answers)
    ms = statistics.median(answers[0][0])
    return Measured(n_ranks, round(ms, 3), round(calls, 2), round(1e6 * store_s / N_MEETINGS / n_ranks, 1))


@dataclass(frozen=True, slots=True)
class Model:
    """A store with one thread, at which ranks wait in turn; each process has a core of its own."""

    round_trip_ms: float
    """Of the first rank, without others to wait for."""
    rank_us: float
    """CPU time of the store, for each rank."""

    def meeting_ms(self, n_ranks: int) -> float:
        """One meeting."""
        return self.round_trip_ms + n_ranks * self.rank_us / 1e3

    def tuning_share(self, n_ranks: int) -> float:
        """Of a cold tuning that its meetings take."""
        return (1 + N_TUNING_MEETINGS) * self.meeting_ms(n_ranks) / 1e3 / COLD_TUNING_S


def fitted(table: Sequence[Measured]) -> Model:
    """The model of these measurements; CPU times of the largest groups, which hold the reading of all parts."""
    table = sorted(table, key=lambda each: each.n_ranks)
    return Model(table[0].ms, max(each.store_us for each in table[-3:]))


def report(table: Sequence[Measured]) -> str:
    """The table and the model, as markdown."""
    lines = ["| ranks | ms | store calls per rank | store us per rank |", "|---|---|---|---|"]
    lines += [f"| {each.n_ranks} | {each.ms:.2f} | {each.calls:.1f} | {each.store_us:.0f} |" for each in table]
    model = fitted(table)
    lines += ["", f"Model: {model}", "", "| ranks | ms | of a cold tuning |", "|---|---|---|"]
    for n in (64, 128, 256, 512, 1024, 2048, 4096):
        lines.append(f"| {n} | {model.meeting_ms(n):.1f} | {100 * model.tuning_share(n):.2f} % |")
    return "\n".join(lines)


def main() -> None:
    """Measure all, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write what was measured here")
    options = parser.parse_args()
    table = [measure(n) for n in RANKS]
    print(f"python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores; {PART_BYTES} bytes a part")
    print(report(table))
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in table], indent=1) + "\n")


if __name__ == "__main__":
    main()
