"""What the first call of a process costs that finds everything in the cache: one kernel, one on two
ranks, eleven kernels.

No GPU needed: the fake H200 driver of ``dist_tune.testing`` compiles for real and launches nothing.
Each figure is of fresh processes. In each the step runs untuned first, with the configs that were
tuned: its cold call is Triton's own cost (imports, hashes, loading from Triton's cache on disk),
its warm call is subtracted from the first call through the tuner. What remains is the tuner's.

    .venv/bin/python benchmarks/bench_first_hit.py
    .venv/bin/python benchmarks/bench_first_hit.py --steps gla
    .venv/bin/python benchmarks/bench_first_hit.py --whole

``gla`` needs fla-core, and tuning it takes minutes; ``--whole`` is the whole first call, half a
second after the decoration.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from ast import literal_eval
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TRITON_INTERPRET"] = (
    "0"  # real compilation, on the fake driver; read when Triton is imported
)

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from triton.runtime.autotuner import Autotuner

from benchmarks.first_hit_steps import step_of
from dist_tune import contextual_autotune
from dist_tune.testing import install_fake_driver
from kernels.harness import versions

AFTER_S = 0.5
"""From the decoration to a call that is measured as a whole, as a program takes to make its inputs
and a device's context.
"""
WHOLE = ("untuned", "tuned")
STEPS = {
    "one": "1 kernel",
    "one-2-ranks": "1 kernel, 2 ranks",
    "eleven": "11 kernels",
    "gla": "chunk_gla, 11 sites",
}


def name_of(kernel: Any) -> str:
    """Name of an autotuned kernel, the same in all processes."""
    return f"{kernel.base_fn.__module__}.{kernel.base_fn.__qualname__}"


def kernels() -> dict[str, Any]:
    """All autotuned kernels of this process, by name."""
    return {name_of(each): each for each in gc.get_objects() if issubclass(type(each), Autotuner)}


def ms_of(call: Any) -> tuple[float, float]:
    """Milliseconds of a call, and milliseconds of processor time of its thread."""
    cpu, wall = time.thread_time(), time.perf_counter()
    call()
    return (time.perf_counter() - wall) * 1e3, (time.thread_time() - cpu) * 1e3


@contextmanager
def collections_ms() -> Iterator[list[float]]:
    """Milliseconds of each garbage collection meanwhile.

    Whether one falls into a call depends on what the process has made before it.
    """
    found: list[float] = []

    def note(phase: str, _: Any) -> None:
        found.append(time.perf_counter() * 1e3 * (1 if phase == "stop" else -1))

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


def one_process(name: str, folder: Path, first: str) -> None:
    """Tune, or find what was tuned, and print what it took.

    ``first``: the one call of the process, if it makes one alone.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    install_fake_driver()
    step, args = step_of(name, folder)
    if world > 1:
        store = dist.FileStore(os.environ["BENCH_STORE"], world)
        dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=world)
    tuned: Any = step if first == "untuned" else contextual_autotune(is_dist=world > 1)(step)
    chosen = folder / f"{name}-{world}.json"
    if not chosen.exists():
        tuned(*args)
        if world > 1:
            dist.barrier()
        found = {
            name: [(repr(key), each.configs.index(config)) for key, config in each.cache.items()]
            for name, each in kernels().items()
        }
        if os.environ.get("RANK", "0") == "0":
            chosen.write_text(json.dumps(found))
        return
    told = json.loads(chosen.read_text())
    for kernel, autotuner in kernels().items():
        autotuner.cache.update(
            {literal_eval(key): autotuner.configs[i] for key, i in told.get(kernel, ())}
        )
    if first:
        if first == "tuned":
            for autotuner in kernels().values():
                autotuner.cache.clear()
        time.sleep(AFTER_S)
        whole = ms_of(lambda: (tuned if first == "tuned" else step)(*args))
        assert first == "untuned" or all(each.is_recalled for each in tuned.records), (
            "not all sites were found in the cache"
        )
        print(
            json.dumps({"whole": whole, "sites": 0 if first == "untuned" else len(tuned.records)})
        )
        sys.stdout.flush()
        if world > 1:
            dist.barrier()
        os._exit(0)
    cold = ms_of(lambda: step(*args))
    warm = min(ms_of(lambda: step(*args)) for _ in range(3))
    for autotuner in kernels().values():
        autotuner.cache.clear()
    if world > 1:
        dist.barrier()
    before = set(sys.modules)
    with collections_ms() as collected:
        hit = ms_of(lambda: tuned(*args))
    assert tuned.records, "no site was met"
    assert all(each.is_recalled for each in tuned.records), "not all sites were found in the cache"
    facts = {
        "sites": len(tuned.records),
        "imported": sorted(set(sys.modules) - before),
        "collections": sum(collected),
    }
    print(json.dumps({"cold": cold, "warm": warm, "hit": hit, **facts}))
    sys.stdout.flush()
    if world > 1:
        dist.barrier()
    os._exit(0)  # a process group's threads may not let the interpreter go


