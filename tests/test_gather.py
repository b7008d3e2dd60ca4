"""kernels/gather.py and kernels/copier.py without a GPU: words for streams, and what a group of one rank needs."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.once


def test_many_words_are_queued_in_several_submissions(monkeypatch: pytest.MonkeyPatch):
    """The driver takes less than 256 operations at once; each keeps its own weight."""
    from kernels import gather

    calls: list[tuple[Any, ...]] = []

    def driver_function(name: str) -> Any:
        def function(*args: Any) -> int:
            calls.append(args)
            return 0

        return function

    monkeypatch.setattr(gather, "driver_function", driver_function)
    words, stream = torch.zeros(300, dtype=torch.int32), SimpleNamespace(cuda_stream=7)
    many = gather.MemoryOps([(gather.WAIT, words, i) for i in range(300)], list(range(300)))
    many.queue(stream, 2)  # type: ignore[arg-type]
    assert [(count, batch[0].value, batch[-1].value) for _, count, batch, _ in calls] == [(255, 0, 508), (45, 510, 598)]


def test_a_shard_goes_to_its_place_at_each_peer_and_raises_its_flag(monkeypatch: pytest.MonkeyPatch):
    """Rank 1 of three: two steps use both slots; flags have the number of the step, credits that of the one before."""
    from kernels import gather, symmetric

    blocks = [torch.zeros(4096, dtype=torch.uint8) for _ in range(3)]

    def driver_function(name: str) -> Any:
        def function(*args: Any) -> int:
            if name == "cuMemcpyAsync":
                ctypes.memmove(*args[:3])
            for op in args[2] if name == "cuStreamBatchMemOp_v2" else ():
                if op.operation == gather.WRITE:
                    ctypes.c_uint32.from_address(op.address).value = op.value
            return 0

        return function

    stream = SimpleNamespace(cuda_stream=0, wait_event=lambda _: None)
    event = SimpleNamespace(record=lambda *_: None)

    def all_gather_object(by_rank: list[Any], own: Any, group: Any) -> None:
        by_rank[:] = [own] * 3

    for name, fake in {"get_rank": lambda _: 1, "get_world_size": lambda _: 3, "all_gather_object": all_gather_object}.items():
        monkeypatch.setattr(torch.distributed, name, fake)
    for name, made in {"Stream": stream, "Event": event, "current_stream": stream}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, made=made, **__: made)
    monkeypatch.setattr(symmetric, "_mapped_blocks", lambda n_bytes, group: [block[:n_bytes] for block in blocks])
    monkeypatch.setattr(gather, "driver_function", driver_function)
    group: Any = None
    pushes = gather.PushGather(torch.Size((2, 8)), torch.bfloat16, torch.device("cpu"), group)
    for epoch in (1, 2):
        shard = torch.full((2, 8), float(epoch), dtype=torch.bfloat16)
        gathered = pushes.start(shard)
        pushes.finish()
        assert (gathered.epoch, list(gathered.shards.shape), gathered.flags.tolist()) == (epoch, [6, 8], [0, 0, 0])
        for peer in (0, 2):
            at_peer = pushes._memory.on(peer)
            assert torch.equal(at_peer["slots"][epoch % 2, 1], shard)
            assert not at_peer["slots"][:, [0, 2]].any()
            assert (at_peer["ready"].tolist(), at_peer["credits"].tolist()) == ([0, epoch, 0], [0, epoch - 1, 0])
    assert not pushes._memory.own["slots"].any()


def test_a_group_of_one_rank_has_nothing_to_copy():
    """The own part is stored where it is summed; copies are refused where several ranks sum all rows."""
    from kernels.copier import Copier
    from kernels.partials import Plan

    plan = Plan(m=8, n=8, n_parts=1, dtype=torch.bfloat16, partial_dtype=torch.bfloat16, gathers=False)

    def memory(n_ranks: int) -> Any:
        own = {"received": torch.zeros(2, n_ranks, 64), "arrivals": torch.zeros(n_ranks, 32, dtype=torch.int32)}
        return SimpleNamespace(rank=0, n_ranks=n_ranks, device=torch.device("cpu"), own=own)

    Copier(plan, memory(1)).queue(0, 1, 64, None)
    with pytest.raises(ValueError, match="where all ranks sum all rows, push or pull"):
        Copier(plan, memory(2))
