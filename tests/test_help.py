"""``--help`` of every script: the usage on stdout, exit code 0, and nothing is changed. Commands: tests/cli/test_main.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.programs import ROOT, of_checkout, run_python

pytestmark = pytest.mark.processes

LEFT_OUT = "logs", "docs", "__pycache__", ".*_cache", "*.egg-info", "site", "build", "dist"
"""Of the copy, in which no script is."""
TOOLS = "make", "python3", "python", "pip", "torchrun", "timeout", "git"
"""What a shell script would work with."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout as a clone has it."""
    left_out = shutil.ignore_patterns(*LEFT_OUT)
    folder = tmp_path_factory.mktemp("help") / "copy"
    shutil.copytree(ROOT, folder, symlinks=True, ignore=lambda path, names: left_out(path, names) | {".git", ".venv"} & {*names})
    return folder


def programs() -> list[str]:
    """Python files that are run as they are. Those in dist_tune are commands or are run by them, and those of tests by pytest."""
    found = [path for path in ROOT.glob("*/**/*.py") if not path.name.startswith("test_")]
    own = ("dist_tune", ".venv", "build", "site")
    found = [path for path in found if path.relative_to(ROOT).parts[0] not in own]
    found = [path for path in found if path.name != "train.py"]  # as people write them, with libraries that are not here
    return sorted(str(path.relative_to(ROOT)) for path in found if re.search("^if __name__ ==", path.read_text(), re.MULTILINE))


def shell_scripts() -> list[str]:
    """Files that begin with ``#!``."""
    found = [
        path
        for pattern in ("*", ".ci/*", "*/*", "*/*/*")
        for path in ROOT.glob(pattern)
        if path.is_file() and all(part == ".ci" or part[0] != "." for part in path.relative_to(ROOT).parts)
    ]
    return sorted({str(path.relative_to(ROOT)) for path in found if path.read_bytes()[:2] == b"#!"})


def contents(folder: Path) -> dict[str, bytes]:
    """All files by name."""
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path): path.read_bytes() for path in files}


def test_the_lists_hold_what_is_known_to_be_a_script():
    """The globs find what they are for."""
    assert {"kernels/ag_gemm.py", "examples/allgather_gemm.py", "benchmarks/online_jobs.py", "launch/tune_a8w8_blockscale.py"} < {
        *programs()
    }
    assert {"tests/mutations.py", "tests/faults/matrix.py", "tests/faults/hosts.py"} < {*programs()}
    assert {*shell_scripts()} >= {".ci/run", "launch/setup.sh", "launch/launch.sh", "benchmarks/all_gpus.sh"}


def test_each_program_has_help_and_changes_nothing_then(copy: Path, tmp_path: Path):
    """Run as ``python FILE --help`` from another folder."""
    before, wrong = contents(copy), {}
    for program in programs():
        env = {**of_checkout(tmp_path), "PYTHONPATH": str(copy)}
        done = run_python(copy / program, "--help", cwd=tmp_path, env=env)
        if done.returncode != 0 or not done.stdout.lower().startswith("usage: "):
            wrong[program] = f"{done.returncode}: {done.stdout[:200]}{done.stderr[-500:]}"
    assert wrong == {}
    assert contents(copy) == before
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("script", shell_scripts())
def test_each_shell_script_has_help_and_changes_nothing_then(copy: Path, tmp_path: Path, script: str, option: str):
    """It calls none of the tools that it works with, which are not what they seem here."""
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).write_text(f'#!/bin/sh\necho "{tool} $*" >> {tmp_path}/called\nexit 1\n')
        (tmp_path / "bin" / tool).chmod(0o755)
    before = contents(copy)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "PYTHON": "python3"}
    done = subprocess.run([copy / script, option], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    called = tmp_path / "called"
    assert not called.exists(), called.read_text()
    assert (done.returncode, done.stderr, "#" in done.stdout[:1]) == (0, "", False)
    assert len(done.stdout.splitlines()) >= 2
    assert contents(copy) == before
