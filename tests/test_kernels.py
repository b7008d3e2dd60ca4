"""The files of kernels/ and benchmarks/ as modules and as programs."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[1]
KERNELS = sorted((ROOT / "kernels").glob("*.py"))
PROGRAMS = [*(path for path in KERNELS if "__main__" in path.read_text()), *sorted((ROOT / "benchmarks").glob("bench_*.py"))]


def test_every_program_says_what_it_can_do(tmp_path: Path):
    """--help ends with 0 and names the file: no sign in a help text is taken for a format."""
    assert len(PROGRAMS) == 9
    program = (
        "import runpy, sys\n"
        "for path in sys.argv[1:]:\n"
        "    sys.argv = [path, '--help']\n"
        "    try: runpy.run_path(path, run_name='__main__')\n"
        "    except SystemExit as left: print('left with', left.code)\n"
    )
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-c", program, *map(str, PROGRAMS)]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("left with 0") == len(PROGRAMS)
    assert [path.name for path in PROGRAMS if f"usage: {path.name} " not in done.stdout] == []


@pytest.mark.parametrize("path", [path for path in KERNELS if not path.stem.endswith(("_cases", "harness"))], ids=lambda path: path.stem)
def test_a_kernel_does_not_import_what_checks_and_times_it(path: Path):
    """Started as a program, the file leaves before its kernel is defined, which the cases then import under its own name."""
    body = ast.parse(path.read_text()).body
    guards = [node for node in body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)]
    own = [ast.unparse(node) for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [line for line in own if "_cases" in line or "harness" in line] == []
    for guard in guards:
        before = [ast.unparse(node) for node in body[: body.index(guard)]]
        assert [line for line in before if "torch" in line and "import" in line and not line.startswith("'")] == []
        assert ast.unparse(guard.body[-1]).startswith("sys.exit(main(")
