"""The benchmark of leads: its names, and that it says what it needs."""

from pathlib import Path

import pytest
import torch

from benchmarks.bench_leads import CASES
from tests.programs import run_python

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]


def test_each_case_has_a_name_of_its_own():
    assert len({f"{case}" for case in CASES}) == len(CASES)


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.is_available(), reason="it runs there")
def test_it_needs_a_gpu(tmp_path: Path):
    done = run_python(f"{ROOT}/benchmarks/bench_leads.py", cwd=tmp_path)
    assert (done.returncode, "needs a GPU" in done.stdout) == (0, True)
