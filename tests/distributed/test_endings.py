"""Ends of other calls on the way to the meetings of one's own: rank 1 writes them, and rank 0 is the one under test."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from dist_tune.distributed.protocol.calls import Place
from dist_tune.distributed.protocol.endings import Endings, has_gone_on, is_end_of
from dist_tune.distributed.protocol.meetings import Meetings
from dist_tune.errors import PeerFailedError

pytestmark = pytest.mark.once

GLOO = "[/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"


def end_of(closure: str, number: int, issued: int = 0, *, talks: bool = False) -> dict[str, Any]:
    """The verdict by which rank 1 has ended this call."""
    place = Place(closure, number, issued, before=issued - talks)
    error = {"rank": 1, "kind": "ValueError", "error": "ValueError: theirs", "message": "theirs"}
    return {"state": "aborted", **error, "place": place}


APART = {"state": "apart", "passed": {}, "place": Place("g", 3)}


@pytest.fixture
def host() -> Any:
    return dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=60), wait_for_workers=False)


def entered(host: Any) -> tuple[Meetings, Any]:
    """Rank 0 in call 1 of f, and the store of its meetings."""
    rank_0 = Meetings(host.clone(), 0, (0, 1), 2.0)
    rank_0.enter("f", 1)
    return rank_0, dist.PrefixStore("1", host)


def test_a_collective_that_failed_is_traced_to_its_cause_past_a_meeting_about_another_call(host: Any):
    """Others have met about a call that a rank has passed, while this rank waited for word of its own."""
    rank_0, store = entered(host)
    store.set("0/verdict", json.dumps(APART))
    store.set("1/verdict", json.dumps(end_of("f", 1)))
    with pytest.raises(PeerFailedError, match="rank 1 raised ValueError: theirs"):
        rank_0.abort(RuntimeError(GLOO))
    rank_0.close()


def test_an_error_is_told_although_a_peer_has_just_ended_another_call(host: Any):
    """In the next epoch; and the peer's is not lost for the call that it is about."""
    rank_0, store = entered(host)
    store.set("0/verdict", json.dumps(end_of("g", 3)))
    error = ValueError("mine")
    rank_0.abort(error)
    assert json.loads(store.get("1/verdict"))["error"] == "ValueError: mine"
    assert not hasattr(error, "__notes__")
    rank_0.enter("g", 2)
    with pytest.raises(PeerFailedError, match="rank 1 raised ValueError: theirs"):
        rank_0.enter("g", 3)
    rank_0.enter("g", 3)  # once
    rank_0.close()


def test_an_end_is_of_the_calls_of_its_number_or_after_its_collectives():
    """The latter if some of them are of the call; of a rank that has called again since, collectives tell."""
    assert is_end_of(end_of("f", 2), Place("f", 2))
    assert not is_end_of(end_of("f", 2), Place("f", 1))
    assert is_end_of(end_of("f", 2, 5, talks=True), Place("f", 1, 5, before=4))
    assert not is_end_of(end_of("f", 2, 5), Place("f", 1, 5, before=4))
    own = Place("f", 2, 5, before=4)
    verdict = end_of("f", 2, 4)
    assert has_gone_on({**verdict, "place": Place("f", 2, 4, before=4)}, own)
    assert not has_gone_on({**verdict, "place": Place("f", 2, 5, before=5)}, own)
    assert not has_gone_on({**verdict, "place": Place("f", 2, 4, before=4)}, Place("f", 2, 5, before=5))


def test_ends_of_calls_that_are_never_made_are_forgotten():
    """The latest are kept."""
    endings = Endings()
    for number in range(1, 101):
        endings.keep(end_of("f", number))
    assert endings.take(Place("f", 1)) is None
    assert endings.take(Place("f", 100)) == end_of("f", 100)
    assert endings.take(Place("f", 100)) is None


def test_an_end_kept_under_another_number_is_found_by_its_collectives():
    """Ranks that have met in fewer calls count otherwise: the end of their third is that of the second here, and not of the third."""
    endings = Endings()
    endings.keep(end_of("f", 3, 10, talks=True))
    assert endings.take(Place("f", 2, 10, before=9)) is not None
    endings.keep(end_of("f", 3, 10, talks=True))
    assert endings.take(Place("f", 3, 12, before=12)) is None
    endings.keep(end_of("f", 3, 10))
    assert endings.take(Place("f", 3, 10, before=10)) is not None
