"""Programs of kernels/ from their command lines: one table of checks, tunings and refusals, alone and on gloo ranks that interpret."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.programs import ROOT, Done, of_checkout, run_python
from tests.worlds import further

pytestmark = pytest.mark.processes

SUM, SOFTMAX = ("--shape", "1025", "--dtype", "bf16", "--dtype", "fp32"), ("--shape", "1,1", "--shape", "2,300")


def run(cwd: Path, program: str, *options: str, n_ranks: int = 0, timeout_s: float = 115.0) -> Done:
    """kernels/<first word of program>.py with the other words as its first options."""
    name, *first = program.split()
    script = str(ROOT / f"kernels/{name}.py")
    return run_python(script, *first, *options, cwd=cwd, env=of_checkout(cwd), n_ranks=n_ranks, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("program", "n_ranks", "options", "n_results"),
    [
        ("guides vector_add", 0, SUM, 6),
        ("guides matmul", 0, ("--shape", "33,17,70"), 4),
        ("guides softmax", 0, SOFTMAX, 18),
        ("persistent_gemm", 0, ("--shape", "33,17,70"), 5),
        ("gemm_a8w8_blockscale", 0, ("--shape", "32,128,512", "1,2,3", "--dtype", "fp16"), 14),
        ("ag_gemm", 2, ("--shape", "140,70,45", "--dtype", "fp16"), 4),
        further("ag_gemm", 2, (), 12),
        further("gemm_rs", 1, ("--shape", "38,35,45"), 11),
        further("gemm_rs", 2, ("--shape", "70,35,90"), 11),
        further("gemm_rs", 2, ("--shape", "2,8,16", "--straggler", "1", "--dtype", "fp16"), 11),
        further("gemm_rs", 4, ("--shape", "36,35,92"), 11),
        further("gemm_allreduce", 1, ("--shape", "19,35,45"), 11),
        further("gemm_allreduce", 2, ("--shape", "19,35,90"), 11),
        further("gemm_allreduce", 2, ("--shape", "2,8,16", "--straggler", "1", "--dtype", "fp16"), 11),
        further("gemm_allreduce", 4, ("--shape", "7,35,92"), 11),
        ("ag_moe", 2, ("--check", "--shape", "18,70,45,2,2", "--straggler", "0", "--skew", "1"), 2),
        further("moe_reduce_rs", 2, ("--check", "--shape", "18,35,46,2,2", "--straggler", "0", "--skew", "1"), 3),
    ],
)
def test_results_are_right_where_no_block_divides_the_shape(
    tmp_path: Path, program: str, n_ranks: int, options: tuple[str, ...], n_results: int
):
    """With each config or way, and tuned; into memory full of NaN, of ranks with inputs of their own, one of them late."""
    done = run(tmp_path, program, "--case", "check", *options, n_ranks=n_ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = [line for line in done.stdout.splitlines() if line.startswith("check ")]
    assert len(verdicts) == n_results
    assert all(" ok " in line for line in verdicts)
    # A check of ranks keeps nothing: a config found there would have been checked at another time.
    assert (tmp_path / "cache").exists() == (n_ranks == 0 and program != "gemm_a8w8_blockscale")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("n_ranks", [1, 3, 4])
@pytest.mark.parametrize(("program", "shape", "n_ways"), [("ag_moe", "{5},{12},40,3,2", 2), ("moe_reduce_rs", "{5},40,{10},3,2", 3)])
def test_any_number_of_ranks_computes_the_same(tmp_path: Path, program: str, shape: str, n_ways: int, n_ranks: int):
    """One, three and four ranks, all paths, strongly skewed so that experts are empty; one rank in both dtypes, and tuned, too."""
    case = ("--case", "check", "--dtype", "bf16") if n_ranks == 1 else ("--check",)
    whole = re.sub(r"{(\d+)}", lambda own: str(int(own[1]) * n_ranks), shape)
    done = run(tmp_path, program, *case, "--dtype", "fp16", "--skew", "3", "--shape", whole, n_ranks=n_ranks, timeout_s=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == (2 * n_ways + 2 if n_ranks == 1 else n_ways)


@pytest.mark.parametrize(
    ("program", "options", "winners"),
    [
        further(
            "moe_reduce_rs",
            ("8192", "2048", "1536", "2", "1", "--autotune"),
            {"moe_reduce_rs.moe_reduce_rs", "grouped_gemm.grouped_gemm_kernel"},
        ),
        ("ag_gemm", ("--case", "tune", "--tuner", "function", "--shape", "2,16,8"), {"ag_gemm.ag_gemm"}),
        further("gemm_rs", ("--case", "tune", "--shape", "4,16,16"), {"gemm_rs.gemm_rs", "push_gemm.push_gemm_kernel"}),
        further("gemm_rs", ("--case", "tune", "--shape", "4,16,16", "--tuner", "contextual"), {"push_gemm.push_gemm_kernel"}),
        further(
            "gemm_allreduce", ("--case", "tune", "--shape", "4,16,16"), {"gemm_allreduce.gemm_allreduce", "push_gemm.push_gemm_kernel"}
        ),
    ],
)
def test_tuning_ends_with_one_winner_of_each_kernel(tmp_path: Path, program: str, options: tuple[str, ...], winners: set[str]):
    """The same on both ranks, with a right result; sizes that stand as they are run scaled down on a CPU, which is said."""
    done = run(tmp_path, program, *options, n_ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [
        line.removeprefix("winner of kernels.").partition(": ")[0] for line in done.stdout.splitlines() if line.startswith("winner of ")
    ]
    assert set(told) == winners
    assert "the same on all 2 ranks: True" in done.stdout
    assert " ok tuned" in done.stdout
    assert ("so this runs (64, 64, 64, 2, 1); --shape runs sizes as they are" in done.stdout) == (options[0] == "8192")


@pytest.mark.slow  # the same programs run above, and launch.sh starts torchrun for a supervised job in tests/ranks/test_journals.py
@pytest.mark.parametrize(
    "arguments",
    [
        ("ag_gemm", "--case", "tune", "--shape", "64,64,64"),
        ("ag_moe", "--M", "2048", "--autotune"),
        ("moe_reduce_rs", "8192", "2048", "1536", "32", "2", "--check", "--autotune"),
    ],
)
def test_commands_of_the_documents_end_right_and_leave_a_log_for_each_rank(tmp_path: Path, arguments: tuple[str, ...]):
    """Under launch.sh itself and torchrun, which start two CPU ranks that interpret."""
    command = ["bash", str(ROOT / "launch/launch.sh"), str(ROOT / f"kernels/{arguments[0]}.py"), *arguments[1:]]
    own = {name: value for name, value in of_checkout(tmp_path).items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " ok tuned" in done.stdout
    logs = [f"rank-{rank}.{ending}" for rank in (0, 1) for ending in ("jsonl", "log")]
    assert sorted(path.name for path in (tmp_path / ".autotune_logs").iterdir()) == logs


@pytest.mark.parametrize(
    ("program", "n_ranks", "options", "message"),
    [
        ("guides", 0, ("nothing",), "guides.py {vector_add,matmul,softmax}"),
        ("guides matmul", 0, ("--case", "perf"), "--case perf needs a GPU: the interpreter's times say nothing about one"),
        ("guides matmul", 0, ("--shape", "4,5"), "--shape needs 3 sizes, M,N,K; got 4,5"),
        ("guides matmul", 0, ("--shape", "4,5,-6"), "invalid parse_shape value: '4,5,-6'"),
        ("ag_gemm", 0, (), "torchrun --nproc_per_node=2 kernels/ag_gemm.py"),
        ("ag_gemm", 2, ("--shape", "63,64,64"), "M and N must be multiples of the 2 ranks, got --shape 63,64,64"),
        ("moe_reduce_rs", 2, ("--shape", "5,64,64,2,1"), "M and K must be multiples of the 2 ranks"),
        ("ag_moe", 2, ("--shape", "4,64,64,2,3"), "top_k from 1 to experts"),
        ("ag_moe", 2, ("1", "2"), "need five sizes, M N K experts top_k; got 1 2"),
        ("gemm_rs", 2, ("--case", "perf"), "needs GPUs"),
    ],
)
def test_what_cannot_run_says_why(tmp_path: Path, program: str, n_ranks: int, options: tuple[str, ...], message: str):
    """Sizes that ranks cannot share, too few of them, no ranks, and times without a GPU."""
    done = run(tmp_path, program, *options, n_ranks=n_ranks)
    assert done.returncode != 0
    assert message in done.stderr


BROKEN_KERNELS = """
import dataclasses, torch
import kernels.guides as g, kernels.gemm_a8w8_blockscale as a8w8
from kernels import cases
def code(name, *options): print('exit', cases.main(name, [*options]))
code('guides', 'vector_add', '--shape', '300')
right = a8w8.gemm_a8w8_blockscale
def with_wrong_scale(x, w, x_scale, w_scale, **options):
    x_scale = x_scale.clone()
    x_scale[-1, -1] *= 2
    return right(x, w, x_scale, w_scale, **options)
