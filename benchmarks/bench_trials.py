"""What a launch costs the host in a call that tries configs online, beside one in a steady call;
and the thread beside the step.

No GPU needed: the fake H200 driver of ``dist_tune.testing`` compiles for real and launches nothing,
so that only Python is timed. One rank, 24 kernels with four launches each in a call. Target: at
most 10 us more in a call with trials.

    .venv/bin/python benchmarks/bench_trials.py
    .venv/bin/python benchmarks/bench_trials.py --checkout FOLDER  # its dist_tune, to compare
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

N_LAUNCHES = 4
CONFIGS = "[triton.Config({'BLOCK': b}, num_warps=w) for b in (16, 32, 64, 128) for w in (1, 2)]"
KERNEL = f"""
@triton.autotune(configs={CONFIGS}, key=["n", "m"])
@triton.jit
def kernel_NUMBER(x, y, n, m, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) + NUMBER, mask=at < n)
"""


def make_kernels(n: int, folder: Path) -> list[Any]:
    """Kernels that differ in a constant."""
    path = folder / "made.py"
    source = "".join(KERNEL.replace("NUMBER", str(number)) for number in range(n))
    path.write_text(f"import triton\nimport triton.language as tl\n{source}")
    spec = importlib.util.spec_from_file_location("made", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["made"] = made
    spec.loader.exec_module(made)
    return [getattr(made, f"kernel_{number}") for number in range(n)]


def main() -> None:
    """Print a line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkout", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--kernels", type=int, default=24)
    parser.add_argument("--step-ms", type=float, default=0.0, help="of other work in a call")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    os.environ |= {
        "TRITON_INTERPRET": "0",
        "DIST_TUNE_VERBOSITY": "quiet",
        "DIST_TUNE_CACHE_DIR": str(folder / "cache"),
        "DIST_TUNE_LOG_DIR": str(folder / "logs"),
    }
    sys.path.insert(0, str(options.checkout))
    import torch

    from dist_tune import contextual_autotune
    from dist_tune.testing import FakeH200, install_fake_driver

    install_fake_driver()
    ran = list[tuple[Any, ...]]()

    def launch_ms(source: Any, metadata: Any) -> float:
        ran.append((*source.constants.values(), metadata.num_warps))
        return 0.0

    FakeH200.launch_ms = staticmethod(launch_ms)
    kernels = make_kernels(options.kernels, folder)
    x, y = torch.zeros(4096), torch.zeros(4096)

    @contextual_autotune(search="online", max_slowdown=1.0)
    def step() -> None:
        time.sleep(options.step_ms / 1e3)
        for each in kernels:
            for _ in range(N_LAUNCHES):
                each[(1,)](x, y, 4096, 64)

    trials_us, steady_us = list[float](), list[float]()
    before: tuple[Any, ...] = ()
    began, n_after, ended_s, beside_s = time.perf_counter(), 0, 0.0, 0.0
    while n_after < 100 and time.perf_counter() - began < 120:
        ran.clear()
        began_s = time.thread_time()
        step()
        us = (time.thread_time() - began_s) * 1e6 / (N_LAUNCHES * options.kernels)
        (steady_us if tuple(ran) == before else trials_us).append(us)
        before = tuple(ran)
        if any(each.name == "dist_tune online" for each in threading.enumerate()):
            beside_s, ended_s = (
                time.process_time() - time.thread_time(),
                time.perf_counter() - began,
            )
        n_after += bool(step.records)
    after_us = median(steady_us[-100:])
    print(
        f"us a launch: {median(trials_us[20:]):.1f} in {len(trials_us)} calls that try configs,"
        f" {after_us:.1f} afterwards, {median(trials_us[20:]) - after_us:.1f} more; the other"
        f" threads of this process took {100 * beside_s / ended_s:.1f} % of a core until the end of"
        " the tuning, with compilation"
    )


if __name__ == "__main__":
    main()
