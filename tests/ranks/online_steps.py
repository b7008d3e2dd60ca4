"""Jobs whose steps may not be repeated, and which are tuned while they run: what ranks run in tests of online tuning."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import triton

from dist_tune import contextual_autotune
from dist_tune.measure import clocks
from dist_tune.testing import FakeH200
from tests.steps import autotuned, launch

BLOCKS = (16, 32, 64, 128)


def times_of(rank: int, speeds: dict[int, float], late: int = -1) -> Any:
    """Milliseconds of a launch by its BLOCK; twice as long on the rank ``late`` for the fastest."""

    def launch_ms(source: Any, metadata: Any) -> float:
        block = next(value for name, value in named(source).items() if name == "BLOCK")
        return speeds[block] * (3.0 if rank == late and speeds[block] == min(speeds.values()) else 1.0)

    return launch_ms


def named(source: Any) -> dict[str, Any]:
    names = source.fn.arg_names
    return {names[at[0]] if isinstance(at, tuple) else at: value for at, value in source.constants.items()}


def job(rank: int, n_calls: int, is_dist: bool, late: int = -1, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """A step that counts itself; times of its config after each call."""
    FakeH200.launch_ms = staticmethod(times_of(rank, {16: 1.0, 32: 0.5, 64: 0.25, 128: 0.8}, late))
    kernel = autotuned(configs=[triton.Config({"BLOCK": block}) for block in BLOCKS])
    x = torch.zeros(256)
    weight = torch.zeros(1)

    @contextual_autotune(is_dist=is_dist, **(options or {}))
    def step() -> float:
        launch(kernel, x)
        weight.add_(1.0)
        if is_dist:
            dist.all_reduce(weight.clone())
        return float(weight)

    values, used, ended = [], [], None
    for k in range(n_calls):
        values.append(step())
        used.append(next(iter(kernel.cache.values())).kwargs["BLOCK"])
        if step.records and ended is None:
            ended = k
        time.sleep(0.002)
    return {"values": values, "used": used, "ended": ended, "records": [r.best.config for r in step.records], "weight": float(weight)}


# -- what ranks launch, call by call -----------------------------------------------------------------------------------


class Launches:
    """What this rank's fake device launches in each call, and how long that takes."""

    def __init__(self, ms: Callable[[int], float], name: str = "BLOCK") -> None:
        """``ms``: of a launch, by the value of the constant ``name``."""
        self.by_call: list[list[int]] = []
        self._ms, self._name = ms, name
        FakeH200.launch_ms = staticmethod(self._launched)

    def _launched(self, source: Any, metadata: Any) -> float:
        value = named(source)[self._name]
        if self.by_call:
            self.by_call[-1].append(value)
        return self._ms(value)


def online_threads() -> list[threading.Thread]:
    """The threads of tunings beside this process's calls."""
    return [each for each in threading.enumerate() if each.name == "dist_tune online"]


def run_job(
    step: Callable[[int], Any], launches: Launches | None = None, *, is_dist: bool = True, n_more: int = 5, n_most: int = 4000
) -> list[Any]:
    """The values of ``step(k)``, called until its tuning is over on all ranks and ``n_more`` times after that."""
    values, n_left = list[Any](), n_more
    while n_left and len(values) < n_most:
        if launches is not None:
            launches.by_call.append([])
        values.append(step(len(values)))
        is_over = torch.tensor(float(len(values) > 1 and not online_threads()))
        if is_dist:
            dist.all_reduce(is_over, dist.ReduceOp.MIN)
        n_left -= int(is_over)
        time.sleep(1e-3)
    assert not n_left, f"not over after {len(values)} calls"
    return values


class Talk(NamedTuple):
    """What a step's thread must not do."""

    what: str
    call: int


