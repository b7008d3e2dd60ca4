"""Asks a reference what a result should be, without letting it leave traces.

Knows a function that says what is right, and nothing of the one that is tuned. A reference may write to the arguments, as one
with ``out=`` does: a candidate that then writes nothing would find the right answer there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dist_tune.measure.compare import parts_of
from dist_tune.measure.tensor_memory import Region, is_one_of, same_bits, tensors_in, version_of


def ask(reference: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a reference returns, in memory that no argument shares; what torch has written to arguments meanwhile is undone.

    Needs memory for a copy of the arguments while it runs; those that do not fit are left as the reference leaves them.
    """
    arguments = list(tensors_in((args, kwargs)).values())
    kept = [each for each in map(_Kept.of, arguments) if each is not None]
    try:
        return _own(reference(*args, **kwargs), arguments)
    finally:
        for each in reversed(kept):
            each.put_back()


class _Kept(NamedTuple):
    """An argument, and what it held."""

    argument: torch.Tensor
    memory: torch.Tensor
    copy: torch.Tensor
    version: int | None

    @classmethod
    def of(cls, argument: torch.Tensor) -> _Kept | None:
        """None if it owns no memory, or there is none for a copy."""
        region = Region.of(argument)
        memory = None if region is None else region.tensor()
        try:
            return None if memory is None else cls(argument, memory, memory.clone(), version_of(argument))
        except torch.OutOfMemoryError:
            return None

    def put_back(self) -> None:
        # Only what torch has written to: peers may write to symmetric memory meanwhile.
        is_written = version_of(self.argument) != self.version if self.version is not None else not same_bits(self.memory, self.copy)
        if is_written:
            self.memory.copy_(self.copy)


def _own(value: Any, others: list[torch.Tensor]) -> Any:
    """The value, with copies of tensors that share memory with others."""
    if isinstance(value, torch.Tensor):
        return value.clone() if is_one_of(value, others) else value
    if isinstance(value, list | tuple):
        return [_own(each, others) for each in value]
    parts = parts_of(value)
    return value if parts is None else {key: _own(each, others) for key, each in parts.items()}
