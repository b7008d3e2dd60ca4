"""Kernels and steps for the tests: the one library of them."""

from __future__ import annotations

import os
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

from dist_tune import TunedFunction, autotune, contextual_autotune
from dist_tune.records import Cache, TuningRecord, record_bytes
from dist_tune.testing import ExactTime
from tests.interpreter import ELEMENTWISE
from tests.worlds import caught, folder, is_interpreted


@triton.jit
def add_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < n
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=keep) + 1.0, mask=keep)


@triton.jit
def accumulate_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < n
    tl.store(y_ptr + at, tl.load(y_ptr + at, mask=keep) + tl.load(x_ptr + at, mask=keep), mask=keep)


ELEMENTWISE |= {add_kernel.fn: lambda x, y: x + 1, accumulate_kernel.fn: lambda x, y: y + x}


@triton.jit
def atomic_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr, tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0)))


@triton.jit
def shift_kernel(x_ptr, y_ptr, n, shift, BLOCK: tl.constexpr):
    """``shift`` is an argument of several classes: 1, a multiple of 16, another one."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + shift, mask=at < n)


@triton.jit
def dot_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, tl.dot(x, x))


@triton.jit
def gemm_kernel(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr):
    at_m, at_n, at_k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, 32)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, 32):
        total = tl.dot(
            tl.load(a + at_m[:, None] * K + (k + at_k)[None, :]),
            tl.load(b + (k + at_k)[:, None] * BN + at_n[None, :]),
            total,
        )
    tl.store(c + at_m[:, None] * BN + at_n[None, :], total)


@triton.jit
def product_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """The first tile of x @ x, of n x n elements, in a loop that can be pipelined."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, n, BLOCK):
        left, right = (
            tl.load(x_ptr + at[:, None] * n + k + at[None, :]),
            tl.load(x_ptr + (k + at[:, None]) * n + at[None, :]),
        )
        total = tl.dot(left, right, total)
    tl.store(y_ptr + at[:, None] * n + at[None, :], total)


def configs(*blocks: int, **options: Any) -> list[triton.Config]:
    """One config a block size."""
    return [triton.Config({"BLOCK": block}, **options) for block in blocks]


def autotuned(
    kernel: Any = add_kernel,
    blocks: tuple[int, ...] = (16, 32, 64),
    key: tuple[str, ...] = ("n",),
    **options: Any,
) -> Any:
    """A fresh autotuned kernel."""
    return triton.autotune(
        configs=options.pop("configs", None) or configs(*blocks), key=list(key), **options
    )(kernel)


def launch(kernel: Any, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    """Launch it over ``x``; returns the output."""
    y = torch.empty_like(x) if y is None else y
    n = x.numel()
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, n)
    return y


def best(kernel: Any) -> list[int]:
    """The block sizes in the kernel's cache, by key."""
    return [kernel.cache[key].kwargs["BLOCK"] for key in sorted(kernel.cache, key=str)]


def tuned(kernel: Any, closure: Any = None, **options: Any) -> Any:
    """A closure, or the launch of ``kernel`` alone, tuned on all ranks with one replay a
    candidate.
    """
    options = {"is_dist": True, "n_repeat": 1, "n_warmup": 0, **options}
    return contextual_autotune(**options)(closure or (lambda x: launch(kernel, x)))


def is_unpatched() -> bool:
    """Whether ``Autotuner.run`` has Triton's own code: none of its constants is ours."""
    return not any(
        type(constant).__module__.startswith("dist_tune")
        for constant in Autotuner.run.__code__.co_consts
    )


# -- a step under either decorator -----------------------------------------------------------------

Face = Literal["contextual", "function"]
FACES: tuple[Face, ...] = ("contextual", "function")
"""Both decorators, as cases of a test: ``@on_each_rank(cases=FACES)``."""
_steps: dict[str, Any] = {}


