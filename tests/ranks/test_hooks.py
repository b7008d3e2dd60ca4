"""Kernels as libraries decorate and launch them: hooks, heuristics, restored tensors, what a launch
and a tuning leave on them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch.utils.checkpoint import checkpoint
from triton import knobs

from dist_tune import PeerFailedError
from tests.steps import (
    accumulate_kernel,
    add_kernel,
    all_reduced,
    autotuned,
    best,
    configs,
    launch,
    tuned,
)
from tests.worlds import is_interpreted, log, on_each_rank

N = 128
Closure = Callable[[torch.Tensor], Any]


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(N, meta["BLOCK"]),)


# -- what is launched ------------------------------------------------------------------------------


@triton.jit
def scaled_kernel(
    pointers, n, scales, bias, ACT: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = ACT(tl.load(pointers[0] + at, mask=at < n)) * scales[0] + scales[1]
    if bias is not None:
        value += tl.load(bias + at, mask=at < n)
    tl.store(pointers[1] + at, value.to(DTYPE), mask=at < n)


@triton.jit
def double(value):
    return 2.0 * value


@triton.jit
def negative(value):
    return -value


@triton.jit
def even_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr = False):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = (at < n) | EVEN
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=keep) + 1.0, mask=keep)


def heuristics(rank: int) -> Closure:
    """Inside, which give the block, and outside, which give the size."""
    inside = autotuned(
        triton.heuristics({"BLOCK": lambda args: 32})(add_kernel),
        configs=[triton.Config({}, num_warps=w) for w in (1, 2)],
    )
    outside: Any = triton.heuristics({"n": lambda args: args["x_ptr"].numel()})(
        autotuned(blocks=(16, 32))
    )

    def closure(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        outside[grid](x_ptr=launch(inside, x), y_ptr=y)
        return y

    return closure


def tuples_functions_none_and_dtypes(rank: int) -> Closure:
    names = ["bias"]  # restored and zeroed, if it is there
    keys = ("n", "scales", "bias", "ACT", "DTYPE")
    kernel, bias = (
        autotuned(scaled_kernel, (16, 32), keys, reset_to_zero=names, restore_value=names),
        torch.zeros(N),
    )

    def closure(x: torch.Tensor) -> torch.Tensor:
        y, z = torch.empty_like(x, dtype=torch.float16), torch.empty_like(x)
        kernel[grid]((x, y), N, (2.0, 1), None, double, tl.float16)
        kernel[grid]((y, z), N, (2.0, 2), bias=bias, ACT=negative, DTYPE=tl.float32)
        return z

    return closure


class Own(torch.Tensor):
    pass


def uncommon_tensors(rank: int) -> Closure:
    """No element on rank 0, no dimension, a subclass."""
    kernel = autotuned()
    return lambda x: (
        launch(kernel, x.as_subclass(Own))
        + launch(kernel, x[0])
        + launch(kernel, x[: N * rank]).sum() * 0.0
    )


def partials(rank: int) -> Closure:
    kernel = autotuned()

    def closure(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        functools.partial(kernel[grid], x, y_ptr=y)(n=N)
        functools.partial(kernel.run, grid=grid, warmup=False)(y, y, N)
        return y

    return closure


def a_triton_op(rank: int) -> Closure:
    kernel = autotuned()

    @torch.library.triton_op("dist_tune_tests::add_one", mutates_args={})
    def add_one(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        torch.library.wrap_triton(kernel)[grid](x, y, N)
        return y

    return lambda x: add_one(add_one(x))


class AddOne(torch.autograd.Function):
    kernel: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return launch(AddOne.kernel, x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return launch(AddOne.kernel, grads[0].contiguous())


def checkpoints(rank: int) -> Closure:
    AddOne.kernel = autotuned()

    def closure(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        again, once = (
            checkpoint(AddOne.apply, x, use_reentrant=each).square().sum() for each in (True, False)
        )
        again.backward()
        assert x.grad is not None
        return x.grad + torch.autograd.grad(once, x)[0]  # 2 (2 (x + 1) + 1)

    return closure


LAUNCHES: dict[Any, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    heuristics: (2, lambda x: x + 2),
    tuples_functions_none_and_dtypes: (2, lambda x: -2 * (4 * x + 1) + 2),
    uncommon_tensors: (3, lambda x: x + 2),
    partials: (1, lambda x: x + 2),
    a_triton_op: (1, lambda x: x + 2),
    checkpoints: (1, lambda x: 4 * x + 6),
}
"""What makes the closure on a rank -> sites, and the result."""


@on_each_rank(cases=[*LAUNCHES], modes=("interpret", "fake"))
def test_what_libraries_pass_and_how_they_launch(rank: int, make: Callable[[int], Closure]) -> Any:
    """Tuned as any other launch, with the right result and one config for all ranks."""
    n_sites, expected = LAUNCHES[make]
    step, x = tuned(None, make(rank)), torch.arange(float(N))
    for _ in range(2):
        assert torch.equal(step(x), expected(x)) or not is_interpreted()
    assert len(step.records) == n_sites
    return [(each.key, each.best.config) for each in step.records]


@on_each_rank(modes=("interpret", "fake"))
def test_heuristics_above_the_tuner(rank: int):
    """One site with and without the constant that they give; the log tells of the variant that is
    compiled without it.
    """
    kernel = autotuned(even_kernel, blocks=(16, 32))
    above = triton.heuristics({"EVEN": lambda args: args["n"] % 32 == 0})(kernel)
    step = tuned(kernel, lambda x: launch(kernel, launch(above, x)))
    called = [step(torch.zeros(N))[0].item() for _ in range(2)]
    assert (len(best(kernel)), step.records[0].n_variants) == (1, 1 if is_interpreted() else 2)
    assert (
        called == [2.0, 2.0]
        if is_interpreted()
        else "variant=2 is compiled: EVEN is not given\n" in log()
    )


@triton.jit
def copy_kernel(x_desc, y_desc, n: tl.constexpr, BLOCK: tl.constexpr):
    for i in range(0, n, BLOCK):
        for j in range(0, n, BLOCK):
            y_desc.store([i, j], x_desc.load([i, j]))


@on_each_rank(modes=("interpret", "fake"))
def test_hooks_that_set_the_block_shape_of_descriptors(rank: int):
    """What such a hook sets is part of what is compiled, so it also runs before compilation."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    def set_shapes(full: dict[str, Any]) -> None:
        full["x_desc"].block_shape = full["y_desc"].block_shape = [full["BLOCK"], full["BLOCK"]]

    kernel = autotuned(copy_kernel, configs=configs(16, 32, 64, pre_hook=set_shapes))
    x, y = torch.randn(64, 64), torch.zeros(64, 64)
    step = tuned(
        kernel,
        lambda: kernel[(1,)](
            *(TensorDescriptor(each, [64, 64], [64, 1], [1, 1]) for each in (x, y)), 64
        ),
    )
    step()
    assert [each.failure for each in step.records[0].candidates] == [None] * 3
    assert torch.equal(x, y) or not is_interpreted()


