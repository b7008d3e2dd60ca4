"""Poison: other values in the memory of earlier results before a run, so that elements which the run does not write show.

Knows tensors and who holds their memory; nothing of checks, candidates or ranks. An allocator gives a candidate that writes nothing the
memory that still holds the last right answer, and so does a function that is given its output. The poison is NaN, because what is computed
from it is NaN, too; where a run may be repeated at will, it is two sets of values. Memory that only objects hold is left alone, unless such
a run has returned it: peers may write to symmetric memory at any time. All of it happens between runs: a fill between the function's own
kernels, as by a mode that fills fresh allocations, could wait for one that spins until a peer answers, and overtake a write on another
stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dist_tune.measure.compare import tensors_of, tolerance
from dist_tune.measure.memory import Path, Region, bits_of, held_by_objects, memory_of, shares_memory

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
_FREE_INTEGERS = 0x55
"""Poison of each byte of free memory for integers. Integers that are held may be flags that kernels wait for."""


@dataclass(eq=False)
class _Place:
    """Memory of an earlier result that is held."""

    key: Path | StorageWeakRef | None
    """The position of the argument that it is part of; its storage where it is no argument."""
    memory: torch.Tensor
    copy: torch.Tensor | None = None
    """Its values before it was poisoned."""

    @property
    def n_left(self) -> int:
        """Elements that are poison still."""
        return int((bits_of(self.memory) == NANS[self.memory.dtype]).sum())

    @property
    def has_nan(self) -> bool:
        """True if it holds poison, or NaN that was computed from it."""
        return bool((self.memory.float() if self.memory.dtype.itemsize == 1 else self.memory).isnan().any())


class ResultMemory:
    """Memory of the results of one function; one per tuning and rank."""

    def __init__(self) -> None:
        self.outputs: dict[Path, set[tuple[Region, Region]]] = {}
        """Positions of arguments that results are part of, the same on all ranks; how argument and result lie in one storage."""
        self._regions: dict[Region, None] = {}
        """Results of runs of the same call that are no arguments, the latest last."""
        self._latest: list[Region] = []
        """Those of the last run of any call."""
        self._is_read: dict[Path | StorageWeakRef | None, bool] = {}
        """True if the function reads the values at a place, where that is known."""
        self._has_mixed = False
        """True if several unknown places were poisoned at once, and one of them is read: from then on it is one at a time."""
        self._poisoned: list[_Place] = []

    def remember(self, results: list[torch.Tensor], arguments: Mapping[Path, torch.Tensor]) -> None:
        """Learn where the results of a run lie. Those of the last few runs stay known: functions take turns with two or three buffers."""
        self._latest.clear()
        for result in results:
            region = Region.of(result)
            path = next((path for path, argument in arguments.items() if shares_memory(result, [argument])), None)
            if path is not None:
                whole = Region.of(arguments[path])
                pairs = self.outputs.setdefault(path, set())
                if whole is not None and region is not None and whole.storage == region.storage:
                    pairs.add((whole._replace(storage=None), region._replace(storage=None)))
            elif region is not None:
                self._latest.append(region)
                self._regions.pop(region, None)
                self._regions[region] = None
        for region in list(self._regions)[: -max(8, 3 * len(self._latest))]:
            del self._regions[region]

    def forget(self, *, is_similar: bool) -> None:
        """Prepare for another call: earlier results may be its inputs. One that is not similar may read what this one did not."""
        self._regions.clear()
        self._is_read = {key: is_read for key, is_read in self._is_read.items() if isinstance(key, tuple) and (is_read or is_similar)}

    def poison_held(self, arguments: Mapping[Path, torch.Tensor], roots: tuple[Any, ...], *, only: Path | None = None) -> None:
        """Poison memory of earlier results that is held, unless the function reads it, or objects reachable from ``roots`` hold it.

        ``only`` that of one argument.
        """
        places = [_Place(path, memory) for path in self.outputs if path in arguments for memory in self._parts(path, arguments[path])]
        hidden = [_Place(region.storage, memory) for region in self._regions if (memory := region.tensor()) is not None]
        contexts = held_by_objects(roots) if hidden else None
        places += [place for place in hidden if contexts is not None and not shares_memory(place.memory, contexts)]
        places = [place for place in places if place.memory.dtype in NANS and not self._is_read.get(place.key, False)]
        unknown = [place.key for place in places if place.key not in self._is_read]
        left_out = set(unknown[1:]) - set(unknown[:1]) if self._has_mixed else set()
        with suppress(torch.OutOfMemoryError):  # what there is no copy of is left alone
            for place in places:
                if place.key is only or (only is None and place.key not in left_out):
                    place.copy = place.memory.clone()
                    self._poisoned.append(place)
        for place in self._poisoned:
            bits_of(place.memory).fill_(NANS[place.memory.dtype])

    def _parts(self, path: Path, argument: torch.Tensor) -> list[torch.Tensor]:
        """The parts of an argument that were results when one lay in its storage like this one."""
        region = Region.of(argument)
        if region is None:
            return []
        parts = [part for whole, part in self.outputs[path] if whole == region._replace(storage=None)]
        return [memory for part in parts if (memory := part._replace(storage=region.storage).tensor()) is not None]

    def poison_free(self, expected: list[torch.Tensor]) -> None:
        """Poison free memory that an allocator would give to the next result: one like the last, or like what is expected."""
        regions = self._latest or ([] if self.outputs else [each for each in map(Region.of, expected) if each is not None])
        n_sets = 2 if sum(region.n_bytes for region in regions) < _SMALL_BYTES else 1
        with suppress(torch.OutOfMemoryError):
            # All of them before the first is freed, so that they are different blocks.
            blocks = [(torch.empty(each.n_bytes, dtype=torch.uint8, device=each.device), each.dtype) for each in regions * n_sets]
            for block, dtype in blocks:
                real = dtype.to_real() if dtype.is_complex else dtype
                if real in NANS:
                    bits_of(block[: block.numel() // real.itemsize * real.itemsize].view(real)).fill_(NANS[real])
                elif dtype != torch.bool:
                    block.fill_(_FREE_INTEGERS)

    def resolve(self, results: list[torch.Tensor], wrong: str, *, is_independent: bool) -> str:
        """Why a run is wrong, in the light of the poison before it: empty also where it may just have read that. Puts back what it read.

        ``is_independent``: what is expected does not depend on what the arguments held.
        """
        mine = [place for place in self._poisoned if shares_memory(place.memory, results)]
        unknown = [place for place in mine if place.key not in self._is_read]
        if not wrong:
            self._is_read |= {place.key: False for place in unknown}
            # NaN in a result that equals the expected one is the function's own; a check may not have looked at NaN made of poison.
            self.restore(keeps=True, right=mine if is_independent else [])
            return ""
        if unknown and not _is_missing(mine, unknown, is_independent=is_independent):
            wrong = ""
            if has_nan := {place.key for place in unknown if place.has_nan}:  # computed from poison: that explains what is wrong
                self._is_read |= {place.key: False for place in unknown if place.key not in has_nan}
                self._is_read |= dict.fromkeys(has_nan, True) if len(has_nan) == 1 else {}
                self._has_mixed |= len(has_nan) > 1
        self.restore()
        return wrong

    def repeat(self, run: Callable[[], Any], result: Any) -> tuple[Any, str]:
        """The result of ``run()`` with other values where ``result`` lies, and how much of that it leaves as it was: empty if nothing.

        Values that come out as they were put in may be made of them, as max(x, 0) is. With the opposite put in they are not, then.
        ``restore`` puts back what was there, ``accept`` lets stand what the run has written.
        """
        places = {path: _Place(None, each) for path, tensor in tensors_of(result).items() if (each := _writable(tensor)) is not None}
        self._poisoned += places.values()
        for place in places.values():
            place.copy = place.memory.clone()
        values = {path: _unlike(place.memory) for path, place in places.items()}
        left = {path: torch.ones((), dtype=torch.bool, device=each.device) for path, each in values.items()}
        for _ in range(2):
            for path, place in places.items():
                place.memory.copy_(values[path])
            blocks = [each.clone() for each in values.values()]
            del blocks  # an allocator may give them to the next result
            result = run()
            tensors = tensors_of(result)
            left = {path: mask & _is_left(tensors.get(path), values[path]) for path, mask in left.items()}
            if not any(mask.any() for mask in left.values()):
                return result, ""
            values = {path: _opposite(each) for path, each in values.items()}
        mask = next(mask for mask in left.values() if mask.any())
        return result, f"{int(mask.sum())} of {mask.numel()} elements are not written: they are what was there before"

    def accept(self) -> None:
        """Let stand what a run has written over poison."""
        self._poisoned.clear()

    def leave(self, path: Path) -> None:
        """Never poison an argument again: the function reads it."""
        self._is_read[path] = True

    def restore(self, *, keeps: bool = False, right: Sequence[_Place] = ()) -> None:
        """Put back what was poisoned; ``keeps`` places without NaN, and in ``right`` ones all elements that were written."""
        for place in reversed(self._poisoned):
            if place.copy is None or (keeps and not place.has_nan):
                continue
            if any(place is each for each in right):
                written = bits_of(place.memory)
                written.copy_(torch.where(written == NANS[place.memory.dtype], bits_of(place.copy), written))
            else:
                place.memory.copy_(place.copy)
        self._poisoned.clear()


def _is_missing(places: list[_Place], unknown: list[_Place], *, is_independent: bool) -> bool:
    """True if a run is wrong for more than having read poison: some is left where it was to write, or there is no NaN at all.

    An argument may be handed through as it is, unless what is expected ``is_independent`` of it. Of other memory a part may be kept from
    run to run.
    """
    for place in places:
        is_argument, n_left = isinstance(place.key, tuple), place.n_left
        if n_left and (place not in unknown or (is_independent if is_argument else n_left == place.memory.numel())):
            return True
    return is_independent and isinstance(unknown[0].key, tuple) and not any(place.has_nan for place in places)


def _writable(tensor: torch.Tensor) -> torch.Tensor | None:
    """The memory of a tensor, also of one made in inference mode; None if it owns none that torch can write to."""
    memory = memory_of(tensor)
    try:
        return memory if memory is None else memory.copy_(memory.clone())
    except (RuntimeError, NotImplementedError):  # several of its elements are one
        return None


def _unlike(tensor: torch.Tensor) -> torch.Tensor:
    """Finite values, far from those of a right result, each another one."""
    if not tolerance(tensor.dtype):  # other bits: torch does not compute with wide unsigned integers and packed formats
        return ~tensor if tensor.dtype == torch.bool else (~bits_of(tensor)).view(tensor.dtype)
    scale = tensor.float().abs().nan_to_num(0.0, 0.0, 0.0).max().clamp(min=1.0)
    noise = torch.randn(tensor.shape, device=tensor.device)
    largest = min(torch.finfo(tensor.dtype).max, torch.finfo(torch.float32).max)
    return ((noise + noise.sign()) * 8 * scale).clamp(-largest, largest).to(tensor.dtype)


def _opposite(tensor: torch.Tensor) -> torch.Tensor:
    """Each value negated."""
    if tolerance(tensor.dtype):
        return (-tensor.float()).to(tensor.dtype)
    return ~tensor if tensor.dtype == torch.bool else (-bits_of(tensor)).view(tensor.dtype)


def _is_left(tensor: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    """A mask of the elements of a result that are what was put there; of another kind of tensor none is."""
    written = None if tensor is None else memory_of(tensor)
    if tensor is None or written is None or written.shape != values.shape or written.dtype != values.dtype:
        return torch.zeros((), dtype=torch.bool, device=values.device)
    mask = bits_of(written) == bits_of(values)
    return mask.any(-1) if tensor.is_complex() else mask