class Step:
    """One step with some configs under either decorator: what it ran, and what was chosen.

    Its value is its tensor plus 1.

        step = Step(face, {16: 2.0, 32: 1.0 + rank}, rest=all_reduced)
        step(torch.zeros(64))
        assert (step.best, step.failures) == ([16], [None, None])

    A second one of the same ``name`` is what a later job makes: its kernel or function is the same
    one, by code.
    """

    def __init__(
        self,
        face: Face,
        ms: Mapping[int, float] | Sequence[int] = (16, 32, 64),
        *,
        act: Callable[[int], object] = lambda block: None,
        rest: Callable[[torch.Tensor], Any] = lambda y: y,
        name: str = "step",
        **options: Any,
    ) -> None:
        """``ms``: block -> milliseconds of its launch on this rank, or blocks alone, the smaller
        the slower.

        ``act(block)`` is called in each launch, and ``rest(y)`` after it; both may raise, sleep, or
        talk to other ranks. Options are those of the decorators; each config is timed once if they
        say nothing else.
        """
        self.ran: list[int] = []
        """The block of each launch."""
        self.ms = dict(ms) if isinstance(ms, Mapping) else {block: 640.0 / block for block in ms}

        self.act, self.rest = act, rest
        # What a hook or function captures is a part of its code, and ranks and jobs would have
        # different ones.
        _steps[name] = self
        options = {"n_repeat": 1, "n_warmup": 0, **options}
        if face == "contextual":

            def hook(full: dict[str, Any]) -> None:
                globals()["_steps"][name].work(full["BLOCK"])

            self.kernel = autotuned(
                configs=[triton.Config({"BLOCK": block}, pre_hook=hook) for block in self.ms]
            )

            def closure(x: torch.Tensor) -> Any:
                return rest(launch(self.kernel, x))

            self.call: Any = contextual_autotune(is_dist=dist.is_initialized(), **options)(
                named(name, closure)
            )
        else:

            def function(x: torch.Tensor, BLOCK: int) -> Any:
                step = globals()["_steps"][name]
                step.work(BLOCK)
                return step.rest(x + 1.0)

            space = [{"BLOCK": block} for block in self.ms]
            self.call = autotune(space, lambda x: x.numel(), **options)(named(name, function))

    def work(self, block: int) -> None:
        self.ran.append(block)
        ExactTime.pass_ms(self.ms[block])
        self.act(block)

    def __call__(self, x: torch.Tensor, **options: Any) -> Any:
        return self.call(x, **options)

    @property
    def records(self) -> Any:
        return self.call.records

    @property
    def best(self) -> list[int]:
        """The block of each record, in the order of tunings."""
        return [record.best.fields["BLOCK"] for record in self.records]

    @property
    def failures(self) -> list[str | None]:
        """Why candidates of the last record failed."""
        return failures(self)


def all_reduced(y: torch.Tensor) -> torch.Tensor:
    """The rest of a step: a sum over all ranks."""
    dist.all_reduce(y)
    return y


# -- jobs that share a cache -----------------------------------------------------------------------


