"""The import graph of dist_tune in a checkout: ``python logs/layout/graph.py CHECKOUT``.

An import of a name through a folder's ``__init__`` counts as one of the module that defines it.
"""

# ruff: noqa: T201  # a script
from __future__ import annotations

import ast
import sys
from collections import Counter
from functools import cache
from pathlib import Path

PACKAGE = Path(sys.argv[1]) / "dist_tune"
MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}


@cache
def imported(module: str) -> frozenset[tuple[str, str]]:
    """(dotted origin below dist_tune, name) of all imports of a module from this package."""
    tree = ast.parse(MODULES[module].read_text())
    for block in [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]:
        block.body = []  # names of types alone
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    ours = [node for node in nodes if f"{node.module}.".startswith("dist_tune.")]
    return frozenset(((node.module or "").partition(".")[2], alias.name) for node in ours for alias in node.names)


def origin(place: str, name: str) -> str | None:
    """The module that defines a name."""
    if f"{place}.{name}".lstrip(".") in MODULES:
        return f"{place}.{name}".lstrip(".")
    if place in MODULES:
        return place
    door = f"{place}.__init__".lstrip(".")
    found = (origin(inner, each) for inner, each in imported(door) if each == name and inner != place) if door in MODULES else ()
    return next(iter(found), None)


@cache
def level(module: str) -> int:
    """1 for a module that imports none of the others."""
    return 1 + max(map(level, arrows[module]), default=0)


def folder(module: str) -> str:
    """The folder of a module; one for all files of the package's root."""
    return module.rpartition(".")[0] or "(files)"


code = [module for module in MODULES if module.rpartition(".")[2] not in ("__init__", "__main__")]
arrows = {module: {found for each in imported(module) if (found := origin(*each)) and found != module} for module in code}
between = {(folder(a), folder(b)) for a in code for b in arrows[a] if folder(a) != folder(b)}
print(f"{len(code)} modules on {max(map(level, code))} levels with {sum(map(len, arrows.values()))} arrows")
print(f"{len({folder(module) for module in code})} places with {len(between)} arrows between them")
lines: Counter[str] = Counter()
for module, path in MODULES.items():
    lines[folder(module)] += path.read_text().count("\n")
print(*(f"{place:12} {n:6} lines" for place, n in sorted(lines.items())), sep="\n")
print(f"{'all':12} {sum(lines.values()):6} lines")
