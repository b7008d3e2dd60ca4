"""A tuning of two kernels on two ranks in which a config ends its process, or the test does; attempts count their launches in a folder."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton

from dist_tune import autotune, contextual_autotune
from tests.ranks.kernels import add_kernel, autotuned, best, launch

BLOCKS = (8, 16, 32, 64, 128, 256)


def kill(number: int = signal.SIGKILL) -> None:
    """End this process as the kernel's out-of-memory killer does, or another signal."""
    os.kill(os.getpid(), number)
    time.sleep(60)


def counted(folder: Path, rank: int, name: str, ends: Any) -> list[triton.Config]:
    """Configs that write down their launches; the middle two are fast.

    ``ends``: (block, rank, launches before, way), where the process ends: of that config, or of all if the block is 0; with -1 once ranks
    have agreed on times. In the way "turns" another rank ends in each attempt, from rank 0 on.
    """
    os.environ["TURN"] = str(len(list(folder.glob("turn-*"))))  # no value of the hook's: with another one the kernel is another

    def hook(block: int) -> Any:
        def note(_: dict[str, Any]) -> None:
            with open(folder / f"{name}-{block}-rank-{rank}", "ab") as file:
                file.write(b".")
            time.sleep(0.002 if block in (32, 64) else 0.02 + BLOCKS.index(block) / 1e3)
            if ends is not None and ends[3] == "turns" and block == ends[0] and os.environ["TURN"] == str(rank):
                (folder / f"turn-{rank}").write_text("")
                os._exit(7)
            n_launches = sum(n for (b, r), n in launches(folder, name).items() if r == rank and ends is not None and ends[0] in (0, b))
            is_time = ends is not None and (n_launches > ends[2] if ends[2] >= 0 else has_agreed())
            if ends is not None and rank == ends[1] and ends[0] in (0, block) and is_time:
                if ends[3] in ("once", "term", "int"):
                    if (folder / "died").exists():
                        return
                    (folder / "died").write_text("")
                    kill({"term": signal.SIGTERM, "int": signal.SIGINT}.get(ends[3], signal.SIGKILL))
                os._exit(7) if ends[3] == "exit" else kill()

        return note

    return [triton.Config({"BLOCK": block}, pre_hook=hook(block)) for block in BLOCKS]


def has_agreed() -> bool:
    """True once a meeting of the race is over on some rank."""
    found = [path for path in Path(os.environ["DIST_TUNE_CACHE_DIR"]).glob("journals/*.jsonl") if path.is_file()]
    return any(b'"agreed"' in path.read_bytes() for path in found)


def launches(folder: Path, name: str = "one") -> dict[tuple[int, int], int]:
    """(Block, rank) -> launches so far."""
    found = {}
    for block in BLOCKS:
        for rank in (0, 1):
            path = folder / f"{name}-{block}-rank-{rank}"
            found[block, rank] = path.stat().st_size if path.exists() else 0
    return found


def tune(rank: int, folder: Path, ends: Any = None, n_kernels: int = 1, fails: Any = (), options: Any = (), device: str = "cpu") -> Any:
    """Tune ``n_kernels`` kernels in one step, each config timed once; what a test wants to know of it. ``fails``: (run, rank) raises."""
    names = ["one", "two"][:n_kernels]
    kernels = [autotuned(add_kernel, configs=counted(folder, rank, name, ends if name == "one" else None)) for name in names]
    runs: list[int] = []

    @contextual_autotune(is_dist=True, **{"search": "exhaustive", "n_repeat": 1, "n_warmup": 0, **dict(options)})
    def step(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if (len(runs), rank) == fails:
            raise KeyboardInterrupt if dict(options).get("budget_s") else ValueError(f"run {len(runs)}")
        for k, kernel in enumerate(kernels):
            x = launch(kernel, x) if k == 0 else launch(kernel, x[:48])
        dist.all_reduce(x)
        return x

    y = step(torch.zeros(64, device=device))
    records = [
        (r.kernel, r.key, r.best.config, [c.failure for c in r.candidates], r.is_recalled, [c.left for c in r.candidates])
        for r in step.records
    ]
    return {"runs": len(runs), "best": [best(k) for k in kernels], "y": y[0].item(), "records": records}


def tune_in(rank: int, folder: Path, ends: Any) -> Any:
    """The same with temporary files of its own."""
    tempfile.tempdir = str(folder / "tmp")
    return tune(rank, folder, ends)


def tune_function(rank: int, folder: Path, ends: Any = None) -> Any:
    """The same for a function."""
    hooks = {config.kwargs["BLOCK"]: config.pre_hook for config in counted(folder, rank, "one", ends)}

    @autotune(config_space=[{"BLOCK": block} for block in BLOCKS], key_fn=lambda x: x.numel(), search="exhaustive", n_repeat=1, n_warmup=0)
    def step(x: torch.Tensor, BLOCK: int = 0) -> torch.Tensor:
        hooks[BLOCK]({})
        y = torch.empty_like(x)
        add_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK=BLOCK)
        dist.all_reduce(y)
        return y

    y = step(torch.zeros(64))
    return {"y": y[0].item(), "records": [(r.best.config, [c.failure for c in r.candidates]) for r in step.records]}


def tune_nested(rank: int, folder: Path) -> Any:
    """A step around a function around a kernel, both tuned: the function's first config launches the kernel, and ends the process."""
    kernel = autotuned(add_kernel, configs=counted(folder, rank, "one", None))

    @autotune(config_space=[{"way": 0}, {"way": 1}], key_fn=lambda x: x.numel(), n_repeat=1, n_warmup=0)
    def function(x: torch.Tensor, way: int = 0) -> torch.Tensor:
        y = launch(kernel, x)
        if way == 0:
            os._exit(7)
        return y

    @contextual_autotune(is_dist=True, search="exhaustive", n_repeat=1, n_warmup=0)
    def step(x: torch.Tensor) -> torch.Tensor:
        y = function(x)
        dist.all_reduce(y)
        return y

    y = step(torch.zeros(64))
    return {"y": y[0].item(), "failures": [[each.failure for each in record.candidates] for record in step.records]}
