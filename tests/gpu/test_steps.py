"""Steps of kernels/ on all GPUs of the machine: each exchange, order of tiles and number of chunks, with ranks that are late."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import needs_two_gpus
from tests.programs import ROOT

pytestmark = [pytest.mark.gpu, needs_two_gpus, pytest.mark.timeout(400)]  # four tunings of each product, compiled for the first time

ONE_LATE = [("--case", "check", "--straggler", rank) for rank in ("0", "1")]


@pytest.mark.parametrize(
    ("name", "shapes", "options", "n_ways"),
    [
        *((name, ["{333},1003,{1001}", "16,8192,8192"], late, 22) for name in ("gemm_rs", "gemm_allreduce") for late in ONE_LATE),
        ("ag_moe", ["{333},{1003},1001,5,3"], ("--check", "--skew", "1"), 2),
        ("moe_reduce_rs", ["{333},1003,{501},5,3"], ("--check", "--skew", "1"), 3),
        ("moe_reduce_rs", ["{4096},2048,{768},32,2"], ("--check", "--skew", "1"), 3),
    ],
)
def test_each_way_is_right_between_gpus(tmp_path: Path, name: str, shapes: list[str], options: tuple[str, ...], n_ways: int):
    """Twenty steps without a host sync, sizes that no block divides, skewed experts; a late rank sleeps on the device before each step.

    A size in braces is one rank's share.
    """
    n_ranks = torch.cuda.device_count()
    of_all = [re.sub(r"{(\d+)}", lambda share: str(int(share[1]) * n_ranks), shape) for shape in shapes]
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    options += ("--dtype", "bf16", "--dtype", "fp16", *(word for shape in of_all for word in ("--shape", shape)))
    done = subprocess.run(
        [*ranks, str(ROOT / f"kernels/{name}.py"), *options], cwd=tmp_path, capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == 2 * n_ways
