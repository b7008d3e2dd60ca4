"""The stages after TTGIR: run once for equal input, as far as what they read is equal, and timed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.backends.nvidia.compiler import CUDABackend

from dist_tune.compiler.candidate import Compilation
from dist_tune.compiler.passes.stages import Stages, watched_stages
from dist_tune.testing import on_ranks, values
from tests.ranks.kernels import autotuned, configs, launch, tuned

Stage = Callable[[Any, Any], Any]
OWN = CUDABackend.add_stages


class Compilers:
    """Compilations through a backend whose stages after TTGIR are ``stage``, with text for a module."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stage: Callable[[Any, Any, Any], Any]) -> None:
        def add_stages(self: Any, stages: dict[str, Any], options: Any) -> None:
            stages["ttgir"] = lambda source, metadata: source
            stages["ptx"] = lambda source, metadata: stage(source, metadata, options)

        monkeypatch.setattr(CUDABackend, "add_stages", add_stages)
        self.n_waits = 0
        self.stages = Stages(self._on_wait)
        self.backend = SimpleNamespace(target="sm_90")

    def _on_wait(self) -> None:
        self.n_waits += 1

    def compile(self, text: str, metadata: dict[str, Any] | None = None, **options: Any) -> Any:
        """The result of the last stage, and the metadata; what it raised is the result as well."""
        metadata = {} if metadata is None else metadata

        def compiled() -> Any:
            made: dict[str, Any] = {}
            CUDABackend.add_stages(self.backend, made, SimpleNamespace(**options))
            return made["ptx"](made["ttgir"](text, metadata), metadata)

        compilation = Compilation("", compiled)
        self.stages.run(compilation, None)
        return compilation.result, metadata


def test_a_stage_runs_once_for_what_it_reads(monkeypatch: pytest.MonkeyPatch):
    """Text, options and metadata that it reads decide; what it does not read does not, and what it writes is written for each."""
    runs: list[Any] = []

    def stage(source: Any, metadata: Any, options: Any) -> str:
        runs.append(source)
        metadata["shared"] = len(source) * options.scale
        return f"{source}:{options.scale}:{metadata.get('limit')}"

    compilers = Compilers(monkeypatch, stage)
    with watched_stages():
        assert compilers.compile("a", {"num_stages": 1}, scale=2, num_stages=1) == ("a:2:None", {"num_stages": 1, "shared": 2})
        assert compilers.compile("a", {"num_stages": 4}, scale=2, num_stages=4) == ("a:2:None", {"num_stages": 4, "shared": 2})
        assert runs == ["a"]
        assert compilers.compile("b", scale=2, num_stages=1)[0] == "b:2:None"
        assert compilers.compile("a", scale=3, num_stages=1)[0] == "a:3:None"
        assert compilers.compile("a", {"limit": 1}, scale=2)[0] == "a:2:1"
        assert runs == ["a", "b", "a", "a"]
        compilers.stages.close()
        assert compilers.compile("a", {"num_stages": 1}, scale=2)[0] == "a:2:None"
    assert runs == ["a", "b", "a", "a", "a"]


def test_a_stage_that_goes_through_all_metadata_runs_for_each(monkeypatch: pytest.MonkeyPatch):
    runs: list[Any] = []

    def stage(source: Any, metadata: Any, options: Any) -> str:
        runs.append({**metadata})
        return "ptx"

    compilers = Compilers(monkeypatch, stage)
    with watched_stages():
        for number in (1, 2):
            assert compilers.compile("a", {"number": number})[0] == "ptx"
    assert runs == [{"number": 1}, {"number": 2}]


def test_a_failure_is_not_taken_over(monkeypatch: pytest.MonkeyPatch):
    """The first fails; the next one runs the stage itself, and the third takes that result."""
    runs: list[Any] = []

    def stage(source: Any, metadata: Any, options: Any) -> str:
        runs.append(source)
        if len(runs) == 1:
            raise RuntimeError("out of luck")
        return "ptx"

    compilers = Compilers(monkeypatch, stage)
    compilers.stages.begin()
    with watched_stages():
        got = [compilers.compile("a")[0] for _ in range(3)]
    assert got[0].reason == "RuntimeError: out of luck"
    assert got[1:] == ["ptx", "ptx"]
    assert len(runs) == 2
    work = compilers.stages.take_work()
    assert work is not None
    assert (work.n_failed, work.n_compiled, work.n_equal, work.n_found) == (1, 1, 1, 0)


def test_one_waits_for_another_thread_and_does_not_count_as_at_work(monkeypatch: pytest.MonkeyPatch):
    """The second says that it waits, so that another thread can work meanwhile, and its wait is no work."""
    started, may_go = threading.Event(), threading.Event()

    def stage(source: Any, metadata: Any, options: Any) -> str:
        started.set()
        assert may_go.wait(10)
        return "ptx"

    compilers = Compilers(monkeypatch, stage)
    compilers.stages.begin()
    with watched_stages():
        threads = [threading.Thread(target=compilers.compile, args=["a"]) for _ in range(2)]
        threads[0].start()
        assert started.wait(10)
        threads[1].start()
        end = time.monotonic() + 10
        while compilers.n_waits == 0 and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.5)
        may_go.set()
        for thread in threads:
            thread.join(10)
    work = compilers.stages.take_work()
    assert work is not None
    assert (work.n_compiled, work.n_equal, compilers.n_waits) == (1, 1, 1)
    assert 0.5 <= work.busy_s < 0.95
    assert work.slowest_s >= 0.5


