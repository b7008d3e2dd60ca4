"""Arguments that are wrappers of tensors: results of collectives under way, and distributed tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dist_tune import autotune
from dist_tune.testing import values
from tests.function_options import BLOCKS, QUICK
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


def _plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _results_of_collectives(rank: int) -> Any:
    from torch.distributed._functional_collectives import all_reduce

    told = []
    for check in (None, _plus_one):
        x: Any = all_reduce(torch.full((1 << 10,), rank + 1.0), "sum", list(range(2)))

        @autotune(BLOCKS, None, check=check, **QUICK)
        def step(x: torch.Tensor, block: int) -> torch.Tensor:
            return x + 1

        told.append((bool((step(x) == 4).all()), [each.failure for each in step.records[0].candidates]))
    return told


def test_a_result_of_a_collective_may_be_an_argument():
    """It is waited for before it is copied, with a check, too."""
    assert values(on_ranks(2, _results_of_collectives)) == [[(True, [None] * 3)] * 2] * 2


def _distributed_tensors(rank: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    x: Any = distribute_tensor(torch.ones(8), init_device_mesh("cpu", (2,)), [Shard(0)])

    @autotune(BLOCKS, None, **QUICK)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        return x.add_(1)

    y: Any = step(x)
    return y.to_local().tolist(), len(step.records)


def test_a_distributed_tensor_is_changed_once():
    """Its part on this rank is what is copied and put back, because the function is not tuned."""
    assert values(on_ranks(2, _distributed_tensors)) == [([2.0] * 4, 0)] * 2
