"""Keys of a function that are tuned one after the other and never come again: the sign of a key function that is wrong.

Several shapes in a row are several signatures of arguments, and no such sign. Knows calls by number; nothing of configs or ranks.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

_MAX_KEYS = 3
"""Keys that one signature of arguments is tuned for in a row."""


class KeyHistory:
    """The latest tunings of one function, as long as no call between them found its config."""

    def __init__(self) -> None:
        self._last_call = 0
        self._keys: dict[Hashable, list[str]] = {}
        """Signature of the arguments -> its keys."""
        self._final: dict[Hashable, Any] = {}
        """Group and signature, None for all -> config of new keys."""
        self.final_keys: list[str] = []
        """Keys of the signature that was closed last."""

    def is_last(self, call: int, signature: Hashable) -> bool:
        """True if a tuning in the ``call``-th call is the last one that this signature gets, unless its key comes again."""
        if call != self._last_call + 1:
            self._keys.clear()
        return len(self.keys(signature)) == _MAX_KEYS - 1

    def add(self, call: int, signature: Hashable, key: str) -> None:
        """A key was tuned."""
        self._last_call = call
        self._keys.setdefault(signature, []).append(key)

    def keys(self, signature: Hashable) -> list[str]:
        """Keys of a signature in a row."""
        return self._keys.get(signature, [])

    def close(self, group: Hashable, signature: Hashable, config: Any, *, closes_all: bool) -> None:
        """From now on new keys of this signature use ``config``; with ``closes_all`` those of all signatures."""
        self._final[group, None if closes_all else signature] = config
        self.final_keys = self.keys(signature)

    @property
    def is_closed(self) -> bool:
        """True if new keys of some signature are tuned no more."""
        return bool(self._final)

    def final_config(self, group: Hashable, signature: Hashable) -> Any:
        """The config for a new key; None where it is to be tuned."""
        return self._final.get((group, signature), self._final.get((group, None)))
