"""The cause of a broken collective, from the beats of all ranks."""

from __future__ import annotations

import pytest

from dist_tune.distributed.heartbeat import Life, cause_of

TWO = [(1, 2), (2, 2), (3, 2)]


def _life(runs: list[tuple[int, int]], odd: dict[str, str] | None = None, troubles: list[str] | None = None) -> Life:
    return Life(1, "step, call 1", "", 0.0, runs=runs, odd=odd or {}, troubles=troubles or [])


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
