"""Run a GPU's script where there is none: compile its kernels for an H200, and launch nothing.

    torchrun --nproc-per-node 2 benchmarks/jobs/on_cpu.py SCRIPT [its arguments]

A launch takes a time that follows from the kernel's name and config, and its results are NaN. The
rest of the script runs on the CPU. JOBS_CONFIGS=4 in the environment leaves each kernel four of its
configs, because two cores compile all of them for many minutes.
"""

from __future__ import annotations

import argparse
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
    """From 0.05 to 0.3 ms by name, constants, warps and stages: the same in all processes."""
    constants = map(str, sorted(source.constants.items()))
    launched = metadata.name, *constants, metadata.num_warps, metadata.num_stages
    return LEAST_MS + (MOST_MS - LEAST_MS) * (zlib.crc32(repr(launched).encode()) % 10007) / 10006


def bench(run: Callable[[], object], *args: object, quantiles: Any = None, **more: object) -> Any:
    """Milliseconds of the median of three runs, as often as quantiles are asked for."""
    run()
    ms = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        ms.append((time.perf_counter() - began) * 1e3)
    middle = statistics.median(ms)
    return [middle] * len(quantiles) if quantiles else middle


def take_few_configs(n: int) -> None:
    """Leave kernels that are decorated from now on ``n`` configs, from all over their lists."""
    plain = Autotuner.__init__

    def init(self: Any, fn: Any, names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        if configs:
            configs = configs[:: max(1, len(configs) // n)][:n]
        plain(self, fn, names, configs, *args, **kwargs)

    Autotuner.__init__ = init


def autocast_here() -> None:
    """Let the autograd functions of libraries, made for a GPU's autocast, follow the CPU's."""
    for name in ("custom_fwd", "custom_bwd"):
        plain = getattr(torch.amp, name)

        def here(function: Any = None, *, plain: Any = plain, **options: Any) -> Any:
            return plain(function, **{**options, "device_type": "cpu"})

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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    options = parser.parse_args()
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
    sys.argv[:] = [options.script, *options.arguments]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
