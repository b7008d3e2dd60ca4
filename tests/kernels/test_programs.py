"""Programs of kernels/ from their command lines: checks, tunings, times and refusals, alone and on
gloo ranks that interpret.
"""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory  # defines the operators

from kernels import cases, cute_build, harness
from tests.programs import ROOT, Done, of_checkout, run_python
from tests.worlds import further, on_each_rank


def run(cwd: Path, program: str, *options: str, n_ranks: int = 0) -> Done:
    """kernels/<first word of program>.py with the other words as its first options."""
    name, *first = program.split()
    script = str(ROOT / f"kernels/{name}.py")
    return run_python(
        script, *first, *options, cwd=cwd, env=of_checkout(cwd), n_ranks=n_ranks, timeout_s=280
    )


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("program", "n_ranks", "options", "n_results"),
    [
        ("guides vector_add", 0, "--shape 1025 3 --dtype bf16 --dtype fp32", 12),
        ("ag_moe", 2, "--check --shape 10,34,20,2,2 --straggler 0 --skew 1", 2),
        further("gemm_a8w8_blockscale", 0, "", 21),
        further("ag_gemm", 2, "", 12),
        *(
            further(name, 2, "--shape 2,8,16 --straggler 1 --dtype fp16", 11)
            for name in ("gemm_rs", "gemm_allreduce")
        ),
        *(further("gemm_rs", n, f"--shape {n * 19},35,{n * 23}", 11) for n in (1, 2, 4)),
        *(further("gemm_allreduce", n, f"--shape 19,35,{n * 23}", 11) for n in (1, 2, 4)),
        *(
            further("ag_moe", n, f"--shape {n * 5},{n * 12},40,3,2 --skew 3 --check", 2)
            for n in (1, 3, 4)
        ),
        *(
            further("moe_reduce_rs", n, f"--shape {n * 5},40,{n * 10},3,2 --skew 3 --check", 3)
            for n in (1, 3, 4)
        ),
    ],
)
def test_a_check_has_a_line_for_each_result(
    tmp_path: Path, program: str, n_ranks: int, options: str, n_results: int
):
    """On any number of ranks; with each config or way, and tuned; into memory full of NaN, experts
    without rows, a rank that is late.
    """
    done = run(tmp_path, program, "--case", "check", *options.split(), n_ranks=n_ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = [line for line in done.stdout.splitlines() if line.startswith("check ")]
    assert [" ok " in line for line in verdicts] == [True] * n_results
    # A check of ranks keeps nothing: a config found there would have been checked at another time.
    assert (tmp_path / "cache").exists() == (program == "guides vector_add")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "options", "winners"),
    [
        ("ag_gemm", "--tuner function --shape 2,16,8", {"ag_gemm.ag_gemm"}),
        further("gemm_rs", "--shape 4,16,16", {"gemm_rs.gemm_rs", "push_gemm.push_gemm_kernel"}),
        further("gemm_rs", "--shape 4,16,16 --tuner contextual", {"push_gemm.push_gemm_kernel"}),
        further(
            "gemm_allreduce",
            "--shape 4,16,16",
            {"gemm_allreduce.gemm_allreduce", "push_gemm.push_gemm_kernel"},
        ),
        further(
            "moe_reduce_rs",
            "8192 2048 1536 2 1 --autotune",
            {"moe_reduce_rs.moe_reduce_rs", "grouped_gemm.grouped_gemm_kernel"},
        ),
    ],
)
def test_tuning_ends_with_one_winner_of_each_kernel(
    tmp_path: Path, program: str, options: str, winners: set[str]
):
    """The same on both ranks, with a right result; sizes that stand as they are run scaled down on
    a CPU, which is said.
    """
    done = run(tmp_path, program, "--case", "tune", *options.split(), n_ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(re.findall(r"^winner of kernels\.([\w.]+): ", done.stdout, re.MULTILINE)) == winners
    assert "the same on all 2 ranks: True" in done.stdout
    assert " ok tuned" in done.stdout
    assert (
        "so this runs (64, 64, 64, 2, 1); --shape runs sizes as they are" in done.stdout
    ) == options.startswith("8192")


# The same programs run above, and launch.sh starts torchrun for a supervised job in
# tests/ranks/test_journals.py
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "command",
    [
        "ag_gemm.py --case tune --shape 64,64,64",
        "moe_reduce_rs.py 8192 2048 1536 32 2 --check --autotune",
    ],
)
def test_commands_of_the_documents_end_right_and_leave_a_log_for_each_rank(
    tmp_path: Path, command: str
):
    """Under launch.sh itself and torchrun, which start two CPU ranks that interpret."""
    script, *options = command.split()
    own = {
        name: value for name, value in of_checkout(tmp_path).items() if name != "TRITON_INTERPRET"
    }
    words = ["bash", str(ROOT / "launch/launch.sh"), str(ROOT / "kernels" / script), *options]
    done = subprocess.run(
        words, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " ok tuned" in done.stdout
    logs = sorted(path.name for path in (tmp_path / ".autotune_logs").iterdir())
    assert logs == ["rank-0.log", "rank-1.log"]


# -- what cannot run -------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "shape", "message"),
    [
        ("ag_gemm", "63,64,64", "M and N must be multiples of the 2 ranks, got --shape 63,64,64"),
        ("ag_moe", "4,64,64,2,3", "top_k from 1 to experts"),
    ],
)
def test_sizes_that_ranks_cannot_share_end_the_program(
    tmp_path: Path, program: str, shape: str, message: str
):
    done = run(tmp_path, program, "--shape", shape, n_ranks=2)
    assert (done.returncode != 0, message in done.stderr) == (True, True), done.stderr


