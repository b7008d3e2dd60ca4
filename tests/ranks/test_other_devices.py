"""A step on an AMD GPU that is not there: kernels become real gfx942 code in this process, launches are those of the fake driver."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from dist_tune import contextual_autotune
from dist_tune.compiler.processes import Worker, is_possible
from dist_tune.testing import FakeH200, on_ranks, values
from tests.steps import gemm_kernel

pytestmark = pytest.mark.processes


class FakeMI300(FakeH200):
    """The target of an MI300X: wavefronts of 64. Of the rest only its shared memory counts here."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", "gfx942", 64)


def note_tools() -> list[Any]:
    """Processes, and launchers of NVIDIA's driver, that this process starts from here on."""
    from triton.backends.nvidia import driver as nvidia

    started: list[Any] = []
    own = subprocess.Popen.__init__

    def noting(self: Any, args: Any, *rest: Any, **named: Any) -> None:
        started.append(args)
        own(self, args, *rest, **named)

    subprocess.Popen.__init__ = noting  # type: ignore[method-assign]
    Worker.__init__ = lambda self: started.append("a compiler's process")  # type: ignore[method-assign]
    if hasattr(nvidia, "make_launcher"):  # up to Triton 3.6
        nvidia.make_launcher = lambda *args: started.append("a launcher")
    return started


def tune_on_amd(rank: int) -> dict[str, Any]:
    """Tune one product, and take it from its record; what was made and started meanwhile."""
    torch.version.hip, FakeH200.shared_limit_bytes = "6.4.2", 65536
    driver.set_active(FakeMI300())
    FakeH200.launch_ms = staticmethod(lambda src, metadata: {2: (0.1, 1.0)[rank], 4: 0.5}[metadata.num_warps])
    started, files = note_tools(), Path(triton.knobs.cache.dir)
    configs = [triton.Config({"BM": 32, "BN": 32}, num_warps=warps) for warps in (2, 4)]
    kernel = triton.autotune([*configs, triton.Config({"BM": 256, "BN": 256}, num_warps=4, num_stages=4)], key=["K"])(gemm_kernel)

    @contextual_autotune(is_dist=True)
    def step() -> None:
        kernel[(1,)](a, a, c, 64)

    a, c = torch.zeros(256, 256, dtype=torch.bfloat16), torch.zeros(256, 256)
    step()
    (record,) = step.records
    kernel.cache.clear()
    step.records.clear()
    step()
    for thread in threading.enumerate():
        if thread.name == "dist_tune launcher":
            thread.join()
    return {
        "winner": record.best.config, "failures": [each.failure for each in record.candidates], "runtime": record.environment.cuda,
        "is_recalled": step.records[0].is_recalled, "started": started, "has_processes": is_possible(),
        "made": {path.suffix for path in files.rglob("*.*") if path.suffix in (".hsaco", ".amdgcn", ".ptx", ".cubin", ".so")},
    }  # fmt: skip


def test_a_step_is_tuned_for_an_amd_gpu():
    """Compiled in the ranks' own processes, without a launcher or tool of NVIDIA's; found again by a key with HIP's version."""
    for each in values(on_ranks(2, tune_on_amd, mode="fake", clock="exact", timeout_s=110, env={"DIST_TUNE_DEADLINE_S": "60"})):
        assert each["winner"] == "BM=32 BN=32 num_warps=4 num_stages=3"  # the slowest rank decides
        assert [bool(failure) for failure in each["failures"]] == [False, False, True]
        assert "shared memory, Required: 98304, Hardware limit: 65536" in each["failures"][2]
        assert (each["runtime"], each["is_recalled"]) == ("hip 6.4.2", True)
        assert (each["started"], each["has_processes"], each["made"]) == ([], False, {".hsaco", ".amdgcn"})
