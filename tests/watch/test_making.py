"""``make()`` on two ranks, which are threads of this process: on both or on none."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from dist_tune.distributed import Regroup
from dist_tune.errors import StuckConfigError
from dist_tune.watch import making

MODULE = sys.modules["dist_tune.watch.making"]


def _make(monkeypatch: pytest.MonkeyPatch, leave: Callable[..., None], *makes: Callable[[], None]) -> list[Any]:
    """What each rank raised, or None."""
    store: Any = dist.HashStore()
    words = SimpleNamespace(opened=nullcontext, tell=_nothing, leave=leave)
    monkeypatch.setattr(MODULE, "regroup_of", lambda ranks, number: Regroup(store, ranks.rank, (0, 1), f"{number}"))
    monkeypatch.setattr(MODULE, "LastWords", lambda *args: words)
    monkeypatch.setattr(MODULE, "tuning_log", lambda *args, is_first: nullcontext())
    monkeypatch.setattr(MODULE, "_POLL_S", 0.001)

    def rank_of(rank: int) -> BaseException | None:
        ranks: Any = SimpleNamespace(rank=rank, members=(0, 1), gather_s=10.0)
        settings: Any = SimpleNamespace(deadline_s=0.001)
        try:
            with making(ranks, settings, StuckConfigError("rank 1: candidate 2", 1, "candidate 2")):
                makes[rank]()
        except Exception as error:  # noqa: BLE001
            return error
        return None

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank_of, range(2)))


def _nothing(*args: object) -> None:
    """Made."""


def _fail() -> None:
    raise ValueError("no groups left")


def test_a_factory_that_fails_on_one_rank_ends_the_call_on_all(monkeypatch: pytest.MonkeyPatch):
    """Its own error there, and the tuning's on the others, with the reason; no thread is left."""
    first, second = _make(monkeypatch, _nothing, _nothing, _fail)
    assert isinstance(first, StuckConfigError)
    assert first.__notes__ == ["process groups are not made anew: make() of rank 1 raised ValueError: no groups left"]
    assert isinstance(second, ValueError)
    assert _make(monkeypatch, _nothing, _nothing, _nothing) == [None, None]
    assert "dist_tune make" not in [each.name for each in threading.enumerate()]


def test_a_rank_that_waits_in_its_factory_for_one_that_failed_leaves(monkeypatch: pytest.MonkeyPatch):
    """Nothing ends a store's or a group's wait inside of it, so the process does, with the other's reason."""
    left, told = threading.Event(), []

    def leave(what: str, advice: str) -> None:
        told.append(what)
        left.set()

    _make(monkeypatch, leave, lambda: assert_set(left), _fail)
    assert len(told) == 1
    assert "make() of rank 1 raised ValueError: no groups left" in told[0]


def assert_set(event: threading.Event) -> None:
    """Wait for it."""
    assert event.wait(10.0)
