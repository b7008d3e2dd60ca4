"""A kernel's metadata on its way through the compiler, and who reads and writes what of it."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

MISSING = object()


class ObservedMetadata(MutableMapping[str, Any]):
    """A kernel's metadata, and what a stage reads and writes of it."""

    def __init__(self, own: dict[str, Any]) -> None:
        self.read: dict[str, Any] = {}
        self.written: dict[str, Any] = {}
        self.is_known = True
        """False if it was used in other ways."""
        self.own = own
        """Not observed."""

    def __getitem__(self, name: str) -> Any:
        if name not in self.written:
            self.read[name] = self.own.get(name, MISSING)
        return self.own[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.own[name] = self.written[name] = value

    def __delitem__(self, name: str) -> None:
        self.is_known = False
        del self.own[name]

    def __iter__(self) -> Iterator[str]:
        self.is_known = False
        return iter(self.own)

    def __len__(self) -> int:
        self.is_known = False
        return len(self.own)
