"""Imports between modules, and what importing the package does."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import dist_tune
from dist_tune import errors

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dist_tune"

# A module imports only from its own place and from places above it. A place is a folder, or some
# files of the package's root.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("accelerator", "errors", "validation", "files", "settings", "configs", "keys", "pruning"),
    ("search",),
    ("log",),
    ("ranks",),
    ("measure",),
    ("compiler",),
    ("records",),
    ("launches",),
    ("sites",),
    ("watch",),
    ("replays",),
    ("tuning",),
    ("contextual", "function", "install", "operators", "ahead", "testing"),
    ("offline",),
    ("report",),
    ("cli", "__main__"),
)
FOLDERS = {name for layer in LAYERS for name in layer if (PACKAGE / name).is_dir()}
ONLY_USERS = {
    "triton": {
        "configs",
        "pruning",
        "measure.clocks",
        "compiler",
        "launches",
        "cli.doctor",
        "testing",
    },
    "torch.distributed": {"ranks", "testing"},
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """Dotted name below dist_tune: "search.race", "contextual"; of a folder's ``__init__`` the
    folder's.
    """
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names of all that a module imports, also inside functions; relative ones as if they
    were absolute.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = ".".join(filter(None, ["dist_tune" if node.level else "", node.module]))
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed"


def without_type_checking(tree: ast.Module) -> ast.Module:
    """The module as it runs: a type in a signature makes no module a user of its library."""
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"))
    ]
    return tree


def is_of(name: str, library: str) -> bool:
    return f"{name}.".startswith(f"{library}.")


def layer_of(module: str) -> int:
    """Number of a module's place, from the top; raises where it has none."""
    place = module.partition(".")[0]
    return next(number for number, places in enumerate(LAYERS) if place in places)


def exports(folder: str) -> list[str]:
    """The names in the ``__all__`` of a folder's ``__init__``."""
    body = ast.parse((PACKAGE / folder / "__init__.py").read_text()).body
    return next(
        ast.literal_eval(each.value)
        for each in body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__all__"
    )


def misplaced(module: str, source: str) -> list[str]:
    """Imports of ``module`` that point down, or into another folder past its ``__init__``."""
    wrong = []
    for name in imported(ast.parse(source)):
        root, *rest = name.split(".")
        if root != "dist_tune" or not rest or not any(rest[0] in places for places in LAYERS):
            continue
        is_own = rest[0] == module.partition(".")[0]
        is_past = (
            rest[0] in FOLDERS
            and len(rest) > 1
            and rest[1:] not in [[each] for each in exports(rest[0])]
        )
        if layer_of(rest[0]) > layer_of(module) or (is_past and not is_own):
            wrong.append(name)
    return wrong


def trespasses(module: str, source: str) -> list[str]:
    """Imports of ``module`` that are another place's job."""
    names = list(imported(without_type_checking(ast.parse(source))))
    foreign = [
        library
        for library, users in ONLY_USERS.items()
        if not any(is_of(module, user) for user in users)
    ]
    return [name for name in names if any(is_of(name, library) for library in foreign)]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_upward(path: Path):
    """Each module imports only what stands above it, and only its owners touch triton or
    torch.distributed.
    """
    module = name_of(path)
    if module in ("", "__init__"):
        assert trespasses("dist_tune", path.read_text()) == []
        return
    assert any(module.partition(".")[0] in places for places in LAYERS), (
        f"{path.name} has no place in LAYERS: say what it may import"
    )
    assert misplaced(module, path.read_text()) == []
    assert trespasses(module, path.read_text()) == []


def test_a_file_of_kernels_reads_without_those_that_import_it():
    """No circle of imports, those in functions and of a file that is run among them."""
    TopologicalSorter(
        {
            path.stem: {
                part
                for name in imported(ast.parse(path.read_text()))
                if is_of(name, "kernels")
                for part in name.split(".")[1:2]
            }
            for path in (ROOT / "kernels").glob("*.py")
        }
    ).prepare()


