"""Memory that tensors lie in: tensors in containers and objects, memory that two of them share, regions that keep none of them alive.

Knows tensors by their storage and not by their purpose. Looks at the user's objects without running their code.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from types import BuiltinFunctionType, CellType, CodeType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType, TracebackType
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Path = tuple[Any, ...]
"""Position in nested containers: indices and keys, from the outside in."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COPIES_SHARE = 0.25
"""Of a GPU's free memory that copies of tensors may take."""
_MAX_OBJECTS = 10_000
"""Objects searched for tensors; of more, the tensors that they hold are not known."""
_HOLDS_NOTHING = (
    type(None), bool, int, float, complex, str, bytes, type, ModuleType, BuiltinFunctionType, torch.dtype, torch.device,
    type(lru_cache(id)), CodeType, FrameType, GeneratorType, TracebackType,
)  # fmt: skip
_NO_MAPPINGS = (torch.Tensor, int, float, str, bytes, type(None), FunctionType, MethodType, partial, torch.dtype)
_PLAIN = (Mapping, list, tuple, set, partial, MethodType, FunctionType, CellType)
"""Containers of arguments and captures; all others are objects, as a context with symmetric memory is."""


class Region(NamedTuple):
    """Memory of a tensor, without keeping it alive."""

    storage: StorageWeakRef | None
    """None in a description that fits any storage."""
    n_bytes: int
    """Size of the storage."""
    device: torch.device
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Region | None:
        """The region of a tensor; None if it owns no memory: empty, sparse, or a wrapper of others; or if it is nested."""
        storage = _storage(tensor)
        if storage is None or storage.nbytes() == 0 or tensor.is_nested or tensor.numel() == 0:
            return None
        shape = tuple(1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True))  # once, if expanded
        offset = int(tensor.storage_offset())
        return cls(StorageWeakRef(storage), storage.nbytes(), tensor.device, tensor.dtype, offset, shape, tensor.stride())

    def tensor(self) -> torch.Tensor | None:
        """The memory as a tensor of real numbers; None if it has been freed."""
        storage = None if self.storage is None else torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return None
        # Not a view of the tensor: autograd and version counters must not see writes to it.
        alive = torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, self.offset, self.shape, self.strides)
        return torch.view_as_real(alive) if self.dtype.is_complex else alive


def memory_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The memory of a tensor as real numbers, without autograd; None if it owns none."""
    region = Region.of(tensor)
    return None if region is None else region.tensor()


def overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write values into a tensor's memory, also of an inference tensor; autograd and version counters do not see it."""
    with torch.no_grad():
        memory = memory_of(tensor)
        if memory is None:  # of a wrapper of other tensors
            tensor.copy_(values)
        else:
            memory.copy_(torch.view_as_real(values) if values.is_complex() else values)


def has_same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two contents of one shape are equal bit by bit, NaN's too. Waits for the device."""
    return torch.equal(bits_of(tensor), bits_of(other))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of real numbers as integers, in the same memory: of the same size, so that strides do not matter."""
    return tensor.view(_INTEGERS.get(tensor.dtype.itemsize, tensor.dtype))


def room_bytes(device: torch.device, on_host: float) -> float:
    """Memory that copies may take: a share of what is free on a GPU, with what torch's allocator holds without using it, or ``on_host``."""
    if device.type != "cuda":
        return on_host
    free, _ = torch.cuda.mem_get_info(device)
    return _COPIES_SHARE * (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def shares_memory(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    """True if a tensor is one of the others, or lies in memory of one."""
    mine = _storage(tensor)
    for other in others:
        theirs = _storage(other)
        if tensor is other or (mine is not None and theirs is not None and _overlap(mine, theirs)):
            return True
    return False


def version_of(tensor: torch.Tensor) -> int | None:
    """Number of torch's writes to a tensor; None for inference tensors, which do not count them."""
    return None if tensor.is_inference() else tensor._version


def is_mapping(value: Any) -> bool:
    """True for dicts and what else is a Mapping."""
    # Mapping comes last: for each type that is none Python asks all of its subclasses, 20 and more: 0.1 ms of a hit.
    is_none = isinstance(value, _NO_MAPPINGS) or type(value).__module__.partition(".")[0] == "triton"
    return isinstance(value, dict) or (not is_none and isinstance(value, Mapping))


def leaves_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Leaves of nested tuples, lists and dicts, with their positions."""
    is_row = isinstance(value, list | tuple)
    if is_row or is_mapping(value):
        for key, each in enumerate(value) if is_row else value.items():
            yield from leaves_of(each, (*path, key))
    else:
        yield path, value


def tensors_in(value: Any) -> dict[Path, torch.Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    return {path: leaf for path, leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)}


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor, or those that it is a wrapper of."""
    value: Any = tensor
    if hasattr(value, "trigger_wait"):  # the result of a collective, which may still be under way
        value = value.trigger_wait()
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            if isinstance(inner := getattr(value, name), torch.Tensor):  # a mesh of devices is none
                yield from plain_tensors(inner)
    else:
        yield value


def held_by_objects(roots: tuple[Any, ...]) -> list[torch.Tensor] | None:
    """Tensors in attributes of objects, at any depth; None if there are too many objects to search.

    From a function the search goes on to the values that it captures: its cells, and globals that it names, other than functions.
    """
    found: list[torch.Tensor] = []
    seen: set[tuple[int, bool]] = set()
    waiting: list[tuple[Any, bool]] = [(roots, False)]
    while waiting:
        value, is_inside = waiting.pop()
        if isinstance(value, _HOLDS_NOTHING) or (id(value), is_inside) in seen:
            continue
        seen.add((id(value), is_inside))
        if len(seen) > _MAX_OBJECTS:
            return None
        if isinstance(value, torch.Tensor):
            found += [value] if is_inside else []
        elif isinstance(value, FunctionType):
            waiting += [] if is_inside else [(each, False) for each in _captured(value)]
        elif not is_inside or not isinstance(value, MethodType | partial):
            # gc's references, since getattr() may run code of the object.
            waiting += [(each, is_inside or not isinstance(value, _PLAIN)) for each in gc.get_referents(value)]
    return found


def _captured(function: FunctionType) -> list[Any]:
    named = (function.__globals__.get(name) for name in function.__code__.co_names)
    return [
        *(function.__closure__ or ()),
        function.__dict__.get("__wrapped__"),
        *(each for each in named if not isinstance(each, FunctionType)),
    ]


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    value: Any = tensor
    if is_traceable_wrapper_subclass(value):  # it may name a storage that has no memory, and reading that ends the process
        return None
    try:
        return tensor.untyped_storage() if tensor.layout is not torch.jagged else None  # which has one that cannot be asked anything
    except (NotImplementedError, RuntimeError):  # sparse, or a wrapper
        return None


def _overlap(a: torch.UntypedStorage, b: torch.UntypedStorage) -> bool:
    # By address, too: tensors in symmetric memory have storages of their own for parts of one allocation.
    start, end = max(a.data_ptr(), b.data_ptr()), min(a.data_ptr() + a.nbytes(), b.data_ptr() + b.nbytes())
    return a._cdata == b._cdata or (a.device == b.device and start < end)
