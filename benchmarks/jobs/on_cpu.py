"""Run a GPU's script where there is none: kernels are compiled for an H200, and launches take a time that follows from their names.

    torchrun --nproc-per-node 2 benchmarks/jobs/on_cpu.py SCRIPT [its arguments]

What kernels compute is left out: their results are NaN. The rest of the script runs on the CPU.
JOBS_CONFIGS=4 in the environment leaves each kernel four of its configs, because two cores compile for
many minutes otherwise.
"""

from __future__ import annotations

import os
import runpy
import statistics
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver

from benchmarks.library_steps import pretend_a_gpu
from dist_tune.testing import FakeH200
from dist_tune.testing.fake_gpu import install_fake_driver

LEAST_MS, MOST_MS = 0.05, 0.3


def launch_ms(source: Any, metadata: Any) -> float:
    """From 0.05 to 0.3 ms by the kernel's name, its constants and its warps and stages: the same in all processes."""
    launched = metadata.name, *map(str, sorted(source.constants.items())), metadata.num_warps, metadata.num_stages
    return LEAST_MS + (MOST_MS - LEAST_MS) * (zlib.crc32(repr(launched).encode()) % 10007) / 10006


def bench(run: Callable[[], object], *args: object, quantiles: Any = None, **options: object) -> Any:
    """Three runs after a first one: milliseconds by the wall clock, as often as quantiles are asked for."""
    run()
    ms = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        ms.append((time.perf_counter() - began) * 1e3)
    middle = statistics.median(ms)
    return [middle] * len(quantiles) if quantiles else middle


def take_few_configs(n: int) -> None:
    """Leave kernels that are decorated from now on at most ``n`` configs, from all over their lists."""
    plain = Autotuner.__init__

    def init(self: Any, fn: Any, arg_names: Any, configs: list[Any], *args: Any, **kwargs: Any) -> None:
        configs = configs[:: max(1, len(configs) // n)][:n] if configs else configs
        plain(self, fn, arg_names, configs, *args, **kwargs)

    Autotuner.__init__ = init


def autocast_here() -> None:
    """Let the autograd functions of libraries, made for a GPU's autocast, follow the CPU's."""
    for name in ("custom_fwd", "custom_bwd"):
        plain = getattr(torch.amp, name)

        def here(function: Any = None, *, device_type: str, plain: Any = plain, **options: Any) -> Any:
            return plain(function, device_type="cpu", **options)

        setattr(torch.amp, name, here)


class Gpu(FakeH200):
    """With what Triton's own tuner and libraries ask of a driver."""

    def get_benchmarker(self) -> Callable[..., Any]:
        """Of launches."""
        return bench

    def get_active_torch_device(self) -> torch.device:
        """Where tensors are."""
        return torch.device("cpu")


def main() -> None:
    """Pretend a GPU, and run the script as Python would."""
    # It leaves its kernels one config each if torch is deterministic, as it is here.
    os.environ.setdefault("MAMBA_DETERMINISTIC", "0")
    pretend_a_gpu()
    install_fake_driver()
    FakeH200.launch_ms = staticmethod(launch_ms)
    driver.set_active(Gpu())
    autocast_here()
    if n := int(os.environ.get("JOBS_CONFIGS", "0")):
        take_few_configs(n)
    torch.set_num_threads(1)
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