def test_the_layers_are_those_of_contributing():
    """Each module and folder of the package stands in the row of its layer in CONTRIBUTING."""
    rows = [
        line.split("|")[2]
        for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines()
        if re.match(r"\| \d+ \|", line)
    ]
    for row, places in zip(rows, LAYERS, strict=True):
        assert sorted(re.sub(r"\(files\)|`|\.py|/", "", row).split()) == sorted(
            name for name in places if name != "__main__"
        )


def test_the_code_uses_each_word_of_the_glossary():
    """At most 35 words; what the code says no more is not one of them."""
    rows = re.findall(
        r"^\| ([^|]+) \|",
        (ROOT / "CONTRIBUTING.md").read_text().partition("## Glossary")[2],
        re.MULTILINE,
    )
    words = [word for row in rows if row != "word" for word in row.split(", ")]
    said = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    assert 20 < len(words) <= 35
    assert [
        word
        for word in words
        if not re.search(re.sub("[ -]", "[ _-]", rf"(?<![a-z]){word}"), said, re.IGNORECASE)
    ] == []


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_a_folder_says_what_it_is_for(folder: str):
    """Its ``__init__`` opens with a description, and exports by name what others may use."""
    tree = ast.parse((PACKAGE / folder / "__init__.py").read_text())
    assert len((ast.get_docstring(tree) or "").splitlines()) >= 3
    assert any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for node in tree.body
    )


@pytest.mark.parametrize(
    ("source", "from_where", "allowed_in"),
    [
        ("from dist_tune.tuning import Tuning", "search.race", "tuning.sites"),  # downward
        ("from dist_tune import tuning", "search.race", "tuning.sites"),
        ("import dist_tune.tuning.tuning", "search.race", "tuning.sites"),
        ("def f():\n from dist_tune.tuning.tuning import Tuning", "search.race", "tuning.sites"),
        (
            "from dist_tune.search.race import Race",
            "tuning.sites",
            "search.plan",
        ),  # past another folder's door
        ("from dist_tune.search import race", "tuning.sites", "search.plan"),
        (
            "import torch.distributed as dist",
            "search.race",
            "ranks.group",
        ),  # another place's job
        ("from torch import distributed", "search.race", "ranks.group"),
        ("def f():\n torch.distributed.barrier()", "search.race", "ranks.group"),
        ("import triton", "search.race", "launches.kernel"),
    ],
)
def test_an_import_that_is_no_module_s_own_is_seen(source: str, from_where: str, allowed_in: str):
    assert misplaced(from_where, source) + trespasses(from_where, source)
    assert misplaced(allowed_in, source) + trespasses(allowed_in, source) == []


def test_what_a_folder_exports_and_what_type_checkers_read_may_be_imported():
    assert misplaced("tuning.sites", "from dist_tune.search import Race") == []
    assert (
        trespasses("search.race", "import torch, tritonish\nif TYPE_CHECKING:\n import triton")
        == []
    )


def test_no_module_has_a_public_name():
    """Importing `dist_tune.x` would put the module in the place of the function `x`; of `install`
    the module can be called.
    """
    assert {name_of(path) for path in MODULES} & set(dist_tune.__all__) == {"install"}


def test_names_that_are_imported_on_use_are_those_that_type_checkers_read():
    """Each once, of the same module, and never the module itself; a misspelt name is not looked for
    anywhere else.
    """
    choice = next(
        node
        for node in ast.parse((PACKAGE / "__init__.py").read_text()).body
        if isinstance(node, ast.If)
    )
    homes = {
        name.rpartition(".")[2]: name.rpartition(".")[0]
        for name in imported(ast.Module(choice.body, []))
    }
    assert sorted(homes) == sorted(dist_tune.__all__)
    assert {*homes} <= {*dir(dist_tune)}
    assert [
        each
        for each, home in homes.items()
        if getattr(dist_tune, each) is not getattr(importlib.import_module(home), each)
    ] == []
    with pytest.raises(AttributeError, match="module 'dist_tune' has no attribute 'Recrod'"):
        _ = dist_tune.Recrod  # type: ignore[attr-defined]


