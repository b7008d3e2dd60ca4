"""What a call is given, as the caller gave it: its arguments and the random generators, kept before a run and put back after it.

Knows tensors and where they lie; nothing of candidates, ranks or checks. Triton's kernels write without raising torch's version
counters, so values are compared. Symmetric memory is left alone: peers may write to it at any time.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dist_tune.distributed import is_symmetric
from dist_tune.errors import DistTuneError
from dist_tune.measure.compare import difference
from dist_tune.measure.memory import Path, Snapshot, leaves_of, n_bytes_of, parts_of, plain_tensors, shares_memory, tensors_in, version_of


def _cuda_state() -> torch.Tensor | None:
    return torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def generators_in(value: Any) -> list[tuple[torch.Generator, torch.Tensor]]:
    """The generators in nested tuples, lists and dicts, with their states."""
    return [(leaf, leaf.get_state()) for _, leaf in leaves_of(value) if isinstance(leaf, torch.Generator)]


@dataclass(frozen=True)
class RngState:
    """State of this process's random generators when this object was made: Python's, numpy's, torch's on the CPU and the current GPU."""

    others: list[tuple[torch.Generator, torch.Tensor]] = field(default_factory=list)
    """Generators that a function is given, with their states."""

    python: Any = field(default_factory=random.getstate)
    numpy: Any = field(default_factory=np.random.get_state)
    torch_cpu: torch.Tensor = field(default_factory=torch.get_rng_state)
    torch_cuda: torch.Tensor | None = field(default_factory=_cuda_state)

    def restore(self) -> None:
        """Go back to that state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda is not None:
            torch.cuda.set_rng_state(self.torch_cuda)
        for generator, state in self.others:
            generator.set_state(state)


class Inputs:
    """The tensors among the arguments of one call, in containers, wrappers and modules, too."""

    def __init__(self) -> None:
        self._function: Callable[..., Any] = print
        self.values = Snapshot()
        self._graphs: dict[Path, tuple[torch.Tensor, torch.Tensor | None, Any]] = {}
        """Tensors that there is a copy of, with their gradients and their places in the graph of autograd."""
        self._watched: dict[Path, tuple[torch.Tensor, int]] = {}
        """Tensors that there is no copy of, and their versions."""
        self._known: set[Path] = set()
        """Those that some run has changed."""
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        """Generators among the arguments, with their states."""

    def keep(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy the tensors of a call, the small ones first, as far as memory allows; of others torch's writes are noticed."""
        self.forget()
        self._function = function
        self._generators = generators_in((args, kwargs))
        for path, tensor in sorted(_tensors_of((args, kwargs)), key=lambda each: n_bytes_of(each[1])):
            if is_symmetric(tensor):
                continue
            if self.values.keep(path, tensor):
                self._graphs[path] = tensor, tensor.grad if tensor.is_leaf else None, tensor.grad_fn
            elif (version := version_of(tensor)) is not None:
                self._watched[path] = tensor, version

    def changed(self) -> set[Path]:
        """Positions of the copied tensors whose values are others now. Waits for the device."""
        changed = self.values.changed()
        self._known |= changed
        return changed

    def harmed(self, paths: set[Path]) -> set[str]:
        """Names of those whose values are farther from the kept ones than rounding goes: no earlier result that was written again."""
        return {_name(path, self._function) for path in paths if any(difference(*each) for each in self.values.copies([path]))}

    def put_back(self, paths: set[Path] | None = None) -> None:
        """Put back all values, or those at some positions, gradients and generators. Does not wait for the device."""
        for generator, state in self._generators:
            generator.set_state(state)
        self.values.put_back(paths)
        for tensor, grad, _ in self._graphs.values():
            if tensor.is_leaf and tensor.grad is not grad:
                tensor.grad = grad

    def restart(self, *, compares: bool) -> None:
        """Put back what any run is known to change, before the next one. ``compares``: with what the last one changed, which waits.

        Raises:
            DistTuneError: a run has changed an argument that there is no copy of, or its place in the graph of autograd.
        """
        lost = [path for path, (tensor, version) in self._watched.items() if version_of(tensor) != version]
        lost += [path for path, (tensor, _, node) in self._graphs.items() if tensor.grad_fn is not node]
        if lost:
            raise DistTuneError(
                f"{name_of(self._function)} changes its argument {_name(lost[0], self._function)} in place, and a check calls it many "
                f"times: there is no room for a copy, or its autograd graph cannot be put back. Pass reset=, which is to put it back "
                f"before each call but the first; reset=lambda: None if the function only overwrites it."
            )
        if compares:
            self.changed()
        self.put_back(self._known)

    def forget(self) -> None:
        """Free all copies: what runs change from here on stands."""
        for kept in (self._graphs, self._watched, self._known, self._generators):
            kept.clear()
        self.values.forget()


def ask(reference: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], written: set[Path] | None = None) -> Any:
    """The result of a reference, in memory that no argument shares; what torch has written to arguments meanwhile is undone.

    With ``out=`` it writes the right answer there, where a candidate that then writes nothing would find it. Needs memory for a copy of the
    arguments while it runs; those that do not fit are left as the reference leaves them. ``written`` gets the positions of what it wrote.
    """
    arguments, values = tensors_in((args, kwargs)), Snapshot()
    versions = {path: version_of(each) for path, each in arguments.items() if values.keep(path, each)}
    try:
        return _own(reference(*args, **kwargs), list(arguments.values()))
    finally:
        # Peers may write to symmetric memory meanwhile: that stays.
        changed = [path for path, version in versions.items() if version is None or version_of(arguments[path]) != version]
        values.put_back(changed)
        if written is not None:
            written.update(path for path in changed if versions[path] is not None)


def _own(value: Any, others: list[torch.Tensor]) -> Any:
    """The value, with copies of tensors that share memory with others."""
    if isinstance(value, torch.Tensor):
        return value.clone() if shares_memory(value, others) else value
    if isinstance(value, list | tuple):
        return [_own(each, others) for each in value]
    parts = parts_of(value)
    return value if parts is None else {key: _own(each, others) for key, each in parts.items()}


def name_of(function: Any) -> str:
    """Name of a function or callable object in messages."""
    return getattr(function, "__qualname__", type(function).__qualname__).rpartition("<locals>.")[2]


def _name(path: Path, function: Callable[..., Any]) -> str:
    """Name of an argument: "x", "state['moments'][0]"."""
    _, first, *rest = path
    if isinstance(first, int):
        with suppress(ValueError, TypeError):  # a builtin
            parameters = list(inspect.signature(function).parameters.values())
            named = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
            first = named[first] if first < len(named) else f"number {first}"
    return f"{first}{''.join(f'[{key!r}]' for key in rest)}"


def _tensors_of(value: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    for path, leaf in leaves_of(value):
        named = [*leaf.named_parameters(), *leaf.named_buffers()] if isinstance(leaf, torch.nn.Module) else []
        for place, tensor in [((*path, name), each) for name, each in named] or [(path, leaf)]:
            if isinstance(tensor, torch.Tensor):
                for k, plain in enumerate(plain_tensors(tensor)):
                    yield (place if plain is tensor else (*place, k)), plain
                    if plain.is_leaf and plain.grad is not None:
                        yield (*place, "grad"), plain.grad
