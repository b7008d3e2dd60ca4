"""Kinds of GPUs: names, versions, leads and clocks of AMD's and Intel's, which are faked, and of
NVIDIA's, which stay as they were.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from dist_tune import accelerator, prune_by_group_size_m, prune_by_shared_memory
from dist_tune.measure import clocks, is_capturing
from dist_tune.records.record import environment
from dist_tune.testing import FakeH200
from tests.programs import of_checkout
from tests.test_pruning import A, B, config, on_gpu

MI300X = SimpleNamespace(
    gcnArchName="gfx942:sramecc+:xnack-",
    multi_processor_count=304,
    L2_cache_size=4 << 20,
    total_memory=192 << 30,
)
H200 = SimpleNamespace(multi_processor_count=132, L2_cache_size=50 << 20)
MAX_1550 = SimpleNamespace(max_compute_units=448, total_memory=64 << 30)


class Gpu:
    """Of a kind: torch's functions for it, and what they were asked for."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: str) -> None:
        self.n_bytes: list[int] = []
        self.slept: list[int] = []
        self.events: list[dict[str, Any]] = []
        api = torch.xpu if kind == "xpu" else torch.cuda
        name, properties = {
            "cuda": ("NVIDIA H200", H200),
            "hip": ("AMD Instinct MI300X", MI300X),
            "xpu": ("Intel(R) Data Center GPU Max 1550", MAX_1550),
        }[kind]
        functions = {
            "is_available": lambda: True,
            "device_count": lambda: 2,
            "current_device": lambda: 1,
            "get_device_name": lambda: name,
            "get_device_properties": lambda device=None: properties,
            "_sleep": self.slept.append,
            "Event": lambda **options: self.events.append(options),
        }
        for each, function in functions.items():
            if (kind, each) != ("xpu", "_sleep"):
                patch.setattr(api, each, function, raising=False)
        for module in (accelerator, clocks):
            patch.setattr(module, "api", api)
        for each, version in {"cuda": "13.0", "hip": "6.4.2", "xpu": "20250101"}.items():
            patch.setattr(torch.version, each, version if each == kind else None)
        patch.setattr(torch, "empty", self._empty)

    def _empty(self, n_bytes: int, *, dtype: torch.dtype, device: str) -> Any:
        assert (dtype, device) == (torch.uint8, accelerator.device_type())
        self.n_bytes.append(n_bytes)
        return SimpleNamespace(zero_=lambda: None)


@pytest.mark.parametrize(
    ("kind", "name", "version"),
    [
        ("cuda", "NVIDIA H200", "13.0"),
        ("hip", "AMD Instinct MI300X, gfx942, 304 compute units", "hip 6.4.2"),
        ("xpu", "Intel(R) Data Center GPU Max 1550, 448 compute units", "xpu 20250101"),
    ],
)
def test_a_record_is_of_one_kind_of_gpu(
    monkeypatch: pytest.MonkeyPatch, kind: str, name: str, version: str
):
    """A CUDA record's key has the bare name and number, as always; others have the runtime's name,
    and the units of a part of a GPU.
    """
    Gpu(monkeypatch, kind)
    here = environment(world_size=2, ranks_per_host=2)
    assert (accelerator.kind(), here.device, here.cuda, here.device_count) == (
        kind,
        name,
        version,
        2,
    )
    assert list(here.keyed) == ["device", "world_size", "ranks_per_host", "torch", "triton", "cuda"]


def test_leads_are_as_long_as_asked(monkeypatch: pytest.MonkeyPatch):
    """On CUDA by a bound of its clocks; on HIP and XPU nothing spins."""
    for kind, slept, n_bytes in (
        ("cuda", [4_000_000], 100 << 20),
        ("hip", [], 256 << 20),
        ("xpu", [], 256 << 20),
    ):
        with monkeypatch.context() as patch:
            gpu = Gpu(patch, kind)
            clock = clocks.device_clock()
            clock.prepare(2.0)
            assert (gpu.slept, gpu.n_bytes) == (slept, [n_bytes])
            clock.prepare(2.0, is_cold=False)
            assert gpu.slept == [*slept, *slept[-1:]]
            clock.event()
            assert gpu.events == [{"enable_timing": True}]


