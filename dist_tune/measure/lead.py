"""How long a device is kept busy before a replay, so that the host has queued all of it when it begins. Pure."""

from __future__ import annotations

from dist_tune.measure.clocks import MAX_LEAD_MS

LONGEST_MS = 100.0
"""Longest lead of a step that does not wait for its device: its host may be far slower, as where Python launches many small kernels."""
_MARGIN_MS = 3.0
"""Longest margin over the host's time. A collective that waits for its turn for tens of milliseconds wakes up to 0.2 ms late (H200)."""
_N_MISSES = 4
"""Replays in a row without a lead that was enough, after which the step is taken for one that waits for its device."""
_RETRY_AFTER = 16
"""Replays after which such a step has one long lead again: its host may have been busy with something else."""
_GROWTH = 1.1
"""A full launch queue blocks the host, so one long replay says little; where the host was ahead its time grows by a tenth at most."""
_DECAY = 0.8


class Lead:
    """The host's time of a replay, and from it the lead. Milliseconds.

    The first lead is as long as one may be that is of no use: a step whose host is quicker shows its time in it. A step that waits for
    its device is never ahead of it, and has no long leads.
    """

    def __init__(self) -> None:
        self._host_ms = MAX_LEAD_MS - _MARGIN_MS
        self._n_missed = 0
        self._is_known = False

    def ms(self, queued_ms: float = 0.0) -> float:
        """Milliseconds to keep the device busy before the next replay; ``queued_ms``: what it has yet to do keeps it busy as well."""
        may_be_long = self._n_missed < _N_MISSES or self._n_missed % _RETRY_AFTER == 0
        most_ms = LONGEST_MS if may_be_long else MAX_LEAD_MS
        return max(0.0, min(self._host_ms + min(0.5 * self._host_ms, _MARGIN_MS), most_ms) - queued_ms)

    def add(self, host_ms: float, *, is_ahead: bool) -> None:
        """Take in how long the host took to queue a replay; ``is_ahead``: the device had not begun it by then."""
        self._n_missed = 0 if is_ahead else self._n_missed + 1
        if is_ahead and self._is_known:  # one quick replay is no quick host
            host_ms = max(host_ms, _DECAY * self._host_ms)
        self._host_ms = min(host_ms, (_GROWTH if is_ahead else 3.0) * self._host_ms)
        self._is_known |= is_ahead
