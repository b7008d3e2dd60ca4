"""examples/ without a GPU, as programs: two ranks that interpret, an operator in a library's place,
code for the fake driver.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.programs import ROOT, Done, of_checkout, run_python
from tests.worlds import further

pytestmark = pytest.mark.processes

EXAMPLES = ROOT / "examples"


def run(
    cwd: Path, command: str, *options: str, n_ranks: int = 0, path: str = "", interpret: str = "1"
) -> Done:
    """A file of examples/, or a program of this module."""
    script = [str(EXAMPLES / command)] if command.endswith(".py") else ["-c", command]
    environment = of_checkout(cwd, path, TRITON_INTERPRET=interpret, DIST_TUNE_VERBOSITY="quiet")
    return run_python(*script, *options, cwd=cwd, env=environment, n_ranks=n_ranks)


def last_line(done: Done) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_the_gallery_names_every_example():
    """Each file that can be started has its row."""
    listed = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))
    assert listed == {
        path.name for path in EXAMPLES.glob("*.py") if '__name__ == "__main__"' in path.read_text()
    }


@pytest.mark.slow  # tests/kernels/test_programs.py has the same step
def test_the_gather_and_product_is_tuned_and_right(tmp_path: Path):
    """It is compared with a plain gather and product."""
    done = run(tmp_path, "allgather_gemm.py", "--shapes", "64,32,32", n_ranks=2)
    assert re.findall(r"64 x (\d+) x 32: BLOCK_M=\d+", done.stdout) == ["32"], done.stderr


@pytest.mark.slow  # tests/ranks/test_online.py has such loops
def test_a_training_loop_is_tuned_while_it_runs(tmp_path: Path):
    """Forward and backward, optimizer, schedule and data inside the step: what is trained is the
    untuned loop's to the bit.
    """
    by_its_own_clock = (
        "from dist_tune.testing import ExactTime\nfrom examples.mlp_training import"
        " main\nExactTime.keep()\nmain()"
    )
    done = run(
        tmp_path, by_its_own_clock, "--width", "32", "--rows", "16", "--steps", "500", n_ranks=2
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = (
        r"tuned in \d+ of 500 steps; losses and parameters are those of the untuned loop; .*forward"
        r" BLOCK="
    )
    assert re.search(told, done.stdout), done.stdout


def test_files_are_tuned_once_and_served(tmp_path: Path):
    """The second command tunes nothing."""
    assert "wrote" in run(tmp_path, "serving_files.py", "--tune").stdout
    (tmp_path / ".autotune_logs/rank-0.log").unlink()
    assert run(tmp_path, "serving_files.py").stdout.count(" tokens: {'BLOCK'") == 3
    assert not (tmp_path / ".autotune_logs/rank-0.log").exists()


@pytest.mark.parametrize(
    ("script", "options", "n_ranks", "message"),
    [
        ("state_space_scan.py", ("--shape", "1,65,1,16,16,32"), 2, "need L as a multiple of Q"),
        ("linear_attention.py", (), 0, "needs GPUs"),  # with the library, whose kernels need one
    ],
)
def test_what_cannot_run_says_why(
    tmp_path: Path, script: str, options: tuple[str, ...], n_ranks: int, message: str
):
    """Rows that fill no chunk, and no GPU for times or a library's kernels."""
    done = run(tmp_path, script, *options, n_ranks=n_ranks, path=library(tmp_path / "site"))
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1]


# -- examples/state_space_scan.py ------------------------------------------------------------------

# As the script, with as few replays as there can be: the interpreter takes a second for each.
QUICK = """
import sys
import examples.state_space_scan as scan
from dist_tune import contextual_autotune
scan.step = contextual_autotune(is_dist=True, n_repeat=1, n_warmup=0, cache=False)(scan.step.__wrapped__)
sys.exit(scan.main())
"""  # noqa: E501


@pytest.mark.slow
def test_results_are_right_in_the_tuning_call_and_after_it(tmp_path: Path):
    """Y and seven gradients on two ranks whose inputs differ, sums over as many parts as the
    launched configs have made.
    """
    line = last_line(run(tmp_path, QUICK, "--case", "check", n_ranks=2))
    assert line.startswith(
        "check: B,L,H,P,N,Q=1,64,1,16,16,32 torch.bfloat16, 15 sites, largest relative error "
    )
    assert line.endswith("; ok")


@pytest.mark.slow
def test_parts_of_a_config_that_was_not_launched_fail_the_check(tmp_path: Path):
    """The host takes the smallest block for the launched one: memory that no program has written is
    summed, and the command fails.
    """
    sabotage = """
import inspect
import examples.state_space_backward as backward
source = inspect.getsource(backward.backward)
for right, wrong in {
    'decay_kernel.best_config.kwargs["BLOCK_M"]': "16",
    "cum.new_empty(n, h, n_parts, q)": "cum.new_full((n, h, n_parts, q), 7.0)",
}.items():
    assert right in source
    source = source.replace(right, wrong)
exec(source, vars(backward))
backward.smallest, backward.decay_kernel.configs = (lambda kernel, name: 16), backward.decay_kernel.configs[1:]
scan.backward = backward.backward
sys.exit"""  # noqa: E501
    done = run(
        tmp_path,
        QUICK.replace("sys.exit", sabotage),
        "--case",
        "check",
        "--dtype",
        "fp32",
        n_ranks=2,
    )
    assert (done.returncode, "; FAILED" in done.stdout) == (1, True)


# -- examples/linear_attention.py ------------------------------------------------------------------