a8w8.gemm_a8w8_blockscale = with_wrong_scale
code('gemm_a8w8_blockscale', '--shape', '32,128,512', '--dtype', 'fp16')
a8w8.gemm_a8w8_blockscale = lambda *inputs, **options: right(*inputs, **options) * float('nan')
code('gemm_a8w8_blockscale', '--shape', '1,2,3')
g._launch = lambda *args, **fixed: None
code('guides', 'vector_add', '--shape', '300')
code('guides', 'matmul', '--shape', '16,16,16')
def last_column_lost(x, config=None):
    y = torch.softmax(x, dim=1)
    y[-1, -1] = 0
    return y
g.softmax = last_column_lost
code('guides', 'softmax', '--shape', '2,70')
def problems(*args):
    for problem in cases.persistent_products(*args):
        yield dataclasses.replace(problem, expected=lambda: problem.expected() + 0.05)
cases.KERNELS['persistent_gemm'] = dataclasses.replace(cases.KERNELS['persistent_gemm'], problems=problems)
code('persistent_gemm', '--shape', '9,9,9')
"""


def test_a_broken_kernel_fails_the_check(tmp_path: Path):
    """Kernels that write nothing, one that adds to the wrong place, one scale of 128 doubled, NaN, and a wrong reference."""
    done = run_python("-c", BROKEN_KERNELS, cwd=tmp_path, env=of_checkout(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("exit")] == ["exit 0", *["exit 1"] * 6]


SABOTAGED = """
import os, sys
import kernels.ag_gemm as ag, kernels.cases as cases
gathering, right = ag.dist.all_gather_into_tensor, cases.gathered
ag.dist.all_gather_into_tensor = moves_nothing = lambda *a, **k: None
def gathered(shard):
    ag.dist.all_gather_into_tensor = gathering  # the reference needs it
    try: return right(shard)
    finally: ag.dist.all_gather_into_tensor = moves_nothing
