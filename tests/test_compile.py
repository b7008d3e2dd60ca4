"""Compiling and loading real sm_90 code ahead, on the fake H200."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dist_tune.compile import Failure, Resources, load, reason_of
from dist_tune.launch import Launch
from tests.fake_driver import FakeH200
from tests.ranks.kernels import autotuned
from tests.ranks.world import on_ranks, values


@triton.jit
def dot_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, tl.dot(x, x))


def launch_of(kernel: Any = None) -> Launch:
    args = torch.zeros(64, dtype=torch.float16), torch.zeros(64), 64
    return Launch(autotuned(kernel) if kernel else autotuned(), args, {"grid": (1,), "warmup": False})


def on_fake(function: Callable[..., Any], *args: Any, mode: str = "fake") -> Any:
    (value,) = values(on_ranks(1, function, *args, mode=mode, is_dist=False))
    return value


def terminal_of(call: Callable[[], Any]) -> tuple[Any, str]:
    """What ``call`` returns, and what it writes to the file descriptors of stdout and stderr."""
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        saved = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            value = call()
            print("after", flush=True)
        finally:
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)
        file.seek(0)
        return value, file.read().decode()


def _loads(rank: int) -> Any:
    return load(launch_of(), triton.Config({"BLOCK": 16})), FakeH200.launches


def test_loading_tells_resources_and_launches_nothing():
    """Shared memory from the compiler, registers and spills from the loader."""
    resources, launches = on_fake(_loads)
    assert (resources, launches) == (Resources(shared_bytes=0, n_regs=64, n_spills=0), [])


def _out_of_resources(rank: int) -> Any:
    FakeH200.shared_limit_bytes = 32767
    return load(launch_of(dot_kernel), triton.Config({"BLOCK": 128})), FakeH200.launches


def test_what_does_not_fit_fails_without_a_launch():
    """Triton's OutOfResources becomes a value that says what was needed and what there is."""
    failure, launches = on_fake(_out_of_resources)
    assert isinstance(failure, Failure)
    assert failure.reason.startswith("OutOfResources: out of resource: shared memory, Required: 32768, Hardware limit: 32767")
    assert launches == []


def _too_few_registers(rank: int) -> Any:
    return terminal_of(lambda: load(launch_of(dot_kernel), triton.Config({"BLOCK": 64}, maxnreg=24)))


def test_an_error_of_ptxas_is_a_failure():
    """A maxnreg below what the kernel needs: the assembler's words are the reason, on one line, and the terminal stays clean."""
    failure, terminal = on_fake(_too_few_registers)
    assert isinstance(failure, Failure)
    assert failure.reason.startswith("PTXASError: ")
    assert "Insufficient registers" in failure.reason
    assert "\n" not in failure.reason
    assert ".entry dot_kernel" in failure.output  # Triton prints the PTX
    assert terminal == "after\n"


def _noisy(rank: int, does_fail: bool) -> Any:
    def load_binary(*args: Any) -> tuple[int, int, int, int, int]:
        print("python")
        print("python's stderr", file=sys.stderr)
        ctypes.CDLL(None).dprintf(1, b"C\n")
        ctypes.CDLL(None).dprintf(2, b"C's stderr\n")
        if does_fail:
            raise RuntimeError("does\n\n  not load  ")
        return (1, 2, 64, 0, 1024)

    FakeH200.utils.load_binary = load_binary  # type: ignore[method-assign, assignment]
    return terminal_of(lambda: load(launch_of(), triton.Config({"BLOCK": 16})))


def test_what_a_compiler_writes_goes_into_the_failure():
    """From Python and from C, on stdout and stderr; none of it reaches the terminal, which works again afterwards."""
    failure, terminal = on_fake(_noisy, True)
    assert failure.reason == "RuntimeError: does not load"
    assert set(failure.output.splitlines()) >= {"C", "C's stderr", "python", "python's stderr"}  # Triton may warn, too
    assert terminal == "after\n"


def test_what_is_written_meanwhile_reaches_the_terminal_if_nothing_fails():
    """It may be another thread's."""
    resources, terminal = on_fake(_noisy, False)
    assert isinstance(resources, Resources)
    assert terminal.endswith("after\n")
    assert {"C", "python's stderr", "C's stderr"} <= set(terminal.splitlines())


def _without_streams(rank: int) -> Any:
    sys.stdout = sys.stderr = None
    before = len(os.listdir("/proc/self/fd"))
    loaded = [load(launch_of(), triton.Config({"BLOCK": 16})) for _ in range(3)]
    return loaded, len(os.listdir("/proc/self/fd")) - before


def test_a_process_without_a_terminal_compiles_too():
    """``sys.stdout`` may be None, as under a window manager; and no file descriptor is left behind."""
    loaded, n_left = on_fake(_without_streams)
    assert ([type(each) for each in loaded], n_left) == ([Resources] * 3, 0)


def _descriptors(rank: int) -> Any:
    config = triton.Config({"BLOCK": 16})
    load(launch_of(), config)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        load(launch_of(), config)
    os.close(1)
    return type(load(launch_of(), config)).__name__, len(os.listdir("/proc/self/fd")) + 1 - before


def test_file_descriptors_are_given_back():
    """Also where stdout is closed."""
    assert on_fake(_descriptors) == ("Resources", 0)


def _interpreted(rank: int) -> Any:
    return load(launch_of(), triton.Config({"BLOCK": 16}))


def test_the_interpreter_compiles_nothing():
    assert on_fake(_interpreted, mode="interpret") is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError(""), "ValueError: "),
        (RuntimeError("a\n  b \n\nc"), "RuntimeError: a b c"),
        (KeyError("x" * 400), "KeyError: '" + "x" * 299),
    ],
)
def test_a_reason_is_one_line(error: Exception, reason: str):
    """Of bounded length, with the type first."""
    assert reason_of(error) == reason
