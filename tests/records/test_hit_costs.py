"""Costs of the first call of a process that hits, as counts: what is read, compiled, imported and
exchanged, each once.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dist_tune.launches import read_code
from dist_tune.testing import on_ranks, values
from tests.programs import ROOT, of_checkout, run_python
from tests.records.hit_program import calls_in, first_call, first_kernel


def test_code_that_functions_share_is_read_once_in_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Ten functions with one callee are eleven to read, however often they are asked for; a kernel
    has its key of Triton.
    """
    monkeypatch.syspath_prepend(str(tmp_path))
    helper = "def helper(x):\n    return [each + len(str(each)) for each in range(x)]\n"
    (tmp_path / "read_once.py").write_text(
        helper + "".join(f"def f{k}():\n    return helper({k})\n" for k in range(10))
    )
    functions = [getattr(importlib.import_module("read_once"), f"f{k}") for k in range(10)]
    names = ("getblock", "getmodule")  # the second asks all modules for their files
    counted = calls_in(lambda: [read_code(each) for each in [*functions, *functions]], *names)
    assert counted == {"getblock": 11}
    assert (
        calls_in(lambda: read_code(first_kernel, launches=True), *names) == {}
    )  # Triton has read it


@pytest.mark.processes
def test_a_hit_imports_nothing_of_tuning_and_reads_each_thing_once(tmp_path: Path):
    """Of each of two kernels a record and a fingerprint; in one process nothing is to be told
    apart; environment and settings once.
    """
    environment = of_checkout(
        tmp_path, os.pathsep.join(filter(None, sys.path)), DIST_TUNE_LOG_DIR=str(tmp_path / "log")
    )
    environment |= {"DIST_TUNE_VERBOSITY": "quiet"}
    del environment["DIST_TUNE_LOG_LEVEL"]
    program = (
        "import json; from tests.records.hit_program import first_call;"
        " print(json.dumps(first_call(is_dist=False)))"
    )
    tuned = run_python("-c", program, env=environment, cwd=ROOT)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (tuned.returncode, done.returncode) == (0, 0), tuned.stderr + done.stderr
    hit = json.loads(done.stdout.splitlines()[-1])
    assert (hit["hits"], hit["loaded"]) == ([True, True], [])
    assert [name for name in hit["imported"] if not name.startswith(("triton.", "torch."))] == []
    # Settings were read at import, in the same environment. What was measured needs no watch.
    assert hit["counted"] == {"record_in": 2, "read_code": 2, "environment": 1}


@pytest.mark.processes
def test_ranks_that_all_hit_meet_once(tmp_path: Path):
    """One meeting for the sites of a call, however many they are, and none for each of them."""
    env = {
        "DIST_TUNE_CACHE_DIR": str(tmp_path / "cache"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    values(on_ranks(2, first_call, env=env))
    outcomes = on_ranks(2, first_call, env=env)
    assert [each["hits"] for each in values(outcomes)] == [[True, True]] * 2
    assert [each.log.count("meeting=") for each in outcomes] == [1, 1]
