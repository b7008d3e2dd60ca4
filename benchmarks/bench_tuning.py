"""How long tuning the AllGather-GEMM takes and how good its choice is, beside other ways to tune
the same step.

Side by side in one run, on the same ranks and the same space: vanilla `triton.autotune` (each rank
for itself, the kernel alone), dist_tune's exhaustive search without shared compilation, and
dist_tune as it comes. The choice is judged by the time of the whole step: the winners and the best
of the exhaustive search are timed again, interleaved, and regret is the distance to the best of
them. Seconds are MAX over ranks; those of each meeting the MIN, since the last rank to come does
not wait.

    launch/launch.sh benchmarks/bench_tuning.py --shape 4096,11008,4096 --json bench.json
    launch/launch.sh benchmarks/bench_tuning.py  # without a GPU: a few configs, interpreted
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import torch.distributed as dist

# Before triton: without a GPU it chooses the interpreter.
from kernels import ag_gemm, harness, shard_gemm

import triton  # isort: skip
from rich.console import Console
from rich.table import Table

from dist_tune import contextual_autotune
from dist_tune.records import TuningRecord

PHASES = ("discover", "compile", "race", "finals", "apply")
N_BEST = 24
"""So many of the exhaustive search's best are timed again, beside the winners."""


@dataclass
class Run:
    """One tuning, as all ranks saw it."""

    tuner: str
    cache: str
    """"cold": nothing compiled; "disk": all compiled before, nothing loaded; "memory": all loaded.
    """
    seconds: float
    winners: list[int]
    """Index of the config that each rank ended with."""
    n_replays: int | None = None
    spent: dict[str, float] = field(default_factory=dict)
    meetings_s: float | None = None
    regret: float | None = None
    """Share by which the step with these winners is slower than the best step seen."""


def notes_space() -> list[triton.Config]:
    """The 216 configs that all tuners search: 68 of them need more shared memory than an H200
    has.
    """
    blocks = product((64, 128, 256), (64, 128, 256), (32, 64, 128), (2, 3, 4, 5), (4, 8))
    return [
        shard_gemm.make_config(bm, bn, bk, warps=warps, stages=stages)
        for bm, bn, bk, stages, warps in blocks
    ]


def wall_ms(run: Callable[[], object], quantiles: object = None) -> list[float]:
    """A `do_bench` for the interpreter, where there is no device to time."""
    began = time.perf_counter()
    run()
    return [(time.perf_counter() - began) * 1e3] * 3


