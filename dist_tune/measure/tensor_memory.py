"""Which memory tensors lie in, and who holds it: tensors in containers and objects, and whether two of them share memory.

Knows tensors by their storage and nothing of what they are for. Looks at the user's objects without running their code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Path = tuple[Any, ...]
"""Of something in nested containers: indices and keys, from the outside in."""

_MAX_OBJECTS = 10_000
"""Objects looked at for tensors that they hold; of more, what they hold is not known."""
_HOLD_NOTHING = (type(None), bool, int, float, complex, str, bytes, type, ModuleType, BuiltinFunctionType, torch.dtype, torch.device)


class Region(NamedTuple):
    """Where a tensor lies, without keeping it alive."""

    storage: StorageWeakRef
    n_bytes: int
    dtype: torch.dtype
    device: torch.device
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Region | None:
        """None for a tensor that owns no memory: empty, sparse, or a wrapper of others."""
        storage = _storage(tensor)
        if storage is None or storage.nbytes() == 0 or tensor.numel() == 0:
            return None
        shape = tuple(1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True))  # once, if expanded
        offset = int(tensor.storage_offset())
        return cls(StorageWeakRef(storage), storage.nbytes(), tensor.dtype, tensor.device, offset, shape, tensor.stride())

    def tensor(self) -> torch.Tensor | None:
        """What lies there, as it lies there and as real numbers; None if that memory has been given back."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return None
        # Not a view of the tensor: what is written here is no business of autograd's, nor of who counts versions.
        alive = torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, self.offset, self.shape, self.strides)
        return torch.view_as_real(alive) if self.dtype.is_complex else alive


def is_one_of(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    """Whether it is one of the others, or shares memory with one."""
    mine = _storage(tensor)
    for other in others:
        theirs = _storage(other)
        if tensor is other or (mine is not None and theirs is not None and _overlap(mine, theirs)):
            return True
    return False


def version_of(tensor: torch.Tensor) -> int | None:
    """How often torch has written to it; None where it does not count."""
    return None if tensor.is_inference() else tensor._version


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype, which is not complex, are the same to the bit, NaN included."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return torch.equal(a.view(bits), b.view(bits))


def leaves_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """What is in nested tuples, lists and dicts, with its position."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from leaves_of(each, (*path, key))
    elif isinstance(value, list | tuple):
        for k, each in enumerate(value):
            yield from leaves_of(each, (*path, k))
    else:
        yield path, value


def tensors_in(value: Any) -> dict[Path, torch.Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    return {path: leaf for path, leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)}


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, or a wrapper
        return None


def _overlap(a: torch.UntypedStorage, b: torch.UntypedStorage) -> bool:
    # By address, too: tensors in symmetric memory have storages of their own for parts of one allocation.
    start, end = max(a.data_ptr(), b.data_ptr()), min(a.data_ptr() + a.nbytes(), b.data_ptr() + b.nbytes())
    return a._cdata == b._cdata or (a.device == b.device and start < end)


def tensors_in_objects(roots: tuple[Any, ...]) -> list[torch.Tensor] | None:
    """Tensors in attributes of objects, at any depth; None if there are too many objects to look at. Runs no code of theirs."""
    found: list[torch.Tensor] = []
    seen: set[tuple[int, bool]] = set()
    waiting: list[tuple[Any, bool]] = [(roots, False)]
    while waiting:
        value, is_inside = waiting.pop()
        if isinstance(value, _HOLD_NOTHING) or (id(value), is_inside) in seen:
            continue
        seen.add((id(value), is_inside))
        if len(seen) > _MAX_OBJECTS:
            return None
        if isinstance(value, torch.Tensor):
            found += [value] if is_inside else []
        elif isinstance(value, Mapping | list | tuple | set):
            waiting += [(each, is_inside) for each in (value.values() if isinstance(value, Mapping) else value)]
        elif isinstance(value, FunctionType | MethodType | partial):
            waiting += [] if is_inside else [(each, False) for each in _captured(value)]
        else:
            waiting += [(each, True) for each in _attributes(value)]
    return found


def _attributes(value: Any) -> Iterator[Any]:
    with suppress(AttributeError):  # not by getattr(), which an object may answer itself
        yield from object.__getattribute__(value, "__dict__").values()
    for kind in type(value).__mro__:
        for slot in vars(kind).values() if "__slots__" in vars(kind) else ():
            with suppress(AttributeError):  # empty
                if isinstance(slot, MemberDescriptorType):
                    yield slot.__get__(value)


def _captured(function: Any) -> Iterator[Any]:
    """What a function brings along: its object, its first arguments, what it was defined around, the globals that it names."""
    if isinstance(function, partial):
        yield from (function.func, function.args, function.keywords)
    elif isinstance(function, MethodType):
        yield from (function.__self__, function.__func__)
    else:
        yield getattr(function, "__wrapped__", None)
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # not filled yet
                yield cell.cell_contents
        named = (function.__globals__.get(name) for name in function.__code__.co_names)
        yield from (value for value in named if not isinstance(value, FunctionType))
