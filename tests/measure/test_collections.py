"""The garbage collector while kernels are timed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dist_tune.measure import no_full_collections

pytestmark = pytest.mark.once


@contextmanager
def _full_collections() -> Iterator[list[int]]:
    """Numbers of objects that the collector leaves alone, at each collection of the oldest generation meanwhile."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            found.append(gc.get_freeze_count())

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


def test_the_oldest_objects_are_left_alone_and_none_is_collected_twice_for_it_afterwards():
    """As many new objects as make Python collect all: within, none does; afterwards once, as without a tuning."""
    gc.collect()
    n, before = len(gc.get_objects()), gc.get_threshold()
    with _full_collections() as found:
        with no_full_collections():
            kept = [[i] for i in range(max(n, 200_000))]
        assert found == []
        kept += [[i] for i in range(max(n, 200_000) // 4)]
    assert found == [0]
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_a_threshold_that_the_program_sets_meanwhile_stays():
    """It is the program's."""
    before = gc.get_threshold()
    try:
        with no_full_collections():
            gc.set_threshold(1000, 5, 5)
        assert gc.get_threshold() == (1000, 5, 5)
    finally:
        gc.set_threshold(*before)


def test_a_program_that_sets_the_youngest_generation_alone_has_its_full_collections_again():
    """``gc.set_threshold(0)`` around a step of its own: the others stay as they are for it, and were raised by the tuning."""
    young, middle, old = before = gc.get_threshold()
    try:
        with no_full_collections():
            gc.set_threshold(young + 1)
        assert gc.get_threshold() == (young + 1, middle, old)
    finally:
        gc.set_threshold(*before)
