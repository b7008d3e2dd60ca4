"""examples/state_space_scan.py: two gloo ranks under the Triton interpreter, and code for a GPU that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import ROOT, Done, of_checkout, run_python

pytestmark = [pytest.mark.once, pytest.mark.processes]

SCRIPT = str(ROOT / "examples/state_space_scan.py")
# As the script, with as few replays as there can be: the interpreter takes a second for each.
QUICK = """
import sys
import examples.state_space_scan as scan
from dist_tune import contextual_autotune
scan.step = contextual_autotune(is_dist=True, n_repeat=1, n_warmup=0, cache=False)(scan.step.__wrapped__)
"""


def run(cwd: Path, *command: str, n_ranks: int = 0, interpret: str = "1") -> Done:
    environment = of_checkout(cwd, TRITON_INTERPRET=interpret, DIST_TUNE_VERBOSITY="quiet")
    return run_python(*command, cwd=cwd, env=environment, n_ranks=n_ranks)


@pytest.mark.parametrize(("option", "dtype"), [((), "bfloat16"), pytest.param(("--dtype", "fp32"), "float32", marks=pytest.mark.slow)])
def test_results_are_right_in_the_tuning_call_and_after_it(tmp_path: Path, option: tuple[str, ...], dtype: str) -> None:
    """Y and seven gradients on two ranks whose inputs differ, sums over as many parts as the launched configs have made."""
    (tmp_path / "program.py").write_text(f"{QUICK}sys.exit(scan.main())\n")
    done = run(tmp_path, "program.py", "--case", "check", *option, n_ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    line = done.stdout.splitlines()[-1]
    assert line.startswith(f"check: B,L,H,P,N,Q=1,64,1,16,16,32 torch.{dtype}, 15 sites, largest relative error ")
    assert line.endswith("; ok")


@pytest.mark.slow
def test_seconds_of_a_tuning_are_told_by_phase(tmp_path: Path) -> None:
    """A line for each site, and at the end one with the counts and the seconds."""
    (tmp_path / "program.py").write_text(f"{QUICK}sys.exit(scan.main())\n")
    done = run(tmp_path, "program.py", "--case", "tune", "--shape", "1,32,1,16,16,32", "--dtype", "fp32", n_ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert sum(line.startswith("│") for line in lines) >= 15
    assert re.match(r"tune: 15 sites, 30 configs, \d+ replays, first call [\d.]+ s \(discover [\d.]+, compile .*, settle [\d.]+\)$", last)


@pytest.mark.slow
def test_parts_of_a_config_that_was_not_launched_fail_the_check(tmp_path: Path) -> None:
    """The host takes the smallest block for the launched one: memory that no program has written is summed, and the command fails."""
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
"""
    (tmp_path / "program.py").write_text(f"{QUICK}{sabotage}sys.exit(scan.main())\n")
    done = run(tmp_path, "program.py", "--case", "check", "--dtype", "fp32", n_ranks=2)
    assert done.returncode == 1
    assert "; FAILED" in done.stdout


@pytest.mark.slow  # seconds of compilation; tests/test_kernel_code.py has the kernels of this repository's steps
def test_the_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """Twelve kernels at 15 keys have 110 configs; the first of each becomes sm_90 code, products with matrix units."""
    lines = [
        "import torch, torch.distributed as dist",
        "from dist_tune import testing",
        "testing.install_fake_driver()",
        "import examples.state_space_scan as scan",
        "from examples import beside_vanilla",
        "from triton.runtime.autotuner import Autotuner",
        "dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())",
        "kernels = {each.base_fn.__name__: each for each in beside_vanilla.kernels_in('examples', Autotuner)}",
        "n_configs = {name: len(each.configs) for name, each in kernels.items()}",
        "for each in kernels.values(): each.configs = each.configs[:1]",
        "given = scan.arguments((1, 128, 2, 64, 64, 64), torch.bfloat16, torch.device('cpu'))",
        "scan.step.__wrapped__(*given)",
        "launches = testing.FakeH200.launches",
        "print(len(kernels), len(launches), sum(n_configs[name] for name in launches), set(launches) == set(kernels))",
    ]
    (tmp_path / "program.py").write_text("\n".join(lines))
    done = run(tmp_path, "program.py", interpret="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "12 15 110 True"
    compiled = {path.stem: path.read_text() for path in (tmp_path / "triton").rglob("*.ptx")}
    assert len(compiled) == 12
    products = {name for name, ptx in compiled.items() if "mma" in ptx}
    assert len(products) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--shape", "1,65,1,16,16,32"), "need L as a multiple of Q"), (("--case", "perf"), "--case perf needs GPUs")],
)
def test_what_cannot_run_says_why(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    """Rows that fill no chunk, and times without a GPU."""
    done = run(tmp_path, SCRIPT, *arguments, n_ranks=2)
    assert done.returncode != 0
    assert message in done.stderr
