"""Processor time of the host in a tuning without faults, by phase, of this version beside others.

No GPU needed: the fake H200 driver of ``dist_tune.testing`` compiles for real, and a launch takes the time of its config by a clock that
nothing else moves, so that all versions make their replays at the same times and only Python is measured. Processor time and no wall time:
other programs of the machine do not count. All candidates are in memory, as a tuning finds them after the first one of a process.

    .venv/bin/python benchmarks/bench_host.py --ranks 1 --runs 5                          # this version
    .venv/bin/python benchmarks/bench_host.py --tree old=/path/to/checkout --tree new=.   # versions in turn, each in fresh processes
    .venv/bin/python benchmarks/bench_host.py --profile tuner.prof                        # what the tuner's thread does, by function
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ.get("BENCH_TREE") or str(Path(__file__).resolve().parents[1]))
os.environ["TRITON_INTERPRET"] = "0"  # real compilation, on the fake driver; read when Triton is imported

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from rich.console import Console
from rich.table import Table

PHASES = ("discover", "compile", "race", "finals", "settle", "rest")
N_WARM_UP = 2
"""Tunings of a process before those that count: the first compiles or loads, the second fills what is kept in memory."""
CONFIGS = [
    triton.Config({"BLOCK_M": bm, "BLOCK_N": bn, "BLOCK_K": bk}, num_warps=warps, num_stages=stages)
    for bm, bn, bk, stages, warps in product((64, 128, 256), (64, 128, 256), (32, 64, 128), (2, 3, 4, 5), (4, 8))
]
"""The 216 configs of the AllGather-GEMM in bench_tuning.py."""


@triton.jit
def gemm(a, b, c, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """A matrix product; never run."""
    at_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at_k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        total += tl.dot(tl.load(a + at_m[:, None] * K + k + at_k[None, :]), tl.load(b + (k + at_k[:, None]) * N + at_n[None, :]))
    tl.store(c + at_m[:, None] * N + at_n[None, :], total.to(tl.bfloat16))


class Clock:
    """A clock that launches move, and readings by a microsecond."""

    seconds = 0.0

    @classmethod
    def now(cls) -> float:
        """Seconds."""
        cls.seconds += 1e-6
        return cls.seconds

    @classmethod
    def launch_ms(cls, src: Any, metadata: Any) -> float:
        """A launch takes 0.3 to 3 ms, by its config, and no time of the processor."""
        spread = int(metadata.hash[:6], 16) / 2**24 if metadata.hash[:1] in "0123456789abcdef" else 0.5
        cls.seconds += (0.3 + 2.7 * spread) / 1e3
        return 0.0


class Account:
    """Processor time by phase: of the tuner's thread, and of all threads."""

    def __init__(self) -> None:
        self.main: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.all: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.begin()

    def begin(self) -> None:
        """A call begins."""
        self._main, self._all = time.thread_time(), time.process_time()

    def end(self, phase: str) -> None:
        """A phase has ended."""
        main, every = time.thread_time(), time.process_time()
        self.main[phase] += main - self._main
        self.all[phase] += every - self._all
        self._main, self._all = main, every


def one_process(options: argparse.Namespace) -> None:
    """Tune again and again in this process; print the account of each."""
    from dist_tune import contextual_autotune
    from dist_tune.measure import clocks
    from dist_tune.testing import FakeH200, install_fake_driver

    rank, world = int(os.environ.get("RANK", "0")), options.ranks
    torch.set_num_threads(1)
    install_fake_driver()
    FakeH200.launch_ms = staticmethod(Clock.launch_ms)
    for name in ("begin", "end"):  # of any version: not all have one clock for both
        setattr(clocks.WallSpan, name, lambda span, name=name: setattr(span, f"_{name}", Clock.now()))
    account, expenses = Account(), importlib.import_module("dist_tune.tuning.context").Expenses
    end_phase = expenses.end_phase

    def end(self: Any, name: str) -> None:
        account.end(name)
        end_phase(self, name)

    expenses.end_phase = end
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    a, b, c = (torch.zeros(256, 256, dtype=torch.bfloat16) for _ in range(3))
    profile = cProfile.Profile(time.thread_time)
    for run in range(N_WARM_UP + options.runs):
        kernel = triton.autotune(configs=CONFIGS, key=["M", "N", "K"])(gemm)

        def step(kernel: Any = kernel) -> None:
            kernel[(1, 1)](a, b, c, 256, 256, 256)

        tuned: Any = contextual_autotune(is_dist=world > 1, cache=options.cache, search="racing")(step)
        if world > 1:
            dist.barrier()
        account.__init__()  # type: ignore[misc]
        if options.profile and run >= N_WARM_UP:
            profile.enable()
        account.begin()
        tuned()
        account.end("rest")
        profile.disable()
        if run >= N_WARM_UP and rank == 0:
            record = tuned.records[-1]
            told = {"main": account.main, "all": account.all, "replays": record.n_replays}
            print(json.dumps(told), flush=True)
        FakeH200.launches.clear()
    if options.profile and rank == 0:
        pstats.Stats(profile, stream=sys.stderr).sort_stats(options.sort).print_stats(options.lines)
        profile.dump_stats(options.profile)
    if world > 1:
        dist.barrier()


