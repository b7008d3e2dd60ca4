"""Answers of ranks that are paused while others ask and answer."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from dist_tune.distributed.liveness.presence import Presence
from dist_tune.distributed.protocol.calls import Place
from dist_tune.distributed.protocol.parts import Parts
from dist_tune.distributed.protocol.waiting import Wait

pytestmark = pytest.mark.once

MEMBERS = (0, 1, 2)


class _Paused:
    """A client of a store that stands still before it begins to wait."""

    def __init__(self, own: Any) -> None:
        self._own, self.goes_on = own, threading.Event()
        self._waiting = own.clone()  # a set() on the other one would wait as well

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def clone(self) -> _Paused:
        return self

    def wait(self, *args: Any) -> None:
        self.goes_on.wait()
        self._waiting.wait(*args)


def _until(condition: Any) -> None:
    end = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_rank_that_was_paused_before_it_waited_for_a_question_answers_the_next_one():
    """Another one has deleted that question meanwhile, after it had answered a later one; the paused rank is not taken for gone."""
    host = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=60), wait_for_workers=False)
    paused = _Paused(host.clone())  # type: ignore[attr-defined]  # missing in torch's stubs
    passed = {"f": [1]}  # of the closure's calls, by the paused rank
    ranks = {0: Presence(host.clone(), host.clone(), 0, MEMBERS, lambda: ({}, None))}  # type: ignore[attr-defined]
    ranks[1] = Presence(paused, paused, 1, MEMBERS, lambda: (passed, None))  # type: ignore[arg-type]
    ranks[2] = Presence(host.clone(), host.clone(), 2, MEMBERS, lambda: ({}, None))  # type: ignore[attr-defined]
    _until(lambda: len(ranks[0].answers_of(MEMBERS)) == 3)
    for _ in range(2):
        number = ranks[0].ask()
        _until(lambda: all(answer.number == number for answer in ranks[0].answers_of([0, 2]).values()))  # noqa: B023  # within this round
    assert not host.check(["question/1"])
    paused.goes_on.set()
    verdicts: list[Any] = []
    parts = Parts(host.clone(), 0, MEMBERS)  # type: ignore[attr-defined]
    for rank in (0, 2):
        host.set(f"0/parts/{rank}", "")

    def decide(verdict: Any) -> None:
        verdicts.append(verdict)
        host.set("0/verdict", "")

    Wait(parts, 0, lambda: None, decide, lambda missing, within_s: None).for_calls(ranks[0], Place("f", 1), 6.0, 20.0, is_optional=True)
    assert verdicts == [{"state": "apart", "passed": {1: passed}}]
    for each in (ranks[2], ranks[1], ranks[0]):
        each.stop()