def test_modules_of_the_package_are_found_as_well():
    assert dist_tune.offline is importlib.import_module("dist_tune.offline")  # type: ignore[attr-defined]
    assert not hasattr(dist_tune, "__wrapped__")


@pytest.mark.processes
def test_importing_is_cheap_until_something_is_used_and_changes_nothing():
    """It loads neither torch nor Triton, nor what reads settings or writes logs; Triton's Autotuner
    and the environment stay.
    """
    program = """
import sys
import dist_tune
from dist_tune import errors
assert not {"torch", "triton", "numpy", "pydantic", "pydantic_settings", "loguru", "rich", "typer"} & set(sys.modules)
import os
import torch.distributed
from triton.runtime.autotuner import Autotuner
before = dict(vars(Autotuner)), dict(os.environ)
from dist_tune import *
assert (dict(vars(Autotuner)), dict(os.environ)) == before
assert not torch.distributed.is_initialized()
"""  # noqa: E501
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_every_error_that_ends_a_call_is_a_name_of_the_package():
    """These two end none."""
    found = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.DistTuneError)
    }
    assert found - set(dist_tune.__all__) == {"AloneError", "JobEndedError"}


# -- tests -----------------------------------------------------------------------------------------

ROOTS = {"self", "cls", "os", "sys", "torch"}
"""Names whose attributes are none of ours."""


def private_names(trees: Iterable[ast.AST]) -> set[str]:
    """What these modules define with one underscore."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    defined |= {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return {name for name in defined if re.match("_[^_]", name)}


def private_uses(tree: ast.AST, private: set[str]) -> list[str]:
    """Uses of such names by a test: imported, as an attribute, or in the text that tells a patch
    what to replace.
    """
    found, ours = [], private - private_names([tree])
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dist_tune"):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id in ROOTS
        ):
            found.append(node.attr)
        elif isinstance(node, ast.Call) and re.search(
            r"(attr|item|patch|object)$",
            str(getattr(node.func, "attr", getattr(node.func, "id", ""))),
        ):
            owner = node.args[0] if node.args else None
            if not (isinstance(owner, ast.Name) and owner.id in ROOTS):
                found += [
                    str(each.value).rpartition(".")[2]
                    for each in node.args
                    if isinstance(each, ast.Constant)
                ]
    return [name for name in found if name in ours]


@pytest.mark.processes  # it lasts seconds
def test_no_test_uses_a_private_name_of_the_package():
    """So that what is behind a behaviour may change without its tests."""
    private = private_names(ast.parse(path.read_text()) for path in MODULES)
    sources = {
        str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("*.py")
    }
    named = {
        path: source
        for path, source in sources.items()
        if private & {*re.findall(r"\b_\w+", source)}
    }
    uses = {path: private_uses(ast.parse(source), private) for path, source in named.items()}
    assert {path: names for path, names in uses.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "is_seen"),
    [
        ("from dist_tune.keys import _hidden", True),
        ("keys._hidden", True),
        ("patch.setattr('dist_tune.keys._hidden', 1)", True),
        ("monkeypatch.setattr(keys, '_hidden', 1)", True),
        ("self._hidden, os._hidden, print('_hidden'), keys.text", False),
        ("patch.setattr(os, '_hidden', 1)", False),
        ("_hidden = 1\nmodule._hidden", False),
    ],
)
def test_a_private_name_in_a_test_is_seen(source: str, is_seen: bool):
    """But for those of other packages, and of the tests themselves."""
    assert bool(private_uses(ast.parse(source), {"_hidden"})) == is_seen