def test_a_kernel_counts_as_equal_if_its_last_stage_is_taken_over(monkeypatch: pytest.MonkeyPatch):
    """The second has taken over LLVM IR, is first at PTX, and the other takes that: one of them was compiled."""
    compilers = Compilers(monkeypatch, lambda source, metadata, options: "ptx")
    inner = CUDABackend.add_stages
    second_is_through, first_is_in = threading.Event(), threading.Event()

    def make_llir(source: Any, metadata: Any) -> str:
        first_is_in.set()
        time.sleep(0.05)
        return "llir"

    def add_stages(self: Any, stages: dict[str, Any], options: Any) -> None:
        inner(self, stages, options)
        stages["llir"] = make_llir
        stages["ptx"] = stages.pop("ptx")

    monkeypatch.setattr(CUDABackend, "add_stages", add_stages)

    def compile_both(number: int) -> Any:
        made: dict[str, Any] = {}
        CUDABackend.add_stages(compilers.backend, made, SimpleNamespace())
        text = made["llir"]("ttgir", {})
        if number == 0:
            assert second_is_through.wait(10)
        text = made["ptx"](text, {})
        second_is_through.set()
        return text

    compilers.stages.begin()
    with watched_stages():
        first = threading.Thread(target=lambda: compilers.stages.run(Compilation("", lambda: compile_both(0)), None))
        first.start()
        assert first_is_in.wait(10)
        compilers.stages.run(Compilation("", lambda: compile_both(1)), None)
        first.join(10)
    work = compilers.stages.take_work()
    assert work is not None
    assert (work.n_compiled, work.n_equal) == (1, 1)


def test_the_end_of_a_tuning_frees_those_that_wait(monkeypatch: pytest.MonkeyPatch):
    """The first never comes back; the second goes on alone."""
    entered, never = [], threading.Event()

    def stage(source: Any, metadata: Any, options: Any) -> str:
        entered.append(threading.get_ident())
        if len(entered) == 1:
            never.wait(20)
        return "ptx"

    compilers = Compilers(monkeypatch, stage)
    got: list[Any] = []
    with watched_stages():
        threads = [threading.Thread(target=lambda: got.append(compilers.compile("a")[0]), daemon=True) for _ in range(2)]
        threads[0].start()
        while not entered:
            time.sleep(0.001)
        threads[1].start()
        while compilers.n_waits == 0:
            time.sleep(0.001)
        compilers.stages.close()
        threads[1].join(10)
        assert got == ["ptx"]
        never.set()
        threads[0].join(10)
    assert got == ["ptx", "ptx"]


def test_other_threads_and_hooks_compile_as_always(monkeypatch: pytest.MonkeyPatch):
    """Outside of a tuning's compilation the stages are Triton's; with a hook in the compiler each runs for each kernel."""
    runs: list[Any] = []

    def stage(source: Any, metadata: Any, options: Any) -> str:
        assert type(metadata) is dict
        runs.append(source)
        return "ptx"

    compilers = Compilers(monkeypatch, stage)
    with watched_stages():
        for _ in range(2):
            made: dict[str, Any] = {}
            CUDABackend.add_stages(compilers.backend, made, SimpleNamespace())
            made["ptx"]("a", {})
        monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", lambda *args: None)
        for _ in range(2):
            compilers.compile("a")
    assert len(runs) == 4


def test_triton_is_left_as_found():
    """Also where two tunings overlap."""
    with watched_stages():
        with watched_stages():
            assert CUDABackend.add_stages is not OWN
        assert CUDABackend.add_stages is not OWN
    assert CUDABackend.add_stages is OWN


def _told(rank: int, mode: str) -> Any:
    import torch

    kernel = autotuned(configs=[config for stages in (2, 3) for config in configs(16, 32, num_stages=stages)])
    step = tuned(kernel)
    step(torch.zeros(64))
    again = autotuned(configs=[*kernel.configs, *configs(64)])
    if mode == "fake":
        launch.__globals__["add_kernel"].device_caches.clear()  # as in another process
        tuned(again)(torch.zeros(64))
    return step.records[0].spent.compile_cpu


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["fake", "interpret"])
def test_the_log_says_where_compile_time_goes(mode: Any):
    """Kernels by fate, CPU-seconds by stage, threads, the slowest; under the interpreter there is none of it."""
    (outcome,) = on_ranks(1, _told, mode, mode=mode)
    (cpu_s,) = values([outcome])
    lines = [line for line in outcome.log.splitlines() if "threads_at_work" in line]
    slowest = [line for line in outcome.log.splitlines() if "slowest compilation: seconds=" in line]
    if mode == "interpret":
        assert (cpu_s, lines, slowest) == (0.0, [], [])
        return
    assert cpu_s > 0.0
    assert "kernels: compiled=2 equal=2 on_disk=0 failed=0 cpu_seconds: front_end=0." in lines[0]
    assert "kernels: compiled=1 equal=0 on_disk=4 failed=0" in lines[1]
    words = dict(word.split("=") for word in lines[0].split() if word.count("=") == 1)
    assert all(float(words[name]) > 0.0 for name in ("front_end", "ttgir", "llir", "ptx", "ptxas", "threads_at_work"))
    assert 'config="BLOCK=64' in slowest[1]
