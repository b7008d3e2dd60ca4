"""What a call is given, as the caller gave it: its arguments and the random generators, kept before
a run and put back after it.

Knows tensors and where they lie; nothing of candidates, ranks or checks. Triton's kernels write
without raising torch's version counters, so values are compared. Symmetric memory is left alone:
peers may write to it at any time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dist_tune.accelerator import api
from dist_tune.errors import DistTuneError
from dist_tune.measure.differences import difference
from dist_tune.measure.memory import (
    Snapshot,
    leaves_of,
    n_bytes_of,
    parts_of,
    shares_memory,
    tensors_in,
    version_of,
)
from dist_tune.measure.reachable import Leaf, held_by


def generators_in(value: Any) -> list[tuple[torch.Generator, torch.Tensor]]:
    """The generators in nested tuples, lists and dicts, with their states."""
    return [
        (leaf, leaf.get_state())
        for _, leaf in leaves_of(value)
        if isinstance(leaf, torch.Generator)
    ]


@dataclass(frozen=True)
class RngState:
    """State of this process's random generators when this object was made: Python's, numpy's,
    torch's on the CPU and the current GPU.
    """

    others: list[tuple[torch.Generator, torch.Tensor]] = field(default_factory=list)
    """Generators that a function is given, with their states."""

    python: Any = field(default_factory=random.getstate)
    numpy: Any = field(default_factory=np.random.get_state)
    torch_cpu: torch.Tensor = field(default_factory=torch.get_rng_state)
    torch_cuda: torch.Tensor | None = field(
        default_factory=lambda: api.get_rng_state() if api.is_initialized() else None
    )

    def restore(self) -> None:
        """Go back to that state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda is not None:
            api.set_rng_state(self.torch_cuda)
        for generator, state in self.others:
            generator.set_state(state)


class Inputs:
    """The tensors among the arguments of one call, in containers, wrappers and modules, too."""

    def __init__(self) -> None:
        self._function: Callable[..., Any] = print
        self.values = Snapshot()
        self._leaves: list[Leaf] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._known: set[str] = set()
        """Names of those that some run has changed."""
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        """Generators among the arguments, with their states."""

    def keep(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Copy the tensors of a call, the small ones first, as far as memory allows; of others
        torch's writes are noticed.
        """
        self.forget()
        self._function, self._generators = function, generators_in((args, kwargs))
        self._leaves = [leaf for leaf in held_by(function, args, kwargs) if leaf.kind == "argument"]
        for leaf in sorted(self._leaves, key=lambda leaf: n_bytes_of(leaf.tensor)):
            self.values.keep(leaf.name, leaf.tensor)
        self._gradients = [
            (leaf.tensor, leaf.tensor.grad) for leaf in self._leaves if leaf.tensor.is_leaf
        ]

    def changed(self) -> set[str]:
        """Names of the copied tensors whose values are others now. Waits for the device."""
        changed = self.values.changed()
        self._known |= changed
        return changed

    def harmed(self, names: set[str]) -> set[str]:
        """Those whose values are farther from the kept ones than rounding goes: no earlier result
        that was written again.
        """
        return {
            name
            for name, (memory, copy) in self.values.alive(names).items()
            if difference(memory, copy)
        }

    def put_back(self, names: set[str] | None = None) -> None:
        """Put back all values, or some, gradients and generators. Does not wait for the device."""
        for generator, state in self._generators:
            generator.set_state(state)
        self.values.put_back(names)
        for tensor, grad in self._gradients:
            if tensor.is_leaf and tensor.grad is not grad:
                tensor.grad = grad

    def restart(self, *, compares: bool) -> None:
        """Put back what any run is known to change, before the next one.

        ``compares``: with what the last one changed, which waits.

        Raises:
            DistTuneError: a run has changed an argument that there is no copy of, or its place in
                the graph of autograd.
        """
        for leaf in self._leaves:
            is_written = leaf.name not in self.values and version_of(leaf.tensor) != leaf.version
            if is_written or leaf.tensor.grad_fn is not leaf.node:
                raise DistTuneError(
                    f"{name_of(self._function)} changes its argument {leaf.name} in place, and a"
                    " check calls it many times: there is no room for a copy, or its autograd"
                    " graph cannot be put back. Pass reset=, which is to put it back before each"
                    " call but the first; reset=lambda: None if the function only overwrites it."
                )
        if compares:
            self.changed()
        self.put_back(self._known)

    def forget(self) -> None:
        """Free all copies: what runs change from here on stands."""
        for kept in (self._leaves, self._gradients, self._known, self._generators):
            kept.clear()
        self.values.forget()


def ask(
    reference: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    written: set[str] | None = None,
) -> Any:
    """The result of a reference, in memory that no argument shares; what it has written to
    arguments meanwhile is undone.

    With ``out=`` it writes the right answer there, where a candidate that then writes nothing would
    find it. Needs memory for a copy of the arguments while it runs; those that do not fit are left
    as the reference leaves them. ``written`` gets the names of what it wrote.
    """
    inputs = Inputs()
    inputs.keep(reference, args, kwargs)
    try:
        return _own(reference(*args, **kwargs), list(tensors_in((args, kwargs)).values()))
    finally:
        changed = inputs.changed()
        inputs.values.put_back(changed)
        if written is not None:
            written.update(changed)


def _own(value: Any, others: list[torch.Tensor]) -> Any:
    """The value, with copies of tensors that share memory with others."""
    if isinstance(value, torch.Tensor):
        return value.clone() if shares_memory(value, others) else value
    if isinstance(value, list | tuple):
        return [_own(each, others) for each in value]
    parts = parts_of(value)
    return value if parts is None else {key: _own(part, others) for key, part in parts.items()}


def name_of(function: Any) -> str:
    """Name of a function or callable object in messages."""
    return getattr(function, "__qualname__", type(function).__qualname__).rpartition("<locals>.")[2]