def measured(name: str, tree: Path, options: argparse.Namespace, folder: Path, port: int) -> list[dict[str, Any]]:
    """The accounts of a fresh process (or several ranks) of a version."""
    own = folder / name  # checkouts may have one name
    env = os.environ | {
        "BENCH_TREE": str(tree.resolve()), "PYTHONPATH": str(tree.resolve()), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1",
        "DIST_TUNE_LOG_DIR": str(own / "logs"), "DIST_TUNE_CACHE_DIR": str(own / "cache"), "DIST_TUNE_ALWAYS_TUNE": "1",
        "DIST_TUNE_VERBOSITY": "quiet", "DIST_TUNE_PROGRESS": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "WORLD_SIZE": str(options.ranks), "TRITON_CACHE_DIR": str(Path(options.triton_cache or folder / "triton").resolve()),
    }  # fmt: skip
    command = [sys.executable, __file__, *sys.argv[1:], "--child"]
    if options.profile:  # the child's folder is another one
        command += ["--profile", str(Path(options.profile).resolve())]
    ranks = [
        subprocess.Popen(command, env=env | {"RANK": str(rank)}, cwd=folder, stdout=subprocess.PIPE, text=True)
        for rank in range(options.ranks)
    ]
    texts = [each.communicate()[0] for each in ranks]
    if any(each.returncode for each in ranks):
        raise SystemExit(f"{tree}: a process ended with {[each.returncode for each in ranks]}")
    return [json.loads(line) for line in texts[0].splitlines() if line.startswith("{")]


def table(title: str, found: dict[str, list[dict[str, Any]]], threads: str) -> Table:
    """Milliseconds by phase: the median over tunings, and how far quartiles are apart in the sum."""
    result = Table("version", *PHASES, "sum", "quartiles", "least", "beside the first", "tunings", "replays", title=title)
    sums = {name: [1e3 * sum(each[threads].values()) for each in runs] for name, runs in found.items()}
    first = statistics.median(next(iter(sums.values())))
    for name, runs in found.items():
        medians = [f"{1e3 * statistics.median(each[threads][phase] for each in runs):.1f}" for phase in PHASES]
        low, middle, high = statistics.quantiles(sums[name] * 2 if len(runs) == 1 else sums[name], n=4)
        result.add_row(
            name, *medians, f"{middle:.1f}", f"{low:.1f} to {high:.1f}", f"{min(sums[name]):.1f}", f"{middle / first - 1:+.1%}",
            str(len(runs)), str(statistics.median(each["replays"] for each in runs)),
        )  # fmt: skip
    return result


def main() -> None:
    """Measure, and print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tree", action="append", default=[], help="NAME=FOLDER, a checkout; several are measured in turn")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5, help="tunings of a process that count")
    parser.add_argument("--processes", type=int, default=5, help="of each version")
    parser.add_argument("--cache", action="store_true", help="with a cache, and so with a journal; each tuning is made all the same")
    parser.add_argument("--triton-cache", help="folder in which compiled kernels are kept; compiling all takes some minutes")
    parser.add_argument("--profile", metavar="FILE", help="write the profile of the tuner's thread, and print it")
    parser.add_argument("--sort", default="tottime")
    parser.add_argument("--lines", type=int, default=45)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        one_process(options)
        return
    given = dict(each.split("=", 1) for each in options.tree or [f"this={Path(__file__).resolve().parents[1]}"])
    trees = {name: Path(folder).resolve() for name, folder in given.items()}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    console = Console(width=180)
    with tempfile.TemporaryDirectory() as folder:
        for k in range(options.processes):
            for name, tree in trees.items():
                found[name] += measured(name, tree, options, Path(folder), 29600 + k)
    what = f"{options.ranks} ranks, {len(CONFIGS)} configs, cache={options.cache}, torch {torch.__version__}, triton {triton.__version__}"
    console.print(table(f"ms of processor time of the tuner's thread; {what}", found, "main"))
    console.print(table(f"ms of processor time of all threads; {what}", found, "all"))


if __name__ == "__main__":
    main()