def in_processes(step: str, folder: Path, n_ranks: int, first: str = "") -> list[dict[str, Any]]:
    """Run one process for each rank; what each printed."""
    environment = {
        "DIST_TUNE_CACHE_DIR": f"{folder}/cache-{n_ranks}",
        "DIST_TUNE_LOG_DIR": f"{folder}/logs",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "DIST_TUNE_VERBOSITY": "quiet",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(n_ranks),
        "BENCH_STORE": tempfile.mktemp(dir=folder),
    }
    command = [
        sys.executable,
        __file__,
        "--process",
        step,
        "--folder",
        str(folder),
        "--first",
        first,
    ]
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, **environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(n_ranks)
    ]
    printed = [each.communicate()[0] for each in started]
    if any(each.returncode for each in started):
        raise SystemExit(f"a process of the step {step} failed")
    return [json.loads(text.splitlines()[-1]) for text in printed if text.strip().startswith("{")]


def row(step: str, rounds: list[list[dict[str, Any]]]) -> list[str]:
    """The slowest rank of each round: median and least."""

    def shown(of: Any) -> str:
        values = [max(map(of, ranks)) for ranks in rounds]
        return f"{statistics.median(values):.1f} ({min(values):.1f})"

    first = rounds[0][0]
    return [
        STEPS[step],
        str(first["sites"]),
        shown(lambda each: each["cold"][0]),
        shown(lambda each: each["hit"][0] - each["warm"][0]),
        shown(lambda each: each["hit"][1] - each["warm"][1]),
        shown(lambda each: each["collections"]),
        str(len(first["imported"])),
    ]


def whole_row(step: str, turns: list[list[list[dict[str, Any]]]]) -> list[str]:
    """The slowest rank's whole first call, untuned and tuned."""
    values = [
        [max(rank["whole"][0] for rank in ranks) for ranks in each]
        for each in zip(*turns, strict=True)
    ]
    return [
        STEPS[step],
        str(turns[0][-1][0]["sites"]),
        *(f"{statistics.median(each):.1f} ({min(each):.1f})" for each in values),
    ]


def main() -> None:
    """Print the table, or be one of its processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--steps", nargs="*", choices=STEPS, default=["one", "one-2-ranks", "eleven"]
    )
    parser.add_argument("--processes", type=int, default=7, help="fresh processes of each step")
    parser.add_argument(
        "--folder",
        type=Path,
        help="keeps what was tuned and compiled; a new temporary folder if not given",
    )
    parser.add_argument("--process", help=argparse.SUPPRESS)
    parser.add_argument("--first", default="", help=argparse.SUPPRESS)
    parser.add_argument(
        "--whole",
        action="store_true",
        help="the first call of a process as a whole, tuned and untuned in turn",
    )
    options = parser.parse_args()
    if options.process:
        one_process(options.process, options.folder, options.first)
        return
    title = (
        f"first call that hits; ms, median (least) of {options.processes} processes;"
        f" {versions('CPU, fake driver')}"
    )
    columns = [
        "Triton's own, cold",
        "the tuner's, wall",
        "the tuner's, CPU",
        "collections in it",
        "modules imported",
    ]
    table = Table(
        "step",
        "sites",
        *([f"whole, {each}" for each in WHOLE] if options.whole else columns),
        title=title,
    )
    with tempfile.TemporaryDirectory(prefix="bench_first_hit-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for step in options.steps:
            n_ranks = 2 if step.endswith("-2-ranks") else 1
            kernel = step.removesuffix("-2-ranks")
            if not (folder / f"{kernel}-{n_ranks}.json").exists():
                in_processes(kernel, folder, n_ranks)
            if options.whole:
                turns = [
                    [in_processes(kernel, folder, n_ranks, each) for each in WHOLE]
                    for _ in range(options.processes)
                ]
                table.add_row(*whole_row(step, turns))
                continue
            table.add_row(
                *row(
                    step, [in_processes(kernel, folder, n_ranks) for _ in range(options.processes)]
                )
            )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
