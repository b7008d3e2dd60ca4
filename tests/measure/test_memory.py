"""Which memory tensors lie in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dist_tune.measure.memory import Region, has_same_bits, shares_memory, tensors_in


@dataclass
class Node:
    value: torch.Tensor
    others: Any = None
    unset: torch.Tensor = field(init=False)


def test_a_container_is_searched_once():
    """A list in itself, a tree whose nodes know their parent, and twenty pairs in one another,
    which have a million ends.
    """
    value = torch.ones(1)
    itself: list[Any] = [value]
    itself.append(itself)
    root = Node(value)
    root.others = [Node(value, root) for _ in range(40)]
    pair: Any = value
    for _ in range(20):
        pair = (pair, pair)
    assert list(tensors_in(itself, has_fields=True)) == [(0,)]
    assert len(tensors_in(root, has_fields=True)) == 41
    assert list(tensors_in((pair, value), has_fields=True))[-1] == (1,)
    assert len(tensors_in(pair, has_fields=True)) == 2
    assert list(tensors_in([[value], {"a": value}], has_fields=True)) == [(0, 0), (1, "a")]


def test_memory_is_shared_by_address():
    """By views, and by tensors that were made of the same memory in two ways."""
    array = np.zeros(8, dtype=np.float32)
    whole, end, other = torch.from_numpy(array), torch.from_numpy(array[4:]), torch.zeros(8)
    assert shares_memory(whole, [other, end])
    assert shares_memory(whole[:2], [whole[4:]])  # of one storage
    assert not shares_memory(whole, [other])
    assert not shares_memory(torch.empty(0), [torch.empty(0)])
    empty = torch.empty(0)
    assert shares_memory(empty, [empty])
    assert shares_memory(empty.view(0, 3), [empty])
    assert not shares_memory(torch.eye(2).to_sparse(), [other])


def test_a_region_keeps_nothing_alive():
    """It finds what lies there as long as somebody else holds it."""
    tensor = torch.arange(6.0).view(2, 3)
    region = Region.of(tensor.t()[1:])
    assert region is not None
    found = region.tensor()
    assert found is not None
    assert found.tolist() == [[1.0, 4.0], [2.0, 5.0]]
    del found, tensor
    assert region.tensor() is None
    assert Region.of(torch.zeros(3)[:0]) is None


def test_contents_are_compared_by_bits():
    """NaN is NaN, zeros of two signs differ, and strides do not matter, also of a single element
    that is expanded.
    """
    nan, one = torch.full((3,), torch.nan), torch.ones(())
    assert has_same_bits(nan, nan.clone())
    assert not has_same_bits(torch.zeros(2), -torch.zeros(2))
    assert has_same_bits(torch.ones(2, 3).t(), torch.ones(3, 2))
    assert has_same_bits(one.expand(4)[:1], one.expand(1))
    assert has_same_bits(one, one.clone())