cases.gathered = gathered
code = cases.main('ag_gemm', ['--case', 'check', '--shape', '64,64,64'])
print(f'exit {code}\\n', end='', flush=True)  # in one piece: both ranks end at the same moment
sys.exit(code)
"""


def test_wrong_results_fail_the_check_on_all_ranks(tmp_path: Path):
    """A gather that moves nothing is found, and the command fails."""
    done = run_python("-c", SABOTAGED, cwd=tmp_path, env=of_checkout(tmp_path), n_ranks=2)
    assert done.returncode != 0
    # A tuned function is not even left with a wrong config: none was right while it was tuned.
    assert done.stdout.count("FAILED, the limit is") == 4
    assert "NoValidConfigError" not in done.stdout
    assert done.stdout.count("none of its 8 configs runs on all ranks") == 1
    assert "the result is wrong" in done.stdout
    assert done.stdout.count("exit 1") == 2


def test_times_are_a_table_with_each_contender(tmp_path: Path):
    """Measured on the CPU here: us, ratio to the tuned one, and a rate; no number is cut off at the width of a log."""
    script = (
        "import torch\n"
        "from kernels import cases, harness\n"
        "import dist_tune.measure as clocks\n"
        "measure = clocks.measure\n"
        "clocks.measure = lambda run, n_warmup, num_iters: measure(run, 1, 5)\n"
        "console, cpu = harness.console_of(), torch.device('cpu')\n"
        "for problem in (*cases.sums((300,), torch.float32, cpu), *cases.persistent_products((33, 17, 8), torch.float16, cpu)):\n"
        "    console.print(harness.perf(problem))\n"
        "names = ('tuned', 'product', 'NCCL', 'NCCL and torch', 'first config', 'product tuned alone', 'torch two-shot')\n"
        "times = {'aligned, host ahead': dict.fromkeys(names, 2000.0), 'back to back': dict.fromkeys(names, 123456.78)}\n"
        "console.print(harness.times_table('M,N,K=(8192, 8192, 28672) torch.bfloat16', times, 2 * 8192**3))\n"
    )
    done = run_python("-c", script, cwd=tmp_path, env=of_checkout(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows[::3]][:2] == ["a + b [300] torch.float32", "A @ B.T [33, 17, 8] torch.float16"]
    assert [row[2] for row in rows[:6]] == ["tuned", "first config", "torch", "tuned", "first config", "cuBLAS"]
    assert ["GB/s" in rows[0][5], "TFLOP/s" in rows[3][5]] == [True, True]
    assert rows[6][3:] == ["2000.00", "1.00", "549.8 TFLOP/s"]
    assert sum(row[3] == "123456.78" for row in rows) == 7
    assert "…" not in done.stdout


def test_torchs_operators_have_the_names_and_arguments_that_contenders_use():
    """No GPU is needed to see an operator's schema."""
    import torch
    import torch.distributed._symmetric_memory  # defines the operators

    def arguments(operator: Any) -> list[str]:
        return [f"{each.type} {each.name}" for each in operator.default._schema.arguments]

    symm_mem = torch.ops.symm_mem
    scatter = ["Tensor A", "Tensor B", "str reduce_op", "int scatter_dim", "str group_name"]
    assert arguments(symm_mem.fused_matmul_reduce_scatter) == scatter
    assert arguments(symm_mem.fused_all_gather_matmul)[:4] == ["Tensor A", "List[Tensor] Bs", "int gather_dim", "str group_name"]
    assert arguments(symm_mem.one_shot_all_reduce) == ["Tensor input", "str reduce_op", "str group_name"]
    assert arguments(symm_mem.two_shot_all_reduce_) == ["Tensor input", "str reduce_op", "str group_name"]
    assert [each.split()[1] for each in arguments(torch.ops.aten._grouped_mm)][:3] == ["self", "mat2", "offs"]


