"""Calls after the process that hosts the store has come to its end."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import autotune, contextual_autotune
from tests.cases import further
from tests.ranks.kernels import autotuned, launch
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once

QUICK: Any = {"n_repeat": 1, "n_warmup": 0}


def _host_ends(rank: int, face: str, is_late: bool) -> Any:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port: list[Any] = [store.port if store is not None else 0]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    store = store or dist.TCPStore("127.0.0.1", port[0], is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    kernel = autotuned(blocks=(16, 32))
    step: Any = contextual_autotune(is_dist=True, **QUICK)(lambda x, n: float(launch(kernel, torch.ones(n)).sum()))
    if face == "function":
        step = autotune([{"block": 1}, {"block": 2}], key_fn=lambda x, n: n, **QUICK)(lambda x, n, block: 2.0 * n)
    step(torch.ones(64), 64)
    if rank == 0:
        time.sleep(0.5)
        os._exit(0)
    time.sleep(1.0 if is_late else 0.0)
    return [step(torch.ones(size), n) for size, n in ((96, 64), (128, 96), (64, 128))]


@pytest.mark.parametrize("is_late", [further(False), True])
@pytest.mark.parametrize("face", ["contextual", "function"])
def test_the_last_rank_goes_on_with_configs_it_knows(face: str, is_late: bool):
    """New shapes and new keys after the host of the store has ended its program are no error: nothing is tuned."""
    _, outcome = on_ranks(2, _host_ends, face, is_late)
    assert (outcome.error, outcome.value) == ("", [128.0, 192.0, 256.0]), outcome.message
