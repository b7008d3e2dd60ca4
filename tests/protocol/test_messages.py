"""What peers post on the store: what cannot be read is an error that names its rank, and each
verdict its error, with ranks and causes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.errors import SHARED_ERRORS, DistTuneError, NoValidConfigError, PeerFailedError
from dist_tune.ranks.calls import ENDED, Place
from dist_tune.ranks.messages import (
    FAILED,
    HEADER,
    MISSED_ADVICE,
    VERDICT,
    Header,
    Reduction,
    Verdict,
    aborted,
    error_of,
    is_secondary,
    mismatched,
    read,
    timed_out,
)
from tests.protocol.in_memory import GLOO, Rank, joined

DEADLINE_S = 0.15
CALL = Place("f", 1)
NOT_JSON = [b"", b"\xff\xfe", b"{", b"[" * 20_000, b"nan", b"\x1b[2J\n"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(
            st.sampled_from(["kind", "ranks", "text", "n_issued", "1"]) | st.text(max_size=4), inner
        )
    ),
    max_leaves=12,
)


@Reduction
def total(parts: Mapping[int, int]) -> int:
    return sum(parts.values())


def told(posted: Mapping[str, bytes], *meeting: Any, is_gathering: bool = False) -> str:
    """Class and message, on one printable line, of the error of rank 0 in its first meeting.

    The test writes what rank 1 posts.
    """
    store = dist.HashStore()
    rank = Rank(store, 0, 2, DEADLINE_S)
    rank.gather_s = DEADLINE_S
    for key, content in posted.items():
        store.set(key, content)  # type: ignore[arg-type]  # as another program may
    with rank.calling("f") as place:
        rank.enter(place)
        with pytest.raises(DistTuneError) as caught:
            rank.reduce("t", *meeting, is_gathering=is_gathering)
    rank.close()
    assert str(caught.value).isprintable()
    return f"{type(caught.value).__name__}: {caught.value}"


def part_of(*header: Any, part: str = "1") -> bytes:
    return json.dumps(header or ["f", "t", ""]).encode() + b"\n" + part.encode()


BAD_PARTS = [
    *NOT_JSON,
    b"{}",
    b"[]",
    b"7",
    part_of(1, "t", ""),
    part_of("f", None, ""),
    part_of("f", "t", "", [["x"]]),
    part_of("f", "t", 4),
    part_of(part="no number"),
    part_of(part='"\\n\\u001b"'),
]
WRONG: list[object] = [
    {},
    [],
    {"kind": 3},
    {"kind": "ValueError", "ranks": ["one"]},
    {"kind": "ValueError", "error": None},
    {"kind": "AbsentRanksError", "ranks": {}},
    {"kind": ""},
    {"kind": "AloneError", "n_issued": "x"},
]
TEXT = "rank 1 raised ValueError: x\n12:00:00 INFO winner=7\x1b[2J"
LATE = "(AbsentRanks|Alone)Error: rank . (is alone|last seen at)"
"""Of a rank that does not come, and answers no question: both patiences are one deadline here."""
FORGED = {"kind": "ValueError", "ranks": [1], "text": TEXT, "error": TEXT}
POSTED = [
    *(
        (
            "f/n1/0/part/1",
            each,
            "PeerFailedError: rank 1 posted what cannot be read: its part of a meeting",
        )
        for each in BAD_PARTS
    ),
    *(
        ("f/n1/0/verdict", each, "PeerFailedError: .*(as rank 0 reads it|the result of a meeting)")
        for each in (*NOT_JSON, *(json.dumps(each).encode() for each in WRONG))
    ),
    (
        "f/n1/0/verdict",
        json.dumps(FORGED).encode(),
        r"PeerFailedError: .*x\\n12:00:00 INFO winner=7\\x1b\[2J",
    ),  # any rank may abort
    *(
        ("beat/1", each, LATE)
        for each in (b"", b"\xff\xfe", b"1.0 f: replay 2\n\x1b[2J", b"x" * 2**20)
    ),
    *(("card/1", each, LATE) for each in (*NOT_JSON, b"7", b"[1]", b'{"question": "x"}')),
]


@pytest.mark.parametrize("is_gathering", [False, True])
@pytest.mark.parametrize(("key", "content", "words"), POSTED)
def test_what_a_peer_posts_that_cannot_be_read_is_told(
    key: str, content: bytes, words: str, is_gathering: bool
):
    """A part names its rank, a verdict its reader, because any rank may have written it; a beat and
    a card are as none. One short line.
    """
    others = {"f/n1/0/count": b"1"} if "part" in key else {}  # rank 0 will be the last to come
    message = told(
        {"beat/1": b"", "card/1": b'{"question": 0}', key: content, **others},
        2,
        total,
        is_gathering=is_gathering,
    )
    assert re.match(words, message)
    assert len(message) < 10_000


@pytest.mark.parametrize("n_bytes", [9 * 2**20, 5 * 2**20])
def test_what_the_store_cannot_take_is_not_posted(n_bytes: int):
    """The store closes the connection of a rank that posts more than 8 MiB; quotes are escaped, so
    5 MiB of them are more.
    """
    assert "this rank's part of a meeting takes" in told({}, '"' * n_bytes, joined)


@given(JSON)
def test_any_json_is_understood_or_refused(value: object):
    """As a part, or as a verdict that has its error."""
    content = json.dumps(value).encode()
    with suppress(PeerFailedError):
        read(HEADER, content, 1, "a part")
    with suppress(PeerFailedError):
        verdict, _ = read(VERDICT, content, -1, "a verdict")
        assert isinstance(error_of(verdict, 0, CALL), DistTuneError)


SEEN = {0: "compilation", 3: "no call", 1: "replay 2 of f, call 1 for 3.0 s"}
LAST = (
    "rank 1 last seen at: replay 2 of f, call 1 for 3.0 s; rank 3 last seen at: no call; rank 0"
    " last seen at: compilation. So ranks [1, 3] did not come "
)
ENDS = [
    *(
        (aborted(SHARED_ERRORS[kind]("why\nconfig"), 1, CALL, 0), kind, "^why\nconfig$", ())
        for kind in sorted(SHARED_ERRORS)
    ),
    (
        aborted(ValueError("boom"), 1, CALL, 0),
        "PeerFailedError",
        "^rank 1 raised ValueError: boom while f was",
        (1, "ValueError: boom"),
    ),
    (
        timed_out(SEEN, [3, 1], "report 1", CALL, "within 3 s"),
        "AbsentRanksError",
        (
            f"^{re.escape(LAST)}to the exchange 'report 1' of f, call 1 within 3 s. Every rank of"
            r" the group must call the step with the same group= "
        ),
        (),
    ),
    (
        timed_out(SEEN, [3, 1], f"{FAILED}gloo", CALL, "in 4 s"),
        "AbsentRanksError",
        f"^{re.escape(LAST)}after a failed collective of f, call 1 in 4 s. Every((?!gloo).)*$",
        (),
    ),
    (
        timed_out({1: f"x, {ENDED}", 3: ENDED, 2: ""}, [1, 3], "t", CALL, "in 4 s"),
        "AbsentRanksError",
        "in 4 s. Its log, or what .* why. Rank 0 stops",
        (),
    ),
]


@pytest.mark.parametrize(("verdict", "kind", "words", "cause"), ENDS)
def test_the_end_of_a_call_says_who_ended_it_and_where_they_were(
    verdict: Verdict, kind: str, words: str, cause: tuple[object, ...]
):
    """An error that all ranks share is the same on all, line by line; of absent ranks it says what
    each last did, in their order.
    """
    error = error_of(verdict, 0, CALL)
    assert type(error).__name__ == kind
    assert re.search(words, str(error), re.DOTALL), str(error)
    assert kind in SHARED_ERRORS or str(error).endswith("Rank 0 stops for that.")
    assert kind != "PeerFailedError" or (error.rank, error.error) == cause  # type: ignore[attr-defined]
    assert kind != "AbsentRanksError" or error.ranks == (1, 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("topic", "came"),
    [(f"{FAILED}gloo", "waited in vain"), ("report 1", "came to 'report 1'")],
)
def test_a_collective_that_did_not_find_its_ranks_is_told_with_what_each_did(topic: str, came: str):
    """On all ranks, with what to do and not in gloo's words; and whose collective failed first."""
    first, second = (Header("f", FAILED + "gloo", "replay 2, a"), Header("f", topic, "replay 3, b"))
    error = error_of(mismatched({0: first, 1: second}, CALL), 0, CALL)
    assert isinstance(error, PeerFailedError)
    assert (error.rank, error.error) == (0, "gloo")
    assert str(error) == (
        "A collective of f, which was being tuned, did not find all its ranks: rank 0 waited in"
        f" vain (replay 2, a); rank 1 {came} (replay 3, b). {MISSED_ADVICE} Rank 0 stops for that."
    )


def test_a_group_whose_collective_failed_before_is_named_as_the_cause():
    """Not the collectives of the call, which find no peers any more."""
    header = Header("f", f"{FAILED}RuntimeError: {CLOSED}", "replay 2")
    told = str(error_of(mismatched({0: header, 1: header}, CALL), 0, CALL))
    assert "the group anew. Rank 0" in told
    assert MISSED_ADVICE not in told


# Of gloo, once a collective has timed out.
CLOSED = RuntimeError("Application timeout caused pair closure")
CAUSES = [
    RuntimeError("my signal timed out"),
    ValueError("gloo"),
    NoValidConfigError("site nccl_kernel"),
]


@pytest.mark.parametrize("error", [GLOO, CLOSED, dist.DistNetworkError("x"), *CAUSES])
def test_only_a_broken_collective_is_a_consequence(error: Exception):
    """Words of gloo and NCCL count in a RuntimeError of torch; in an error of ours they are a
    kernel's name.
    """
    assert is_secondary(error) is (error not in CAUSES)
