"""Jobs for tests of the cache: each decorates its kernel or function anew, as another process would, and says what came of that.

Many short scenarios share one world, each with a cache folder of its own, because a world takes longer to start than a job.
"""

from __future__ import annotations

import functools
import importlib
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist

from dist_tune import autotune
from dist_tune.cache.records import TuningRecord, record_bytes
from dist_tune.cache.store import Cache
from dist_tune.testing import values
from tests.ranks.kernels import autotuned, launch, tuned
from tests.ranks.world import caught
from tests.ranks.worlds import on_ranks

Face = Literal["contextual", "function"]
FACES: tuple[Face, ...] = ("contextual", "function")
Got = dict[str, list[Any]]
"""What each rank came to, by scenario."""
RUNS: list[int] = []
"""The block of each run of ``work``."""


# -- a job -----------------------------------------------------------------------------------------------------------


def work(x: torch.Tensor, *, BLOCK: int) -> torch.Tensor:
    RUNS.append(BLOCK)
    return x + 1.0


def job(
    face: Face, *, blocks: tuple[int, ...] = (16, 32, 64), n: int = 64, kernel: Any = None, function: Any = work, **options: Any
) -> SimpleNamespace:
    """The first two calls of a new job: what they chose and use, how often the closure ran, the error of the first."""
    x = torch.zeros(n)
    RUNS.clear()
    if face == "contextual":
        kernel = autotuned(blocks=blocks) if kernel is None else kernel
        step: Any = tuned(kernel, lambda x: RUNS.append(0) or launch(kernel, x), **options)  # type: ignore[func-returns-value]
    else:
        space = [{"BLOCK": block} for block in blocks]
        step = autotune(space, lambda x: x.numel(), **{"n_warmup": 0, "n_repeat": 1, **options})(function)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        error = caught(lambda: step(x))
    n_runs, n_records, value = len(RUNS), len(step.records), None
    if not error.kind:
        value = step(x)[0].item()
    return SimpleNamespace(
        winner=step.records[-1].best.fields["BLOCK"] if step.records else None,
        used=[each.kwargs["BLOCK"] for each in kernel.cache.values()] if face == "contextual" else RUNS[n_runs:],
        n_runs=n_runs,
        is_hit=step.records[-1].is_recalled if step.records else None,
        is_steady=(len(RUNS), len(step.records)) == (n_runs + 1, n_records),
        value=value,
        error=error,
        warned=[str(each.message) for each in warned],
        record=step.records[-1] if step.records else None,
    )


def hit(block: int) -> tuple[Any, ...]:
    """The ``summary`` of a job that took this block from the cache, and whose closure ran once for that."""
    return block, [block], 1, True, True, 1.0, ""


def summary(each: SimpleNamespace) -> tuple[Any, ...]:
    """What a test of a hit looks at."""
    return each.winner, each.used, each.n_runs, each.is_hit, each.is_steady, each.value, each.error.kind


def is_tuned(each: SimpleNamespace) -> bool:
    """Whether a job has tuned, and its kernel or function uses what came of that."""
    return each.is_hit is False and each.used == [each.winner] and each.n_runs > 3 and each.is_steady and each.value == 1.0


# -- the cache -------------------------------------------------------------------------------------------------------


@contextmanager
def settings(path: str | Path | None = None, **variables: str) -> Iterator[None]:
    """On this rank the cache lies here meanwhile, and ``DIST_TUNE_...`` variables are set."""
    names = {f"DIST_TUNE_{name}": value for name, value in variables.items()}
    if path is not None:
        names["DIST_TUNE_CACHE_DIR"] = str(path)
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def records(path: str | Path) -> list[TuningRecord]:
    """All that are kept here."""
    return [entry.record for entry in Cache(Path(path)).entries()]


def rewrite(path: str | Path, *, environment: Mapping[str, Any] | None = None, **changes: Any) -> None:
    """Change fields of all records here, and keep each under the key that it then has. ``winner`` is a block."""
    cache = Cache(Path(path))
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


def edited(rank: int, path: Path, **changes: Any) -> None:
    """``rewrite`` on the first rank, between barriers."""
    dist.barrier()
    if rank == 0:
        rewrite(path, **changes)
    dist.barrier()


def a_job(face: Face, folder: Path | str, setting: dict[str, str] | None = None, **options: Any) -> Any:
    """The next job of all ranks, on this one with this folder and these settings."""
    dist.barrier()
    with settings(folder, **(setting or {})):
        return job(face, **options)


def own_records(face: Face, rank: int, path: Path, winner: int = 32, **options: Any) -> Path:
    """The rank's own folder after a job, with records that say this winner."""
    a_job(face, path / str(rank), **options)
    rewrite(path / str(rank), winner=winner)
    return path / str(rank)


# -- scenarios -------------------------------------------------------------------------------------------------------


def play(n_ranks: int, root: Path, scenarios: Sequence[Callable[..., Any]], **options: Any) -> dict[str, list[Any]]:
    """Scenario -> what it returned on each rank; each is called with rank and folder, where the cache lies at first."""
    module, names = scenarios[0].__module__, [scenario.__name__ for scenario in scenarios]
    by_rank = values(on_ranks(n_ranks, _play, str(root), module, names, **options))
    return {name: [got[name] for got in by_rank] for name in names}


def both_faces(scenario: Callable[[Face, int, Path], Any]) -> Callable[[int, Path], Any]:
    """A scenario for both tuners, each with folders of its own."""

    @functools.wraps(scenario)
    def played(rank: int, path: Path) -> Any:
        return {face: scenario(face, rank, path / face) for face in FACES}

    return played


def _play(rank: int, root: str, module: str, names: Sequence[str]) -> dict[str, Any]:
    got: dict[str, Any] = {}
    for name in names:
        path = Path(root) / name
        with settings(path / "shared"):
            try:
                got[name] = getattr(importlib.import_module(module), name)(rank, path)
            except Exception:  # noqa: BLE001  # a failure of this scenario's test, not of all
                got[name] = traceback.format_exc()
        if dist.is_initialized():
            dist.barrier()
    return got
