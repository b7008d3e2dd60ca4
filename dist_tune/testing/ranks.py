"""Ranks as processes of one machine: started, waited for, and ended.

Knows nothing of devices but the fake one.
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
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import torch.distributed as dist
import triton
from triton.runtime.jit import JITFunction, KernelInterface

from dist_tune.testing.fake_gpu import ExactTime, install_fake_driver

PRELOADED: tuple[str, ...] = (
    "dist_tune.contextual",
    "dist_tune.function",
    "dist_tune.offline",
    "dist_tune.testing",
    "triton.runtime.interpreter",
    "triton.experimental.gluon.nvidia.hopper",  # the first launch imports it
    "torch.distributed._symmetric_memory",
    "numpy",
    "pytest",
    "hypothesis",
    "dist_tune.testing.preload",
)
"""Modules that the fork server imports, with all that they import; those that are not installed are
left out.
"""

Mode = Literal["interpret", "fake", "gpu"]
"""Triton's interpreter on the CPU, real compilation for a ``FakeH200``, or the machine's GPUs."""
Clock = Literal["wall", "exact"]
"""Times of launches and replays on the CPU: as long as they take, or those of ``ExactTime``."""


@dataclass(frozen=True)
class Outcome:
    """The end of one rank."""

    value: Any = None
    """The returned value; None if the rank raised."""
    error: str = ""
    """Class name of the raised exception, "Hung" after the time limit, "Died" without a result;
    empty if the rank returned.
    """
    message: str = ""
    """Its text."""
    seconds: float = 0.0
    """Time in the function, without the start of the process."""
    log: str = ""
    """The rank's tuning log, with each event on one line."""
    notes: str = field(default="", repr=False)
    """The traceback."""


class _World(NamedTuple):
    n: int
    mode: Mode
    env: dict[str, str]
    folder: str
    is_dist: bool
    clock: Clock


def on_ranks(
    n: int,
    function: Callable[..., Any],
    *args: Any,
    mode: Mode = "interpret",
    env: dict[str, str] | None = None,
    timeout_s: float = 90.0,
    is_dist: bool = True,
    clock: Clock = "wall",
) -> list[Outcome]:
    """Call ``function(rank, *args)`` in ``n`` processes, which form one gloo process group if
    ``is_dist``.

    ``function`` is a module-level function of a module that can be imported; ``args`` and the
    returned value can be pickled. Logs and caches of dist_tune and Triton lie in a folder that is
    deleted afterwards. A tuning waits 3 seconds for a rank without progress, with the fake driver,
    where kernels are compiled, 15; ``env`` overrides these environment variables and adds others. A
    rank that is not done after ``timeout_s`` seconds is killed. With the exact ``clock`` what is
    chosen does not depend on how busy the machine is. An error of a rank is reported in its
    ``Outcome`` and not raised.

    Raises:
        ValueError: no rank, an unknown ``mode`` or ``clock``, or the exact clock on a GPU, whose
            time it cannot keep.
    """
    if n < 1:
        raise ValueError(f"need at least one rank, got {n}")
    for name, given, known in (("mode", mode, get_args(Mode)), ("clock", clock, get_args(Clock))):
        if given not in known:
            raise ValueError(f"{name} must be one of {known}, got {given!r}")
    if mode == "gpu" and clock == "exact":
        raise ValueError(
            'clock="exact" keeps the time of launches on the CPU; with mode="gpu" the GPU keeps its'
            " own: leave it out"
        )
    with tempfile.TemporaryDirectory() as folder:
        defaults = {
            "DIST_TUNE_DEADLINE_S": (
                "15" if mode == "fake" else "3"
            ),  # a compilation takes a busy machine seconds
            "DIST_TUNE_VERBOSITY": "quiet",
            "DIST_TUNE_LOG_DIR": f"{folder}/logs",
            "DIST_TUNE_CACHE_DIR": f"{folder}/cache",
            "OMP_NUM_THREADS": "1",
            "TRITON_CACHE_DIR": f"{folder}/triton",
        }
        world = _World(n, mode, defaults | (env or {}), folder, is_dist, clock)
        context = fork_context()
        call = (function.__module__, function.__qualname__, args)
        pipes, processes = [], []
        for rank in range(n):
            mine, theirs = context.Pipe(duplex=False)
            processes.append(
                context.Process(target=_run_rank, args=(theirs, rank, world, call), daemon=True)
            )
            processes[-1].start()
            theirs.close()
            pipes.append(mine)
        end = time.monotonic() + timeout_s
        outcomes = [_receive(pipe, rank, end, timeout_s) for rank, pipe in enumerate(pipes)]
        for rank, (process, outcome) in enumerate(zip(processes, outcomes, strict=True)):
            process.join(timeout=0 if outcome.error == "Hung" else 5)
            if process.is_alive():
                process.kill()
            if outcome.error == "Died":
                path = Path(world.env["DIST_TUNE_LOG_DIR"], f"rank-{rank}.log")
                message, log = (
                    f"{outcome.message}, with exit code {process.exitcode}",
                    path.read_text() if path.exists() else "",
                )
                outcomes[rank] = replace(outcome, message=message, log=log)
        return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    """The values that the ranks returned.

    Raises:
        AssertionError: a rank raised; with its traceback and its log.
    """
    for rank, outcome in enumerate(outcomes):
        assert not outcome.error, (
            f"rank {rank} raised {outcome.error}: {outcome.message}\n{outcome.notes}\n{outcome.log}"
        )
    return [outcome.value for outcome in outcomes]


