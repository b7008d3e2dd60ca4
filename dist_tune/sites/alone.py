"""What a closure keeps between calls: signatures that have had their first call, and sites that a rank has met without the others.

Knows launches and their keys; nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dist_tune.runtime import Tunable
from dist_tune.sites.site import Site

_ALWAYS = 8
"""Calls in which such a site asks for a meeting; after these in every call whose number is a power of two. Asking costs about 0.1 s."""


class Untuned:
    """Untuned sites of one closure on this rank."""

    def __init__(self) -> None:
        self._sites: dict[tuple[int, str], list[Any]] = {}
        """(Identity of the decorated object, key) -> site and number of its calls."""

    def note(self, sites: Iterable[Site]) -> None:
        """Add sites, or keep those that are known."""
        for site in sites:
            for owner in site.slots:
                self._sites.setdefault((owner, site.key), [site, 0])

    def config(self, launch: Tunable) -> Any:
        """The config for a launch that shall not ask for a meeting; None for one that is new, or whose turn it is."""
        entry = self._sites.get((id(launch.owner), launch.key_text)) if self._sites else None
        if entry is None:
            return None
        entry[1] += 1
        site, n_calls = entry
        is_due = n_calls <= _ALWAYS or n_calls & (n_calls - 1) == 0
        return None if is_due else site.configs[next(i for i in (site.stand_in, site.near, 0) if i is not None)]


class Signatures:
    """Signatures that have had their first call."""

    def __init__(self) -> None:
        self.known: set[object] = set()
        """One set for ever, because calls look into it themselves."""
        self.is_waived = False
        """True once ranks were found to be called with different arguments, so that only a miss is worth a meeting."""