class Job(Step):
    """The first two calls of a step in the next job of all ranks, which decorates it anew, as
    another process would.
    """

    def __init__(
        self,
        face: Face,
        ms: Mapping[int, float] | Sequence[int] = (16, 32, 64),
        *,
        n: int = 64,
        path: Path | None = None,
        settings: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """The cache lies at ``path``, and variables ``DIST_TUNE_...`` are set as ``settings`` says.

        Other options are those of ``Step``.
        """
        if dist.is_initialized():
            dist.barrier()
        super().__init__(face, ms, **options)
        x, values = torch.zeros(n), list[Any]()
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
            for name, setting in {"CACHE_DIR": str(path or folder()), **(settings or {})}.items():
                patch.setenv(f"DIST_TUNE_{name}", setting)
            warnings.simplefilter("always")
            self.error = caught(lambda: values.append(self(x)))
            self.first = list(self.ran)
            """The blocks of the first call's launches."""
            self.record: Any = self.records[-1] if self.records else None
            self.how = self.error.kind
            """"tuned 64", "hit 64", "given 64" (without a tuning or a record of its own), or the
            error's name.
            """
            if values:
                n_records = len(self.records)
                values.append(self(x))
                (block,) = self.ran[len(self.first) :]
                assert (
                    not is_interpreted() or [value.tolist() for value in values] == [[1.0] * n] * 2
                )
                assert (
                    len(self.first) == 1 or not (self.record is None or self.record.is_recalled),
                    len(self.records),
                ) == (
                    True,
                    n_records,
                )
                kinds = {None: "given", True: "hit", False: "tuned"}
                self.how = f"{kinds[self.record and self.record.is_recalled]} {block}"
        self.warned = [str(each.message) for each in warned]


def records(path: Path | None = None) -> list[TuningRecord]:
    """All that are kept here, or where the cache of this body lies."""
    return [entry.record for entry in Cache(path or folder()).entries()]


def edited(
    rank: int,
    path: Path | None = None,
    *,
    environment: Mapping[str, Any] | None = None,
    **changes: Any,
) -> None:
    """Change fields of all records of a rank at ``path``, or else of all ranks, and keep each under
    its new key; ``winner`` is a block.
    """
    if path is None:
        dist.barrier()
    cache = Cache(path or folder())
    for entry in cache.entries() if path is not None or rank == 0 else []:
        record, update = entry.record, dict(changes)
        if "winner" in changes:
            update["winner"] = next(
                each.index
                for each in record.candidates
                if each.fields["BLOCK"] == changes["winner"]
            )
        if environment is not None:
            update["environment"] = record.environment.model_copy(update=dict(environment))
        changed = record.model_copy(update=update)
        entry.path.unlink()
        cache.path_of(changed.cache_key).write_bytes(record_bytes(changed))
    if path is None:
        dist.barrier()


def own_records(face: Face, rank: int, winner: int = 32, **options: Any) -> Path:
    """The rank's own folder after a job, with records that say this winner."""
    path = folder() / str(rank)
    Job(face, path=path, **options)
    edited(rank, path, winner=winner)
    return path


# -- functions with configs ------------------------------------------------------------------------

QUICK: Any = {"n_warmup": 0, "n_repeat": 1, "cache": False}
BLOCKS = [{"block": block} for block in (1, 2, 4)]
runs_of_this_process: list[int] = []
"""Not a variable of a test's function: what a function has captured is a part of its code, and so
of its cache key.
"""


def shape_of(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return tuple(x.shape)


def chosen(function: TunedFunction[Any, Any]) -> list[str]:
    """The configs that its tunings ended with."""
    return [record.best.config for record in function.records]


def failures(tuned: Any) -> list[str | None]:
    """Why candidates of the last record failed."""
    return [each.failure for each in tuned.records[-1].candidates]


def names(tuned: Any) -> list[tuple[str, bool]]:
    """Kernels and functions of the records, and whether they came from the cache."""
    return sorted(
        (record.kernel.rpartition(".")[2], record.is_recalled) for record in tuned.records
    )


def named(name: str, function: Any) -> Any:
    """A rank that has left one call may wait in the next one, and others come late: they tell calls
    apart by names.
    """
    function.__qualname__ = name
    return function


def told(call: Any) -> tuple[str, str, float]:
    """The error that a call raises, its message, and after how many seconds; empty if there is
    none.
    """
    began = time.monotonic()
    try:
        call()
    except BaseException as error:  # noqa: BLE001  # KeyboardInterrupt, too
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No progress, and folders of the test's own."""
    for name, value in {
        "VERBOSITY": "quiet",
        "LOG_DIR": str(tmp_path / "logs"),
        "CACHE_DIR": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(f"DIST_TUNE_{name}", value)


# -- jobs that are tuned in their own calls --------------------------------------------------------


def constants_of(source: Any) -> dict[str, Any]:
    """The constants of a kernel's source, as ``FakeH200.launch_ms`` is given it."""
    names = source.fn.arg_names
    return {
        names[at[0]] if isinstance(at, tuple) else at: value
        for at, value in source.constants.items()
    }


def online_threads() -> list[threading.Thread]:
    """The threads of tunings beside this process's calls."""
    return [each for each in threading.enumerate() if each.name == "dist_tune online"]


def run_job(
    step: Callable[[int], Any],
    *,
    n_more: int = 5,
    n_most: int = 4000,
    is_over: Callable[[], bool] = lambda: not online_threads(),
) -> list[Any]:
    """The values of ``step(k)``, called until its tuning is over on all ranks and ``n_more`` times
    after that.
    """
    values, n_left = list[Any](), n_more
    while n_left and len(values) < n_most:
        values.append(step(len(values)))
        over = torch.tensor(float(len(values) > 1 and is_over()))
        if dist.is_initialized():
            dist.all_reduce(over, dist.ReduceOp.MIN)
        n_left -= int(over)
        time.sleep(1e-3)
    assert not n_left, f"not over after {len(values)} calls"
    return values


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kernel: Any) -> torch.Tensor:
        ctx.kernel = kernel
        return launch(kernel, x.detach().float()).to(x.dtype) + x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        launch(ctx.kernel, grads[0].float())
        return 2 * grads[0], None


class Layer(torch.nn.Module):
    """A linear layer, a kernel in the forward and in the backward pass, and dropout."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.kernel = torch.nn.Linear(64, 64), kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.nn.functional.dropout(
            _Doubled.apply(self.linear(x), self.kernel), 0.5
        )
        return y


# -- kernels of libraries --------------------------------------------------------------------------


class Filed(Autotuner):  # type: ignore[misc]  # Triton is not typed
    """As libraries make it that keep configs in files of their own: a copy of Triton's run, with
    another key.
    """

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.nargs: Any = dict(zip(self.arg_names, args, strict=False))
        if len(self.configs) > 1:
            named = {**self.nargs, **kwargs}
            key = f"{named['n'] // 10}_{named['x_ptr'].dtype}"
            if key not in self.cache:
                self.cache[key] = self.prune_configs(kwargs)[0]
            config = self.cache[key]
        else:
            config = self.configs[0]
        self.best_config = config
        result = self.fn.run(*args, **kwargs, **config.all_kwargs())
        self.nargs = None
        return result


class Bare:
    """A cache with no more than Triton asks for."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    def __contains__(self, key: object) -> bool:
        return key in self.kept

    def __getitem__(self, key: Any) -> Any:
        return self.kept[key]

    def __setitem__(self, key: Any, config: Any) -> None:
        self.kept[key] = config


def made(
    kind: Any, kernel: Any = add_kernel, restored: list[str] | None = None, *blocks: int
) -> Any:
    """A kernel as a library makes it: by its class of tuners, or with its class of caches."""
    if issubclass(kind, Autotuner):
        return kind(
            kernel, kernel.arg_names, configs(*(blocks or (16, 32, 64))), ["n"], None, restored
        )
    kernel = autotuned(kernel, restore_value=restored)
    kernel.cache = kind()
    return kernel


def threads_left() -> list[str]:
    """Names of the watchdog's threads in this process."""
    return [each.name for each in threading.enumerate() if "watchdog" in each.name]


def stop_for(seconds: float) -> None:
    """SIGSTOP for so long, as a debugger or a full swap does."""
    me = os.getpid()
    with subprocess.Popen(["/bin/sh", "-c", f"kill -STOP {me}; sleep {seconds}; kill -CONT {me}"]):
        pass
