"""``--help`` of every script: the usage on stdout, exit code 0, and nothing is changed.

Commands: tests/cli/test_main.py.
"""

from __future__ import annotations

import json
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
FOLDERS = "benchmarks", "examples", "kernels", "launch", "tests"
ASK = """
import contextlib, io, json, runpy, sys, traceback
told, programs = {}, sys.argv[1:]
for program in programs:
    sys.argv, sys.path[0] = [program, "--help"], program.rpartition("/")[0]
    shown, code = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(shown):
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        code = traceback.format_exc()
    told[program] = [code or 0, shown.getvalue()[:7].lower()]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout as a clone has it."""
    left_out = shutil.ignore_patterns(*LEFT_OUT)
    folder = tmp_path_factory.mktemp("help") / "copy"
    shutil.copytree(
        ROOT,
        folder,
        symlinks=True,
        ignore=lambda path, names: left_out(path, names) | {".git", ".venv"} & {*names},
    )
    return folder


def programs() -> list[str]:
    """Python files that are run as they are.

    Those in dist_tune are commands or are run by them, and those of tests by pytest.

    Not those named train.py: they are as people write them, with libraries that are not here.
    """
    found = [
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not re.match("test_|train[.]py", path.name)
    ]
    return sorted(
        str(path.relative_to(ROOT))
        for path in found
        if re.search("^if __name__ ==", path.read_text(), re.MULTILINE)
    )


def shell_scripts() -> list[str]:
    """Files that begin with ``#!``."""
    found = [
        path
        for pattern in ("*", ".ci/*", "*/*", "*/*/*")
        for path in ROOT.glob(pattern)
        if path.is_file()
        and all(part == ".ci" or part[0] != "." for part in path.relative_to(ROOT).parts)
    ]
    return sorted({str(path.relative_to(ROOT)) for path in found if path.read_bytes()[:2] == b"#!"})


def contents(folder: Path) -> dict[str, bytes]:
    """All files by name."""
    files = [
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    return {str(path): path.read_bytes() for path in files}


def test_the_lists_hold_what_is_known_to_be_a_script():
    """The globs find what they are for."""
    assert {
        "kernels/ag_gemm.py",
        "examples/allgather_gemm.py",
        "benchmarks/online_jobs.py",
        "launch/tune_a8w8_blockscale.py",
    } < {*programs()}
    assert {"tests/mutations.py", "tests/faults/matrix.py", "tests/faults/hosts.py"} < {*programs()}
    assert {*shell_scripts()} >= {
        ".ci/run",
        "launch/setup.sh",
        "launch/launch.sh",
        "benchmarks/all_gpus.sh",
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_program_has_help_and_changes_nothing_then(copy: Path, tmp_path: Path, folder: str):
    """Run as ``python FILE --help`` from another folder."""
    before = contents(copy)
    asked = [str(copy / program) for program in programs() if program.startswith(folder)]
    env = {**of_checkout(tmp_path), "PYTHONPATH": str(copy)}
    done = run_python("-c", ASK, *asked, cwd=tmp_path, env=env)
    assert json.loads(done.stdout or "{}") == {program: [0, "usage: "] for program in asked}, (
        done.stderr
    )
    assert (contents(copy) == before, [*tmp_path.iterdir()]) == (True, [])


def test_each_shell_script_has_help_and_changes_nothing_then(copy: Path, tmp_path: Path):
    """It calls none of the tools that it works with, which are not what they seem here."""
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).write_text(
            f'#!/bin/sh\necho "{tool} $*" >> {tmp_path}/called\nexit 1\n'
        )
        (tmp_path / "bin" / tool).chmod(0o755)
    before = contents(copy)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "PYTHON": "python3"}
    for script in shell_scripts():
        for option in ("--help", "-h"):
            done = subprocess.run(
                [copy / script, option],
                cwd=tmp_path,
                env=env,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert (done.returncode, done.stderr, "#" in done.stdout[:1]) == (0, "", False), script
            assert len(done.stdout.splitlines()) >= 2
    assert ((tmp_path / "called").exists(), contents(copy) == before) == (False, True)