# In the place of the library's operator: doubled by a kernel of triton.autotune, forward and
# backward: two sites, by the kernel's key.
OPERATOR = """
import torch
import triton
import triton.language as tl

@triton.autotune(
    configs=[triton.Config({"BLOCK": block}) for block in (512, 1024)], key=["n", "IS_BACKWARD"],
    do_bench=lambda call, quantiles: (call(), [1.0] * 3)[1],
)
@triton.jit
def double_kernel(x, y, n, IS_BACKWARD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n).to(tl.float32) * 2.0 + SHIFT
    tl.store(y + at, value.to(y.dtype.element_ty), mask=at < n)

def doubled(x, is_backward):
    y = torch.empty_like(x)
    double_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel(), is_backward)
    return y

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return doubled(x, False)

    @staticmethod
    def backward(ctx, dy):
        return doubled(dy.contiguous(), True)

def chunk_gla(q, k, v, g):
    return Double.apply((q * k * v * g.to(q.dtype)).contiguous()), None
"""  # noqa: E501
PROGRAM = """
import sys, triton
import examples.linear_attention as example
from examples import beside_vanilla
example.missing, example.SHAPE = (lambda: ""), (1, 16, 2, 16)
example.triton.testing.do_bench = lambda call, quantiles, **options: (call(), [1.0] * 3)[1]
def with_other_configs(package):
    for kernel in beside_vanilla.kernels_in(package, example.Autotuner):
        kernel.configs = [triton.Config({"BLOCK": block}) for block in (128, 256)]
if sys.argv.pop() == "other":
    example.quick_vanilla = with_other_configs
sys.exit(example.main())
"""


def library(folder: Path, shift: str = "0.0") -> str:
    """A folder with a package `fla` that has nothing but `fla.ops.gla.chunk_gla`."""
    for package in ("fla", "fla/ops", "fla/ops/gla"):
        (folder / package).mkdir(parents=True, exist_ok=True)
        (folder / package / "__init__.py").write_text("")
    (folder / "fla/ops/gla/__init__.py").write_text("from fla.ops.gla.chunk import chunk_gla\n")
    (folder / "fla/ops/gla/chunk.py").write_text(OPERATOR.replace("SHIFT", shift))
    return str(folder)


def test_without_the_library_it_says_how_to_install_it(tmp_path: Path):
    """In one line, with the exit code of a wrong command line, whether there are GPUs or not."""
    hidden = "import importlib.util, runpy\nimportlib.util.find_spec = lambda name, *_: None\n"
    done = run(
        tmp_path,
        f"{hidden}runpy.run_path({str(EXAMPLES / 'linear_attention.py')!r}, run_name='__main__')",
        "--case",
        "perf",
    )
    assert done.returncode == 2
    assert (
        "needs fla-core, which is not installed: pip install 'dist_tune[examples]'"
        in done.stderr.splitlines()[-1]
    )
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert any(each.startswith("fla-core") for each in extras["examples"])


def test_both_choices_are_compared(tmp_path: Path):
    """Two ranks, an operator with two sites: dist_tune tunes, then vanilla does; output and all
    gradients are equal.
    """
    line = last_line(
        run(
            tmp_path, PROGRAM, "--case", "check", "same", n_ranks=2, path=library(tmp_path / "site")
        )
    )
    assert line.startswith("check: 2 sites, 4 configs, ")
    assert (
        "; 10 results, largest difference of an element 0.0e+00, largest relative error 0.0e+00 "
        in line
    )
    assert line.endswith("; ok")


def test_results_that_differ_fail_the_check(tmp_path: Path):
    """A kernel whose result depends on its config, of which vanilla gets others: the command
    fails.
    """
    done = run(
        tmp_path, PROGRAM, "other", n_ranks=2, path=library(tmp_path / "site", shift="BLOCK")
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "; FAILED" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(("vanilla", "n_compiled"), [("cold", [4, 4]), further("compiled", [4])])
def test_each_tuner_starts_with_nothing_compiled(
    tmp_path: Path, vanilla: str, n_compiled: list[int]
):
    """Real compilation on the fake driver, into a folder for each tuner or one for both; a table,
    and a last line with the figures.
    """
    fake = """
from dist_tune import testing
testing.install_fake_driver()
import shutil, torch, torch.distributed as dist
from pathlib import Path
import examples.linear_attention as example
from examples import beside_vanilla
from kernels import harness
device, console = harness.join_ranks()
remove = shutil.rmtree
def removed(folder, **options):
    if dist.get_rank() == 0 and "/triton-" in str(folder):
        print("compiled", len(list(Path(folder).rglob("*.cubin"))), flush=True)
    remove(folder, **options)
beside_vanilla.shutil.rmtree = removed
def aligned_ms(runs, head_start_cycles):
    for run in runs.values():
        run()
    return dict(zip(runs, (1.0, 2.0)))
beside_vanilla.harness.aligned_ms = aligned_ms
given = example.arguments((1, 16, 2, 16), device)
plain = lambda: example.step.__wrapped__(*given)
beside_vanilla.perf("fla", lambda: example.step(*given), plain, VANILLA, console)
dist.barrier()
""".replace("VANILLA", repr(vanilla))
    done = run(tmp_path, fake, n_ranks=2, path=library(tmp_path / "site"), interpret="0")
    last = last_line(done)
    lines = done.stdout.splitlines()
    assert [int(line.split()[1]) for line in lines if line.startswith("compiled ")] == n_compiled
    rows = [
        [cell.strip() for cell in line.split("│")[1:3]] for line in lines if line.startswith("│")
    ]
    assert rows == [["dist_tune", "cold"], ["triton.autotune", vanilla]]
    assert last.startswith("perf: first call ")
    assert last.endswith("step on the device 1.0000 ms, with vanilla's choice 2.0000 ms, 2.000 x")
