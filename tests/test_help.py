"""``--help`` of every script and of every command: exit code 0 and the usage on stdout, before any work is begun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.once, pytest.mark.processes]

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [
    str(path.relative_to(ROOT))
    for folder in ("kernels", "examples", "launch", "benchmarks")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "\nif __name__ ==" in path.read_text()
]
COMMANDS = ["", "cache", *[f"cache {name}" for name in ("path", "ls", "show", "explain", "export", "merge", "clear")], "doctor", "show"]

# All in one process, which imports torch and Triton once.
ASK = """
import contextlib, io, json, runpy, sys

def answer(words):
    sys.argv, told, code = [*words, "--help"], io.StringIO(), None
    try:
        with contextlib.redirect_stdout(told):
            runpy.run_module("dist_tune", run_name="__main__") if words[0] == "dist_tune" else runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except Exception as error:
        code = f"{type(error).__name__}: {error}"
    return code, told.getvalue()

print(json.dumps([answer(words) for words in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[object, str]]:
    """Command line without ``--help`` -> exit code, or the error, and stdout."""
    lines = [*SCRIPTS, *[f"dist_tune {command}".strip() for command in COMMANDS]]
    command = [sys.executable, "-c", ASK, json.dumps([line.split() for line in lines])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(lines, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_has_help(answers: dict[str, tuple[object, str]], script: str):
    code, told = answers[script]
    assert code == 0
    assert told.startswith(f"usage: {Path(script).name} ")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_help(answers: dict[str, tuple[object, str]], command: str):
    code, told = answers[f"dist_tune {command}".strip()]
    assert code == 0
    assert f"Usage: dist-tune {command}".strip() in told
