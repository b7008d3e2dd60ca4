"""kernels/ag_moe.py and kernels/moe_reduce_rs.py from their command lines: gloo ranks under the interpreter, and code for a Hopper GPU."""

import os
import subprocess
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


def verdicts(done: Done) -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split(" ok ")[1] for line in done.stdout.splitlines() if "relative error" in line]


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


@pytest.mark.once
@pytest.mark.parametrize(
    ("script", "shape"),
    [(AG_MOE, "18,70,45,2,2"), pytest.param(MOE_RS, "18,35,46,2,2", marks=pytest.mark.slow)],
)
def test_every_order_of_tiles_and_number_of_chunks_is_right(tmp_path: Path, script: str, shape: str):
    """Fixed configs that between them take every path, five fresh inputs each, ranks late in turn."""
    done = run(tmp_path, script, "--check", "--dtype", "bf16", "--shape", shape, "--straggler", "20", "--skew", "1", n_ranks=2)
    ways = verdicts(done)
    assert [way.split()[0] for way in ways] == (
        ["order=arrival", "order=expert", "order=part"] if script == AG_MOE else ["n_chunks=1", "n_chunks=4", "n_chunks=2"]
    )


@pytest.mark.once
def test_knobs_and_product_are_tuned_together_and_right(tmp_path: Path):
    """The form of the command with five sizes, scaled down on a CPU, which it says; one tuning of two sites."""
    done = run(tmp_path, MOE_RS, "8192", "2048", "1536", "2", "1", "--autotune", n_ranks=2)
    assert len(verdicts(done)) == 1
    assert "= (8192, 2048, 1536, 2, 1), so this runs (64, 64, 64, 2, 1); --shape runs sizes as they are" in done.stdout
    assert "2 sites, 6 candidates on 2 ranks" in done.stderr + done.stdout
    assert "kernels.moe_reduce_rs.moe_reduce_rs: " in done.stdout
    assert "kernels.grouped_gemm.grouped_gemm_kernel: " in done.stdout


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [(AG_MOE, "--M", "2048", "--autotune"), (MOE_RS, "8192", "2048", "1536", "32", "2", "--check", "--autotune")]
)
def test_the_short_forms_of_the_commands_end_right(tmp_path: Path, arguments: tuple[str, ...]):
    """Under launch.sh itself, which starts two CPU ranks."""
    command = ["bash", str(ROOT / "launch/launch.sh"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=110, check=False)
    assert verdicts(Done(command, done.returncode, done.stdout, done.stderr))[-1].startswith("tuned")


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("n_ranks", [1, 3, 4])
@pytest.mark.parametrize(("script", "sizes"), [(AG_MOE, (5, 12, 40, 3, 2)), (MOE_RS, (5, 40, 10, 3, 2))])
def test_any_number_of_ranks_computes_the_same(tmp_path: Path, script: str, sizes: tuple[int, ...], n_ranks: int):
    """One, three and four ranks, all paths, strongly skewed so that experts are empty; one rank in both dtypes, and tuned, too."""
    m, n, k, n_experts, top_k = sizes
    shape = (m * n_ranks, n * n_ranks, k * n_ranks, n_experts, top_k)
    case = ("--case", "check", "--dtype", "bf16") if n_ranks == 1 else ("--check",)
    options = ("--dtype", "fp16", "--skew", "3", "--shape", ",".join(map(str, shape)))
    done = run(tmp_path, script, *case, *options, n_ranks=n_ranks, timeout_s=280.0)
    assert len(verdicts(done)) == (8 if n_ranks == 1 else 3)


@pytest.mark.once
@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (MOE_RS, ("--shape", "5,64,64,2,1"), "M and K must be multiples of the 2 ranks"),
        (AG_MOE, ("--shape", "4,64,64,2,3"), "top_k from 1 to experts"),
        (AG_MOE, ("1", "2"), "need five sizes, M N K experts top_k; got 1 2"),
        (AG_MOE, ("--case", "perf"), "needs GPUs"),
    ],
)
def test_what_cannot_run_says_why(tmp_path: Path, script: str, arguments: tuple[str, ...], message: str):
    """Sizes that two ranks cannot share, too few sizes, and times without a GPU."""
    done = run(tmp_path, script, *arguments, n_ranks=2)
    assert done.returncode != 0
    assert message in done.stderr


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
