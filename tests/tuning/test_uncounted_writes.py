"""State that torch does not count writes to: statistics of norms, epochs of schedulers, tensors that kernels add to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from dist_tune import contextual_autotune
from dist_tune.testing import on_ranks, values
from tests.cases import further
from tests.ranks.kernels import accumulate_kernel, autotuned, launch

pytestmark = [pytest.mark.once, pytest.mark.processes]

QUICK: Any = {"n_repeat": 2, "n_warmup": 1}


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.last = torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1)
        self.kernel = autotuned(blocks=(16, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.last(self.drop(self.norm(launch(self.kernel, x)))).square().mean()
        return loss


def _statistics(rank: int, is_tuned: bool, trains: bool) -> Any:
    torch.manual_seed(0)
    model = _Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    total = torch.zeros(64)
    add: Any = triton.jit(accumulate_kernel.fn)

    def run(x: torch.Tensor) -> float:
        loss = model(x)
        add[(4,)](x, total, 64, BLOCK=16)
        if trains:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        return float(loss.detach())

    step = contextual_autotune(**QUICK)(run) if is_tuned else run
    if not is_tuned:
        model.kernel.cache[(64, "torch.float32", "torch.float32")] = model.kernel.configs[0]
    losses = [step(torch.arange(64.0).view(4, 16)) for _ in range(3)]
    norm = model.norm
    assert norm.running_mean is not None
    return (
        losses,
        norm.running_mean.tolist(),
        int(norm.num_batches_tracked or 0),
        scheduler.last_epoch,
        scheduler.get_last_lr(),
        total.tolist(),
    )


@pytest.mark.parametrize("trains", [True, further(False)])
def test_what_torch_does_not_count_is_put_back(trains: bool):
    """Statistics of a batch norm, a scheduler's epoch, random numbers, and a tensor that a kernel adds to beside an optimizer."""
    assert values(on_ranks(1, _statistics, True, trains, is_dist=False)) == values(on_ranks(1, _statistics, False, trains, is_dist=False))
