"""The arguments of a call as the caller gave them: copied before the first run, compared after others, put back where runs changed them.

Knows tensors and where they lie; nothing of candidates, ranks or checks. Triton's kernels write without raising torch's version
counters, so values are compared. Symmetric memory is left alone: peers may write to it at any time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dist_tune.distributed import is_symmetric
from dist_tune.errors import DistTuneError
from dist_tune.measure.compare import difference
from dist_tune.measure.memory import Path, has_same_bits, leaves_of, memory_of, room_bytes, version_of
from dist_tune.measure.state import generators_in

_MAX_HOST_BYTES = 1 << 30
"""Of all copies in the host's memory together."""


class _Kept:
    """A tensor that is copied, with its gradient and its place in the graph of autograd."""

    def __init__(self, tensor: torch.Tensor, memory: torch.Tensor) -> None:
        self.memory = memory
        """As real numbers, without autograd, so that version counters do not see what is put back."""
        self.copy = memory.clone()
        self._tensor = tensor
        self._node = tensor.grad_fn
        with torch.enable_grad():
            self._origin = None if self._node is None else _Origin.apply(tensor)
        self._grad = tensor.grad if tensor.is_leaf else None

    @property
    def kept(self) -> torch.Tensor:
        """The copy, beside the tensor: the host compares far more slowly than a device."""
        return self.copy.to(self.memory.device)

    @property
    def is_changed(self) -> bool:
        """True if any bit is another. Waits for the device."""
        return not has_same_bits(self.memory, self.kept)

    def put_back_graph(self) -> None:
        """Let the tensor come from where it came from, and its gradient be the one it was.

        Raises:
            RuntimeError: it is a view of another one.
        """
        if self._tensor.grad_fn is not self._node:
            self._tensor.detach_()
            if self._origin is not None:
                with torch.enable_grad():
                    self._tensor.copy_(self._origin)
            self._node = self._tensor.grad_fn
            self.memory.copy_(self.copy)
        if self._tensor.is_leaf and self._tensor.grad is not self._grad:
            self._tensor.grad = self._grad


class _Origin(torch.autograd.Function):
    """A tensor without values of its own, whose gradient goes where that of another one went."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """As large as ``tensor``, and one element in memory."""
        return tensor.new_empty(()).expand(tensor.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """The gradient as it comes."""
        return grads[0]


class Inputs:
    """The tensors among the arguments of one call, in containers, wrappers and modules, too."""

    def __init__(self) -> None:
        self._function: Callable[..., Any] = print
        self._kept: dict[Path, _Kept] = {}
        self._watched: dict[Path, tuple[torch.Tensor, int]] = {}
        """Tensors that there is no room for a copy of, and their versions."""
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
                if memory.device not in budgets:
                    budgets[memory.device] = room_bytes(memory.device, _MAX_HOST_BYTES)
                budgets[memory.device] -= memory.numel() * memory.element_size()
                if budgets[memory.device] >= 0:
                    with suppress(torch.OutOfMemoryError):
                        self._kept[path] = _Kept(tensor, memory)
                        continue
            if version is not None:
                self._watched[path] = tensor, version

    def changed(self) -> set[Path]:
        """Positions of the copied tensors whose values are others now. Waits for the device."""
        changed = {path for path, each in self._kept.items() if each.is_changed}
        self._known |= changed
        return changed

    def harmed(self, paths: set[Path]) -> set[str]:
        """Names of those whose values are farther from the kept ones than rounding goes: no earlier result that was written again."""
        kept = {path: self._kept[path] for path in paths}
        differing = [path for path, each in kept.items() if difference(each.memory, each.kept)]
        return {_name(path, self._function) for path in differing}

    def move_to_host(self) -> bool:
        """Put all back, and free the device of the copies, which slows down what follows; False if there are none on a device."""
        moved = [each for each in self._kept.values() if each.copy.device.type != "cpu"]
        self.put_back()
        for each in moved:
            each.copy = each.copy.cpu()
        return bool(moved)

    def put_back(self, paths: set[Path] | None = None) -> None:
        """Put back all values, or those at some positions, gradients and generators. Does not wait for the device.

        Raises:
            DistTuneError: a tensor is a view, and torch has recorded what was done to it for a backward pass.
        """
        for generator, state in self._generators:
            generator.set_state(state)
        with torch.no_grad():
            for memory, copy in self.copies(paths):
                memory.copy_(copy)
            for path, each in self._kept.items():
                try:
                    each.put_back_graph()
                except RuntimeError as error:
                    raise DistTuneError(self._cannot(path, f"its place in the graph of autograd cannot be put back ({error})")) from error

    def restart(self, *, compares: bool) -> None:
        """Put back what any run is known to change, before the next one. ``compares``: with what the last one changed, which waits.

        Raises:
            DistTuneError: one of them has changed an argument that there is no copy of.
        """
        for path, (tensor, version) in self._watched.items():
            if version_of(tensor) != version:
                n_bytes = tensor.numel() * tensor.element_size()
                raise DistTuneError(self._cannot(path, f"there is no room for a copy of its {n_bytes} bytes"))
        if compares:
            self.changed()
        self.put_back(self._known)

    def copies(self, paths: set[Path] | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Memory and copy of all, or at some positions."""
        return [(each.memory, each.copy) for path, each in self._kept.items() if paths is None or path in paths]

    def _cannot(self, path: Path, reason: str) -> str:
        return (
            f"{name_of(self._function)} changes its argument {_name(path, self._function)} in place, and a tuning calls it many times: "
            f"{reason}. Pass reset=, which is to put it back before each call but the first; reset=lambda: None if the function only "
            f"overwrites it."
        )

    def forget(self) -> None:
        """Free all copies: what runs change from here on stands."""
        self._kept.clear()
        self._watched.clear()
        self._known.clear()
        self._generators.clear()


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
        if isinstance(leaf, torch.nn.Module):
            for name, each in (*leaf.named_parameters(), *leaf.named_buffers()):
                yield from _parts_of((*path, name), each)
        elif isinstance(leaf, torch.Tensor):
            yield from _parts_of(path, leaf)


def _parts_of(path: Path, tensor: torch.Tensor) -> Iterator[tuple[Path, torch.Tensor]]:
    """The tensor, or those that it is a wrapper of."""
    value: Any = tensor
    if hasattr(value, "trigger_wait"):  # the result of a collective, which may still be under way
        value = value.trigger_wait()
    if is_traceable_wrapper_subclass(value):
        inner = {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}
        for name, each in inner.items():
            if isinstance(each, torch.Tensor):  # a mesh of devices is none
                yield from _parts_of((*path, name), each)
    else:
        yield path, value
        if value.is_leaf and value.grad is not None:
            yield (*path, "grad"), value.grad


def _memory_of(tensor: torch.Tensor) -> torch.Tensor | None:
    if not tensor.is_nested or tensor.layout is not torch.strided:
        return memory_of(tensor)
    # Nested, without strides of its own.
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
