"""GEMM-ReduceScatter and GEMM-AllReduce on real GPUs: each exchange, one rank late, and the tuned function."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]  # four tunings of each product, compiled for the first time

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["gemm_rs", "gemm_allreduce"])
@pytest.mark.parametrize("straggler", ["0", "1"])
def test_each_exchange_is_right_between_gpus(tmp_path: Path, name: str, straggler: str):
    """On all GPUs: twenty steps without a host sync, shapes that no block divides; one rank sleeps on the device before each step."""
    n_ranks = torch.cuda.device_count()
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    options = ["--case", "check", "--straggler", straggler, "--dtype", "bf16", "--dtype", "fp16"]
    shapes = ["--shape", f"{333 * n_ranks},1003,{1001 * n_ranks}", "--shape", "16,8192,8192"]
    done = subprocess.run(
        [*ranks, str(ROOT / f"kernels/{name}.py"), *options, *shapes],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == 4 * 11
