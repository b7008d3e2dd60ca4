"""Both layers of a mixture of experts on GPUs: each order of tiles, way to gather and number of chunks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "shape", "n_ways"),
    [("ag_moe", "666,2006,1001,5,3", 6), ("moe_reduce_rs", "666,1003,1002,5,3", 3), ("moe_reduce_rs", "8192,2048,1536,32,2", 3)],
)
def test_each_fixed_config_is_right_between_gpus(tmp_path: Path, name: str, shape: str, n_ways: int):
    """Twenty steps without a host sync, skewed experts, sizes that no block divides; one rank after the other starts 2 ms late."""
    n_ranks = min(torch.cuda.device_count(), 2)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    options = ["--check", "--dtype", "bf16", "--dtype", "fp16", "--skew", "1", "--straggler", "2", "--shape", shape]
    command = [*ranks, str(ROOT / f"kernels/{name}.py"), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == 2 * n_ways
