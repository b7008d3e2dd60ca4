"""What a config out of the cache costs: the first call, which finds it, the calls after it, and the
step that runs with it.

Each phase is a run of its own over the ranks that torchrun starts; without --phase they follow one
another:

- tune: tunes AllGather-GEMM into DIST_TUNE_CACHE_DIR (a new temporary folder if that is not set)
  and times the tuned step
- hit: finds it there. The process's first call through the tuner is compared with untuned calls,
  made before it with the same config, so that no figure holds compiling and loading. Then the
  same again for functions decorated anew and, their winners forgotten, for further keys; then what
  later calls cost the host, and whether the step is as fast as when it was tuned
- one-missing: a folder for each rank, and rank 1's is empty

`--phase host` needs neither ranks nor a GPU: later calls of a function on the fake H200 driver of
the tests.

    .venv/bin/python benchmarks/bench_cache.py --shape 4096,11008,4096
    .venv/bin/python benchmarks/bench_cache.py --phase host
    DIST_TUNE_CACHE_DIR=cache launch/launch.sh benchmarks/bench_cache.py --phase hit
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if any(argument.endswith("host") for argument in sys.argv[1:]):
    os.environ["TRITON_INTERPRET"] = (
        "0"  # real compilation, on the fake driver; read when Triton is imported
    )

import torch
import torch.distributed as dist

from kernels.ag_gemm import config_space  # before triton: without a GPU it chooses the interpreter

import triton  # isort: skip
import triton.language as tl  # isort: skip
from rich.console import Console
from rich.table import Table

from benchmarks.compared_calls import ComparedStep, more_us, of_all_ranks, without_arithmetic
from dist_tune import TuningRecord, autotune
from dist_tune.configs import describe
from dist_tune.records import Cache
from kernels.harness import command_line, console_of, join_ranks, parsed, versions, without_hook
from kernels.operands import Shape, key_fn
from kernels.shard_gemm import ag_gemm_kernel

N_HITS = 20
"""So often are hits timed again after the first, each beside an untuned call."""


def tune(step: ComparedStep, told: dict[str, Any], console: Console) -> dict[str, Any]:
    """Tune, and time the tuned step."""
    step.tuned()
    record, ms = step.record, step.step_ms({"tuned": step.tuned})["tuned"]
    how = (
        "found in the cache"
        if record.is_recalled
        else f"tuned in {record.seconds:.2f} s, {record.n_replays} replays"
    )
    console.print(f"{how}: {without_hook(record.best.config)}; step {ms:.4f} ms")
    return {"winner": record.best.config, "seconds": record.seconds, "step_ms": ms}


def hit(step: ComparedStep, told: dict[str, Any], console: Console) -> dict[str, Any]:
    """Find it in a new process, and compare with calls past the tuner."""
    winner = told["tune"]["winner"]
    config = config_of(winner)
    fixed = step.fixed(config)
    fixed()  # compiles and loads
    samples: dict[str, list[tuple[float, float]]] = {"first": [], "anew": [], "further": []}
    with without_arithmetic(step.device):
        untuned_ms = statistics.median(step.ms(fixed) for _ in range(N_HITS))
        samples["first"].append((untuned_ms, step.ms(step.tuned)))
        check_hits(step.record, winner)
        for _ in range(N_HITS):
            for kind, prepare in (("anew", step.decorate), ("further", step.forget)):
                bare_ms = step.ms(fixed)
                prepare()
                samples[kind].append((bare_ms, step.ms(step.tuned)))
                check_hits(step.record, winner)
    # Few enough calls that the queue takes them all. Through gloo a call takes the host a hundred
    # times what is looked for: see host().
    is_on_gpu = step.device.type == "cuda"
    later_us = (
        more_us(step.untuned(config), step.tuned, 40, 20, step.wait_for_all)[2]
        if is_on_gpu
        else None
    )
    more_ms = {
        kind: max(of_all_ranks(statistics.median(b - a for a, b in pairs)))
        for kind, pairs in samples.items()
    }
    least_ms = {
        kind: max(of_all_ranks(min(b for _, b in pairs) - min(a for a, _ in pairs)))
        for kind, pairs in samples.items()
    }
    ms = step.step_ms({"tuned": step.tuned, "untuned": fixed})
    console.print(
        f"all ranks hit: {without_hook(winner)}; first call {more_ms['first']:.2f} ms more than an"
        " untuned one"
    )
    slowest = {
        "untuned_ms": max(of_all_ranks(untuned_ms)),
        "later_us": max(of_all_ranks(later_us)) if is_on_gpu else None,
    }
    return {**slowest, "more_ms": more_ms, "least_ms": least_ms, "step_ms": ms}


def one_missing(step: ComparedStep, told: dict[str, Any], console: Console) -> dict[str, Any]:
    """Find it where every rank has a folder of its own, and that of rank 1 is empty."""
    if dist.get_world_size() < 2:
        raise ValueError("one rank cannot lack what another has: --phase one-missing needs two")
    shared = cache_folder()
    own = shared.with_name(f"{shared.name}-rank-{dist.get_rank()}")
    shutil.rmtree(own, ignore_errors=True)
    if dist.get_rank() == 1:
        own.mkdir()
    else:
        shutil.copytree(shared, own)
    os.environ["DIST_TUNE_CACHE_DIR"] = str(own)
    had = of_all_ranks(len(Cache(own).entries()))
    ms = max(of_all_ranks(step.ms(step.tuned)))
    check_hits(step.record, told["tune"]["winner"])
    have = of_all_ranks(len(Cache(own).entries()))
    lacking = [rank for rank, n_records in enumerate(had) if not n_records]
    console.print(
        f"ranks {lacking} of {len(had)} had no record; all hit the same config in {ms:.1f} ms;"
        f" records now, by rank: {have}"
    )
    if not all(have):
        raise RuntimeError(
            "a rank took the config from another one and did not keep the record: records by rank"
            f" {have}"
        )
    return {"lacking": lacking, "records_before": had, "records_after": have, "ms": ms}


def config_of(text: str) -> triton.Config:
    """The config that a record describes."""
    return (
        {describe(each): each["gemm_config"] for each in config_space()}
        | {describe(each): each for each in ag_gemm_kernel.configs}
    )[text]


def check_hits(record: TuningRecord, winner: str) -> None:
    """Raise on all ranks if any of them has tuned, or has another config than was tuned.

    Collective.
    """
    found = of_all_ranks((record.is_recalled, record.best.config))
    if any(each != (True, winner) for each in found):
        raise RuntimeError(
            f"not all ranks took {winner} from the cache; by rank (whether it is a hit, config):"
            f" {found}"
        )


def cache_folder() -> Path:
    """The cache that ranks share; where none is set, rank 0 makes one, and all come here."""
    if "DIST_TUNE_CACHE_DIR" not in os.environ:
        folder = [
            f"{tempfile.mkdtemp(prefix='bench_cache-')}/cache" if dist.get_rank() == 0 else ""
        ]
        dist.broadcast_object_list(folder)
        os.environ["DIST_TUNE_CACHE_DIR"] = folder[0]
    return Path(os.environ["DIST_TUNE_CACHE_DIR"]).expanduser()


def results_file(folder: Path) -> Path:
    """Where phases leave their figures for the next one: beside the cache."""
    return folder.with_name(f"{folder.name}.bench.json")


def on_ranks(options: argparse.Namespace) -> None:
    """Run one phase on the ranks that torchrun started."""
    device, console = join_ranks()
    folder = cache_folder()
    told: dict[str, Any] = {
        "tuner": options.tuner,
        "shape": options.shape or default_shape(),
        "hits": [],
    }
    if options.phase != "tune":
        told = json.loads(results_file(folder).read_text())
    console.print(
        f"{options.phase}: {told['tuner']}, M,N,K={tuple(told['shape'])}, cache {folder}",
        soft_wrap=True,
    )
    run = {"tune": tune, "hit": hit, "one-missing": one_missing}[options.phase]
    found = run(ComparedStep(told["tuner"], tuple(told["shape"]), device), told, console)
    told |= {"hits": [*told["hits"], found]} if options.phase == "hit" else {options.phase: found}
    if dist.get_rank() == 0:
        results_file(folder).write_text(json.dumps(told, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def default_shape() -> Shape:
    """The first of those that ag_gemm.py tunes; without a GPU a tiny one."""
    return (4096, 11008, 4096) if torch.cuda.is_available() else (64, 64, 64)


@triton.jit
def launched(a, b, n, m, sa0, sa1, sb0, sb1, BLOCK: tl.constexpr):
    """Copies; never run."""
    tl.store(a + tl.arange(0, BLOCK), tl.load(b + tl.arange(0, BLOCK)))


def launches(a: torch.Tensor, b: torch.Tensor, ctx: Any, gemm_config: triton.Config) -> Any:
    """A function that launches a kernel."""
    return launched[(1,)](a, b, 64, 64, 64, 1, 64, 1, **gemm_config.kwargs)


def does_nothing(a: torch.Tensor, b: torch.Tensor, ctx: Any, gemm_config: triton.Config) -> None:
    """A function that launches nothing."""


def host(console: Console) -> None:
    """Later calls on the host alone, of functions of two tensors and a context."""
    from dist_tune.testing import FakeH200, install_fake_driver

    install_fake_driver()
    call_args = (
        torch.zeros(64, 64),
        torch.zeros(64, 64),
        SimpleNamespace(partial_dtype=None, n_ranks=4, n_local_ranks=4),
    )
    space = [{"gemm_config": triton.Config({"BLOCK": block})} for block in (16, 32)]
    table = Table(
        "later call of a function that",
        "bare us",
        "tuned us",
        "more us",
        title=versions("CPU, fake driver"),
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(
            DIST_TUNE_CACHE_DIR=folder, DIST_TUNE_LOG_DIR=folder, DIST_TUNE_VERBOSITY="quiet"
        )
        for function in (launches, does_nothing):
            tuned = autotune(space, key_fn, n_warmup=0, n_repeat=1)(function)
            tuned(*call_args)
            us = more_us(
                lambda function=function: function(*call_args, space[0]["gemm_config"]),  # type: ignore[misc]
                lambda tuned=tuned: tuned(*call_args),  # type: ignore[misc]
                n_rounds=400,
                n_calls=200,
                rest=FakeH200.launches.clear,
            )
            table.add_row(function.__name__.replace("_", " "), *(f"{each:.2f}" for each in us))
    console.print(table)


def all_phases(options: argparse.Namespace, console: Console) -> None:
    """Run the phases that need ranks, each in new processes, and show what they found."""
    launcher = Path(__file__).parents[1] / "launch/launch.sh"
    subject = [
        "--tuner",
        options.tuner,
        *(["--shape", ",".join(map(str, options.shape))] if options.shape else []),
    ]
    with tempfile.TemporaryDirectory(prefix="bench_cache-") as temporary:
        folder = Path(os.environ.get("DIST_TUNE_CACHE_DIR") or f"{temporary}/cache").expanduser()
        for phase in ("tune", *["hit"] * options.processes, "one-missing"):
            environment = {**os.environ, "DIST_TUNE_CACHE_DIR": str(folder)}
            subprocess.run(
                [launcher, __file__, "--phase", phase, *subject], env=environment, check=True
            )
        console.print(table(json.loads(results_file(folder).read_text())))


def table(told: dict[str, Any]) -> Table:
    """What all phases found: medians over the processes that hit, and the least and the most."""
    made_with = versions("CPU, interpreter, kernels do nothing but in the lines of the step")
    title = f"{made_with}; {told['tuner']}, M,N,K={tuple(told['shape'])}"
    result = Table("", "median", "least", "most", "target", title=title)

    def row(name: str, values: list[float], digits: int, target: str = "") -> None:
        result.add_row(
            name,
            *(
                f"{each:.{digits}f}"
                for each in (statistics.median(values), min(values), max(values))
            ),
            target,
        )

    tuned_ms, hits, lost = told["tune"]["step_ms"], told["hits"], told["one-missing"]
    row("an untuned call, ms", [each["untuned_ms"] for each in hits], 2)
    row(
        "first call of a process through the tuner, ms more",
        [each["more_ms"]["first"] for each in hits],
        2,
        "5",
    )
    for kind, name in (
        ("anew", "of a function decorated later"),
        ("further", "with a further key"),
    ):
        row(f"first call {name}, ms more", [each["more_ms"][kind] for each in hits], 2, "5")
        row("  by the fastest call of each", [each["least_ms"][kind] for each in hits], 2)
    if all(each["later_us"] is not None for each in hits):
        row("later calls, host us more", [each["later_us"] for each in hits], 1, "2")
    else:
        result.add_row("later calls, host us more: --phase host", "", "", "", "2")
    row("step when tuned, ms", [tuned_ms], 4)
    row("step with the config out of the cache, ms", [each["step_ms"]["tuned"] for each in hits], 4)
    row(
        "  % more than when tuned",
        [(each["step_ms"]["tuned"] / tuned_ms - 1) * 100 for each in hits],
        2,
        "1",
    )
    row(
        "  % more than untuned, in the same run",
        [(each["step_ms"]["tuned"] / each["step_ms"]["untuned"] - 1) * 100 for each in hits],
        2,
    )
    row(f"first call where ranks {lost['lacking']} lacked the record, ms in all", [lost["ms"]], 1)
    return result


def main() -> None:
    """Run one phase, or all."""
    parser = command_line((__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--phase", choices=["all", "tune", "hit", "one-missing", "host"], default="all"
    )
    parser.add_argument(
        "--tuner",
        choices=("contextual", "function"),
        default="function",
        help="autotune, or contextual_autotune; for tune and all",
    )
    parser.add_argument("--processes", type=int, default=3, help="runs of the phase hit; for all")
    options = parsed(parser)
    options.shape = options.shape and options.shape[-1]  # one shape for all phases
    needs_ranks, has_ranks = options.phase not in ("all", "host"), "LOCAL_RANK" in os.environ
    if needs_ranks != has_ranks:
        launcher = "launch/launch.sh" if needs_ranks else ".venv/bin/python"
        parser.error(f"start --phase {options.phase} with {launcher} benchmarks/bench_cache.py")
    if options.phase in ("hit", "one-missing") and "DIST_TUNE_CACHE_DIR" not in os.environ:
        parser.error(
            f"--phase {options.phase} needs DIST_TUNE_CACHE_DIR, the folder that --phase tune has"
            " printed"
        )
    if needs_ranks:
        on_ranks(options)
        return
    console = console_of(150)
    if options.phase == "host":
        host(console)
    else:
        all_phases(options, console)


if __name__ == "__main__":
    main()