@pytest.mark.parametrize(
    ("program", "is_rank", "message"),
    [
        ("guides nothing", False, "guides.py {vector_add,matmul,softmax}"),
        (
            "guides matmul --case perf",
            False,
            "--case perf needs a GPU: the interpreter's times say nothing about one",
        ),
        ("guides matmul --shape 4,5", False, "--shape needs 3 sizes, M,N,K; got 4,5"),
        ("guides matmul --shape 4,5,-6", False, "invalid parse_shape value: '4,5,-6'"),
        (
            "cute_gemm --dtype fp32",
            False,
            "invalid choice: 'fp32'",
        ),  # a mistake, also where it cannot run
        ("ag_gemm", False, "torchrun --nproc_per_node=2 kernels/ag_gemm.py"),
        ("gemm_rs --case perf", True, "--case perf needs GPUs"),
        ("ag_moe 1 2", True, "need five sizes, M N K experts top_k; got 1 2"),
    ],
)
def test_a_wrong_command_line_says_why(
    program: str,
    is_rank: bool,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Too few sizes, no ranks, and times without a GPU: exit code 2."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if is_rank:
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setenv("RANK", "0")
    try:
        name, *words = program.split()
        code: Any = cases.main(name, words)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "capability", "said"),
    [
        (
            "cutlass",
            (9, 0),
            "not installed: nvidia-cutlass-dsl. Install the extra: pip install 'dist-tune[cute]'.",
        ),
        (
            "tvm_ffi",
            None,
            "not installed: apache-tvm-ffi. ",
        ),  # packages first: they can be installed
        ("", None, "no GPU was found: wgmma and TMA need a Hopper GPU (compute capability 9.0)."),
        (
            "",
            (10, 0),
            "the GPU has compute capability 10.0: wgmma of sm_90a needs 9.0 (H100, H200).",
        ),
        ("", (9, 0), ""),
    ],
)
def test_a_kernel_that_cannot_run_here_is_a_skip(
    missing: str,
    capability: Any,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """One line that says what is missing, and exit code 77, for every case."""
    monkeypatch.setattr(
        cute_build, "find_spec", lambda module: None if module == missing else object()
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    reason = cute_build.reason_to_skip()
    assert reason.startswith(said and f"kernels/cute_gemm.py cannot run here: {said}")
    assert bool(reason) == bool(said)
    if not said:
        return
    for case in ("check", "tune", "perf"):
        assert cases.main("cute_gemm", ["--case", case]) == 77
        assert capsys.readouterr().out == f"skipped: {reason}\n"


# -- what is wrong ---------------------------------------------------------------------------------


def twice_the_last(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.flatten()[:-1], 2 * tensor.flatten()[-1:]]).view(tensor.shape)


FP8, SUM, SOFTMAX = (
    "gemm_a8w8_blockscale --shape 32,128,512",
    "guides vector_add --shape 300",
    "guides softmax --shape 2,70",
)


@on_each_rank(
    1,
    is_dist=False,
    cases=[
        (
            FP8,
            lambda run, x, w, x_scale, *rest, **options: run(
                x, w, twice_the_last(x_scale), *rest, **options
            ),
            1,
        ),
        (FP8, lambda run, *inputs, **options: run(*inputs, **options) * float("nan"), 1),
        (SUM, lambda run, *inputs: torch.empty_like(run(*inputs)), 1),
        (SOFTMAX, lambda run, *inputs: twice_the_last(run(*inputs)), 1),
        (SUM, lambda run, *inputs: run(*inputs), 0),
    ],
)
def test_a_broken_kernel_fails_the_check(rank: int, case: tuple[str, Any, int]):
    """One scale of 128 doubled, NaN, nothing written, one element wrong: exit code 1; as it is,
    0.
    """
    command, broken, code = case
    program, *options = command.split()
    module: Any = importlib.import_module(f"kernels.{program}")
    name = options[0] if program == "guides" else program
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, functools.partial(broken, getattr(module, name)))
        assert cases.main(program, options) == code


