"""Signatures of the arguments that a closure has been called with, by which a call tells whether to ask its peers.

Knows sets of values; nothing of ranks or launches.
"""

from __future__ import annotations


class Signatures:
    """Signatures that have had their first call. None is known after a call that raised, until the next one has looked at that."""

    def __init__(self) -> None:
        self.known: set[object] = set()
        """One set for ever, because calls look into it themselves."""
        self.is_waived = False
        """True once ranks were found to be called with different arguments, so that only a miss is worth a meeting."""
        self._before: tuple[set[object], bool] | None = None

    def doubt(self) -> None:
        """A call with nothing to tune has raised: let the next one begin as a first call."""
        if self._before is None:
            self._before = set(self.known), self.is_waived
            self.known.clear()
            self.is_waived = False

    def trust(self) -> bool:
        """Take back the doubt; True if there was one."""
        before, self._before = self._before, None
        if before is not None:
            self.known |= before[0]
            self.is_waived |= before[1]
        return before is not None
