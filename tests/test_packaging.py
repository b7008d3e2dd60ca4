"""What is shipped, and what may import what."""

import ast
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dist_tune"

# A module imports only modules that stand before it.
LAYERS = (
    "errors", "settings", "space", "source", "keys", "timing", "rng", "tensor_memory", "result_memory", "compare", "reference", "checks",
    "prune", "tunable", "meetings", "ranks", "choice", "plan", "tally", "contest", "engine", "ledger", "shares", "launch",
    "function_launch", "intercept", "terminal", "patches", "shared_memory", "front_end", "efforts", "compile", "compiler", "records",
    "misses", "atomic", "sealed", "cache", "recall", "ballots", "log", "site", "foresight", "sites", "outcome", "agreement", "replayer",
    "discovery", "loading", "rehearsal", "exclusive", "session", "contextual", "fallback", "function_level", "transfer", "tables",
    "cli_cache", "cli_explain", "machine", "probes", "doctor", "cli_doctor", "cli", "__main__", "config_files", "search_space",
    "settling", "strategies", "surroundings", "interruption", "journal", "lockstep", "output_check", "benchmark", "dry_run", "runs",
    "problem", "tuner", "work_queue", "jobs", "class_configs", "offline",
)  # fmt: skip
ONLY_USERS = {
    "triton": {
        "space",
        "prune",
        "timing",
        "launch",
        "intercept",
        "shared_memory",
        "front_end",
        "compile",
        "compiler",
        "foresight",
        "dry_run",
        "probes",
    },
    "torch.distributed": {"meetings", "ranks", "probes"},
}
MODULES = sorted(PACKAGE.glob("*.py"))


def imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names of all that a module imports, also inside functions; relative ones as if they were absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = ".".join(filter(None, ["dist_tune" if node.level else "", node.module]))
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed"


def without_type_checking(tree: ast.Module) -> ast.Module:
    """The module as it runs: a type in a signature makes nobody a user of its library."""
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"))]
    return tree


def is_of(name: str, library: str) -> bool:
    return f"{name}.".startswith(f"{library}.")


def misplaced(module: str, source: str) -> list[str]:
    """Imports of `module` that point downward in LAYERS."""
    below = LAYERS[LAYERS.index(module) :]
    return [name for name in imported(ast.parse(source)) if any(is_of(name, f"dist_tune.{other}") for other in below)]


def trespasses(module: str, source: str) -> list[str]:
    """Imports of `module` that are another module's job."""
    names = list(imported(without_type_checking(ast.parse(source))))
    foreign = [library for library, users in ONLY_USERS.items() if module not in users]
    return [name for name in names if any(is_of(name, library) for library in foreign)]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_imports_point_upward(path: Path):
    """Each module imports only what stands before it, and only its owner touches triton or torch.distributed."""
    if path.stem == "__init__":
        assert trespasses("__init__", path.read_text()) == []
        return
    assert path.stem in LAYERS, f"dist_tune/{path.name} has no place in LAYERS: say what it may import"
    assert misplaced(path.stem, path.read_text()) == []
    assert trespasses(path.stem, path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    ["from dist_tune.session import Session", "from .session import Session", "from . import session", "import dist_tune.session"],
)
def test_a_downward_import_is_seen(source: str):
    assert misplaced("engine", source)
    assert misplaced("contextual", source) == []


@pytest.mark.parametrize(
    "source", ["import torch.distributed as dist", "from torch import distributed", "def f():\n torch.distributed.barrier()"]
)
def test_a_foreign_import_is_seen(source: str):
    assert trespasses("engine", source)
    assert trespasses("ranks", source) == []
    assert trespasses("engine", "import torch, tritonish\nif TYPE_CHECKING:\n import triton") == []


def test_no_module_has_a_public_name():
    """Importing `dist_tune.x` would put the module in the place of the function `x`."""
    import dist_tune

    assert {path.stem for path in MODULES} & set(dist_tune.__all__) == set()


def test_importing_changes_nothing():
    """Triton's Autotuner, the environment and torch.distributed are the same after `import dist_tune`."""
    program = """
import os
import torch.distributed
from triton.runtime.autotuner import Autotuner
before = dict(vars(Autotuner)), dict(os.environ)
import dist_tune
assert (dict(vars(Autotuner)), dict(os.environ)) == before
assert not torch.distributed.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path):
    """Every module and py.typed are in the wheel; kernels, launch and tests are not."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    if importlib.util.find_spec("hatchling"):
        command.insert(4, "--no-build-isolation")
    subprocess.run(command, check=True, timeout=100)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == "dist_tune-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.startswith("dist_tune-0.1.0.dist-info/")]
    assert sorted(names) == sorted(f"dist_tune/{path.name}" for path in [*MODULES, PACKAGE / "py.typed"])
