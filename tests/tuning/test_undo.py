"""Copies of memory that is put back after a run: as few as there is memory to put back, of all that
can be cloned and copied to.
"""

from __future__ import annotations

import gc

import torch

from dist_tune.measure import Snapshot


def test_copies_die_with_their_tensors():
    """A hundred layers with temporaries hold one copy; one that lives is put back, also through a
    view.
    """
    undo, kept = Snapshot(), torch.ones(8)
    undo.copy([kept])
    for _ in range(100):
        undo.copy([torch.ones(1007)])
    assert (
        sum(type(each) is torch.Tensor and each.shape == (1007,) for each in gc.get_objects()) <= 1
    )
    view = kept[2:4]
    kept.fill_(3)
    del kept
    undo.put_back()
    assert view.tolist() == [1.0, 1.0]


class Foreign:
    """A tensor of a library's own."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def clone(self) -> Foreign:
        return Foreign([*self.values])

    def copy_(self, other: Foreign) -> None:
        self.values[:] = other.values


def test_what_can_be_cloned_and_copied_to_is_put_back_as_tensors_are():
    """Once, from the first copy, also through another snapshot."""
    undo, taken, value = Snapshot(), Snapshot(), Foreign([1])
    undo.copy([value])
    value.values[0] = 2
    undo.copy([value])
    taken.take(undo)
    value.values[0] = 3
    taken.put_back()
    assert value.values == [1]
