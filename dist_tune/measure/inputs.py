"""The arguments of a checked function as the caller gave them: copied before the first run, compared after others, put back.

Knows tensors and where they lie; nothing of candidates, ranks or checks. Triton's kernels write without raising torch's version
counters, so values are compared. Symmetric memory is left alone: peers may write to it at any time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from dist_tune.distributed import is_symmetric
from dist_tune.errors import DistTuneError
from dist_tune.measure.compare import difference
from dist_tune.measure.memory import Path, has_same_bits, leaves_of, memory_of, plain_tensors, room_bytes, version_of
from dist_tune.measure.state import generators_in

_MAX_HOST_BYTES = 1 << 30
"""Of all copies in the host's memory together."""


class _Kept(NamedTuple):
    tensor: torch.Tensor
    memory: torch.Tensor
    """As real numbers, without autograd, so that version counters do not see what is put back."""
    copy: torch.Tensor
    grad: torch.Tensor | None
    node: Any
    """The tensor's place in the graph of autograd."""


class Inputs:
    """The tensors among the arguments of one call, in containers, wrappers and modules, too."""

    def __init__(self) -> None:
        self._function: Callable[..., Any] = print
        self._kept: dict[Path, _Kept] = {}
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
        found = [(path, each) for path, each in _tensors_of((args, kwargs)) if not is_symmetric(each)]
        budgets: dict[torch.device, float] = {}
        for path, tensor in sorted(found, key=lambda each: each[1].numel() * each[1].element_size()):
            memory, version = _memory_of(tensor), version_of(tensor)
            if memory is not None:
                left = budgets.setdefault(memory.device, room_bytes(memory.device, _MAX_HOST_BYTES))
                budgets[memory.device] = left - memory.numel() * memory.element_size()
                if budgets[memory.device] >= 0:
                    with suppress(torch.OutOfMemoryError):
                        self._kept[path] = _Kept(tensor, memory, memory.clone(), tensor.grad if tensor.is_leaf else None, tensor.grad_fn)
                        continue
            if version is not None:
                self._watched[path] = tensor, version

    def changed(self) -> set[Path]:
        """Positions of the copied tensors whose values are others now. Waits for the device."""
        changed = {path for path, each in self._kept.items() if not has_same_bits(each.memory, each.copy.to(each.memory.device))}
        self._known |= changed
        return changed

    def harmed(self, paths: set[Path]) -> set[str]:
        """Names of those whose values are farther from the kept ones than rounding goes: no earlier result that was written again."""
        kept = {path: self._kept[path] for path in paths}
        return {_name(path, self._function) for path, each in kept.items() if difference(each.memory, each.copy.to(each.memory.device))}

    def put_back(self, paths: set[Path] | None = None) -> None:
        """Put back all values, or those at some positions, gradients and generators. Does not wait for the device."""
        for generator, state in self._generators:
            generator.set_state(state)
        for memory, copy in self.copies(paths):
            memory.copy_(copy)
        for each in self._kept.values():
            if each.tensor.is_leaf and each.tensor.grad is not each.grad:
                each.tensor.grad = each.grad

    def restart(self, *, compares: bool) -> None:
        """Put back what any run is known to change, before the next one. ``compares``: with what the last one changed, which waits.

        Raises:
            DistTuneError: a run has changed an argument that there is no copy of, or its place in the graph of autograd.
        """
        lost = [path for path, (tensor, version) in self._watched.items() if version_of(tensor) != version]
        lost += [path for path, each in self._kept.items() if each.tensor.grad_fn is not each.node]
        if lost:
            raise DistTuneError(
                f"{name_of(self._function)} changes its argument {_name(lost[0], self._function)} in place, and a check calls it many "
                f"times: there is no room for a copy, or its autograd graph cannot be put back. Pass reset=, which is to put it back "
                f"before each call but the first; reset=lambda: None if the function only overwrites it."
            )
        if compares:
            self.changed()
        self.put_back(self._known)

    def copies(self, paths: set[Path] | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Memory and copy of all, or at some positions."""
        return [(each.memory, each.copy) for path, each in self._kept.items() if paths is None or path in paths]

    def forget(self) -> None:
        """Free all copies: what runs change from here on stands."""
        for kept in (self._kept, self._watched, self._known, self._generators):
            kept.clear()


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


def _memory_of(tensor: torch.Tensor) -> torch.Tensor | None:
    if not tensor.is_nested or tensor.layout is not torch.strided:
        return memory_of(tensor)
    # Nested, without strides of its own.
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
