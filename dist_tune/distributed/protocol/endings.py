"""Ends of calls, as ranks come to them at different times: whether one concerns this rank's call, now or when it comes to it.

Knows places and verdicts, and no store.
"""

from __future__ import annotations

from dist_tune.distributed.protocol.calls import Place, is_inside
from dist_tune.distributed.protocol.verdicts import Verdict

_MAX_KEPT = 64
"""Ends that a rank keeps for calls that it may never make."""


def is_end_of(verdict: Verdict, place: Place) -> bool:
    """True if a verdict is the end of this call: the rank that fixed it was in the same one."""
    return is_inside(verdict["place"], place)


def has_gone_on(verdict: Verdict, place: Place) -> bool:
    """True if the rank that has ended this call has called again since, as far as collectives show.

    It had issued fewer then than this rank has now, and each takes all ranks.
    """
    return verdict["state"] == "aborted" and place.has_talked and verdict["place"].issued < place.issued


class Endings:
    """Ends of calls that this rank has read on its way to the meetings of another one, and has yet to come to."""

    def __init__(self) -> None:
        self._by_call: dict[str, Verdict] = {}

    def keep(self, verdict: Verdict) -> None:
        """Keep one that is not of this rank's call; of several of one call, the first is the cause."""
        if verdict["state"] in ("aborted", "timed out"):
            self._by_call.setdefault(verdict["place"].text, verdict)
            if len(self._by_call) > _MAX_KEPT:
                del self._by_call[next(iter(self._by_call))]

    def take(self, place: Place) -> Verdict | None:
        """The end of this call, if it was read before; one that collectives tell comes before one of the same number."""
        found = [call for call, verdict in self._by_call.items() if is_end_of(verdict, place)]
        if not found:
            return None
        verdict = self._by_call.pop(min(found, key=lambda call: call == place.text))
        # All ranks have issued collectives since, and this one before its call: the rank that has ended it counts calls otherwise.
        is_past = 0 < verdict["place"].issued < place.issued and not place.has_talked
        return None if is_past else verdict
