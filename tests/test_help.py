"""``--help`` of every script: exit code 0 and the usage on stdout, before any work is begun. Commands: tests/cli/test_main.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.once, pytest.mark.processes]

ROOT = Path(__file__).resolve().parents[1]
# All in one process, which imports torch and Triton once.
ASK = """
import contextlib, io, json, runpy, sys

def answer(script):
    sys.argv, told, code = [script, "--help"], io.StringIO(), None
    try:
        with contextlib.redirect_stdout(told):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except Exception as error:
        code = f"{type(error).__name__}: {error}"
    return script, code, told.getvalue()

print(json.dumps([answer(script) for script in sys.argv[1:]]))
"""


def test_each_script_has_help():
    files = [path for folder in ("kernels", "examples", "launch", "benchmarks") for path in sorted((ROOT / folder).glob("*.py"))]
    scripts = [str(path.relative_to(ROOT)) for path in files if "\nif __name__ ==" in path.read_text()]
    done = subprocess.run([sys.executable, "-c", ASK, *scripts], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    wrong = [each for each in json.loads(done.stdout) if each[1] != 0 or not each[2].startswith(f"usage: {Path(each[0]).name} ")]
    assert (wrong, len(scripts) > 10) == ([], True)
