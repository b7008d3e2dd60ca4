"""Imports that code makes when it runs, and the files of the modules that they name. Nothing is imported or run.

Knows Python's bytecode and its finders; nothing of fingerprints.
"""

from __future__ import annotations

import dis
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.util import _LazyModule  # type: ignore[attr-defined]  # missing in its stubs
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from dist_tune.cache.code.inspection import vars_of_module

_CALLS = {"import_module", "__import__"}
_FOREIGN_FOLDERS = {"site-packages", "dist-packages"}
_STARTED = time.time()
"""As file systems date files, about: clocks of file servers may differ."""


class Import(NamedTuple):
    """One import statement, or one call of ``importlib.import_module``."""

    module: str
    """Its absolute name; empty if that is not written in the code."""
    names: tuple[str, ...] = ()
    """Of ``from module import names``."""

    def __str__(self) -> str:
        return ", ".join(f"{self.module}.{name}" for name in self.names) or self.module or "import_module(...)"


def imports_in(codes: Iterable[CodeType], package: str) -> list[Import]:
    """The imports of some code, in order and without repeats; relative ones are those of a module in ``package``."""
    found: list[Import] = []
    for code in codes:
        if dis.opmap["IMPORT_NAME"] in code.co_code[::2] or not _CALLS.isdisjoint((*code.co_names, *code.co_varnames, *code.co_freevars)):
            found += _imports_of(code, package)
    return list(dict.fromkeys(found))


def is_installed(code: CodeType) -> bool:
    """True for the code of an installed package."""
    return _is_foreign_file(code.co_filename)


@lru_cache(maxsize=4096)
def _is_foreign_file(name: str) -> bool:
    return not _FOREIGN_FOLDERS.isdisjoint(Path(name).parts)


def loaded(module: str) -> ModuleType | None:
    """A module that has been imported, and is not to be loaded at its first use."""
    value = sys.modules.get(module)
    return value if isinstance(value, ModuleType) and not issubclass(type(value), _LazyModule) else None


def source_of(module: str) -> Path | None:
    """The file of a module, loaded or not, that has not changed since this process began; None if it is not one of the user's."""
    with suppress(Exception):  # finders of the user's raise anything
        known = sys.modules.get(module)
        origin = _spec_of(module).origin if known is None else vars_of_module(known).get("__file__")
        path = Path(origin)
        # A loaded module may be older than its file: then what is in memory counts.
        is_as_loaded = known is None or isinstance(known, _LazyModule) or path.stat().st_mtime <= _STARTED
        if is_as_loaded and path.suffix == ".py" and _FOREIGN_FOLDERS.isdisjoint(path.parts) and path.is_file():
            return path
    return None


def code_in(path: Path) -> CodeType | None:
    """The code in a file, compiled and not run; None if it is no Python."""
    try:
        return _compiled(path.read_bytes(), str(path))
    except (OSError, SyntaxError, ValueError):
        return None


@lru_cache(maxsize=256)
def _compiled(content: bytes, name: str) -> CodeType:
    return compile(content, name, "exec", dont_inherit=True)


def _spec_of(module: str) -> Any:
    parent = module.rpartition(".")[0]
    folders = None
    if parent:
        known = sys.modules.get(parent)
        folders = vars_of_module(known).get("__path__") if known is not None else _spec_of(parent).submodule_search_locations
        if folders is None:  # no package
            return None
    finders: list[Any] = [PathFinder, *(each for each in sys.meta_path if each is not PathFinder)]
    return next((spec for each in finders if (spec := each.find_spec(module, folders)) is not None), None)


def _imports_of(code: CodeType, package: str) -> Iterator[Import]:
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("EXTENDED_ARG", "PUSH_NULL", "KW_NAMES")]
    for at, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            level, names = steps[at - 2].argval, steps[at - 1].argval
            yield Import(_absolute("." * level + step.argval, package), tuple(names or ()))
        elif step.opname.startswith("LOAD_") and step.argval in _CALLS and at + 1 < len(steps):
            given = steps[at + 1].argval if steps[at + 1].opname == "LOAD_CONST" else None
            yield Import(_absolute(given, package) if isinstance(given, str) else "")


def _absolute(name: str, package: str) -> str:
    stem = name.lstrip(".")
    n_up = len(name) - len(stem) - 1
    if n_up < 0:
        return name
    base = package.rsplit(".", n_up)[0] if n_up else package
    return f"{base}.{stem}".strip(".")
