"""The cause of a broken collective, from the beats of all ranks."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import pytest

from dist_tune.distributed.liveness.heartbeat import Heartbeat
from dist_tune.distributed.liveness.lives import Life, cause_of
from dist_tune.distributed.protocol.calls import Place

TWO = [(1, 2), (2, 2), (3, 2)]


def _life(runs: list[tuple[int, int]], odd: dict[str, str] | None = None, troubles: list[str] | None = None) -> Life:
    return Life(1, Place("step", 1), "", 0.0, runs=runs, odd=odd or {}, troubles=troubles or [])


@pytest.mark.parametrize(
    ("lives", "cause"),
    [
        ({0: _life(TWO), 1: _life(TWO)}, None),
        ({0: _life(TWO), 1: _life([*TWO[:2], (3, 1)], {"3": "replay 3, config a"})}, (1, "replay 3, config a")),
        ({0: _life(TWO[:2]), 1: _life([*TWO[:2], (3, 1)], {"3": "replay 3, config a"})}, (1, "replay 3, config a")),
        ({0: _life([(1, 2), (2, 1)]), 1: _life([(1, 2), (2, 1)])}, None),
        ({0: _life(TWO[:2]), 1: _life(TWO)}, None),
        ({0: _life([]), 1: _life([(1, 0)])}, None),
        ({0: _life(TWO, troubles=["config a"]), 1: _life([(1, 1)])}, (0, "left config a, between")),
    ],
    ids=["in step", "skipped", "skipped, while the other is in it", "fewer on both", "one is ahead", "first run", "failed in between"],
)
def test_the_rank_that_skipped_a_collective_is_found(lives: dict[int, Life], cause: tuple[int, str] | None):
    """A run that takes fewer collectives on all ranks is no cause, nor is one that only some have come to."""
    found = cause_of(lives)
    assert (found is None) == (cause is None)
    if found is not None and cause is not None:
        assert found[0] == cause[0]
        assert cause[1] in found[1]


class CountingStore:
    """All ranks have beaten; counts what is asked."""

    def __init__(self, n_ranks: int) -> None:
        self.n_looks = self.n_beats = 0
        self._n_ranks = n_ranks

    def set(self, key: str, value: str) -> None:
        self.n_beats += 1

    def check(self, keys: list[str]) -> bool:
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.n_looks += 1
        return [b""] * len(keys)


@pytest.mark.parametrize("n_ranks", [2, 64, 256, 4096])
def test_beats_and_looks_of_all_ranks_are_bounded(n_ranks: int, monkeypatch: pytest.MonkeyPatch):
    """512 beats and 64 looks a second of all ranks together, or two of each rank in small groups; some beats within each deadline."""
    counts = CountingStore(n_ranks)
    store: Any = counts
    beating, now = Heartbeat(0, range(n_ranks), lambda: 0), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    beating.at("the meeting")
    while now[0] < 640.0:
        now[0] += beating._every_s
        beating.post(store)
        beating._look(store, lambda line: None)
    assert counts.n_beats * n_ranks / 640 <= max(512, 2 * n_ranks if n_ranks <= 256 else 0)
    assert counts.n_looks * n_ranks / 640 <= max(64 + 1, 2 * n_ranks if n_ranks <= 32 else 0)
    assert beating._every_s <= 10.0


class OneLife(CountingStore):
    """The beat of one peer."""

    def __init__(self, life: Life) -> None:
        super().__init__(1)
        self.life = life

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [json.dumps(dataclasses.asdict(self.life)).encode()]


@pytest.mark.parametrize(("n_issued", "is_told"), [(1, True), (2, False)])
def test_a_rank_that_left_its_first_run_with_fewer_collectives_is_told_of_to_those_that_wait(
    n_issued: int, is_told: bool, monkeypatch: pytest.MonkeyPatch
):
    """Two seconds after this rank began to wait, long before its collective times out."""
    store: Any = OneLife(Life(7, Place("step", 1), "the meeting for 'manifest'", 0.1, n_issued=n_issued))
    beating, now, told = Heartbeat(0, (0, 1), lambda: 2), [0.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    beating.begin(lambda: Place("step", 1))
    while now[0] < 2.5:
        beating._look(store, told.append)
        now[0] += 0.5
    assert [("after 1 collectives of its process where rank 0 is in number 2" in line) for line in told] == [is_told]


def test_runs_with_another_number_of_collectives_are_noted():
    """Beside most of the latest runs, in any order: the first few are named for peers, and a run like most others is not."""
    n_issued = [0]
    beating = Heartbeat(0, [0, 1], lambda: n_issued[0])
    for call, counts, odd in (
        ("one", [2, 2, 1, 2, 2], [2]),
        ("two", [0, 3, 0, 0, 3], [1, 4]),
        ("three", [1, 2, 2, 2, 2, 1], [1, 2, 5]),
        ("four", [1, 2, 2, 2, 2, 2, 2], [1, 2]),
    ):
        beating.begin(lambda: Place(call, 1))  # noqa: B023  # within this round
        for number, count in enumerate(counts):
            with beating.run(number, f"replay {number}"):
                n_issued[0] += count
        assert list(beating._odd) == odd, call
