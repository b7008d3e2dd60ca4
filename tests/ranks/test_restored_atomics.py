"""Tensors under ``restore_value`` to which other kernels of the step add, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dist_tune import contextual_autotune
from dist_tune.testing import values
from tests.cases import further
from tests.ranks.kernels import atomic_kernel, autotuned, configs, launch
from tests.ranks.worlds import on_ranks

N = 64
QUICK: Any = {"is_dist": True, "n_repeat": 1, "n_warmup": 0}


def _restored(rank: int, order: str, place: str) -> Any:
    kernels = {
        "r": autotuned(atomic_kernel, blocks=(16, 32, 64), restore_value=["y_ptr"]),
        "s": autotuned(atomic_kernel, configs=configs(32)),
        "t": autotuned(atomic_kernel, blocks=(32, 64)),
    }
    total = torch.zeros(1)

    @contextual_autotune(**QUICK, cache=False)
    def step(x: torch.Tensor, y: torch.Tensor = total) -> float:
        for name in order:
            launch(kernels[name], x, y)
        return y.item()

    given = (total,) if place == "argument" else ()
    return [step(torch.ones(N), *given) / N for _ in range(3)], total.item() / N


@pytest.mark.parametrize("place", ["argument", "default"])
@pytest.mark.parametrize("order", [*map(further, ["r", "rr", "rs", "sr", "tr"]), "rt", "srsr", "tsrtr"])
def test_atomics_with_restore_value_add_once(order: str, place: str):
    """Launches that are restored (r), of one config (s) and of several (t) add into one output: each call adds what one run adds."""
    n = len(order)
    expected = [1.0 * n, 2.0 * n, 3.0 * n], 3.0 * n
    assert values(on_ranks(2, _restored, order, place)) == [expected] * 2
