"""Runs a function on several ranks, each a real process of one gloo world, and brings back what each returned or raised.

Processes come from a fork server that has imported torch and Triton, so that a world starts in a tenth of a second. A rank
that does not end in time is killed and fails the test: a distributed test never skips and never hangs.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dist_tune.errors import DistTuneError

ROOT = Path(__file__).parents[2]
DEADLINE_S = 3.0
"""Deadline of a tuning in tests; long enough for a compile on a busy machine."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "pydantic_settings", "loguru"])


@dataclass(frozen=True)
class Outcome:
    """How one rank ended."""

    value: Any = None
    error: str = ""
    """Name of the exception's class; empty if the rank returned."""
    message: str = ""
    seconds: float = 0.0
    log: str = ""
    """The rank's tuning log."""
    notes: str = field(default="", repr=False)
    """The traceback."""


def on_ranks(
    n: int,
    function: Callable[..., Any],
    *args: Any,
    mode: str = "interpret",
    env: dict[str, str] | None = None,
    timeout_s: float = 90.0,
    is_dist: bool = True,
) -> list[Outcome]:
    """Call ``function(rank, *args)`` on ``n`` ranks. ``mode``: "interpret", "fake" for the fake H200 driver, or "gpu" with NCCL."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "DIST_TUNE_DEADLINE_S": str(DEADLINE_S),
            "DIST_TUNE_PROGRESS": "0",
            "DIST_TUNE_LOG_DIR": f"{folder}/logs",
            "DIST_TUNE_CACHE_DIR": f"{folder}/cache",
            "OMP_NUM_THREADS": "1",
            "TRITON_CACHE_DIR": f"{folder}/triton",
            **(env or {}),
        }
        pipes, processes = [], []
        for rank in range(n):
            mine, theirs = _context.Pipe(duplex=False)
            child_args = (theirs, rank, n, function.__module__, function.__qualname__, args, mode, settings, folder, is_dist)
            process = _context.Process(target=_child, args=child_args, daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        end = time.monotonic() + timeout_s
        outcomes = []
        for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
            outcomes.append(_receive(pipe, rank, end, timeout_s))
            process.join(timeout=5)
        for process in processes:
            if process.is_alive():
                process.kill()
        return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned; fails with the traceback of a rank that raised."""
    for rank, outcome in enumerate(outcomes):
        assert not outcome.error, f"rank {rank} raised {outcome.error}: {outcome.message}\n{outcome.notes}\n{outcome.log}"
    return [outcome.value for outcome in outcomes]


def same_error(outcomes: list[Outcome], error: str, *words: str, within_s: float = 3 * DEADLINE_S) -> None:
    """Assert that all raised this error, in time, and that its message has the words."""
    for outcome in outcomes:
        assert outcome.error == error, f"{outcome.error}: {outcome.message}\n{outcome.notes}"
        for word in words:
            assert word in outcome.message
        assert outcome.seconds < within_s


def caught(call: Callable[[], object]) -> Any:
    """The error that ``call`` raises, as values; its ``kind`` is empty if there is none."""
    try:
        call()
    except DistTuneError as error:
        return SimpleNamespace(kind=type(error).__name__, message=str(error), cause=str(error.__cause__), **vars(error))
    return SimpleNamespace(kind="", message="")


def _receive(pipe: Connection, rank: int, end: float, timeout_s: float) -> Outcome:
    if not pipe.poll(max(0.0, end - time.monotonic())):
        return Outcome(error="Hung", message=f"rank {rank} did not end within {timeout_s:g} s")
    try:
        outcome: Outcome = pipe.recv()
        return outcome
    except EOFError:
        return Outcome(error="Died", message=f"rank {rank} ended without a result")


def _child(
    pipe: Connection, rank: int, n: int, module: str, name: str, args: Any, mode: str, env: dict[str, str], folder: str, is_dist: bool
) -> None:
    os.environ.update(env, RANK=str(rank), WORLD_SIZE=str(n), LOCAL_RANK=str(rank))
    # Triton reads this where a kernel is decorated, so it is set before the module with the kernels is imported.
    os.environ["TRITON_INTERPRET"] = "1" if mode == "interpret" else "0"
    sys.path.insert(0, str(ROOT))
    import torch.distributed as dist

    if mode == "fake":
        from tests.fake_driver import install

        install()
    if is_dist:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", n), rank=rank, world_size=n, timeout=timedelta(seconds=60))
    began = time.monotonic()
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        outcome = Outcome(value=function(rank, *args))
    except BaseException as error:  # noqa: BLE001  # whatever it is, the test shall see it
        outcome = Outcome(error=type(error).__name__, message=str(error), notes=traceback.format_exc())
    log = Path(env["DIST_TUNE_LOG_DIR"]) / f"rank-{rank}.log"
    text = log.read_text() if log.exists() else ""
    pipe.send(Outcome(outcome.value, outcome.error, outcome.message, time.monotonic() - began, text, outcome.notes))
    pipe.close()
    os._exit(0)  # a gloo group that a test has broken may not let the interpreter go
