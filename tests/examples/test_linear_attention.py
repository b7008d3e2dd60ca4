"""examples/linear_attention.py without a GPU: what it says then, and its logic with an operator that stands in for the library's."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.cases import further
from tests.programs import ROOT, Done, of_checkout, run_python

pytestmark = [pytest.mark.once, pytest.mark.processes]

SCRIPT = str(ROOT / "examples/linear_attention.py")
# Doubled by a kernel of triton.autotune, forward and backward: two sites, by the kernel's key.
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
"""
PROGRAM = """
import sys
import examples.linear_attention as example
from examples import beside_vanilla
example.missing, example.SHAPE = (lambda: ""), (1, 16, 2, 16)
example.triton.testing.do_bench = lambda call, quantiles, **options: (call(), [1.0] * 3)[1]
sys.exit(example.main())
"""


def run(cwd: Path, *command: str, n_ranks: int = 0, path: str = "", interpret: str = "1") -> Done:
    environment = of_checkout(cwd, path, TRITON_INTERPRET=interpret, DIST_TUNE_VERBOSITY="quiet")
    return run_python(*command, cwd=cwd, env=environment, n_ranks=n_ranks)


def library(folder: Path, shift: str = "0.0") -> str:
    """A folder with a package `fla` that has nothing but `fla.ops.gla.chunk_gla`."""
    for package in ("fla", "fla/ops", "fla/ops/gla"):
        (folder / package).mkdir(parents=True, exist_ok=True)
        (folder / package / "__init__.py").write_text("")
    (folder / "fla/ops/gla/__init__.py").write_text("from fla.ops.gla.chunk import chunk_gla\n")
    (folder / "fla/ops/gla/chunk.py").write_text(OPERATOR.replace("SHIFT", shift))
    return str(folder)


@pytest.mark.parametrize("case", ["check", "perf"])
def test_without_the_library_it_says_how_to_install_it(tmp_path: Path, case: str) -> None:
    """In one line, with the exit code of a wrong command line, whether there are GPUs or not."""
    hidden = "import importlib.util, runpy, sys\nfind = importlib.util.find_spec\n"
    hidden += "importlib.util.find_spec = lambda name, *more: None if name == 'fla' else find(name, *more)\n"
    hidden += f"sys.argv = ['linear_attention.py', '--case', {case!r}]\nrunpy.run_path({SCRIPT!r}, run_name='__main__')\n"
    done = run(tmp_path, "-c", hidden)
    assert done.returncode == 2
    assert "needs fla-core, which is not installed: pip install 'dist_tune[examples]'" in done.stderr.splitlines()[-1]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(each.startswith("fla-core") for each in extras["examples"])


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    """With the library alone nothing is run: its kernels need a GPU."""
    done = run(tmp_path, SCRIPT, path=library(tmp_path / "site"))
    assert done.returncode == 2
    assert "needs GPUs" in done.stderr.splitlines()[-1]


def test_both_choices_are_compared(tmp_path: Path) -> None:
    """Two ranks, an operator with two sites: dist_tune tunes, then vanilla does; output and all gradients are equal."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run(tmp_path, "program.py", "--case", "check", n_ranks=2, path=library(tmp_path / "site"))
    assert done.returncode == 0, done.stdout + done.stderr
    line = done.stdout.splitlines()[-1]
    assert line.startswith("check: 2 sites, 4 configs, ")
    assert "; 10 results, largest difference of an element 0.0e+00, largest relative error 0.0e+00 " in line
    assert line.endswith("; ok")


def test_results_that_differ_fail_the_check(tmp_path: Path) -> None:
    """A kernel whose result depends on its config, of which vanilla gets others: the command fails."""
    other = """
import triton
def quick_vanilla(package):
    for kernel in beside_vanilla.kernels_in(package, example.Autotuner):
        kernel.configs = [triton.Config({"BLOCK": block}) for block in (128, 256)]
example.quick_vanilla = quick_vanilla
"""
    (tmp_path / "program.py").write_text(PROGRAM.replace("sys.exit", f"{other}sys.exit"))
    done = run(tmp_path, "program.py", n_ranks=2, path=library(tmp_path / "site", shift="BLOCK"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "; FAILED" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(("vanilla", "n_compiled"), [("cold", [4, 4]), further("compiled", [4])])
def test_each_tuner_starts_with_nothing_compiled(tmp_path: Path, vanilla: str, n_compiled: list[int]) -> None:
    """Real compilation on the fake driver, into a folder for each tuner or one for both; a table, and a last line with the figures."""
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
    (tmp_path / "program.py").write_text(fake)
    done = run(tmp_path, "program.py", n_ranks=2, path=library(tmp_path / "site"), interpret="0")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [int(line.split()[1]) for line in lines if line.startswith("compiled ")] == n_compiled
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in lines if line.startswith("│")]
    assert rows == [["dist_tune", "cold"], ["triton.autotune", vanilla]]
    assert lines[-1].startswith("perf: first call ")
    assert lines[-1].endswith("step on the device 1.0000 ms, with vanilla's choice 2.0000 ms, 2.000 x")
