"""One candidate compiled and loaded ahead: real sm_90 code, on the fake H200."""

from __future__ import annotations

import base64
import os
import re
import sys
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import _async_compile

from dist_tune.compiler.candidate import Candidate, Resources
from dist_tune.compiler.compilation import Compilation, Failure, Toolchain, reason_of
from dist_tune.compiler.pool import Compiler
from dist_tune.errors import FailureKind
from dist_tune.runtime.kernel import Launch
from dist_tune.testing import FakeH200, Mode, on_ranks, values
from tests.steps import add_kernel, autotuned, dot_kernel

TOOLS = Toolchain()


@triton.jit
def asm_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Not valid: MLIR says so on descriptor 2 in the front end, and Triton prints the module."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at).to(tl.int32)
    tl.store(y_ptr + at, tl.inline_asm_elementwise("", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=3))


def launch_of(kernel: Any = None) -> Launch:
    args = torch.zeros(64, dtype=torch.float16), torch.zeros(64), 64
    return Launch(autotuned(kernel or add_kernel), args, {"grid": (1,), "warmup": False})


def load(kernel: Any = None, limit_bytes: int | None = None, **config: Any) -> Resources | Failure | None:
    """One config from source to device."""
    FakeH200.shared_limit_bytes = limit_bytes or FakeH200.shared_limit_bytes
    compiler = Compiler(1, 60)
    compiler.begin("site", launch_of(kernel), {0: triton.Config({"BLOCK": config.pop("block", 16)}, **config)}, [0])
    try:
        return compiler.load("site", 0)
    finally:
        compiler.end()


def compiled() -> list[str]:
    """From here on, kernels that are compiled and not found on disk."""
    names: list[str] = []

    def listener(*, src: Any, cache_hit: bool, **facts: Any) -> None:
        if not cache_hit:
            names.append(src.name)

    triton.knobs.compilation.listener = listener
    return names


def in_memory(kernel: Any) -> list[str]:
    """What kind of things are in Triton's cache of a kernel."""
    return [type(each).__name__ for each in kernel.device_caches[0][0].values()]


def folder_of(candidate: Candidate) -> Path:
    """In Triton's disk cache."""
    name = base64.b32encode(bytes.fromhex(candidate.compilation.key)).decode().rstrip("=")
    return Path(os.environ["TRITON_CACHE_DIR"], name)


def on_fake(function: Callable[..., Any], *args: Any, mode: Mode = "fake") -> Any:
    # Triton 3.9 warns on the terminal if this is not set.
    (value,) = values(on_ranks(1, function, *args, mode=mode, is_dist=False, env={"TRITON_DEFAULT_FP_FUSION": "1"}))
    return value


def terminal_of(call: Callable[[], Any]) -> tuple[Any, str]:
    """What ``call`` returns, and what it writes to the descriptors of stdout and stderr."""
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


def _asked(rank: int) -> Any:
    launch, config, names = launch_of(), triton.Config({"BLOCK": 16}), compiled()
    tensors = [weakref.ref(each) for each in launch.arguments[0] if isinstance(each, torch.Tensor)]
    candidate = Candidate(launch, config)
    del launch
    alive = [each() for each in tensors if each() is not None]
    asked = alive, names[:], in_memory(add_kernel), _async_compile.active_mode.get(), candidate.compilation.is_queued
    candidate.compilation.run(TOOLS)
    ran = names[:], in_memory(add_kernel), folder_of(candidate).is_dir()
    loaded = candidate.load()
    first = loaded, in_memory(add_kernel), FakeH200.launches[:]
    known = Candidate(launch_of(), config)
    is_known = known.compilation.done.is_set() and known.compilation.key == candidate.compilation.key
    add_kernel.device_caches.clear()
    again = loaded == known.load() == load(), is_known, names[1:]
    by_user = Candidate(launch := launch_of(), triton.Config({"BLOCK": 32}))
    add_kernel[(4,)](*launch.arguments[0], BLOCK=32)
    by_user.compilation.run(TOOLS)
    return asked, ran, first, again, (by_user.load(), FakeH200.launches)


@pytest.mark.processes
def test_from_source_to_device_in_three_steps() -> None:
    """Asking compiles nothing, keeps no tensor and leaves Triton as it was; compiling writes the disk cache; loading launches nothing.

    What is in memory or on disk is not compiled again. A kernel that the user launches meanwhile is compiled for that as ever.
    """
    asked, ran, first, again, by_user = on_fake(_asked)
    assert asked == ([], [], [], None, True)
    assert ran == (["add_kernel"], [], True)
    assert first == (Resources(shared_bytes=0, n_regs=64, n_spills=0), ["CompiledKernel"], [])
    assert again == (True, True, [])
    assert by_user == (Resources(0, 64, 0), ["add_kernel"])


