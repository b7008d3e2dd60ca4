"""The files of kernels/ as modules."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[1]
KERNELS = sorted((ROOT / "kernels").glob("*.py"))


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
