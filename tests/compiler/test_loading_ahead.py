"""Kernels are loaded as soon as they are compiled, here or by another process, not after the last one is."""

from __future__ import annotations

import errno
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from dist_tune.compiler.candidate import Candidate, Compilation, Failure, Resources
from dist_tune.compiler.pool import Compiler
from dist_tune.errors import FailureKind
from dist_tune.runtime.kernel_launch import Launch
from dist_tune.testing import fake_gpu, on_ranks, values
from dist_tune.tuning.context import TuningContext
from dist_tune.tuning.phases import compilation
from tests.ranks.kernels import add_kernel, autotuned, configs, launch, tuned

pytestmark = pytest.mark.processes


def _loads_before_the_meeting(rank: int) -> Any:
    loads, met, begun = list[str](), list[int](), list[int]()
    load, reduce, compile_one = fake_gpu._Utils.load_binary, TuningContext.reduce, Compilation.run

    def compiling(self: Compilation, limit_bytes: int | None) -> bool:
        begun.append(1)
        until = time.monotonic() + 20.0
        while len(begun) == 6 and len(loads) < 4 and time.monotonic() < until:  # the last one takes as long as that
            time.sleep(0.01)
        return compile_one(self, limit_bytes)

    def loading(self: Any, name: str, *rest: Any) -> Any:
        loads.append(name)
        return load(self, name, *rest)

    def meeting(self: Any, topic: str, part: Any, fn: Any) -> Any:
        if topic == "compiled":
            met.append(len(loads))
        return reduce(self, topic, part, fn)

    fake_gpu._Utils.load_binary, TuningContext.reduce = loading, meeting  # type: ignore[method-assign,assignment]
    Compilation.run = compiling  # type: ignore[method-assign,assignment]
    kernel, x = autotuned(blocks=(16, 32, 64, 128, 256, 512)), torch.zeros(64)
    tuned(None, lambda: launch(kernel, x), is_dist=False)()
    return len(loads), met


def test_kernels_are_loaded_while_others_are_compiled():
    """Most are on the device when the last one is compiled."""
    ((n_loads, (n_before,)),) = values(on_ranks(1, _loads_before_the_meeting, mode="fake"))
    assert n_loads == 6
    assert n_before >= 4


def _on_disk(rank: int) -> Any:
    kernel, x = autotuned(blocks=(16, 32, 64)), torch.zeros(64)
    asked = Launch(kernel, (x, x, 64), {"grid": (1,), "warmup": False})
    found = []
    for wanted in ([0], [0, 2], []):
        add_kernel.device_caches.clear()  # as in another process
        compiler = Compiler(2, 60)
        compiler.begin("site", asked, configs(16, 32, 64), [])
        found.append((sorted(compiler.on_disk("site", range(3))), sorted(compiler.ready("site"))))
        compiler.queue("site", wanted)
        for _ in compiler.wait("site", wanted):
            pass
        found.append((sorted(compiler.on_disk("site", range(3))), sorted(compiler.ready("site"))))
        for index in wanted:
            compiler.load("site", index)
        assert not compiler.ready("site")
        compiler.end()
    return found


def test_what_another_process_has_compiled_is_known_without_asking_it():
    """By Triton's cache folder; what is compiled here is ready instead, until it is loaded."""
    ((begun, first, again, second, last, none),) = values(on_ranks(1, _on_disk, mode="fake"))
    assert (begun, first) == (([], []), ([], [0]))
    assert (again, second) == (([0], []), ([], [0, 2]))
    assert last == none == ([0, 2], [])


@pytest.mark.parametrize("n_failing", [0, 2, 100])
def test_a_kernel_that_the_machine_cannot_load_beside_compilers_is_loaded_after_them(n_failing: int):
    """Its launcher is compiled in a process of its own, which may have no file descriptor or memory left while others are at work."""
    n_loads = [0]

    def load() -> None:
        n_loads[0] += 1
        if n_loads[0] <= n_failing:
            raise OSError(errno.EMFILE, "Too many open files")

    compiled = SimpleNamespace(_init_handles=load, metadata=SimpleNamespace(shared=64), n_regs=32, n_spills=0, hash="")
    launch: Any = SimpleNamespace(compile=lambda config: compiled)
    candidate = Candidate(launch, triton.Config({}))
    early = candidate.load(is_early=True)
    assert early == (None if n_failing else Resources(64, 32, 0))
    assert candidate.is_ready == bool(n_failing)
    at_last = candidate.load()
    assert isinstance(at_last, Failure) == (n_failing == 100)
    assert not isinstance(at_last, Failure) or at_last.kind is FailureKind.MACHINE


def test_a_load_beside_compilers_is_named_to_the_watchdog():
    """A module that never loads is the candidate's matter, not that of a compilation."""
    noted = list[str]()
    note: Any = SimpleNamespace(note=noted.append)
    context: Any = SimpleNamespace(
        compiler=SimpleNamespace(ready=lambda label: {0, 1, 2}),
        replays=SimpleNamespace(watchdog=note),
        ranks=SimpleNamespace(beat=lambda doing, may_last: None),
        sites=SimpleNamespace(load=lambda site, index, is_early: noted.append(f"{index} is_early={is_early}")),
    )
    site: Any = SimpleNamespace(label="add_kernel[64]", failures={1: "does not compile"})
    compilation._load_ready(context, [site], {"add_kernel[64]": {0, 1, 2}})
    assert noted == [text for i in (0, 2) for text in (f"loading candidate {i} of add_kernel[64]", f"{i} is_early=True")]
