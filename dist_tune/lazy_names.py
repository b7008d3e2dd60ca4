"""Names that a package exports and imports when they are first used, because their modules import torch, Triton or numpy.

Commands that read records and events take 0.3 s without these three, and 2 s with them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def found_on_use(package: str, homes: Mapping[str, tuple[str, ...]]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The ``__getattr__`` and the ``__dir__`` of a package. ``homes``: module of the package -> names that come from it.

    A module of the package is found as well. A name is an ordinary attribute once it was found.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> object:
        if name in home_of:
            found: object = getattr(import_module(f"{package}.{home_of[name]}"), name)
            setattr(sys.modules[package], name, found)
            return found
        if not name.startswith("_") and hasattr(sys.modules[package], "__path__"):
            from importlib.util import find_spec  # here, as all that is not always needed

            if find_spec(f"{package}.{name}"):
                return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return find, names
