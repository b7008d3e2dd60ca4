"""Imports that code makes when it runs are followed, or named; no module is imported for that."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

import pytest
import torch

from dist_tune import autotune
from dist_tune.cache import read_code
from dist_tune.cache.code import imports
from dist_tune.cache.code.fingerprints import fingerprint
from tests.function_options import BLOCKS, quiet
from tests.source_programs import with_globals

pytestmark = pytest.mark.once

FILES = {
    "lazy_helper": "from lazy_deeper import deep\n# words\ndef work(x):\n    return deep(x)\ndef other(x):\n    return x\n",
    "lazy_deeper": "def deep(x):\n    import lazy_pack.inner as inner\n    return inner.deepest(x)\n",
    "lazy_pack/__init__": "from . import sibling\n",
    "lazy_pack/inner": "from .sibling import last\ndef deepest(x):\n    return last(x)\n",
    "lazy_pack/sibling": "def last(x):\n    return x + 1\n",
}
FORMS = [
    "def f(x):\n    from lazy_helper import work\n    return work(x)",
    "def f(x):\n    import lazy_helper\n    return lazy_helper.work(x)",
    "def f(x):\n    import importlib\n    return importlib.import_module('lazy_helper').work(x)",
    "def f(x):\n    from importlib import import_module\n    return import_module('lazy_helper').work(x)",
    "def f(x):\n    return __import__('lazy_helper').work(x)",
    "def f(x):\n    def g():\n        import lazy_helper as h\n        return h.work(x)\n    return g()",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the files, found by import, and none of them loaded."""
    for name, text in FILES.items():
        (tmp_path / name).with_suffix(".py").parent.mkdir(exist_ok=True)
        (tmp_path / name).with_suffix(".py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [each for each in sys.modules if each.startswith("lazy_")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def is_loaded() -> bool:
    return any(name.startswith("lazy_") for name in sys.modules)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("loads", "is_old"), [(False, True), (True, True), (True, False)])
def test_what_an_import_within_a_function_brings_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, form: str, loads: bool, is_old: bool
):
    """In the module and in those that it imports, loaded or not, from memory where a file is newer than the process. Not comments."""

    def read() -> str:
        for name in [each for each in sys.modules if each.startswith("lazy_")]:
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()
        if loads:
            importlib.import_module("lazy_helper")
            importlib.import_module("lazy_pack.inner")
        code = read_code(with_globals(form))
        assert code.not_followed == []
        assert is_loaded() == loads
        return code.digest

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(imports, "_STARTED", time.time() + 3600 * (1 if is_old else -1))
    before = read()
    (folder / "lazy_helper.py").write_text(FILES["lazy_helper"].replace("words", "other words"))
    assert read() == before
    for name, old, new in [
        ("lazy_helper", "deep(x)\ndef", "-deep(x)\ndef"), ("lazy_deeper", "deepest(x)", "deepest(-x)"), ("lazy_pack/sibling", "+ 1", "+ 2"),
    ]:  # fmt: skip
        (folder / f"{name}.py").write_text(FILES[name].replace(old, new))
        assert read() != before
        (folder / f"{name}.py").write_text(FILES[name])
        assert read() == before


def test_it_does_not_matter_whether_a_module_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """So that a script that goes on after a crash, and another rank, find the same record."""
    monkeypatch.setattr(imports, "_STARTED", time.time() + 3600)
    function = with_globals(FORMS[0])
    before = fingerprint(function)
    importlib.import_module("lazy_helper")
    assert fingerprint(function) == before
    monkeypatch.setattr(imports, "_STARTED", 0.0)
    from_memory = fingerprint(function)
    (folder / "lazy_helper.py").write_text("def work(x):\n    return -x\n")  # after it was loaded
    assert fingerprint(function) == from_memory != before


def test_relative_imports_are_followed(folder: Path):
    """As from a module of the package."""
    source = "def f(x):\n    from .inner import deepest\n    return deepest(x)"
    before = fingerprint(with_globals(source, __package__="lazy_pack", __name__="lazy_pack.user"))
    (folder / "lazy_pack" / "sibling.py").write_text("def last(x):\n    return -x\n")
    assert fingerprint(with_globals(source, __package__="lazy_pack", __name__="lazy_pack.user")) != before
    assert not is_loaded()


def test_what_cannot_be_followed_is_named(folder: Path):
    """Modules that there are none of, that are not the user's, that do not parse, whose name is computed; libraries are not listed."""
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "lazy_installed.py").write_text("def work(x): return x\n")
    (folder / "lazy_broken.py").write_text("def work(x: return x\n")
    sys.path.insert(0, str(folder / "site-packages"))
    try:
        function = with_globals(
            "def f(x, name):\n    import json, torch.nn, math\n    from lazy_absent import one, two\n    import lazy_broken\n"
            "    from lazy_installed import work\n    import importlib\n    importlib.import_module(name)\n    from lazy_helper import work"
        )
        expected = ["import_module(...)", "lazy_absent.one, lazy_absent.two", "lazy_broken", "lazy_installed.work"]
        assert read_code(function).not_followed == expected
    finally:
        sys.path.remove(str(folder / "site-packages"))
    assert not is_loaded()


def test_a_record_says_what_its_source_leaves_out(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And goes stale where the import was followed."""
    quiet(monkeypatch, tmp_path)

    def tuned() -> tuple[bool, list[str]]:
        monkeypatch.delitem(sys.modules, "lazy_pack.sibling", raising=False)
        monkeypatch.delitem(sys.modules, "lazy_pack", raising=False)
        importlib.invalidate_caches()

        @autotune(BLOCKS, None, n_warmup=0, n_repeat=1)
        def step(x: torch.Tensor, block: int) -> torch.Tensor:
            from lazy_pack.sibling import last  # type: ignore[import-not-found]

            try:
                from lazy_absent import one  # type: ignore[import-not-found]
            except ImportError:
                one = 1
            return last(x) * one  # type: ignore[no-any-return]

        step(torch.ones(2))
        return step.records[0].is_recalled, step.records[0].not_followed

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert tuned() == (False, ["lazy_absent.one"])
    assert tuned() == (True, ["lazy_absent.one"])
    (folder / "lazy_pack" / "sibling.py").write_text("def last(x):\n    return x + 2 - 1\n")
    assert tuned() == (False, ["lazy_absent.one"])
