"""Reductions: pure functions from the parts of all ranks to one result, and the JSON in which both travel.

Knows types and nothing of ranks or stores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar, get_args, get_type_hints

from pydantic import TypeAdapter

from dist_tune.distributed.protocol.messages import check_size, read_message

Part = TypeVar("Part")
Result = TypeVar("Result")


class Reduction(Generic[Part, Result]):
    """A pure function of rank -> part. The last rank to come computes it for all, so equal parts must give equal results."""

    def __init__(self, function: Callable[[Mapping[int, Part]], Result]) -> None:
        hints = get_type_hints(function)
        self._function = function
        self._result: TypeAdapter[Result] = TypeAdapter(hints.pop("return"))
        (parts,) = hints.values()
        self._part: TypeAdapter[Part] = TypeAdapter(get_args(parts)[1])

    def __call__(self, parts: Mapping[int, Part]) -> Result:
        """The result for these parts, as a plain call."""
        return self._function(parts)

    def dump(self, part: Part) -> str:
        """A rank's part as JSON. Raises ``DistTuneError`` for one that does not fit into a message."""
        return check_size(self._part.dump_json(part).decode(), "this rank's part of a meeting")

    def of_texts(self, texts: Mapping[int, str]) -> str:
        """The result as JSON, from all parts as JSON. Raises ``PeerFailedError`` for a part that is none."""
        parts = {rank: read_message(self._part, text.encode(), rank, "its part of a meeting") for rank, text in texts.items()}
        return check_size(self._result.dump_json(self(parts)).decode(), "the result of a meeting")

    def load(self, text: str) -> Result:
        """The result from its JSON. Raises ``PeerFailedError`` for text that is none."""
        return read_message(self._result, text.encode(), -1, "the result of a meeting")
