"""What becomes of a compilation: reasons of those that fail, hooks and dumps of the user's, work
that is done once. Real sm_90 code.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler.compiler import ASTSource
from triton.runtime import _async_compile

from dist_tune.compiler import reason_of
from tests.steps import (
    add_kernel,
    autotuned,
    configs,
    constants_of,
    failures,
    gemm_kernel,
    launch,
    tuned,
)
from tests.worlds import log, on_each_rank

alone: Any = {"n": 1, "modes": ["fake"], "is_dist": False}


@triton.jit
def asm_kernel(x, BLOCK: tl.constexpr):
    """Of 32 ptxas says that it is not valid; of 64 MLIR does, on descriptor 2 in the front end, and
    Triton prints the module.
    """
    at = tl.arange(0, BLOCK)
    loaded = tl.load(x + at)
    if BLOCK == 32:
        loaded = tl.inline_asm_elementwise(
            "no.such.thing $0, $1;", "=r,r", [loaded], dtype=tl.int32, is_pure=True, pack=1
        )
    if BLOCK == 64:
        loaded = tl.inline_asm_elementwise(
            "", "=r,r", [loaded], dtype=tl.int32, is_pure=True, pack=3
        )
    tl.store(x + at, loaded)


def terminal_of(call: Callable[[], Any]) -> str:
    """What ``call`` writes to the descriptors of stdout and stderr."""
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        saved = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            call()
            print("after", flush=True)
        finally:
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)
        file.seek(0)
        return file.read().decode()


FAILING = [
    (configs(32), "PTXASError: "),
    (configs(64), "RuntimeError: error encountered during parsing"),
    (configs(24), "CompilationError: "),
    (configs(16, num_warps=3), "AssertionError: num_warps must be a power of 2"),
]


@on_each_rank(**alone)
def test_a_failing_compiler_becomes_a_reason(rank: int):
    """Its words on one line; what its process dumps in the log; what the front end dumps on the
    terminal, as without dist_tune; and nothing left in Triton.
    """
    kernel = autotuned(
        asm_kernel, configs=[*configs(16), *(each for each, _ in FAILING for each in each)], key=()
    )
    step = tuned(None, lambda: kernel[(1,)](torch.zeros(64, dtype=torch.int32)), is_dist=False)
    terminal = terminal_of(step)
    none, *found = failures(step)
    assert none is None
    for failure, (_, reason) in zip(found, FAILING, strict=True):
        assert re.search(reason, str(failure))
        assert "\n" not in str(failure)
    told = ("no.such.thing", "tt.elementwise_inline_asm")
    assert [each in log() for each in told] == [True, False]
    assert [each in terminal for each in told] == [False, True]
    assert terminal.splitlines()[-1] == "after"
    assert {type(each).__name__ for each in asm_kernel.device_caches[0][0].values()} == {
        "CompiledKernel"
    }
    assert _async_compile.active_mode.get() is None


def test_a_reason_is_one_line():
    """Of bounded length, with the type first."""
    errors = [ValueError(""), RuntimeError("a\n  b \n\nc"), KeyError("x" * 400)]
    assert [reason_of(each) for each in errors] == [
        "ValueError: ",
        "RuntimeError: a b c",
        "KeyError: '" + "x" * 299,
    ]


def is_32(*, src: Any = None, compile: Any = None, **facts: Any) -> bool:
    """Whether a hook is called for that block."""
    return 32 in (constants_of(src) if src else compile["constants"]).values()


def refuse(**facts: Any) -> None:
    if is_32(**facts):
        raise ValueError("not today")


def end_thread(**facts: Any) -> None:
    if is_32(**facts):
        sys.exit(1)


HOOKS: dict[str, tuple[Any, str, Any, str]] = {
    "keeps Triton from compiling": (
        triton.knobs.runtime,
        "jit_cache_hook",
        lambda **facts: True,
        "",
    ),
    "raises while it compiles": (
        triton.knobs.compilation,
        "listener",
        refuse,
        "ValueError: not today",
    ),
    "raises after it": (
        triton.knobs.runtime,
        "jit_post_compile_hook",
        refuse,
        "ValueError: not today",
    ),
    "ends its thread": (triton.knobs.compilation, "listener", end_thread, "SystemExit"),
}


@on_each_rank(**alone, cases=[*HOOKS])
def test_hooks_are_the_user_s(rank: int, case: str):
    """One that keeps Triton from compiling leaves nothing to load or tune; one that fails drops its
    config alone.
    """
    knobs, name, hook, reason = HOOKS[case]
    step = tuned(autotuned(triton.jit(add_kernel.fn)), is_dist=False)
    with knobs.scope():
        setattr(knobs, name, hook)
        step(torch.zeros(64))
    assert [bool(each.failure) for record in step.records for each in record.candidates] == (
        [False, True, False] if reason else []
    )
    assert reason in log()


@pytest.mark.once
@on_each_rank(**alone)
def test_dumps_are_the_user_s(rank: int):
    """The dump of passes that the user has asked for is on the terminal."""
    os.environ["MLIR_ENABLE_DUMP"] = "1"
    kernel = autotuned(triton.jit(add_kernel.fn), (16, 32))
    assert "IR Dump Before" in terminal_of(lambda: tuned(kernel, is_dist=False)(torch.zeros(64)))


@pytest.mark.once
@on_each_rank(**alone)
def test_the_front_end_is_run_once_for_configs_that_differ_in_warps(rank: int):
    """But for the first run's, which waits for no other thread.

    A parser that loses count is asked again.
    """
    runs, is_lost, own, parse = (
        list[str](),
        iter((True, True)),
        ASTSource.make_ir,
        triton.JITFunction.parse,
    )

    def losing_count(kernel: Any) -> Any:
        """As Python 3.11 does where a collection lets another thread parse meanwhile."""
        if next(is_lost, False):
            raise SystemError("AST constructor recursion depth mismatch")
        return parse(kernel)

    def make_ir(source: Any, *args: Any) -> Any:
        runs.append(source.name)
        return own(source, *args)

    data, sizes = (
        torch.zeros(64, 64, dtype=torch.bfloat16),
        [(n, warps) for n in (16, 32) for warps in (1, 2, 4)],
    )
    kernel = triton.autotune(
        [triton.Config({"BM": 16, "BN": n}, num_warps=warps) for n, warps in sizes], key=[]
    )(gemm_kernel)
    step = tuned(None, lambda: kernel[(1,)](data, data, data.float(), 64), is_dist=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ASTSource, "make_ir", make_ir)
        patch.setattr(triton.JITFunction, "parse", losing_count)
        step()
    assert (failures(step), len(runs) <= 3) == ([None] * 6, True)


@on_each_rank(**alone)
def test_what_is_in_memory_or_on_disk_is_not_compiled_again(rank: int):
    """And no compilation keeps a tensor of the launch that asked for it."""
    hits, kernel, alive = list[bool](), autotuned(triton.jit(add_kernel.fn)), list[Any]()
    triton.knobs.compilation.listener = lambda *, cache_hit, **facts: hits.append(cache_hit)

    def step() -> None:
        x = torch.zeros(64)
        alive.append(weakref.ref(x))
        launch(kernel, x)

    for is_in_memory in (True, True, False):
        if not is_in_memory:
            kernel.fn.device_caches.clear()
        kernel.cache.clear()
        tuned(None, step, is_dist=False, cache=False)()
        assert {each() for each in alive} == {None}
    assert hits == [False] * 3 + [True] * 3
