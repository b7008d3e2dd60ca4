"""Both layers of a mixture of experts on GPUs: each order of tiles and number of chunks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "shape", "n_ways"),
    [("ag_moe", (333, 1003, 1001, 5, 3), 2), ("moe_reduce_rs", (333, 1003, 501, 5, 3), 3), ("moe_reduce_rs", (4096, 2048, 768, 32, 2), 3)],
)
def test_each_fixed_config_is_right_between_gpus(tmp_path: Path, name: str, shape: tuple[int, ...], n_ways: int):
    """On all GPUs: twenty steps without a host sync, skewed experts, sizes that no block divides; each rank in turn starts late.

    ``shape`` has the sizes of one rank's share.
    """
    n_ranks = torch.cuda.device_count()
    shared = (0, 1) if name == "ag_moe" else (0, 2)
    sizes = ",".join(str(size * n_ranks if axis in shared else size) for axis, size in enumerate(shape))
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    options = ["--check", "--dtype", "bf16", "--dtype", "fp16", "--skew", "1", "--shape", sizes]
    command = [*ranks, str(ROOT / f"kernels/{name}.py"), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == 2 * n_ways
