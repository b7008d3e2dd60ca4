"""Assertions about ranks, as ``on_ranks`` reports them, and about the errors that they raise; a store of a rank's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from dist_tune.errors import DistTuneError
from dist_tune.settings import SettingsError
from dist_tune.testing import Outcome

ROOT = Path(__file__).parents[2]
DEADLINE_S = 3.0
"""Deadline of a tuning on ``on_ranks``; long enough for a compile on a busy machine."""


def same_error(outcomes: list[Outcome], error: str, *words: str, within_s: float = 3 * DEADLINE_S) -> None:
    """Assert that all raised this error, in time, and that its message has the words."""
    for outcome in outcomes:
        assert outcome.error == error, f"{outcome.error}: {outcome.message}\n{outcome.notes}"
        for word in words:
            assert word in outcome.message
        assert outcome.seconds < within_s


def caught(call: Callable[[], object]) -> Any:
    """The error that ``call`` raises, as values; its ``kind`` is empty if there is none."""
    try:
        call()
    except (DistTuneError, SettingsError) as error:
        return SimpleNamespace(kind=type(error).__name__, message=str(error), cause=str(error.__cause__), **vars(error))
    return SimpleNamespace(kind="", message="")


def gathered(value: object) -> list[Any]:
    """The values of all ranks, in their order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def over_tcp(rank: int, lead: Callable[[int], int] = lambda port: port) -> None:
    """Join a process group anew, over a TCP store that rank 0 hosts; others find it at the port to which ``lead`` leads."""
    n = dist.get_world_size()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port: list[Any] = [lead(store.port) if store is not None else 0]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    store = store or dist.TCPStore("127.0.0.1", port[0], is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