def test_free_memory_that_a_driver_does_not_tell_is_all_that_is_not_held(
    monkeypatch: pytest.MonkeyPatch,
):
    """Some of Intel's do not; what the allocator holds without using it is free, too.

    On other GPUs the error stands.
    """

    def fails(device: torch.device) -> tuple[int, int]:
        raise RuntimeError("The device doesn't support querying the available free memory.")

    for kind in ("xpu", "cuda"):
        Gpu(monkeypatch, kind)
        for name, value in {
            "mem_get_info": (10 << 30, 0),
            "memory_reserved": 4 << 30,
            "memory_allocated": 1 << 30,
        }.items():
            monkeypatch.setattr(accelerator.api, name, lambda device, value=value: value)
        assert accelerator.free_bytes(torch.device(kind)) == 13 << 30
        monkeypatch.setattr(accelerator.api, "mem_get_info", fails)
        if kind == "xpu":
            assert accelerator.free_bytes(torch.device(kind)) == 63 << 30
    with pytest.raises(RuntimeError, match="free memory"):
        accelerator.free_bytes(torch.device("cuda"))


def test_captures_of_any_kind_are_seen(monkeypatch: pytest.MonkeyPatch):
    """Of XPU by torch.xpu; a torch that cannot capture there says no."""
    Gpu(monkeypatch, "xpu")
    monkeypatch.setattr(torch.xpu, "is_current_stream_capturing", lambda: True)
    assert is_capturing()
    monkeypatch.delattr(torch.xpu, "is_current_stream_capturing")
    assert not is_capturing()


@pytest.mark.parametrize(
    "target", [GPUTarget("hip", "gfx942", 64), GPUTarget("xpu", {"max_num_sub_groups": 64}, 32)]
)
def test_rules_of_nvidia_s_gpus_keep_everything_on_others(
    monkeypatch: pytest.MonkeyPatch, target: GPUTarget
):
    """Tiles that are too large for an H200, and groups of one row in a large product."""

    class Other(FakeH200):
        def get_current_target(self) -> GPUTarget:
            return target

    large, products = config(stages=9, group=1), on_gpu((8192, 8192), (8192, 8192))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)

    def kept() -> list[bool]:
        return [prune_by_shared_memory(large, A, B), prune_by_group_size_m(large, *products)]

    monkeypatch.setattr(driver, "_active", FakeH200())
    assert kept() == [False, False]
    monkeypatch.setattr(driver, "_active", Other())
    monkeypatch.setattr(torch.version, "hip", "6.4.2")
    assert kept() == [True, True]


FAKE_XPU = """
import json, time
from types import SimpleNamespace
import torch

class Event:
    def __init__(self, enable_timing): assert enable_timing
    def record(self, stream=None): self.at = time.perf_counter()
    def query(self): return True
    def elapsed_time(self, end): return (end.at - self.at) * 1e3

torch.accelerator.current_accelerator = lambda check_available=False: torch.device("xpu")
torch.version.xpu = "20250101"
empty, used = torch.empty, set()
torch.empty = lambda *size, device=None, **options: used.add(str(device)) or empty(*size, **options)
unit = SimpleNamespace(max_compute_units=448, total_memory=64 << 30, uuid="0")
for name, value in {
    "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0, "get_device_name": "Arc", "set_rng_state": None,
    "get_device_properties": unit, "synchronize": None, "current_stream": None,
    "max_memory_allocated": 0, "get_rng_state": torch.get_rng_state(),
}.items():
    setattr(torch.xpu, name, lambda *args, value=value: used.add("") or value)
torch.xpu.Event = Event
for name in ("synchronize", "get_device_properties", "get_device_name", "Event", "max_memory_allocated", "get_rng_state"):
    def refuse(*args, name=name, **options): raise AssertionError(f"torch.cuda.{name} was called")
    setattr(torch.cuda, name, refuse)

import dist_tune

@dist_tune.autotune(config_space=[{"seconds": 0.004}, {"seconds": 0.001}], key_fn=lambda x: len(x))
def f(x, seconds=0.0):
    time.sleep(seconds)
    return x + 1

f(torch.zeros(4))
record = f.records[0]
print(json.dumps([record.best.config, record.environment.device, record.environment.cuda, sorted(used)]))
"""  # noqa: E501


@pytest.mark.slow  # it imports torch anew, which takes seconds
@pytest.mark.processes
def test_a_function_is_tuned_on_an_intel_gpu(tmp_path: Path):
    """By events of torch.xpu, without a lead; torch.cuda is not asked.

    No kernel is launched: Triton's wheel has no compiler.
    """
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(FAKE_XPU))
    variables = {"TRITON_INTERPRET": "0", "DIST_TUNE_LOG_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, program],
        env=of_checkout(tmp_path, **variables),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    best, device, version, used = json.loads(done.stdout.splitlines()[-1])
    assert (best, device, version) == ("seconds=0.001", "Arc, 448 compute units", "xpu 20250101")
    assert "xpu" in used