@contextmanager
def silent_steps(launches: Launches, n_late: int = 3) -> Iterator[list[Talk]]:
    """From the second call on, note what this thread does that waits or talks. A span is done ``n_late`` calls after its end."""
    found, mine = list[Talk](), threading.get_ident()

    def noting(what: str, method: Any) -> Any:
        @wraps(method)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == mine and len(launches.by_call) > 1:
                found.append(Talk(f"{what}\n{''.join(traceback.format_stack(limit=8))}", len(launches.by_call)))
            return method(*args, **kwargs)

        return noted

    def record(event: Any) -> None:
        own_record(event)
        event.at_call = len(launches.by_call)

    own_record = clocks._HostEvent.record
    with pytest.MonkeyPatch.context() as patch:
        for kind in (dist.Store, dist.PrefixStore, dist.FileStore, dist.TCPStore, dist.HashStore):
            for name in STORE_METHODS:
                if name in vars(kind):
                    patch.setattr(kind, name, noting(f"{kind.__name__}.{name}", getattr(kind, name)))
        for module in [each for name, each in sys.modules.items() if name.startswith("dist_tune.") and hasattr(each, "wait_for_device")]:
            patch.setattr(module, "wait_for_device", noting("wait_for_device", module.wait_for_device))
        patch.setattr(torch.cuda, "synchronize", noting("synchronize", torch.cuda.synchronize))
        for name in ("is_done", "has_begun", "ms"):
            patch.setattr(clocks.Span, name, noting(f"Span.{name}", getattr(clocks.Span, name)))
        patch.setattr(clocks._HostEvent, "record", record)
        patch.setattr(clocks._HostEvent, "query", lambda event: len(launches.by_call) >= event.at_call + n_late)
        yield found


STORE_METHODS = (
    "set", "get", "add", "check", "wait", "compare_set", "multi_get", "multi_set", "delete_key", "num_keys", "append", "set_timeout",
    "queue_push", "queue_pop", "queue_len", "has_extended_api", "clone",
)  # fmt: skip


# -- jobs that end in the middle ---------------------------------------------------------------------------------------


def has_agreed(n: int) -> bool:
    """True once this job's ranks have agreed on times ``n`` times, as a journal says."""
    for path in Path(os.environ["DIST_TUNE_CACHE_DIR"]).glob("journals/*.jsonl"):
        with suppress(FileNotFoundError):  # deleted at the end of the tuning, by another rank too
            if path.read_bytes().count(b'"kind":"agreed"') >= n:
                return True
    return False


def cut_off(rank: int, n_agreed: int, ends: int = -1, how: str = "", talks: bool = False, n_after: int = 0) -> dict[str, Any]:
    """A job that ends once ranks have agreed on times ``n_agreed`` times, or with its tuning; the rank ``ends`` by SIGKILL, or leaves.

    Without ``talks`` its step has no collective. The others go on for ``n_after`` calls, and end as programs do.
    """
    launches, kernel, x, weight = Launches(SPEEDS.__getitem__), autotuned(blocks=tuple(SPEEDS)), torch.zeros(256), torch.zeros(1)

    @contextual_autotune(is_dist=dist.is_initialized(), max_slowdown=0.3)
    def step() -> float:
        launch(kernel, x)
        weight.add_(1.0)
        if talks:
            dist.all_reduce(weight.clone())
        return float(weight)

    values, error, n_over, n_left = list[float](), "", 0, n_after
    while n_over < 3 and n_left >= 0:
        launches.by_call.append([])
        if has_agreed(n_agreed):
            if ends == rank and how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            n_left -= 1 if ends != rank else n_after + 1
        try:
            values.append(step())
        except RuntimeError as raised:  # of a collective
            error = f"{type(raised).__name__}: {raised}"
            break
        time.sleep(1e-3)
        n_over += len(values) > 1 and not online_threads()
        assert len(values) < 10_000
    n_alive = len(online_threads())
    atexit._run_exitfuncs()
    best = [config.kwargs["BLOCK"] for config in kernel.cache.values()]
    return {
        "values": values, "error": error, "launches": launches.by_call, "best": best,
        "n_records": len(step.records), "n_alive": n_alive, "n_left": len(online_threads()),
    }  # fmt: skip


SPEEDS = {16: 1.0, 32: 0.5, 64: 0.25, 128: 0.8, 256: 0.7, 512: 0.6}
