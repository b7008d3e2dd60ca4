"""What a user hears of compilation, and what it leaves behind: after a tuning, and after one that breaks off."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import Any

import pytest
import torch
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import _async_compile

from dist_tune import contextual_autotune
from dist_tune.testing import values
from tests.compiler.test_candidate import in_memory, terminal_of
from tests.ranks.kernels import add_kernel, autotuned, launch, tuned
from tests.ranks.test_sharing import QUICK, dot, dots, on_fake, rank_kernel


def state() -> Any:
    """What a tuning changes while it compiles."""
    return (
        CUDABackend.make_ptx,
        _async_compile.active_mode.get(),
        sys.stdout,
        sys.stderr,
        os.fstat(2).st_ino,
        len(os.listdir("/proc/self/fd")),
    )


def threads_after_a_while() -> int:
    end = time.monotonic() + 5
    while threading.active_count() > 1 and time.monotonic() < end:
        time.sleep(0.01)
    return threading.active_count()


def _noisy(rank: int) -> Any:
    step = dots(dot(64), dot(64, pack=3), dot(64, maxnreg=24))
    closure = step.__wrapped__
    logging.basicConfig(format="logged %(message)s")
    runs = []

    def speaking() -> None:
        closure()
        runs.append(1)
        print("printed")
        print("printed to stderr", file=sys.stderr)
        logging.warning("well")
        sys.stdout.flush()
        os.write(1, b"C\n")
        if len(runs) > 2:  # in the first run, and in the probe, a failing compiler may take it for its own
            os.write(2, b"C's stderr\n")

    _, terminal = terminal_of(tuned(None, speaking))
    return len(runs), terminal


def test_only_the_user_is_heard():
    """What Python and C++ dump for failing candidates is in the rank's log, and every line of the closure's on the terminal."""
    outcomes = on_fake(2, _noisy, DIST_TUNE_VERBOSITY="quiet")
    logs = "".join(outcome.log for outcome in outcomes)
    for part in ("tt.elementwise_inline_asm", "error: ", ".entry dot_kernel", "Insufficient registers"):
        assert part in logs
    for n_runs, terminal in values(outcomes):
        expected = ["printed", "printed to stderr", "logged well", "C"] * n_runs
        assert sorted(terminal.splitlines()) == sorted([*expected, *["C's stderr"] * (n_runs - 2), "after"])


def _raises(rank: int, error: str) -> Any:
    before = state()
    kernel = autotuned(blocks=(16, 32, 64, 128))

    def closure(x: torch.Tensor) -> None:
        launch(kernel, x)
        if error:
            raise {"KeyError": KeyError, "KeyboardInterrupt": KeyboardInterrupt}[error]("in the first run")

    raised = ""
    try:
        contextual_autotune(is_dist=False, **QUICK)(closure)(torch.zeros(64))
    except (KeyError, KeyboardInterrupt) as caught:
        raised = type(caught).__name__
    n_threads = threads_after_a_while()
    return raised, [a == b for a, b in zip(before, state(), strict=True)], n_threads, set(in_memory(add_kernel))


@pytest.mark.parametrize("error", ["", "KeyError", "KeyboardInterrupt"])
def test_triton_and_the_terminal_are_left_as_found(error: str):
    """After a tuning, and after an exception in the middle of the first run while threads compile."""
    assert values(on_fake(1, _raises, error, is_dist=False)) == [(error, [True] * 6, 1, {"CompiledKernel"})]


def _two_threads(rank: int) -> Any:
    before = state()
    both = threading.Barrier(2, timeout=20)
    kernels = autotuned(blocks=(16, 32)), autotuned(rank_kernel, blocks=(16, 32))
    x = torch.zeros(64)
    runs = [0, 0]

    def closure(number: int) -> None:
        kernels[number][(1,)](x, x, 64, *[7] * number)
        runs[number] += 1
        if runs[number] == 1:
            both.wait()  # both compile

    def tune(number: int) -> None:
        contextual_autotune(is_dist=False, **QUICK)(lambda: closure(number))()

    threads = [threading.Thread(target=tune, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [len(kernel.cache) for kernel in kernels], threads_after_a_while(), [a == b for a, b in zip(before, state(), strict=True)]


@pytest.mark.once
def test_two_tunings_in_two_threads():
    """Both compile at once, one after the other goes on, and the last to leave restores all."""
    assert values(on_fake(1, _two_threads, is_dist=False)) == [([1, 1], 1, [True] * 6)]