def _too_large(rank: int) -> Any:
    failure = load(dot_kernel, limit_bytes=32767, block=128)
    folder = folder_of(Candidate(launch_of(dot_kernel), triton.Config({"BLOCK": 128})))
    again, need = load(dot_kernel, block=128), (folder / "dist_tune.lock").read_text()
    return failure, again == failure, need, in_memory(dot_kernel), sorted(each.name for each in folder.iterdir())


@pytest.mark.processes
def test_what_does_not_fit_is_not_assembled() -> None:
    """Triton's OutOfResources becomes a value that says what is needed; it is on disk."""
    failure, *left = on_fake(_too_large)
    assert failure.reason.startswith("OutOfResources: out of resource: shared memory, Required: 32768, Hardware limit: 32767")
    assert left == [True, "32768", [], ["dist_tune.lock", "dot_kernel.source"]]
    assert failure.kind is FailureKind.COMPILE


FAILING: list[tuple[str, int, dict[str, Any], str, list[str]]] = [
    ("dot_kernel", 64, {"maxnreg": 24}, "PTXASError: .*Insufficient registers", [".entry dot_kernel"]),
    ("asm_kernel", 64, {}, "RuntimeError: error encountered during parsing", ["tt.elementwise_inline_asm"]),
    ("add_kernel", 24, {}, "CompilationError: ", []),
    ("add_kernel", 16, {"num_warps": 3}, "AssertionError: num_warps must be a power of 2", []),
]


def _fails(rank: int) -> Any:
    failures, terminal = terminal_of(lambda: [load(globals()[name], block=block, **options) for name, block, options, _, _ in FAILING])
    left = [*in_memory(dot_kernel), *in_memory(asm_kernel), *in_memory(add_kernel)]
    return failures, terminal, left, _async_compile.active_mode.get()


@pytest.mark.processes
def test_a_failing_compiler_becomes_a_reason() -> None:
    """Its words on one line, what it dumps kept beside, a line of MLIR's front end alone on the terminal, and nothing left in Triton."""
    failures, terminal, left, mode = on_fake(_fails)
    for failure, (_, _, _, reason, output) in zip(failures, FAILING, strict=True):
        assert re.match(reason, failure.reason)
        assert "\n" not in failure.reason
        for part in output:
            assert part in failure.output
    *verifier, after = terminal.splitlines()
    assert ("error: " in verifier[0], len(verifier), after) == (True, 3, "after")
    assert (left, mode) == ([], None)


def _user_s(rank: int) -> Any:
    def hook(**facts: Any) -> None:
        raise ValueError("not today")

    loaded = []
    for knobs, name, value in [
        (triton.knobs.runtime, "jit_cache_hook", lambda **facts: True),
        (triton.knobs.compilation, "listener", hook),
        (triton.knobs.runtime, "jit_post_compile_hook", hook),
    ]:
        with knobs.scope():
            setattr(knobs, name, value)
            loaded.append(load())
    os.environ["MLIR_ENABLE_DUMP"] = "1"
    _, dump = terminal_of(lambda: load(block=32))
    return loaded, dump


@pytest.mark.processes
def test_hooks_and_dumps_are_the_user_s() -> None:
    """A hook that keeps Triton from compiling leaves nothing to load; one that raises, while it compiles or after, drops the config.

    The dump of passes that the user has asked for is on the terminal.
    """
    hooked, dump = on_fake(_user_s)
    not_today = Failure("ValueError: not today")
    assert hooked == [None, not_today, replace(not_today, shared_bytes=0, kind=FailureKind.LOAD)]
    assert "IR Dump Before" in dump


def test_a_hook_that_ends_its_thread_ends_the_compilation() -> None:
    """Nobody waits for it for ever."""
    compilation = Compilation("", lambda: sys.exit(1))
    with pytest.raises(SystemExit):
        compilation.run(TOOLS)
    assert compilation.done.is_set()
    assert compilation.result.reason.startswith("SystemExit")


def _loads(rank: int) -> Any:
    return load()


@pytest.mark.processes
def test_the_interpreter_compiles_nothing() -> None:
    assert on_fake(_loads, mode="interpret") is None


def test_a_reason_is_one_line() -> None:
    """Of bounded length, with the type first."""
    assert reason_of(ValueError("")) == "ValueError: "
    assert reason_of(RuntimeError("a\n  b \n\nc")) == "RuntimeError: a b c"
    assert reason_of(KeyError("x" * 400)) == "KeyError: '" + "x" * 299
