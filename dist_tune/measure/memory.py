"""Memory that tensors lie in: tensors in containers, memory that two of them share, regions and
copies that keep none of them alive.

Knows tensors by their storage and not by their purpose.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dist_tune.accelerator import api, device_type, free_bytes

Path = tuple[Any, ...]
"""Position in nested containers: indices and keys, from the outside in."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COPIES_SHARE = 0.25
"""Of a GPU's free memory that the copies of one snapshot may take."""
_SMALL_BYTES = 64 << 20
"""Of any GPU's memory: tables of indices and the like."""
_MOST_WRAPPED = 4
"""Wrappers around one tensor."""
_MAX_HOST_BYTES = 2 << 30
"""Of the host's memory."""
_NO_MAPPINGS = (
    torch.Tensor,
    int,
    float,
    str,
    bytes,
    type(None),
    FunctionType,
    MethodType,
    partial,
    torch.dtype,
)


class Region(NamedTuple):
    """Memory of a tensor, without keeping it alive."""

    storage: StorageWeakRef
    n_bytes: int
    """Size of the storage."""
    device: torch.device
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Region | None:
        """The region of a tensor; None if it owns no memory: empty, sparse, or a wrapper of
        others.
        """
        storage = _storage(tensor)
        if storage is None or storage.nbytes() == 0 or tensor.numel() == 0:
            return None
        if tensor.is_nested:  # without strides of its own
            return cls(
                StorageWeakRef(storage),
                storage.nbytes(),
                tensor.device,
                torch.uint8,
                0,
                (storage.nbytes(),),
                (1,),
            )
        shape = tuple(
            1 if stride == 0 else size
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )  # once, if expanded
        offset = int(tensor.storage_offset())
        return cls(
            StorageWeakRef(storage),
            storage.nbytes(),
            tensor.device,
            tensor.dtype,
            offset,
            shape,
            tensor.stride(),
        )

    @property
    def is_freed(self) -> bool:
        """True once no tensor lies there any more."""
        return bool(self.storage.expired())

    def tensor(self) -> torch.Tensor | None:
        """The memory as a tensor of real numbers; None if it has been freed."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(
            self.storage.cdata
        )
        if storage is None:
            return None
        # Not a view of the tensor: autograd and version counters must not see writes to it.
        alive = torch.empty(0, dtype=self.dtype, device=self.device).set_(
            storage, self.offset, self.shape, self.strides
        )
        return torch.view_as_real(alive) if self.dtype.is_complex else alive


def memory_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The memory of a tensor as real numbers, without autograd; None if it owns none."""
    region = Region.of(tensor)
    return None if region is None else region.tensor()


def has_same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two contents of one shape are equal bit by bit, NaN's too. Waits for the device."""
    return torch.equal(bits_of(tensor), bits_of(other))


def n_bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of its elements."""
    return tensor.numel() * tensor.element_size()


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of real numbers as integers, in the same memory: of the same size, so that
    strides do not matter.
    """
    return tensor.view(_INTEGERS.get(tensor.dtype.itemsize, tensor.dtype))


def tensor_of(value: Any) -> torch.Tensor | None:
    """The tensor that an argument of a kernel is or wraps, as a descriptor or
    ``triton.reinterpret`` of one; None for all else.
    """
    for _ in range(_MOST_WRAPPED):
        if value is None or isinstance(value, torch.Tensor):
            return value
        value = getattr(value, "base", None)
    return None


@dataclass(frozen=True, slots=True)
class _Opaque:
    """What is no tensor of torch's, and can be cloned and copied to. It is kept alive."""

    value: Any
    is_freed: bool = False

    def tensor(self) -> Any:
        return self.value


