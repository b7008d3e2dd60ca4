"""The ways in which a launch can end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Returned:
    """A launch that returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """A launch that raised, or could not be made."""

    n_collectives: int = 0
    """Collectives that it had issued before, if it is the whole closure."""


class NotMade:
    """A launch that was not made, because it would have compiled its kernel."""


Launched = Returned | Failed | NotMade