SABOTAGED = """
import sys
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


@pytest.mark.processes
def test_wrong_results_fail_the_check_on_all_ranks(tmp_path: Path):
    """A gather that moves nothing is found; a function that is tuned meanwhile is not even left
    with a wrong config: none was right.
    """
    done = run_python("-c", SABOTAGED, cwd=tmp_path, env=of_checkout(tmp_path), n_ranks=2)
    assert done.returncode != 0
    counts = {
        "FAILED, the limit is": 4,
        "none of its 8 configs runs on all ranks": 1,
        "exit 1": 2,
        "NoValidConfigError": 0,
    }
    assert {text: done.stdout.count(text) for text in counts} == counts, done.stdout


# -- times -----------------------------------------------------------------------------------------


def test_times_are_a_table_with_each_contender():
    """Microseconds, the ratio to the tuned one, and a rate; no number is cut off at the width of a
    log.
    """
    x, console = torch.zeros(300), harness.console_of()
    problem = harness.Problem(
        "x + x",
        lambda config: x + x,
        ["first"],
        lambda: x + x,
        0.0,
        {"torch": lambda: x * 2},
        n_bytes=3600,
    )
    names = (
        "tuned",
        "product",
        "NCCL",
        "NCCL and torch",
        "first config",
        "product tuned alone",
        "torch two-shot",
    )
    times = {
        "aligned, host ahead": dict.fromkeys(names, 2000.0),
        "back to back": dict.fromkeys(names, 123456.78),
    }
    with console.capture() as printed:
        console.print(harness.perf(problem))
        console.print(
            harness.times_table("M,N,K=(8192, 8192, 28672) torch.bfloat16", times, 2 * 8192**3)
        )
    assert "…" not in printed.get()
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in printed.get().splitlines()
        if line.startswith("│")
    ]
    assert [(row[2], row[5].split()[1]) for row in rows[:3]] == [
        (name, "GB/s") for name in ("tuned", "first config", "torch")
    ]
    assert rows[3][3:] == ["2000.00", "1.00", "549.8 TFLOP/s"]
    assert [row[3] for row in rows[-7:]] == ["123456.78"] * 7


def test_torchs_operators_have_the_names_and_arguments_that_contenders_use():
    """No GPU is needed to see an operator's schema."""

    def arguments(operator: Any) -> list[str]:
        return [each.name for each in operator.default._schema.arguments]

    symm_mem = torch.ops.symm_mem
    assert arguments(symm_mem.fused_matmul_reduce_scatter) == [
        "A",
        "B",
        "reduce_op",
        "scatter_dim",
        "group_name",
    ]
    assert arguments(symm_mem.fused_all_gather_matmul)[:4] == [
        "A",
        "Bs",
        "gather_dim",
        "group_name",
    ]
    assert (
        arguments(symm_mem.one_shot_all_reduce)
        == arguments(symm_mem.two_shot_all_reduce_)
        == ["input", "reduce_op", "group_name"]
    )
    assert arguments(torch.ops.aten._grouped_mm)[:3] == ["self", "mat2", "offs"]


def test_torchs_sums_compete_where_torch_has_them(monkeypatch: pytest.MonkeyPatch):
    """One-shot and two-shot sum bfloat16, and no fp16: there they are left out rather than fail."""
    memory = torch.distributed._symmetric_memory
    monkeypatch.setattr(
        memory, "empty", lambda *size, dtype, device: torch.empty(*size, dtype=dtype)
    )
    monkeypatch.setattr(memory, "rendezvous", lambda *_: None)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_group", lambda: None)
    found = [
        list(cases.torch_row_parallel(*torch.ones(2, 2, 2, dtype=kind), is_scattered=False))
        for kind in (torch.bfloat16, torch.half)
    ]
    assert found == [["torch one-shot", "torch two-shot"], []]


def test_a_rank_sends_each_peer_what_it_sums():
    """An all-reduce sends twice what a reduce-scatter sends; a gather each rank's rows to each
    peer.
    """
    sums, all_sums, gather = (
        cases.STEPS[name].work for name in ("gemm_rs", "gemm_allreduce", "ag_gemm")
    )
    assert sums((4096, 4096, 11008), 2)[1] == 4096 * 4096
    assert all_sums((4096, 4096, 11008), 8)[1] == 2 * sums((4096, 4096, 11008), 8)[1]
    assert gather((4096, 11008, 4096), 2) == (4096 * 11008 * 4096, 4096 * 4096)


def test_a_program_leaves_its_file_before_the_kernel_is_defined():
    """What it hands over to imports it under its own name, which its records carry."""
    for path in (ROOT / "kernels").glob("*.py"):
        before, is_program, after = path.read_text().partition('\nif __name__ == "__main__"')
        assert "\nimport torch" not in before or not is_program, path.name
        assert 'with_name("program.py")' in after or not is_program, path.name
