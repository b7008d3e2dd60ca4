"""Names that a folder imports when they are first used."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from dist_tune import found_on_use

pytestmark = pytest.mark.once


def test_a_name_is_listed_before_it_is_used_and_an_attribute_after(monkeypatch: pytest.MonkeyPatch):
    """``dir`` and completion show what the folder exports; other names are no attributes."""
    package, home = ModuleType("folder"), ModuleType("folder.home")
    vars(home)["Thing"] = thing = object()
    monkeypatch.setitem(sys.modules, "folder", package)
    monkeypatch.setitem(sys.modules, "folder.home", home)
    vars(package)["__path__"] = []
    vars(package)["__getattr__"], vars(package)["__dir__"] = found_on_use("folder", {"home": ("Thing",)})
    assert "Thing" in dir(package)
    assert "Thing" not in vars(package)
    assert package.Thing is thing
    assert vars(package)["Thing"] is thing
    with pytest.raises(AttributeError, match="module 'folder' has no attribute 'Other'"):
        _ = package.Other
