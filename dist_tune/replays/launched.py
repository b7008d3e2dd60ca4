"""The ways in which a launch can end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dist_tune.compiler import NotLoaded


@dataclass(frozen=True, slots=True)
class Returned:
    """A launch that returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """A launch that raised, or could not be made."""

    n_collectives: int = 0
    """Collectives that it had issued before, if it is the whole closure."""


@dataclass(frozen=True, slots=True)
class NotMade:
    """A launch that was not made."""

    is_refused: bool = True
    """True because it would have compiled its kernel; False because not all ranks can make it."""


class NotAgreedError(NotLoaded):
    """Raised in place of a launch that some rank cannot make."""


Launched = Returned | Failed | NotMade
