"""Steps of kernels/ on all GPUs of the machine: each exchange, order of tiles and number of chunks,
with ranks that are late.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import needs_two_gpus
from tests.programs import ROOT

# Four tunings of each product, compiled for the first time.
pytestmark = [pytest.mark.gpu, needs_two_gpus, pytest.mark.timeout(400)]

ROWS, LATE = "--shape {333},1003,{1001} 16,8192,8192", "--case check --straggler"


@pytest.mark.parametrize(
    ("name", "options", "n_ways"),
    [
        *(
            (name, f"{LATE} {late} {ROWS}", 44)
            for name in ("gemm_rs", "gemm_allreduce")
            for late in (0, 1)
        ),
        ("ag_moe", "--check --skew 1 --shape {333},{1003},1001,5,3", 4),
        (
            "moe_reduce_rs",
            "--check --skew 1 --shape {333},1003,{501},5,3 {4096},2048,{768},32,2",
            12,
        ),
    ],
)
def test_each_way_is_right_between_gpus(tmp_path: Path, name: str, options: str, n_ways: int):
    """Twenty steps without a host sync, sizes that no block divides, skewed experts; a late rank
    sleeps on the device before each step.

    A size in braces is one rank's share.
    """
    n_ranks = torch.cuda.device_count()
    of_all = re.sub(r"{(\d+)}", lambda share: str(int(share[1]) * n_ranks), options)
    ranks = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={n_ranks}",
        str(ROOT / f"kernels/{name}.py"),
    ]
    command = [*ranks, *of_all.split(), "--dtype", "bf16", "--dtype", "fp16"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == n_ways
