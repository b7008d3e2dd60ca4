"""Waiting for parts of ranks that beat, that do not, and that are stopped, on a clock that the test moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from dist_tune.distributed.liveness.heartbeat import Heartbeat
from dist_tune.distributed.liveness.host_processes import STOPPED, UNKNOWN
from dist_tune.distributed.liveness.outside import silent_since
from dist_tune.distributed.protocol import waiting
from dist_tune.distributed.protocol.calls import Place
from dist_tune.distributed.protocol.parts import Parts

DEADLINE_S = 4.0


def _waited(
    monkeypatch: pytest.MonkeyPatch, quiet: dict[int, float | None], state: str = UNKNOWN, *, has_failed: bool = True
) -> tuple[float, dict[int, str]]:
    """Seconds until rank 0 gives ranks 1 and 2 up, and what it says of them. ``quiet``: seconds without a beat; None: it beats.

    ``has_failed``: a collective of rank 0 has.
    """
    now, ended = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    monkeypatch.setattr(waiting, "time", clock)
    monkeypatch.setattr(waiting, "state_of", lambda process: state)
    store: Any = dist.HashStore()
    for rank in quiet:
        Heartbeat(rank, range(3), lambda: 0).post(store)
    parts = Parts(store, 0, range(3))

    def time_out(missing: dict[int, str], within_s: float) -> None:
        ended.append((now[0], missing))
        store.set("0/verdict", "")

    wait = waiting.Wait(parts, 0, lambda: None, lambda verdict: None, time_out)
    parts.bring(0, "")
    quiet_s = (lambda rank: 0.0 if (s := quiet[rank]) is None else s + now[0]) if has_failed else None
    wait.for_parts(DEADLINE_S, 2 * DEADLINE_S, 60.0, quiet_s)
    ((seconds, missing),) = ended
    return seconds, missing


@pytest.mark.parametrize(
    ("quiet", "state", "seconds"),
    [
        ({1: 0.0, 2: 0.0}, UNKNOWN, DEADLINE_S),
        ({1: DEADLINE_S, 2: DEADLINE_S}, UNKNOWN, DEADLINE_S / 4),
        ({1: 0.0, 2: None}, UNKNOWN, 2 * DEADLINE_S),
        ({1: DEADLINE_S, 2: DEADLINE_S}, STOPPED, DEADLINE_S / 4),
    ],
    ids=["since now", "since the collective", "one beats", "stopped"],
)
def test_ranks_that_do_not_beat_are_not_waited_for(
    quiet: dict[int, float | None], state: str, seconds: float, monkeypatch: pytest.MonkeyPatch
):
    """A deadline without a beat of any missing rank ends the wait after a failed collective; one that beats has the whole patience."""
    waited_s, missing = _waited(monkeypatch, quiet, state)
    assert seconds <= waited_s < 1.3 * seconds + DEADLINE_S / 4
    assert set(missing) == {1, 2}


def test_ranks_that_are_stopped_between_replays_are_waited_for(monkeypatch: pytest.MonkeyPatch):
    """Where no collective has failed: for the timeout of the process group, while their processes are stopped."""
    waited_s, missing = _waited(monkeypatch, {1: None, 2: None}, STOPPED, has_failed=False)
    assert 60.0 <= waited_s < 80.0
    assert set(missing) == {1, 2}


class _Looked:
    """A store that a peer beats on, and whose readers are asked for that peer's silence while they read."""

    def __init__(self) -> None:
        self.own: Any = dist.HashStore()
        self.while_reading: list[float] = []
        self.beating: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def check(self, keys: list[str]) -> Any:
        self.while_reading.append(self.beating.quiet_s(1))
        return self.own.check(keys)


def test_silence_of_a_peer_counts_between_looks(monkeypatch: pytest.MonkeyPatch):
    """A peer that beats is never silent, not even while its new beat is being read, long after the last look; without beats it is."""
    now = [0.0]
    store, peer = _Looked(), Heartbeat(1, range(2), lambda: 0)
    store.beating = mine = Heartbeat(0, range(2), lambda: 0)
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def look() -> float:
        mine._look(store, lambda line: None)  # type: ignore[arg-type]
        return mine.quiet_s(1)

    mine.at("the meeting")
    for now[0] in (0.0, 1.0, 100.0):
        peer.post(store.own)
        assert look() == 0.0
    assert store.while_reading == [0.0, 0.0]
    now[0] = 103.0
    assert look() == 3.0
    mine._seen.clear()  # this process was stopped
    assert mine.quiet_s(1) == 0.0


@pytest.mark.parametrize(
    ("beating", "now", "since"),
    [(None, 9.0, 5.0), (1.0, 5.5, 5.0), (1.0, 6.0, 1.0), (8.0, 9.0, 5.0)],
    ids=["the other thread is answered", "for a moment", "both wait", "the other asked later"],
)
def test_a_silent_store_counts_from_the_first_call_without_answer(beating: float | None, now: float, since: float):
    """The beating thread's, once this rank's own call has waited for a quarter of a deadline: one connection alone may be lost."""
    assert silent_since(5.0, beating, now, DEADLINE_S) == since


@pytest.mark.parametrize(("begins", "told"), [(0.3, "replay 3"), (9.9, "its first run")])
def test_a_process_that_did_not_run_says_in_what(begins: float, told: str, monkeypatch: pytest.MonkeyPatch):
    """In what began between two beats, before it was stopped, and not in what began after it went on."""
    now, lines = [0.0], list[str]()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    mine = Heartbeat(0, range(2), lambda: 0)
    mine.begin(lambda: Place("step", 1))

    def wait(seconds: float) -> bool:
        now[0] = begins
        mine.at("replay 3")
        now[0] = 10.0
        return False

    mine._pause(SimpleNamespace(wait=wait), lines.append)  # type: ignore[arg-type]
    assert lines == [f"rank 0 did not run for 9.5 s in {told}: stopped, swapped out, or Python's lock held"]
