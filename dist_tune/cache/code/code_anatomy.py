"""Parts of a kernel or function by name: digests of code, and beside them the values that the code captured or reads.

A fingerprint is one digest of all that. Here values have names of their own, so that two kernels of one factory can be told apart
by the value in which they differ, and by that alone. Runs no code of the user's but ``repr`` of plain values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from dist_tune.cache.code.captured import plain_parts
from dist_tune.cache.code.fingerprints import Reader
from dist_tune.cache.code.inspection import attributes_of, is_code, name_of, package_of

_PLAIN = (bool, int, float, str, type(None))
_MAX_CHARACTERS = 24
"""Of a value that is its own text; a longer one is a digest."""


def anatomy(parts: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text, of each part and of each value that its code has; digests are 12 hex digits.

    Equal in all processes where code and values are. A part is code, a tuple of code, or text. A captured function or kernel is code;
    lists and dicts count with what they hold at this moment, objects with their plain attributes.
    """
    found: dict[str, str] = {}
    for part, thing in parts.items():
        if is_code(thing) or isinstance(thing, tuple):
            reader = _Anatomist(thing)
            digest = reader.digest()
            values = [(part, digest[:12]), *reader.values]
        else:
            values = [(part, _text(thing, ascii(thing)))]
        for name, text in values:
            free = name if name not in found else next(f"{name}@{k}" for k in range(2, len(found) + 2) if f"{name}@{k}" not in found)
            found[free] = text
    return found


class _Anatomist(Reader):
    """Keeps values apart from the code that has them."""

    def __init__(self, root: object) -> None:
        super().__init__(root)
        self.values: list[tuple[str, str]] = []
        """In the order in which they are found, which follows from the code; names repeat."""
        self._kernels: set[int] = set()
        """Functions whose globals Triton compiles in."""
        self._is_kernel = False

    def _held(self, name: str, value: object) -> Any:
        if is_code(value):
            return self._reference(value)
        if name_of(type(value)) == "constexpr":
            value = attributes_of(value).get("value")
        self.values.append((name, _text(value, ascii([self._value(value), *self._attributes(value)]))))
        return "value"

    def _arguments(self, function: FunctionType) -> Any:
        held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        return [self._held("default", each) for each in held], self._value((function.__annotations__, function.__dict__.get("__wrapped__")))

    def _function(self, function: FunctionType) -> tuple[Any, ...]:
        self._is_kernel = id(function) in self._kernels
        return super()._function(function)

    def _named(self, name: str, value: object) -> Any:
        return self._held(name, value) if self._is_kernel and isinstance(value, _PLAIN) else super()._named(name, value)

    def _class(self, cls: type) -> tuple[Any, ...]:
        self._is_kernel = False
        return super()._class(cls)

    def _object(self, thing: object) -> tuple[Any, ...]:
        if package_of(thing) == "triton":
            self._kernels |= {id(each) for each in attributes_of(thing).values() if isinstance(each, FunctionType)}
        self.values += [(name, _text(text, text)) for name, text in self._attributes(thing)]
        return super()._object(thing)

    def _attributes(self, thing: object) -> Iterator[tuple[str, str]]:
        """Plain attributes of an object of the user's, or of a check of ours."""
        return iter(()) if self._is_foreign(thing) and package_of(thing) != "dist_tune" else plain_parts(thing)


def _text(value: object, spelled: str) -> str:
    """A short plain value itself; of others a digest of what spells them out."""
    text = ascii(value) if type(value) in _PLAIN else ""
    return text if 0 < len(text) <= _MAX_CHARACTERS else hashlib.sha256(spelled.encode()).hexdigest()[:12]