def test_torchs_sums_compete_where_torch_has_them(monkeypatch: pytest.MonkeyPatch):
    """One-shot and two-shot sum bfloat16, and no fp16: there they are left out rather than fail."""
    import torch
    import torch.distributed._symmetric_memory as memory

    from kernels.cases import torch_row_parallel

    monkeypatch.setattr(memory, "empty", lambda *size, dtype, device: torch.empty(*size, dtype=dtype))
    monkeypatch.setattr(memory, "rendezvous", lambda *_: None)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_group", lambda: None)
    found = [list(torch_row_parallel(*torch.ones(2, 2, 2, dtype=dtype), is_scattered=False)) for dtype in (torch.bfloat16, torch.half)]
    assert found == [["torch one-shot", "torch two-shot"], []]


def test_a_rank_sends_each_peer_what_it_sums():
    """An all-reduce sends twice what a reduce-scatter sends; a gather each rank's rows to each peer."""
    from kernels.cases import STEPS

    assert STEPS["gemm_rs"].work((4096, 4096, 11008), 2)[1] == 4096 * 4096
    assert STEPS["gemm_allreduce"].work((4096, 4096, 11008), 8)[1] == 2 * STEPS["gemm_rs"].work((4096, 4096, 11008), 8)[1]
    assert STEPS["ag_gemm"].work((4096, 11008, 4096), 2) == (4096 * 11008 * 4096, 4096 * 4096)


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").glob("*.py")), ids=lambda path: path.stem)
def test_a_kernel_does_not_import_what_checks_and_times_it(path: Path):
    """Started as a program, the file leaves before its kernel is defined, which the cases then import under its own name."""
    if path.stem in ("cases", "harness"):
        return
    body = ast.parse(path.read_text()).body
    guards = [node for node in body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)]
    own = [ast.unparse(node) for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [line for line in own if "kernels.cases" in line or "harness" in line] == []
    for guard in guards:
        before = [ast.unparse(node) for node in body[: body.index(guard)]]
        assert [line for line in before if "torch" in line and "import" in line and not line.startswith("'")] == []
        assert ast.unparse(guard.body[-1]) == f"sys.exit(main('{path.stem}'))"