# -- hooks, restored and zeroed tensors ------------------------------------------------------------


@on_each_rank()
def test_hooks_run_as_in_vanilla_triton(rank: int):
    """Pre- and post-hook around every launch of the tuning, the reset once before the final run,
    the config's hook always.
    """
    calls: list[str] = []

    def pre(full: dict[str, Any], reset_only: bool = False) -> None:
        calls.append("reset" if reset_only else f"pre {full['BLOCK']} {full['n']}")

    def post(full: dict[str, Any], exception: Exception | None) -> None:
        calls.append(f"post {type(exception).__name__}")

    hooked = configs(32, pre_hook=lambda full: calls.append(f"config {full['BLOCK']}"))
    step = tuned(autotuned(configs=[*configs(16), *hooked], pre_hook=pre, post_hook=post))
    step(torch.zeros(64))
    *tuning, reset, final = calls
    assert Counter(tuning) == {"pre 16 64": 3, "config 32": 1, "pre 32 64": 1, "post NoneType": 4}
    assert [each for before, each in pairwise(tuning) if before.startswith("pre")] == [
        "post NoneType"
    ] * 4
    step(torch.zeros(64))
    assert (reset, calls[-2:]) == ("reset", [final, "config 32"])


def zero(full: dict[str, Any], reset_only: bool = False) -> None:
    full["y_ptr"].zero_()


ADDED: dict[str, tuple[dict[str, Any], list[float]]] = {
    "restored": ({"restore_value": ["y_ptr"]}, [6.0, 6.0, 7.0]),
    "reinterpreted": ({"restore_value": ["y_ptr"]}, [6.0, 6.0, 7.0]),
    "zeroed": ({"reset_to_zero": ["y_ptr"]}, [1.0, 1.0, 2.0]),
    "zeroed by a hook": ({"pre_hook": zero}, [1.0, 1.0, 2.0]),
    "zeroed by the hook of a config": (
        {"configs": configs(16, 32, 64, pre_hook=zero)},
        [1.0, 1.0, 1.0],
    ),
}
"""Options -> what an output of 5 that a kernel adds 1 to holds: in each run of the tuning, after
it, and after a second call.
"""


