"""Poison: other values in the memory of earlier results before a run, so that elements which the run does not write show.

Knows tensors and who holds their memory; nothing of checks, candidates or ranks. An allocator gives a candidate that writes nothing the
memory that still holds the last right answer, and so does a function that is given its output. The poison is NaN, because what is computed
from it is NaN, too. Integers and memory that objects hold are left alone: they may be flags, and peers may write to symmetric memory at any
time. A run that may be repeated at will is given two other values in all that it has returned. All of it happens between runs: a fill
between the function's own kernels, as by a mode that fills fresh allocations, could wait for one that spins until a peer answers, and
overtake a write on another stream.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch

from dist_tune.distributed import is_symmetric
from dist_tune.measure.memory import Path, Region, Snapshot, bits_of, leaves_of, memory_of, shares_memory, tensors_in

_SMALL_BYTES = 64 << 20
"""Up to this size of the results, free memory for two more sets of them is poisoned, beyond it for one."""

# Signalling NaNs where a format has them: what is computed from one is another NaN, so an element that still is this one was not written.
NANS = {
    torch.float64: 0x7FF5A5A5A5A5A5A5,
    torch.float32: 0x7FA5A5A5,
    torch.float16: 0x7D5A,
    torch.bfloat16: 0x7FA5,
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7D,
    torch.float8_e4m3fnuz: -0x80,
    torch.float8_e5m2fnuz: -0x80,
    torch.float8_e8m0fnu: -1,
}
"""Format -> the bits of its poison, as an integer."""
_BYTES = (0x55, 0xAA)
"""Poison of each byte where a run may be repeated at will: finite numbers of both signs in every format."""
CAPTURED = "captured"
"""First item of the position of a tensor that a function captures."""


class ResultMemory:
    """Memory of the results of one function; one per tuning and rank."""

    def __init__(self) -> None:
        self.held: dict[Path, bool] = {}
        """Positions of arguments and captured tensors that results are part of -> True where a result is all of one."""
        self._latest: list[Region] = []
        """Other results of the last run."""
        self._is_read: bool | None = None
        """True if the function reads what lies where its results do, None if that is not known. One answer for all of them."""
        self._poisoned = Snapshot()

    @property
    def outputs(self) -> set[Path]:
        """Positions of arguments that results are part of, the same on all ranks."""
        return {path for path in self.held if path[0] != CAPTURED}

    @property
    def is_poisoned(self) -> bool:
        """True while memory that somebody holds is poisoned."""
        return bool(self._poisoned.copies())

    def remember(self, results: list[torch.Tensor], tensors: Mapping[Path, torch.Tensor]) -> None:
        """Learn where the results of a run lie. ``tensors``: what its function was given, and has captured."""
        self._latest.clear()
        for result in results:
            paths = [path for path, tensor in tensors.items() if shares_memory(result, [tensor])]
            whole = [path for path in paths if _is_all_of(tensors[path], result)]
            for path in whole or paths[:1]:
                self.held[path] = self.held.get(path, False) or bool(whole)
            if not paths and (region := Region.of(result)) is not None:
                self._latest.append(region)

    def forget(self) -> None:
        """Prepare for a call that is not similar: it may read what this one did not."""
        self._is_read = self._is_read or None

    def leave(self) -> None:
        """Put back what was poisoned, and poison nothing again that is held: the function reads it."""
        self._is_read = True
        self.restore()

    def poison_held(self, tensors: Mapping[Path, torch.Tensor]) -> None:
        """Poison what results were all of, unless the function reads it. What there is no room for a copy of is left alone."""
        for path in [path for path, is_whole in self.held.items() if is_whole and path in tensors and not self._is_read]:
            memory = memory_of(tensors[path])
            if memory is not None and memory.dtype in NANS:
                self._poisoned.keep(path, tensors[path])
        for memory, _ in self._poisoned.copies():
            _fill(memory)

    def poison_free(self, expected: list[torch.Tensor]) -> None:
        """Poison free memory that an allocator would give to the next result: one like the last, or like what is expected."""
        regions = self._latest or ([] if self.held else [each for each in map(Region.of, expected) if each is not None])
        n_sets = 2 if sum(region.n_bytes for region in regions) < _SMALL_BYTES else 1
        with suppress(torch.OutOfMemoryError):
            # All of them before the first is freed, so that they are different blocks.
            blocks = [(torch.empty(each.n_bytes, dtype=torch.uint8, device=each.device), each.dtype) for each in regions * n_sets]
            for block, dtype in blocks:
                real = dtype.to_real() if dtype.is_complex else dtype
                _fill(block[: block.numel() // real.itemsize * real.itemsize].view(real))

    def resolve(self, wrong: str, *, is_independent: bool) -> str:
        """Why a run is wrong, in the light of the poison before it: empty also where it may just have read that. Puts back what it read.

        Wrong with NaN and right without it means that the function reads its outputs. ``is_independent``: what is expected does not depend
        on what they held, so that poison which is left there was to be overwritten.
        """
        places = {path: memory for path in self.held for memory, _ in self._poisoned.copies([path])}
        with_nan = [path for path, memory in places.items() if n_nan([memory])]
        if not wrong:
            self._is_read = False if places else self._is_read
            self._poisoned.put_back(with_nan)  # a part that is kept from run to run, or NaN made of poison, at which a check did not look
            self._poisoned.forget()
            return ""
        # A part of a captured cache may be kept from run to run, and an argument may be handed through as it is.
        left = {path: _is_left(memory) for path, memory in places.items()}
        is_missing = all(path[0] == CAPTURED and each.all() for path, each in left.items()) or (
            is_independent and any(path[0] != CAPTURED and each.any() for path, each in left.items())
        )
        if self._is_read is None and not is_missing and with_nan:
            wrong, self._is_read = "", True
        self.restore()
        return wrong

    def repeat(self, run: Callable[[], Any], judge: Callable[[Any], str], result: Any) -> str:
        """Why a run that was right is wrong when it is repeated, with other values where its ``result`` lies; empty if it is not.

        Values that come out as they were put in may be made of them, as max(x, 0) is. With values of the other sign they are not, then.
        A run that is wrong with both may have read them: it is repeated once more with what was there.
        """
        tensors = {path: each for path, each in tensors_in(result, has_fields=True).items() if not each.is_nested}
        tensors = {path: each for path, each in tensors.items() if self._poisoned.keep(path, each)}
        left: dict[Path, torch.Tensor] = {}
        wrong = ""
        for byte in _BYTES:
            for memory, _ in self._poisoned.copies():
                _fill(memory, byte)
            blocks = [memory.clone() for memory, _ in self._poisoned.copies()]
            del blocks  # an allocator may give them to the next result
            result = run()
            wrong = wrong or judge(result)
            again = {path: each for path, each in tensors_in(result, has_fields=True).items() if path in tensors}
            masks = {path: _is_left(each, byte) for path, each in again.items() if each.shape == tensors[path].shape}
            left = {path: mask & left.get(path, mask) for path, mask in masks.items()}
            missing = [mask for mask in left.values() if mask.any()]
            if not missing and not wrong:
                self._poisoned.forget()
                return ""
        self.restore()
        if missing:
            return f"{int(missing[0].sum())} of {missing[0].numel()} elements are not written: they are what was there before"
        return (wrong := judge(run())) and f"when repeated: {wrong}"

    def restore(self) -> None:
        """Put back what was poisoned."""
        self._poisoned.put_back()
        self._poisoned.forget()


def held_by(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[Path, torch.Tensor]:
    """The tensors that a function is given, and those that it and functions among its arguments capture; none of what objects hold.

    Peers may write to symmetric memory at any time, so that is left alone unless it is an argument.
    """
    found = tensors_in((args, kwargs))
    for path, leaf in leaves_of((args, kwargs, function)):
        if isinstance(leaf, FunctionType):
            with suppress(ValueError):  # a captured name that has no value yet
                captured = inspect.getclosurevars(inspect.unwrap(leaf))
                tensors = tensors_in({**captured.globals, **captured.nonlocals})
                found |= {(CAPTURED, *path, *place): tensor for place, tensor in tensors.items() if not is_symmetric(tensor)}
    return found


def _is_all_of(tensor: torch.Tensor, result: torch.Tensor) -> bool:
    whole, part = memory_of(tensor), memory_of(result)
    return whole is not None and part is not None and (whole.data_ptr(), whole.numel()) == (part.data_ptr(), part.numel())


def n_nan(tensors: Iterable[torch.Tensor]) -> int:
    """Elements that are poison, NaN that was computed from it, or other NaN. Waits for the device."""
    memories = [memory for each in tensors if (memory := memory_of(each)) is not None and memory.dtype in NANS]
    return sum(int((each.float() if each.dtype.itemsize == 1 else each).isnan().sum()) for each in memories)


def _poison_of(dtype: torch.dtype, byte: int) -> int:
    """The bits of an element: all its bytes are ``byte``, or they are NaN if that is 0."""
    if dtype == torch.bool:
        return int(byte != _BYTES[1])
    return NANS[dtype] if dtype in NANS and not byte else int.from_bytes(bytes([byte or _BYTES[0]]) * dtype.itemsize, signed=True)


def _fill(memory: torch.Tensor, byte: int = 0) -> None:
    bits_of(memory).fill_(_poison_of(memory.dtype, byte))


def _is_left(tensor: torch.Tensor, byte: int = 0) -> torch.Tensor:
    """A mask of the elements that are poison; of a tensor without memory none is."""
    memory = memory_of(tensor)
    if memory is None:
        return torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
    return bits_of(memory) == _poison_of(memory.dtype, byte)
