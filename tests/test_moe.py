"""kernels/ag_moe.py and kernels/moe_reduce_rs.py from their command lines: gloo ranks under the interpreter, and code for a Hopper GPU."""

import os
from pathlib import Path

import pytest

from tests.programs import Done, run_python

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
AG_MOE, MOE_RS = str(ROOT / "kernels/ag_moe.py"), str(ROOT / "kernels/moe_reduce_rs.py")


def environment(cwd: Path) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "DIST_TUNE_CACHE_DIR": str(cwd / "cache")}


def run(cwd: Path, *command: str, n_ranks: int = 0, interpret: str = "1", timeout_s: float = 100.0) -> Done:
    return run_python(*command, cwd=cwd, env={**environment(cwd), "TRITON_INTERPRET": interpret}, n_ranks=n_ranks, timeout_s=timeout_s)


@pytest.mark.once
def test_a_result_is_right_and_the_check_finds_what_is_amiss(tmp_path: Path):
    """Odd sizes, skewed experts, shards that come while the product waits; ignored weights and left-out waits are told from rounding."""
    done = run(tmp_path, str(ROOT / "tests/moe_program.py"), n_ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[1:] == [
        "second layer: True",
        "first layer, shards late: True",
        "weights ignored: False",
        "no wait for sums: False",
        "no wait for shards: False",
    ]


def test_the_kernels_compile_for_hopper(tmp_path: Path):
    """Real sm_90 code: 16-byte asynchronous copies of gathered rows, bulk copies of weights, matrix units, releases and acquires."""
    script = (
        "import os; os.environ['TRITON_CACHE_DIR'] = 'cache'\n"
        "import torch\n"
        "from dist_tune import testing\n"
        "testing.install_fake_driver()\n"
        "from kernels.grouped_gemm import Shards, check_configs, drop_hopeless, gpu_configs, multiply_rows\n"
        "from kernels.moe_combine import Partials, push, reduce\n"
        "from kernels.routing import ORDERS, RowSorter\n"
        "a, b, c = (torch.zeros(*s, dtype=torch.bfloat16) for s in ((256, 512), (8, 512, 512), (512, 512)))\n"
        "experts, flags = (torch.zeros(*s, dtype=torch.int32) for s in ((256, 2), (2,)))\n"
        "table = torch.zeros(2, dtype=torch.int64)\n"
        "for order in ORDERS: rows = RowSorter([(256, 512), (0, 256)], 8, order, a.device).sort(experts)\n"
        "multiply_rows(a, b, c, rows, shards=Shards(a[:128], flags, 3, 1), config=check_configs()[0])\n"
        "multiply_rows(a, b, c, rows, done=flags, n_free_sms=8, config=check_configs()[1])\n"
        "partials = Partials(c, torch.zeros(256, 2), table, table, 1, 3)\n"
        "push(partials, flags, 2, 16); reduce(partials, c[:128], 16)\n"
        "print(len(gpu_configs()), len(set(map(str, gpu_configs()))), len(drop_hopeless(gpu_configs(), {'c': c})))\n"
    )
    done = run(tmp_path, "-c", script, interpret="0")
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) == 1  # all distinct, and all fit
    compiled = {path.stem: path.read_text() for path in (tmp_path / "cache").rglob("*.ptx")}
    products = [path.read_text() for path in (tmp_path / "cache").rglob("grouped_gemm_kernel.ptx")]
    assert len(products) == 2
    for ptx in products:
        assert all(what in ptx for what in ("cp.async.cg.shared.global", "0x10", "cp.async.bulk.tensor.2d.shared", "wgmma.mma_async"))
    assert [ptx.count("gpu.release") + ptx.count("release.gpu") for ptx in products].count(0) == 1
    assert all("sys" in compiled[name] for name in ("push_kernel", "reduce_kernel"))
    assert "release" in compiled["push_kernel"]
    assert "acquire" in compiled["reduce_kernel"]
    assert "ld.global.cg.v4" in compiled["reduce_kernel"]


@pytest.mark.once
def test_a_sum_that_cannot_be_launched_counts_its_step(tmp_path: Path):
    """What the peers wait for is queued by then: the next step is another one, or it would take their flags of this one for its own."""
    script = (
        "import torch, torch.distributed as dist, kernels.moe_reduce_rs as layer\n"
        "from kernels.routing import route\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "def fail(*_): raise RuntimeError('does not compile')\n"
        "layer.reduce, layer.multiply_rows, step = fail, lambda *_, **__: None, layer.MoeReduceScatter()\n"
        "step._sorter_for = lambda *_: type('', (), {'sort': lambda *_: type('', (), {'counters': torch.zeros(1)})})()\n"
        "try: step(torch.ones(8, 8).half(), torch.ones(2, 8, 8).half(), route(torch.zeros(4, 2), 2))\n"
        "except RuntimeError as error: print(error)\n"
        "print([buffers._epochs.next for buffers in step._buffers.values()])\n"
    )
    done = run(tmp_path, "-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["does not compile", "[2]"]
