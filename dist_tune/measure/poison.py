"""Poison: other values in the memory of earlier results before a run, so that elements which the run does not write show.

Knows tensors and who holds their memory; nothing of checks, candidates or ranks. An allocator gives a candidate that writes nothing the
memory that still holds the last right answer, and so does a function that is given its output. The poison is NaN, because what is computed
from it is NaN, too; where a run may be repeated at will, it is two values of opposite sign. Memory that objects hold is left alone, unless
such a run has returned it: peers may write to symmetric memory at any time. All of it happens between runs: a fill between the function's
own kernels, as by a mode that fills fresh allocations, could wait for one that spins until a peer answers, and overtake a write on
another stream.
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
_FILLS = (0x55, 0xAA)
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
            bits_of(memory).fill_(NANS[memory.dtype])

    def poison_free(self, expected: list[torch.Tensor]) -> None:
        """Poison free memory that an allocator would give to the next result: one like the last, or like what is expected."""
        regions = self._latest or ([] if self.held else [each for each in map(Region.of, expected) if each is not None])
        n_sets = 2 if sum(region.n_bytes for region in regions) < _SMALL_BYTES else 1
        with suppress(torch.OutOfMemoryError):
            # All of them before the first is freed, so that they are different blocks.
            blocks = [(torch.empty(each.n_bytes, dtype=torch.uint8, device=each.device), each.dtype) for each in regions * n_sets]
            for block, dtype in blocks:
                real = dtype.to_real() if dtype.is_complex else dtype
                if real in NANS:
                    bits_of(block[: block.numel() // real.itemsize * real.itemsize].view(real)).fill_(NANS[real])
                elif dtype != torch.bool:
                    block.fill_(_FILLS[0])

    def resolve(self, wrong: str, *, is_independent: bool) -> str:
        """Why a run is wrong, in the light of the poison before it: empty also where it may just have read that. Puts back what it read.

        Wrong with NaN and right without it means that the function reads its outputs. ``is_independent``: what is expected does not depend
        on what they held, so that poison which is left there was to be overwritten.
        """
        places = {path: each for path in self.held for each in self._poisoned.copies([path])}
        left = {path: bits_of(memory) == NANS[memory.dtype] for path, (memory, _) in places.items()}
        if not wrong:
            self._is_read = False if places else self._is_read
            for path, (memory, copy) in places.items():
                # NaN in a result that equals the expected one is the function's own; a check may not have looked at NaN made of poison.
                if is_independent:
                    bits_of(memory).copy_(torch.where(left[path], bits_of(copy), bits_of(memory)))
                elif n_nan([memory]):
                    memory.copy_(copy)
            self._poisoned.forget()
            return ""
        # A part of a captured cache may be kept from run to run, and an argument may be handed through as it is.
        is_missing = all(path[0] == CAPTURED and each.all() for path, each in left.items()) or (
            is_independent and any(path[0] != CAPTURED and each.any() for path, each in left.items())
        )
        if self._is_read is None and not is_missing and n_nan(memory for memory, _ in places.values()):
            wrong, self._is_read = "", True
        self.restore()
        return wrong

    def repeat(self, run: Callable[[], Any], judge: Callable[[Any], str], result: Any) -> str:
        """Why a run that was right is wrong when it is repeated, with other values where its ``result`` lies; empty if it is not.

        Values that come out as they were put in may be made of them, as max(x, 0) is. With values of the other sign they are not, then.
        A run that is wrong with both may have read them: it is repeated once more with what was there.
        """
        tensors = {path: each for path, each in tensors_in(result, has_fields=True).items() if not each.is_nested}
        places = [path for path, each in tensors.items() if self._poisoned.keep(path, each)]
        left: dict[Path, torch.Tensor] = {path: torch.ones((), dtype=torch.bool, device=tensors[path].device) for path in places}
        wrong = ""
        for fill in _FILLS:
            for memory, _ in self._poisoned.copies():
                bits_of(memory).fill_(_filled(memory.dtype, fill))
            blocks = [memory.clone() for memory, _ in self._poisoned.copies()]
            del blocks  # an allocator may give them to the next result
            result = run()
            written = tensors_in(result, has_fields=True)
            left = {path: mask & _is_left(written.get(path), tensors[path], fill) for path, mask in left.items()}
            wrong = wrong or judge(result)
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


def _filled(dtype: torch.dtype, fill: int) -> int:
    """An element all of whose bytes are ``fill``, as an integer of its size."""
    return int(fill == _FILLS[0]) if dtype == torch.bool else int.from_bytes(bytes([fill]) * dtype.itemsize, "little", signed=True)


def _is_left(tensor: torch.Tensor | None, earlier: torch.Tensor, fill: int) -> torch.Tensor:
    """A mask of the elements of a result that are ``fill``; of another kind of tensor than the ``earlier`` one none is."""
    written = None if tensor is None or (tensor.shape, tensor.dtype) != (earlier.shape, earlier.dtype) else memory_of(tensor)
    if written is None:
        return torch.zeros((), dtype=torch.bool, device=earlier.device)
    mask = bits_of(written) == _filled(written.dtype, fill)
    return mask.any(-1) if earlier.is_complex() else mask
