"""Jobs for tests of the cache: each decorates its kernel or function anew, as another process would, and says what came of that."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from dist_tune import autotune
from dist_tune.cache.records import TuningRecord, record_bytes
from dist_tune.cache.store import Cache
from tests.steps import autotuned, launch, tuned
from tests.worlds import caught

Face = Literal["contextual", "function"]
FACES: tuple[Face, ...] = ("contextual", "function")
RUNS: list[int] = []
"""The block of each run of ``work``."""


def folder() -> Path:
    """Where the cache lies in this body."""
    return Path(os.environ["DIST_TUNE_CACHE_DIR"])


def work(x: torch.Tensor, *, BLOCK: int) -> torch.Tensor:
    RUNS.append(BLOCK)
    return x + 1.0


def job(
    face: Face,
    path: Path | str | None = None,
    settings: Mapping[str, str] | None = None,
    *,
    blocks: tuple[int, ...] = (16, 32, 64),
    n: int = 64,
    kernel: Any = None,
    function: Any = work,
    **options: Any,
) -> SimpleNamespace:
    """The first two calls of the next job of all ranks: what they chose and use, how often the closure ran, the error of the first.

    The cache lies at ``path``, and the variables ``DIST_TUNE_...`` are set as ``settings`` says.
    """
    dist.barrier()
    x = torch.zeros(n)
    RUNS.clear()
    if face == "contextual":
        kernel = autotuned(blocks=blocks) if kernel is None else kernel
        step: Any = tuned(kernel, lambda x: RUNS.append(0) or launch(kernel, x), **options)  # type: ignore[func-returns-value]
    else:
        space = [{"BLOCK": block} for block in blocks]
        step = autotune(space, lambda x: x.numel(), **{"n_warmup": 0, "n_repeat": 1, **options})(function)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        for name, setting in {"CACHE_DIR": str(path or folder()), **(settings or {})}.items():
            patch.setenv(f"DIST_TUNE_{name}", setting)
        warnings.simplefilter("always")
        first = list[Any]()
        error = caught(lambda: first.append(step(x)))
        n_runs, n_records = len(RUNS), len(step.records)
        value = None if error.kind else step(x)[0].item()
    assert error.kind or (type(first[0]), first[0].shape) == (torch.Tensor, x.shape), "the first call returned something else"
    record = step.records[-1] if step.records else None
    return SimpleNamespace(
        winner=record and record.best.fields["BLOCK"],
        used=[each.kwargs["BLOCK"] for each in kernel.cache.values()] if face == "contextual" else RUNS[n_runs:],
        n_runs=n_runs,
        is_hit=record and record.is_recalled,
        is_steady=(len(RUNS), len(step.records)) == (n_runs + 1, n_records),
        value=value,
        error=error,
        warned=[str(each.message) for each in warned],
        record=record,
    )


def is_hit(done: SimpleNamespace, block: int) -> bool:
    """Whether a job took this block from the cache, and its closure ran once for that."""
    found = (done.winner, done.used, done.n_runs, done.is_hit, done.is_steady, done.value, done.error.kind)
    return found == (block, [block], 1, True, True, 1.0, "")


def is_tuned(done: SimpleNamespace) -> bool:
    """Whether a job has tuned, and its kernel or function uses what came of that."""
    return done.is_hit is False and done.used == [done.winner] and done.n_runs > 3 and done.is_steady and done.value == 1.0


def records(path: Path | None = None) -> list[TuningRecord]:
    """All that are kept here."""
    return [entry.record for entry in Cache(path or folder()).entries()]


def rewrite(path: Path, *, environment: Mapping[str, Any] | None = None, **changes: Any) -> None:
    """Change fields of all records here, and keep each under the key that it then has. ``winner`` is a block."""
    cache = Cache(path)
    for entry in cache.entries():
        record, update = entry.record, dict(changes)
        if "winner" in changes:
            update["winner"] = next(each.index for each in record.candidates if each.fields["BLOCK"] == changes["winner"])
        if environment is not None:
            update["environment"] = record.environment.model_copy(update=dict(environment))
        changed = record.model_copy(update=update)
        entry.path.unlink()
        target = cache.path_of(changed.cache_key)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(record_bytes(changed))


def edited(rank: int, **changes: Any) -> None:
    """``rewrite`` of the folder of all ranks, on the first rank, between barriers."""
    dist.barrier()
    if rank == 0:
        rewrite(folder(), **changes)
    dist.barrier()


def own_records(face: Face, rank: int, winner: int = 32, **options: Any) -> Path:
    """The rank's own folder after a job, with records that say this winner."""
    path = folder() / str(rank)
    job(face, path, **options)
    rewrite(path, winner=winner)
    return path
