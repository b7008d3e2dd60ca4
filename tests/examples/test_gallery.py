"""The short examples of examples/, run by their commands on CPU ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import ROOT, Done, of_checkout, run_python

pytestmark = [pytest.mark.once, pytest.mark.processes]

EXAMPLES = ROOT / "examples"


def run(cwd: Path, *command: str, n_ranks: int = 0) -> Done:
    done = run_python(*command, cwd=cwd, env=of_checkout(cwd), n_ranks=n_ranks)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow  # tests/test_kernel_programs.py has the same step
def test_the_gather_and_product_is_tuned_and_right(tmp_path: Path):
    """It is compared with a plain gather and product."""
    done = run(tmp_path, str(EXAMPLES / "allgather_gemm.py"), "--shapes", "64,32,32", n_ranks=2)
    assert re.findall(r"64 x (\d+) x 32: BLOCK_M=\d+", done.stdout) == ["32"]


def test_a_training_loop_of_two_batch_sizes_trains_as_untuned(tmp_path: Path):
    """Forward and backward at two sizes are four keys."""
    done = run(tmp_path, str(EXAMPLES / "mlp_training.py"), n_ranks=2)
    ((n_keys, tuned, plain),) = re.findall(r"(\d+) keys tuned; last loss (\S+), untuned (\S+)", done.stdout)
    assert (n_keys, tuned) == ("4", plain)


def test_files_are_tuned_once_and_served(tmp_path: Path):
    """The second command tunes nothing."""
    script = str(EXAMPLES / "serving_files.py")
    assert "wrote" in run(tmp_path, script, "--tune").stdout
    (tmp_path / ".autotune_logs/rank-0.log").unlink()
    assert run(tmp_path, script).stdout.count(" tokens: {'BLOCK'") == 3
    assert not (tmp_path / ".autotune_logs/rank-0.log").exists()


def test_the_gallery_names_every_example():
    """Each file that can be started has its row."""
    listed = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))
    assert listed == {path.name for path in EXAMPLES.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
