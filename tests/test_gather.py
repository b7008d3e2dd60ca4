"""kernels/gather.py and kernels/copier.py without a GPU: words for streams, and what a group of one rank needs."""

from __future__ import annotations

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
