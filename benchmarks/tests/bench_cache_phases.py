"""The phases of benchmarks/bench_cache.py, each in a world of its own: two gloo ranks, forked from a process that has imported all.

A program, because the interpreter is chosen before Triton is imported; it prints what the ranks returned or raised, as JSON. Its
kernels do nothing, so that it takes seconds.

    TRITON_INTERPRET=1 DIST_TUNE_CACHE_DIR=... python -m benchmarks.tests.bench_cache_phases function tune hit one_missing
"""

import json
import multiprocessing
import os
import sys
import tempfile
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks import bench_cache
from benchmarks.compared_calls import ComparedStep, without_arithmetic

N_RANKS, SHAPE = 2, (2, 16, 8)
bench_cache.N_HITS = 2  # enough to see that each is one


def world(phase: str, tuner: str, told: dict[str, Any]) -> list[Any]:
    """What the ranks of a new world found in a phase: its figures, or the message of an error."""
    fork = multiprocessing.get_context("fork")
    with tempfile.NamedTemporaryFile() as store:
        pipes = [fork.Pipe(duplex=False) for _ in range(N_RANKS)]
        for rank, (_, pipe) in enumerate(pipes):
            fork.Process(target=_rank, args=(rank, store.name, pipe, phase, tuner, told)).start()
        return [pipe.recv() for pipe, _ in pipes]


def _rank(rank: int, store: str, pipe: Connection, phase: str, tuner: str, told: dict[str, Any]) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, N_RANKS), rank=rank, world_size=N_RANKS)
    device = torch.device("cpu")
    try:
        with without_arithmetic(device):
            pipe.send(getattr(bench_cache, phase)(ComparedStep(tuner, SHAPE, device), told, Console(quiet=True)))
    except RuntimeError as error:
        pipe.send(str(error))
    dist.barrier()
    os._exit(0)


def main(tuner: str, *phases: str) -> None:
    """Run the phases in order, and tell each what rank 0 has found in those before."""
    told: dict[str, Any] = {}
    found = []
    for name in phases:
        found.append(world(name, tuner, told))
        told[name] = found[-1][0]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