class Bench:
    """All runs at one shape."""

    def __init__(
        self,
        shape: harness.Shape,
        configs: list[triton.Config],
        jit: Any,
        device: torch.device,
        console: Console,
    ) -> None:
        self.shape = shape
        self.configs = configs
        self.device = device
        self.console = console
        self.runs: list[Run] = []
        self.operands = ag_gemm.random_operands(shape, torch.bfloat16, device)
        self.step = ag_gemm.AllGatherGemm()
        self.step.gather_for(self.operands[0])
        self.last_record: TuningRecord | None = None
        self.jit = jit

    def run(
        self, tuner: str, cache: str, options: dict[str, Any] | None, *, is_shared: bool = True
    ) -> Run:
        """Tune once. `options` are contextual_autotune's; None is vanilla Triton. Collective."""
        kernel = self._fresh_kernel(cache, is_shared)

        def step() -> torch.Tensor:
            return self.step(*self.operands)

        tuned = (
            contextual_autotune(is_dist=True, cache=False, **options)(step)
            if options is not None
            else step
        )
        self._wait_for_all()
        began = time.perf_counter()
        tuned()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        records = getattr(tuned, "records", [])
        self.last_record = records[0] if records else None
        ((_, best),) = kernel.cache.items()
        spent = dict(records[0].spent) if records else {}
        told: list[Any] = [None] * dist.get_world_size()
        meetings_s = records[0].meeting_seconds if records else []
        dist.all_gather_object(told, (seconds, self.configs.index(best), spent, meetings_s))
        run = Run(tuner, cache, max(each for each, *_ in told), [winner for _, winner, *_ in told])
        if records:
            run.n_replays = records[0].n_replays
            run.spent = {name: max(each[name] for _, _, each, _ in told) for name in PHASES}
            run.meetings_s = sum(map(min, *(each for *_, each in told)))
        self.runs.append(run)
        self.console.print(
            f"{tuner}, {cache}: {run.seconds:.2f} s, winners {run.winners}, replays {run.n_replays}"
        )
        return run

    def judge(self, record: TuningRecord | None, n_rounds: int) -> dict[int, float]:
        """Milliseconds of the step with each winner and with the best of an exhaustive search;
        fills in all regrets. Collective.
        """
        by_closure = (
            sorted(
                (c for c in record.candidates if c.closure_ms is not None),
                key=lambda c: c.closure_ms or 0.0,
            )
            if record
            else []
        )
        pool = {(each.index,) * dist.get_world_size() for each in by_closure[:N_BEST]} | {
            tuple(run.winners) for run in self.runs
        }
        steps = {
            str(list(winners)): self._step_with(self.configs[winners[dist.get_rank()]])
            for winners in sorted(pool)
        }
        for step in steps.values():
            step()
        if self.device.type == "cuda":
            ms = harness.aligned_ms(steps, n_rounds)
        else:
            samples = {
                name: [wall_ms(step)[0] for _ in range(n_rounds)] for name, step in steps.items()
            }
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(
                told, {name: statistics.median(each) for name, each in samples.items()}
            )
            ms = {name: max(each[name] for each in told) for name in steps}
        for run in self.runs:
            run.regret = ms[str(run.winners)] / min(ms.values()) - 1
        return {winners[0]: ms[str(list(winners))] for winners in pool if len(set(winners)) == 1}

    def _fresh_kernel(self, cache: str, is_shared: bool) -> Any:
        """The step's kernel without any config chosen, and with as much compiled as `cache`
        says.
        """
        jit = self.jit
        if cache != "memory" and self.device.type == "cuda":
            jit.device_caches.clear()
        if cache == "cold":
            # One folder for all ranks, or, where nothing shall be shared, one for each.
            folder: list[Any] = [tempfile.mkdtemp(prefix="triton-")]
            atexit.register(shutil.rmtree, folder[0], ignore_errors=True)
            if is_shared:
                dist.broadcast_object_list(folder)
            triton.knobs.cache.dir = folder[0]
        options = {} if self.device.type == "cuda" else {"do_bench": wall_ms}
        kernel = triton.autotune(configs=self.configs, key=["M", "N", "K"], **options)(jit)
        shard_gemm.ag_gemm_kernel = kernel
        return kernel

    def _step_with(self, config: triton.Config) -> Callable[[], object]:
        fixed = ag_gemm.AllGatherGemm(config=config)
        fixed._gathers = self.step._gathers
        return lambda: fixed(*self.operands)

    def _wait_for_all(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


def bench(
    shape: harness.Shape, options: argparse.Namespace, device: torch.device, console: Console
) -> dict[str, Any]:
    """All tuners at one shape, their table, and the same as plain values."""
    configs = notes_space() if device.type == "cuda" else shard_gemm.interpreter_configs()
    kernel: Any = shard_gemm.ag_gemm_kernel
    jit = (
        triton.jit(kernel.base_fn, do_not_specialize=["rank"])
        if options.epoch == "int"
        else kernel.fn
    )
    bench, oracle = Bench(shape, configs, jit, device, console=console), None
    if "vanilla" in options.tuners:
        for cache in ("cold", "memory"):
            bench.run("vanilla triton.autotune", cache, None)
    if "exhaustive" in options.tuners:
        for cache in ("cold", "memory"):
            bench.run(
                "dist_tune exhaustive, own caches", cache, {"search": "exhaustive"}, is_shared=False
            )
        oracle = bench.last_record
    repeats = (
        ("cold", options.cold_repeats),
        ("disk", options.disk_repeats),
        ("memory", options.repeats),
    )
    for cache in (
        [cache for cache, n_runs in repeats for _ in range(n_runs)]
        if "racing" in options.tuners
        else []
    ):
        bench.run("dist_tune", cache, {})
    example = bench.last_record.model_dump(mode="json") if bench.last_record is not None else None
    closure_ms = bench.judge(oracle, options.rounds)
    console.print(table(shape, bench.runs))
    best = min(closure_ms, key=closure_ms.__getitem__)
    for index, ms in sorted(closure_ms.items(), key=lambda item: item[1]):
        console.print(
            f"step {ms:.4f} ms, +{ms / closure_ms[best] - 1:.2%}: config {index}:"
            f" {harness.config_text(configs[index])}"
        )
    runs = [asdict(run) for run in bench.runs]
    oracle_table = oracle.model_dump(mode="json") if oracle is not None else None
    return {
        "shape": shape,
        "runs": runs,
        "step_ms": closure_ms,
        "exhaustive": oracle_table,
        "last": example,
    }


def table(shape: harness.Shape, runs: list[Run]) -> Table:
    """One line per tuner and state of the compile cache; medians over repeats, and the worst regret
    of them.
    """
    result = Table(
        title=(
            f"M,N,K = {shape}: seconds, median over runs (slowest run); regret by the time of the"
            " whole step"
        )
    )
    for heading in (
        "tuner",
        "compile cache",
        "runs",
        "seconds",
        *PHASES,
        "meetings",
        "replays",
        "winners",
        "regret",
    ):
        result.add_column(heading)
    for tuner, cache in dict.fromkeys((run.tuner, run.cache) for run in runs):
        alike = [run for run in runs if (run.tuner, run.cache) == (tuner, cache)]
        seconds = [run.seconds for run in alike]
        phases = [
            f"{statistics.median(run.spent[name] for run in alike):.3f}" if alike[0].spent else "-"
            for name in PHASES
        ]
        meetings = [run.meetings_s / run.seconds for run in alike if run.meetings_s is not None]
        counts = Counter(
            str(run.winners[0]) if len(set(run.winners)) == 1 else str(run.winners) for run in alike
        )
        replays = [run.n_replays for run in alike if run.n_replays is not None]
        result.add_row(
            tuner,
            cache,
            str(len(alike)),
            f"{statistics.median(seconds):.2f} ({max(seconds):.2f})",
            *phases,
            f"{statistics.median(meetings):.2%}" if meetings else "-",
            f"{statistics.median(replays):.0f}" if replays else "-",
            ", ".join(f"{winner}: {n}" for winner, n in counts.most_common()),
            f"{max(run.regret or 0.0 for run in alike):.2%}",
        )
    return result


def main() -> None:
    """Join the ranks that torchrun started, run all shapes, print and write what came of it."""
    parser = harness.command_line(
        (__doc__ or "").split("\n")[0], script="benchmarks/bench_tuning.py"
    )
    tuners = ("vanilla", "exhaustive", "racing")
    parser.add_argument(
        "--tuners",
        type=lambda text: text.split(","),
        default=tuners,
        help="vanilla takes minutes with nothing compiled",
    )
    parser.add_argument(
        "--cold-repeats", type=int, default=3, help="runs of dist_tune with nothing compiled"
    )
    parser.add_argument(
        "--disk-repeats",
        type=int,
        default=3,
        help="runs of dist_tune with everything compiled but not loaded",
    )
    parser.add_argument(
        "--repeats", type=int, default=20, help="runs of dist_tune with everything in memory"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=40,
        help="times that each winner's step is timed to find its regret",
    )
    parser.add_argument(
        "--json", type=Path, help="where to write all runs, and the exhaustive search's table"
    )
    parser.add_argument(
        "--epoch",
        choices=("any", "int"),
        default="any",
        help="int: a kernel that Triton compiles anew for classes of epochs",
    )
    options = harness.parsed(parser)
    if set(options.tuners) - set(tuners):
        parser.error(
            f"--tuners are {', '.join(tuners)}, separated by commas; got {','.join(options.tuners)}"
        )
    os.environ.setdefault("DIST_TUNE_VERBOSITY", "quiet")
    device, console = harness.join_ranks(width=220)
    console.print(f"{os.cpu_count()} cores")
    shapes = options.shape or (
        [(4096, 11008, 4096), (8192, 28672, 8192)] if device.type == "cuda" else [(256, 256, 128)]
    )
    results = [bench(shape, options, device, console) for shape in shapes]
    if options.json and dist.get_rank() == 0:
        options.json.write_text(json.dumps(results))
    dist.barrier()  # nobody frees memory that a peer still writes to
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
