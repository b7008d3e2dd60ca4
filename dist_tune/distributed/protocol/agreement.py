"""What follows from the parts of all ranks: a verdict. Pure; knows nothing of stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dist_tune.distributed.protocol.calls import is_apart, raised_in
from dist_tune.distributed.protocol.messages import read_part
from dist_tune.distributed.protocol.verdicts import FAILED, Verdict


def verdict_of(
    members: Sequence[int], texts: Sequence[bytes], reduce: Callable[[dict[int, str]], str], cause: Callable[[], Sequence[Any] | None]
) -> Verdict:
    """The verdict of an epoch to which all members have brought these parts.

    ``cause``: see ``lives.cause_of``; asked for where ranks differ.

    Raises:
        PeerFailedError: a part is none.
    """
    closures, topics, parts, places, passed = zip(*map(read_part, texts, members), strict=True)
    steps = list(zip(closures, topics, strict=True))
    known = {rank: each or {} for rank, each in zip(members, passed, strict=True)}
    is_gathering = None not in passed
    by_rank = dict(zip(members, places, strict=True))
    raised = raised_in(by_rank)
    if is_gathering and is_apart(by_rank, known):
        return {"state": "apart", "passed": known, "raised": raised}
    if is_gathering and raised and len({each.closure for each in places}) > 1:
        return {"state": "apart", "passed": known, "raised": raised, "is_crossed": True}
    if len(set(steps)) > 1 or topics[0].startswith(FAILED):
        return {"state": "agreed", "steps": steps, "cause": cause()}  # on nothing: each rank says why
    verdict: Verdict = {"state": "agreed", "result": reduce(dict(zip(members, parts, strict=True)))}
    if is_gathering and len(numbers := {each.number for each in places}) > 1:
        verdict["number"] = max(numbers)
    return verdict
