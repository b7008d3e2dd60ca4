"""A tuning of kernels or a function on two ranks in which a config ends its process; attempts count
their launches in a folder.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton

from dist_tune import autotune, contextual_autotune
from dist_tune.testing import ExactTime
from tests.steps import add_kernel, autotuned, best, launch

BLOCKS = (8, 16, 32, 64, 128, 256)
Ends = tuple[int, int, int, str]
"""Where a process ends: block, or 0 for all; rank; launches before, or -1 once ranks have agreed on
times; and the way.

The ways: "exit", each time; "once", "term" and "int", in one attempt, with SIGKILL and other
signals; and "turns", where another rank exits in each attempt, from rank 0 on.
"""


def launches(folder: Path, name: str = "one") -> dict[tuple[int, int], int]:
    """(Block, rank) -> launches so far."""
    paths = {
        (block, rank): folder / f"{name}-{block}-rank-{rank}" for block in BLOCKS for rank in (0, 1)
    }
    return {each: path.stat().st_size if path.exists() else 0 for each, path in paths.items()}


def _has_agreed() -> bool:
    """True once a meeting of the race is over on some rank."""
    for path in Path(os.environ["DIST_TUNE_CACHE_DIR"]).glob("journals/*.jsonl"):
        with suppress(FileNotFoundError):  # the other rank is through, and has deleted its own
            if path.is_file() and b'"agreed"' in path.read_bytes():
                return True
    return False


def _end(folder: Path, rank: int, block: int, ends: Ends) -> None:
    at, who, n_before, how = ends
    if rank != (who if how != "turns" else int(os.environ["TURN"])) or at not in (0, block):
        return
    n_launches = sum(
        n for (each, by), n in launches(folder).items() if by == rank and at in (0, each)
    )
    if n_launches <= n_before if n_before >= 0 else not _has_agreed():
        return
    died = folder / f"died-{rank}"
    if how != "exit" and died.exists():
        return
    died.write_text("")
    if how in ("exit", "turns"):
        os._exit(7)
    signal.raise_signal({"once": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}[how])
    time.sleep(60)


def _counted(folder: Path, rank: int, name: str, ends: Ends | None) -> list[triton.Config]:
    """Configs that write down their launches; the middle two are fast."""
    # No value of the hook's: with another one the kernel is another.
    os.environ["TURN"] = str(len(list(folder.glob("died-*"))))

    def hook(block: int) -> Any:
        def note(_: dict[str, Any]) -> None:
            with open(folder / f"{name}-{block}-rank-{rank}", "ab") as file:
                file.write(b".")
            ExactTime.pass_ms(2 if block in (32, 64) else 20 + BLOCKS.index(block))
            if ends is not None:
                _end(folder, rank, block, ends)

        return note

    return [triton.Config({"BLOCK": block}, pre_hook=hook(block)) for block in BLOCKS]


def tune(
    rank: int,
    folder: Path,
    form: str = "kernels",
    *,
    ends: Ends | None = None,
    n_kernels: int = 1,
    fails: Any = (),
    device: str = "cpu",
    **options: Any,
) -> dict[str, Any]:
    """Tune, each config timed once, and tell what came of that.

    ``fails``: (run, rank, error) that the step raises.

    ``form``: a step of ``n_kernels`` "kernels"; a "function"; or "nested", a kernel in a function,
    which ends its process, in a step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    options = {"search": "exhaustive", "n_repeat": 1, "n_warmup": 0, **options}
    kernels = [
        autotuned(add_kernel, configs=_counted(folder, rank, name, ends if name == "one" else None))
        for name in ("one", "two")[:n_kernels]
    ]
    runs: list[int] = []

    def closure(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if (len(runs), rank) == fails[:2]:
            raise fails[2](f"run {len(runs)}")
        for k, kernel in enumerate(kernels):
            x = launch(kernel, x) if k == 0 else launch(kernel, x[:48])
        if not fails:  # the other rank would wait there
            dist.all_reduce(x)
        return x

    def function(x: torch.Tensor, BLOCK: int = 0) -> torch.Tensor:
        if form == "nested":
            x = launch(kernels[0], x)
            if BLOCKS[0] == BLOCK:
                os._exit(7)
        else:
            hooks[BLOCK]({})
            x = x + 1
        dist.all_reduce(x)
        return x

    hooks = {config.kwargs["BLOCK"]: config.pre_hook for config in kernels[0].configs}
    step: Any = contextual_autotune(is_dist=True, **options)(closure)
    if form != "kernels":
        space = [{"BLOCK": block} for block in (BLOCKS if form == "function" else BLOCKS[:2])]
        step = autotune(space, lambda x: x.numel(), **options)(function)
    if form == "nested":
        step = contextual_autotune(is_dist=True, **options)(step)
    y = step(torch.zeros(64, device=device))
    found = {
        f"{record.kernel.rpartition('.')[2]}{record.key.split(',')[0]}": [
            each.failure for each in record.candidates
        ]
        for record in step.records
    }
    is_recalled = all(record.is_recalled for record in step.records)
    return {
        "runs": len(runs),
        "best": [best(each) for each in kernels],
        "y": y[0].item(),
        "failures": found,
        "is_recalled": is_recalled,
    }


def attempt(rank: int, folder: Path, options: dict[str, Any]) -> Any:
    """One start of the job."""
    if "tmp" in options:
        tempfile.tempdir = options.pop("tmp")
    return tune(rank, folder, **options)