@on_each_rank(cases=[*ADDED])
def test_what_a_kernel_adds_is_of_one_launch(rank: int, case: str):
    """Put back at the end of a replay, so that later kernels read what the launch wrote; or zeroed,
    also before the run that counts.
    """
    options, expected = ADDED[case]
    kernel, follower = autotuned(accumulate_kernel, **options), autotuned(blocks=(32, 64))
    total, seen = torch.full((64,), 5.0), list[float]()

    def closure(x: torch.Tensor) -> torch.Tensor:
        given = [
            triton.reinterpret(each, tl.float32) if case == "reinterpreted" else each
            for each in (x, total)
        ]
        kernel[grid](*given, 64)
        y = launch(follower, total)
        seen.append(y[0].item() - 1.0)
        return all_reduced(y)

    step = tuned(None, closure, n_repeat=2, n_warmup=1)
    step(torch.ones(64))
    (in_runs,), after = {*seen}, total[0].item()
    step(torch.ones(64))
    assert [in_runs, after, total[0].item()] == expected


@triton.jit
def locking_kernel(x_ptr, y_ptr, n, lock_ptr, BLOCK: tl.constexpr):
    """Fails while it holds the lock, with all blocks but 64."""
    tl.store(lock_ptr, 1)
    tl.static_assert(BLOCK == 64)
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1.0, mask=at < n)
    tl.store(lock_ptr, 0)


@on_each_rank(1, is_dist=False)
def test_what_a_failed_launch_leaves_is_told_on_the_terminal(rank: int):
    """Once: the error, and the tensors that it may have written to and nothing restores; the next
    config may wait for a lock in them.
    """
    os.environ["DIST_TUNE_VERBOSITY"] = "normal"
    kernel, lock = (
        autotuned(locking_kernel, restore_value=["y_ptr"]),
        torch.zeros(1, dtype=torch.int32),
    )
    step = tuned(
        None,
        lambda x: kernel[(1,)](x, torch.empty_like(x), 64, lock) and None,
        is_dist=False,
        reset=list,
    )
    with contextlib.redirect_stderr(io.StringIO()) as terminal:
        step(torch.zeros(64))
    (line,) = [each for each in terminal.getvalue().splitlines() if "failed in its launch" in each]
    assert re.search(
        "AssertionError.*written to x_ptr, lock_ptr stays, because restore_value does not name it$",
        line,
    )


# -- best_config in a step -------------------------------------------------------------------------


@triton.jit
def partial_kernel(x_ptr, partials_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(partials_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0)))