class Snapshot:
    """Values of tensors, to compare with and to put back.

    Keeps no tensor alive, and forgets those that have been freed.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[Region | _Opaque, Any]] = {}
        """Where a tensor lies, and a copy of its values as real numbers."""
        self._room_bytes: dict[torch.device, float] = {}

    def keep(self, key: Hashable, tensor: torch.Tensor) -> bool:
        """Copy a tensor; False if it owns no memory, or there is no room for a copy."""
        region = Region.of(tensor)
        memory = None if region is None else region.tensor()
        if region is None or memory is None:
            return False
        room_bytes = self._room_bytes.setdefault(
            memory.device, _room_bytes(memory.device)
        ) - n_bytes_of(memory)
        if room_bytes < 0:
            return False
        with suppress(torch.OutOfMemoryError):
            self._kept[key] = region, memory.clone()
            self._room_bytes[memory.device] = room_bytes
            return True
        return False

    def spare(self, device: torch.device) -> None:
        """Copy from here on small tensors, or up to half of what a GPU has beyond its peak: a run
        beside the copies needs that.
        """
        if device.type == device_type():
            spare_bytes = (
                free_bytes(device) + api.memory_allocated(device) - api.max_memory_allocated(device)
            )
            self._room_bytes[device] = min(
                self._room_bytes.get(device, _room_bytes(device)),
                max(spare_bytes / 2, _SMALL_BYTES),
            )

    def copy(self, tensors: Iterable[Any]) -> None:
        """Copy tensors by region, and what has ``clone`` and ``copy_`` as they do, without a limit
        of room.

        The first copy of each counts; those of freed tensors go.
        """
        self._kept = {key: each for key, each in self._kept.items() if not each[0].is_freed}
        for each in tensors:
            tensor = tensor_of(each)
            place = _Opaque(each) if tensor is None else Region.of(tensor)
            key = id(each) if tensor is None else place
            if (
                place is not None
                and key not in self._kept
                and (memory := place.tensor()) is not None
            ):
                self._kept[key] = place, memory.clone()

    def take(self, other: Snapshot, keys: Iterable[Hashable] | None = None) -> None:
        """Take copies of another snapshot, by region.

        The first copy of each counts; those of freed tensors go.
        """
        self.copy([])
        for key in other._kept if keys is None else keys:
            if key in other._kept:
                place = other._kept[key][0]
                self._kept.setdefault(
                    id(place.value) if isinstance(place, _Opaque) else place, other._kept[key]
                )

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def alive(
        self, keys: Iterable[Hashable] | None = None
    ) -> dict[Any, tuple[torch.Tensor, torch.Tensor]]:
        """Memory and copy of all tensors that are alive, or of some."""
        kept = (
            self._kept
            if keys is None
            else {key: self._kept[key] for key in keys if key in self._kept}
        )
        return {
            key: (memory, copy)
            for key, (region, copy) in kept.items()
            if (memory := region.tensor()) is not None
        }

    def changed(self) -> set[Any]:
        """Keys of tensors whose bits are others now. Waits for the device."""
        return {
            key for key, (memory, copy) in self.alive().items() if not has_same_bits(memory, copy)
        }

    def put_back(self, keys: Iterable[Hashable] | None = None) -> None:
        """Put back all values, or some, those copied last first; autograd and version counters do
        not see it. Does not wait.
        """
        for memory, copy in reversed(self.alive(keys).values()):
            memory.copy_(copy)

    def exchange(self) -> None:
        """Put back all values, and keep those that were there instead."""
        there = {
            key: (self._kept[key][0], memory.clone()) for key, (memory, _) in self.alive().items()
        }
        self.put_back()
        self._kept = there

    def forget(self) -> None:
        """Free all copies: what is written from here on stands."""
        self._kept.clear()
        self._room_bytes.clear()


def _room_bytes(device: torch.device) -> float:
    """Memory that copies may take: of a GPU's free memory, with what torch's allocator holds
    without using it, or of the host's.
    """
    return _COPIES_SHARE * free_bytes(device) if device.type == device_type() else _MAX_HOST_BYTES


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
    # Mapping comes last: for each type that is none Python asks all of its subclasses, 20 and more:
    # 0.1 ms of a hit.
    is_none = (
        isinstance(value, _NO_MAPPINGS) or type(value).__module__.partition(".")[0] == "triton"
    )
    return isinstance(value, dict) or (not is_none and isinstance(value, Mapping))


def parts_of(value: Any, *, has_fields: bool = True) -> dict[Any, Any] | None:
    """The items of a container by name or index, with ``has_fields`` also the fields of a
    dataclass; None for anything else.
    """
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if is_mapping(value):
        return dict(value)
    if has_fields and is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: getattr(value, field.name)
            for field in fields(value)
            if hasattr(value, field.name)
        }
    return None


def leaves_of(value: Any, *, has_fields: bool = False) -> Iterator[tuple[Path, Any]]:
    """What containers hold that is none, by position.

    A container is searched once: it may hold itself.
    """
    # By identity, and kept alive, because an identity that is free may be given to another.
    seen: dict[int, Any] = {}
    waiting: list[tuple[Path, Any]] = [((), value)]
    while waiting:
        path, each = waiting.pop()
        if id(each) in seen:
            continue
        parts = parts_of(each, has_fields=has_fields)
        if parts is None:
            yield path, each
        else:
            seen[id(each)] = each
            waiting += [((*path, key), part) for key, part in reversed(parts.items())]


def tensors_in(value: Any, *, has_fields: bool = False) -> dict[Path, torch.Tensor]:
    """The tensors in nested tuples, lists and dicts; with ``has_fields`` also in dataclasses, as in
    results.
    """
    return {
        path: leaf
        for path, leaf in leaves_of(value, has_fields=has_fields)
        if isinstance(leaf, torch.Tensor)
    }


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


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    value: Any = tensor
    # It may name a storage that has no memory, and reading that ends the process.
    if is_traceable_wrapper_subclass(value):
        return None
    try:
        # Which has one that cannot be asked anything.
        return tensor.untyped_storage() if tensor.layout is not torch.jagged else None
    except (NotImplementedError, RuntimeError):  # sparse, or a wrapper
        return None


def _overlap(a: torch.UntypedStorage, b: torch.UntypedStorage) -> bool:
    # By address, too: tensors in symmetric memory have storages of their own for parts of one
    # allocation.
    start, end = (
        max(a.data_ptr(), b.data_ptr()),
        min(a.data_ptr() + a.nbytes(), b.data_ptr() + b.nbytes()),
    )
    return a._cdata == b._cdata or (a.device == b.device and start < end)