# -- processes -------------------------------------------------------------------------------------


def fork_context() -> ForkServerContext:
    """The multiprocessing context of this module's ranks; its server starts with the first process
    and imports ``PRELOADED``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def choose_interpreter(is_on: bool) -> None:
    """Interpret the kernels that this process decorates from now on, or compile them, as if started
    with ``TRITON_INTERPRET=1`` or 0.
    """
    os.environ["TRITON_INTERPRET"] = str(int(is_on))
    # Triton's own kernels, like tl.sum, were decorated when the fork server imported
    # triton.language: decorate them anew.
    if isinstance(triton.language.cdiv, JITFunction) == is_on:
        for name, module in list(sys.modules.items()):
            if name.startswith("triton.language.") and any(
                isinstance(value, KernelInterface) for value in vars(module).values()
            ):
                importlib.reload(module)
        importlib.reload(triton.language)


def _receive(pipe: Connection, rank: int, end: float, timeout_s: float) -> Outcome:
    if not pipe.poll(max(0.0, end - time.monotonic())):
        return Outcome(error="Hung", message=f"rank {rank} did not end within {timeout_s:g} s")
    try:
        return cast(Outcome, pipe.recv())
    except EOFError:
        return Outcome(error="Died", message=f"rank {rank} ended without a result")


def _run_rank(
    pipe: Connection, rank: int, world: _World, call: tuple[str, str, tuple[Any, ...]]
) -> None:
    os.environ.update(world.env, RANK=str(rank), WORLD_SIZE=str(world.n), LOCAL_RANK=str(rank))
    # OpenMP has read the variable already, in the fork server.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    choose_interpreter(world.mode == "interpret")
    if world.mode == "fake":
        install_fake_driver()
    if world.clock == "exact":
        ExactTime.keep()
    if world.is_dist:
        store, timeout = dist.FileStore(f"{world.folder}/store", world.n), timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world.n, timeout=timeout)
        dist.barrier()  # because a rank that ends while others still connect to it would fail them
    began = time.monotonic()
    try:
        module, name, args = call
        function = attrgetter(name)(importlib.import_module(module))
        outcome = Outcome(value=function(rank, *args))
    except BaseException as error:  # noqa: BLE001  # whatever it is, the test shall see it
        outcome = Outcome(
            error=type(error).__name__, message=str(error), notes=traceback.format_exc()
        )
    log = Path(world.env["DIST_TUNE_LOG_DIR"]) / f"rank-{rank}.log"
    pipe.send(
        replace(
            outcome, seconds=time.monotonic() - began, log=log.read_text() if log.exists() else ""
        )
    )
    pipe.close()
    os._exit(0)  # a gloo group that a test has broken may not let the interpreter go