@on_each_rank()
def test_best_config_is_what_was_just_launched(rank: int):
    """In a grid, after a launch, in the hook of another kernel and after the call; also of a
    stand-in for what one rank cannot launch.
    """
    first, launched, hooked = autotuned(partial_kernel, blocks=(64, 32, 16)), [0], list[bool]()

    def is_right() -> bool:
        return bool(first.best_config.kwargs["BLOCK"] == launched[-1])

    def hook(full: dict[str, Any]) -> None:
        hooked.append(
            is_right()
            and second.nargs is not None
            and second.best_config.kwargs["BLOCK"] == full["BLOCK"]
        )

    second = autotuned(configs=configs(16, 32, pre_hook=hook))

    def noted(meta: dict[str, Any]) -> tuple[int]:
        if meta["BLOCK"] == 32 and rank == 1:
            raise ValueError("no such block here")
        launched.append(meta["BLOCK"])
        assert is_right()
        return grid(meta)

    def closure(x: torch.Tensor, partials: torch.Tensor) -> torch.Tensor:
        for n in (N // 2, N):
            first[noted](x, partials, n)
            assert is_right()
        return launch(second, partials[: triton.cdiv(N, launched[-1])])

    step = tuned(None, closure)
    for _ in range(3):
        partials = torch.full((8,), float("nan"))
        step(torch.ones(N), partials)
        assert is_right()
        assert partials[: N // launched[-1]].sum().item() == N
    assert (all(hooked), len(hooked) > 7, len(step.records) > 2) == (True, True, True)


# -- what a tuning leaves --------------------------------------------------------------------------

HAS_LISTENER = hasattr(knobs.autotuning, "listener")
VANILLA: Any = {"do_bench": lambda call, quantiles: (call(), [1.0, 0.5, 2.0])[1]}
PRUNED: Any = {
    "prune_configs_by": {"early_config_prune": lambda configs, named, **kwargs: configs[1:]}
}


def vanilla(step: Closure) -> Closure:
    return step


def by_ranks(step: Closure) -> Closure:
    return tuned(None, step, n_repeat=3)  # type: ignore[no-any-return]


def left_on(kernel: Any) -> Any:
    """What a tuning has left, without what was measured."""
    quantiles_ms = list(kernel.configs_timings.values())
    return {
        "nargs": kernel.nargs,
        "best is in the cache": any(kernel.best_config is each for each in kernel.cache.values()),
        "timed": [each.kwargs["BLOCK"] for each in kernel.configs_timings],
        "infinite": [
            each.kwargs["BLOCK"] for each, ms in kernel.configs_timings.items() if math.isinf(ms[0])
        ],
        "are quantiles": all(
            len(each) == 3 and each[1] <= each[0] <= each[2] for each in quantiles_ms
        ),
        "types": {type(each).__name__ for each in quantiles_ms},
        "seconds": kernel.bench_time > 0,
    }


@on_each_rank()
def test_attributes_are_those_that_vanilla_leaves(rank: int):
    """After a tuning in which a config failed, after a later call, and with a config from the
    cache.
    """

    def failing(meta: dict[str, Any]) -> tuple[int]:
        if meta["BLOCK"] == 32:
            raise triton.OutOfResources(2, 1, "shared memory")
        return grid(meta)

    def found(decorated: Callable[[Closure], Closure]) -> Any:
        kernel = autotuned(**VANILLA)
        step, left = (
            decorated(lambda x: kernel[failing](x, torch.empty_like(x), N) and None),
            list[Any](),
        )
        for is_forgotten in (False, False, True):
            if is_forgotten:
                kernel.cache.clear()
                dist.barrier()  # until the record is written
                del kernel.best_config, kernel.configs_timings, kernel.bench_time
            step(torch.zeros(N))
            left.append(left_on(kernel))
        return left

    assert found(by_ranks) == found(vanilla)


@on_each_rank()
def test_the_line_of_print_autotuning_is_vanillas(rank: int):
    """Once for each tuned key on each rank, in the words of the installed Triton; none without the
    variable, or from a record.
    """

    def printed(decorated: Callable[[Closure], Closure], value: str = "1") -> str:
        os.environ["TRITON_PRINT_AUTOTUNING"] = value
        kernel = autotuned(blocks=(16, 32), **VANILLA)
        step = decorated(lambda x: launch(kernel, x))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            for n in (64, 64, 32):
                step(torch.zeros(n))
            if decorated is by_ranks:
                kernel.cache.clear()
                step(torch.zeros(64))
        text = "".join(
            line
            for line in out.getvalue().splitlines(keepends=True)
            if not line.startswith("Autotuning kernel")
        )
        assert (
            all(f"best config selected: {config};" in text for config in kernel.cache.values())
            or value == "0"
        )
        return re.sub(r"BLOCK: \d+", "BLOCK", re.sub(r"after \d+\.\d\ds", "after SECONDS", text))

    expected = printed(vanilla)
    assert expected.count("Triton autotuning for function add_kernel") == 2
    assert (printed(by_ranks), printed(by_ranks, "0")) == (expected, "")


@on_each_rank(modes=["fake"])
def test_the_listener_hears_what_vanilla_tells_it(rank: int):
    """Once for each key with a choice that is tuned, with vanilla's arguments; not for one from a
    record.
    """
    heard: list[dict[str, Any]] = []
    if HAS_LISTENER:
        knobs.autotuning.listener = lambda **told: heard.append(told)

    def told_by(decorated: Callable[[Closure], Closure]) -> Any:
        heard.clear()
        kernel, pruned = (
            autotuned(blocks=(16, 32), **VANILLA),
            autotuned(blocks=(16, 32), **VANILLA, **PRUNED),
        )
        for _ in range(2):
            decorated(lambda x: launch(pruned, launch(kernel, x)))(torch.zeros(64))
            if decorated is by_ranks:
                kernel.cache.clear()
        (first,) = heard or [{}]
        return (
            sorted(first),
            [first.get(name) for name in ("key", "duration", "cache_hit")][:: 2 if first else 1],
            len(heard),
        )

    assert told_by(by_ranks) == told_by(vanilla)


@on_each_rank()
def test_a_listener_that_raises_ends_the_call_and_leaves_the_winner(rank: int) -> Any:
    """On its rank with its own error, as in vanilla; no rank waits, and the next call and the next
    tuning go on.
    """
    if not HAS_LISTENER:
        return None

    def listener(**told: Any) -> None:
        if rank == 1:
            raise LookupError("the listener has no table")

    kernel, other = autotuned(blocks=(16, 32)), autotuned(blocks=(16, 32))
    step = by_ranks(lambda x: launch(kernel, x)[0].item())
    knobs.autotuning.listener = listener
    with pytest.raises(
        LookupError if rank == 1 else PeerFailedError, match="the listener has no table"
    ):
        step(torch.zeros(64))
    knobs.autotuning.listener = None
    again = by_ranks(lambda x: launch(other, x)[0].item())
    assert (step(torch.zeros(64)), again(torch.zeros(64))) == (1.0, 1.0)
    return best(kernel)
