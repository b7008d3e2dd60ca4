"""What peers post on the store, when it is nothing that a rank of this version posts: an error that names the rank, and no other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.distributed.calls import Place
from dist_tune.distributed.meetings import Meetings
from dist_tune.distributed.messages import Agreed, Reduction, read_part, read_verdict
from dist_tune.distributed.verdicts import error_of
from dist_tune.errors import AbsentRanksError, DistTuneError, PeerFailedError

pytestmark = pytest.mark.once

DEADLINE_S = 0.4
CALL = Place("f", 1)
NOT_JSON = [b"", b"\xff\xfe", b"{", b"[" * 20_000, b"nan", b"\x1b[2J\n"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from(["state", "rank", "place", "missing", "1"]) | st.text(max_size=4), inner)
    ),
    max_leaves=12,
)


@Reduction
def total(parts: Mapping[int, int]) -> int:
    return sum(parts.values())


@Reduction
def joined(parts: Mapping[int, str]) -> str:
    return "".join(parts.values())


class Peer:
    """Rank 1, whose messages the test writes; rank 0 is in its first call."""

    def __init__(self, host: dist.Store, name: str) -> None:
        self.host = host
        self.store: Any = dist.PrefixStore(name, host)
        self.rank_0 = Meetings(dist.PrefixStore(name, host.clone()), 0, (0, 1), DEADLINE_S)  # type: ignore[attr-defined]  # missing in torch's stubs
        self.rank_0.calls("f")

    def comes_with(self, part: bytes) -> None:
        """Bring a part to the first meeting; rank 0 will be the last to come."""
        self.store.set("f/n1/0/part/1", part)
        self.store.set("f/n1/0/count", "1")

    def error(self, meet: Callable[[], object]) -> DistTuneError:
        """The error of rank 0, on one printable line; the process that hosts the store lives."""
        with self.rank_0.calling("f") as number:
            self.rank_0.enter("f", number)
            with pytest.raises(DistTuneError) as caught:
                meet()
        assert self.host.compare_set("alive", "", "yes") == b"yes"
        assert str(caught.value).isprintable()
        return caught.value


@pytest.fixture(scope="module")
def host() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=60), wait_for_workers=False)


@pytest.fixture
def peer(host: dist.Store, request: pytest.FixtureRequest) -> Iterator[Peer]:
    one = Peer(host, request.node.name)
    yield one
    one.rank_0.close()


def part_of(*header: Any, part: str = "1") -> bytes:
    return json.dumps(header or ["f", "t", [], {}, 0, [], None]).encode() + b"\n" + part.encode()


@pytest.mark.parametrize(
    "content",
    [
        *NOT_JSON, b"{}", b"[]", b"7", part_of(1, "t", [], {}, 0, [], None), part_of("f", None, [], {}, 0, [], None),
        part_of("f", "t", [["x"]], {}, 0, [], None),
        part_of("f", "t", [], {"x": "y"}, 0, [], None), part_of(part="no number"), part_of(part='"\\n\\u001b"'),
    ],
)  # fmt: skip
def test_a_part_that_is_none_names_its_rank(peer: Peer, content: bytes):
    """Whether the message cannot be read or what the meeting is about."""
    peer.comes_with(content)
    error = peer.error(lambda: peer.rank_0.reduce("t", 2, total))
    assert isinstance(error, PeerFailedError)
    assert error.rank == 1
    assert str(error).startswith("rank 1 posted what cannot be read: its part of a meeting")


ABORT = {"state": "aborted", "rank": 1, "kind": "ValueError", "error": "ValueError: x", "message": "x"}
TIMEOUT = {"state": "timed out", "missing": {"1": "x"}, "within_s": 1.0, "topic": "t", "by": 1}
WRONG: list[object] = [
    {}, [], {"state": "over"}, {**ABORT, "rank": "one"}, {**ABORT, "error": None}, {**TIMEOUT, "missing": ["1"]},
    {**TIMEOUT, "missing": {"one": "x"}}, {**TIMEOUT, "within_s": "soon"}, {**TIMEOUT, "by": None}, {"state": "alone", "passed": {}},
    {"state": "agreed"}, {"state": "mismatch", "steps": [["f"]]},
]  # fmt: skip


@pytest.mark.parametrize("verdict", [*NOT_JSON, *(json.dumps(each).encode() for each in WRONG)])
@pytest.mark.parametrize("is_gathering", [False, True])
def test_a_verdict_that_is_none_is_told(peer: Peer, verdict: bytes, is_gathering: bool):
    """Any rank may have written it, so the reader is named, or the meeting."""
    meet = peer.rank_0.gather if is_gathering else peer.rank_0.reduce
    with peer.rank_0.calling("f") as number:
        peer.rank_0.enter("f", number)
        peer.store.set("f/n1/0/verdict", verdict)
        with pytest.raises(PeerFailedError, match=r"as rank 0 reads it|the result of a meeting") as caught:
            meet("t", 2, total)
    assert str(caught.value).isprintable()


def test_a_forged_abort_begins_no_line(peer: Peer):
    """It is believed, because any rank may abort, and told with its newlines escaped."""
    forged = {**ABORT, "error": "ValueError: x\n12:00:00 INFO winner=7\x1b[2J"}
    with peer.rank_0.calling("f") as number:
        peer.rank_0.enter("f", number)
        peer.store.set("f/n1/0/verdict", json.dumps(forged))
        with pytest.raises(PeerFailedError, match=r"rank 1 raised ValueError: x\\n12:00:00 INFO winner=7\\x1b\[2J while") as caught:
            peer.rank_0.reduce("t", 2, total)
    assert str(caught.value).isprintable()
    assert caught.value.error.isprintable()


@pytest.mark.parametrize("beat", [b"", b"\xff\xfe", b"1.0 f: replay 2\n\x1b[2J", b"x" * 2**20])
def test_a_beat_that_is_none_is_told_as_text(peer: Peer, beat: bytes):
    """The absent rank is named, with what it showed last on one short line."""
    peer.store.set("beat/1", beat)
    error = peer.error(lambda: peer.rank_0.reduce("t", 2, total))
    assert isinstance(error, AbsentRanksError)
    assert error.ranks == (1,)
    assert len(str(error)) < 10_000


@pytest.mark.parametrize("card", [*NOT_JSON, b"7", b"[1]", b'{"question": "x"}'])
def test_an_answer_that_is_none_is_as_none(peer: Peer, card: bytes):
    """Of a rank that is asked where it is: it is waited for like one that has not come yet."""
    peer.store.set("card/1", card)
    assert isinstance(peer.error(lambda: peer.rank_0.gather("t", 2, total)), AbsentRanksError)


@pytest.mark.parametrize("n_bytes", [9 * 2**20, 5 * 2**20])
def test_what_the_store_cannot_take_is_not_posted(peer: Peer, n_bytes: int):
    """The store closes the connection of a rank that posts more than 8 MiB; quotes are escaped, so 5 MiB of them are more."""
    error = peer.error(lambda: peer.rank_0.reduce("t", '"' * n_bytes, joined))
    assert "this rank's part of a meeting takes" in str(error)


def test_a_part_beyond_the_limit_is_not_parsed(peer: Peer, monkeypatch: pytest.MonkeyPatch):
    """Where a store takes it."""
    monkeypatch.setattr("dist_tune.distributed.messages.MAX_BYTES", 1000)
    monkeypatch.setattr("dist_tune.distributed.messages._HEADER_BYTES", 100)
    peer.comes_with(part_of(part="1" * 2000))
    assert "more than 1000" in str(peer.error(lambda: peer.rank_0.reduce("t", 2, total)))


@given(JSON)
def test_any_json_is_understood_or_refused(value: object):
    """As a part, or as a verdict that has its error."""
    content = json.dumps(value).encode()
    with suppress(PeerFailedError):
        read_part(content, 1)
    with suppress(PeerFailedError):
        verdict, _ = read_verdict(content, 0)
        assert isinstance(verdict, Agreed) or isinstance(error_of(verdict, 0, CALL), DistTuneError)
