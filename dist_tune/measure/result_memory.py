"""Where the results of a function lie, and what stands there before a run: nothing that may be taken for a new result.

Knows tensors and who holds their memory; nothing of checks, candidates or ranks. An allocator gives a candidate that writes nothing
the memory that still holds the last right answer, and so does a function that is given its output. Memory that nobody
holds is filled with NaN; memory that somebody holds, too, but with a copy, until it is known that the function does not
read it. What only a context holds is left alone: peers may write to symmetric memory at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from dist_tune.measure.tensor_memory import Path, Region, is_one_of, tensors_in_objects

_NO_ARGUMENT = object()
_SMALL_BYTES = 64 << 20
"""Of results; of what is larger, memory for one more set of results is spoiled, and not for two."""

# Signalling NaNs where a format has them: what is computed from one is another NaN, so what still is this one was not written.
_SPOILT: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float64: (torch.int64, 0x7FF5A5A5A5A5A5A5),
    torch.float32: (torch.int32, 0x7FA5A5A5),
    torch.float16: (torch.int16, 0x7D5A),
    torch.bfloat16: (torch.int16, 0x7FA5),
    torch.float8_e4m3fn: (torch.int8, 0x7F),
    torch.float8_e5m2: (torch.int8, 0x7D),
    torch.float8_e4m3fnuz: (torch.int8, -0x80),
    torch.float8_e5m2fnuz: (torch.int8, -0x80),
    torch.float8_e8m0fnu: (torch.int8, -1),
}
_SPOILT_BYTE = 0x55
"""Of integers that nobody holds. Those that somebody holds may be flags that kernels wait for."""


class _Part(NamedTuple):
    """Which part of an argument a result is."""

    shift_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    whole: tuple[Any, ...]
    """Of the argument: dtype, shape, strides."""

    def of(self, argument: torch.Tensor) -> Region | None:
        """The same part of another argument; None if that one is made differently, or has less memory around it."""
        region = Region.of(argument)
        if region is None or self.whole != (region.dtype, region.shape, region.strides):
            return None
        start, rest = divmod(region.offset * region.dtype.itemsize + self.shift_bytes, self.dtype.itemsize)
        end = start + 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        if rest or start < 0 or end * self.dtype.itemsize > region.n_bytes:
            return None
        return region._replace(dtype=self.dtype, offset=start, shape=self.shape, strides=self.strides)


class Place(NamedTuple):
    """Memory of an earlier result that somebody holds."""

    key: Path
    """The position of the argument that it is part of; for memory that is no argument, itself."""
    tensor: torch.Tensor

    @property
    def is_argument(self) -> bool:
        """Whether the function is given it."""
        return self.key[0] is not _NO_ARGUMENT


class ResultMemory:
    """Where results lay; one per function that is tuned."""

    def __init__(self) -> None:
        self.outputs: dict[Path, set[_Part]] = {}
        """Positions of arguments that results are part of: the same on all ranks."""
        self._regions: dict[Region, None] = {}
        """Results of runs of the same call that are no arguments, the latest last."""
        self._latest: list[Region] = []
        """Those of the last run of any call."""
        self._is_read: dict[Path, bool] = {}
        """Whether the function needs what lies there, where that is known."""
        self._copies: list[tuple[Place, torch.Tensor]] = []
        """What was spoiled where it is not known."""
        self._has_mixed = False
        """Whether several were spoiled at once, and one of them is read: it takes a run for each to learn which."""
        self._suspected: list[Place] = []
        """What is taken to be read since the last run."""

    def remember(self, results: list[torch.Tensor], arguments: Mapping[Path, torch.Tensor]) -> None:
        """The results of a run. Those of the last few stay remembered, since functions take turns with two or three buffers."""
        self._latest.clear()
        for result in results:
            region = Region.of(result)
            position = next((path for path, argument in arguments.items() if is_one_of(result, [argument])), None)
            if position is not None:
                parts = self.outputs.setdefault(position, set())
                whole = Region.of(arguments[position])
                if region is not None and whole is not None:
                    shift_bytes = result.data_ptr() - arguments[position].data_ptr()
                    parts.add(_Part(shift_bytes, region.dtype, region.shape, region.strides, (whole.dtype, whole.shape, whole.strides)))
            elif region is not None:
                self._latest.append(region)
                self._regions.pop(region, None)
                self._regions[region] = None
        for region in list(self._regions)[: -max(8, 3 * len(self._latest))]:
            del self._regions[region]

    def forget(self, *, is_similar: bool) -> None:
        """Another call comes next: what was a result may be its input by now. One that is not similar may read what this one did not."""
        self._regions.clear()
        self._is_read = {key: is_read for key, is_read in self._is_read.items() if key[0] is not _NO_ARGUMENT and (is_read or is_similar)}

    def held(self, arguments: Mapping[Path, torch.Tensor], roots: tuple[Any, ...]) -> list[Place]:
        """Memory of earlier results that somebody holds and that may be spoiled.

        Not where it is read, nor integers, nor what only objects hold that can be reached from ``roots``.
        """
        outputs = [(path, part.of(arguments[path])) for path, parts in self.outputs.items() if path in arguments for part in parts]
        places = [Place(path, tensor) for path, region in outputs if region is not None and (tensor := region.tensor()) is not None]
        others = [((_NO_ARGUMENT, region.storage), region.tensor()) for region in self._regions]
        hidden = [Place(key, tensor) for key, tensor in others if tensor is not None]
        if hidden:
            # Peers may write to symmetric memory at any time, and a cache of keys and values is not ours to spoil.
            contexts = tensors_in_objects(roots)
            places += [place for place in hidden if contexts is not None and not is_one_of(place.tensor, contexts)]
        return [place for place in places if place.tensor.dtype in _SPOILT and not self._is_read.get(place.key, False)]

    def spoil(self, places: list[Place]) -> None:
        """Fill memory that somebody holds with NaN, and keep a copy where it is not known yet that nobody reads it."""
        untried = [place for place in places if place.key not in self._is_read]
        if self._has_mixed:
            untried = [place for place in untried if place.key == untried[0].key]
        self._copies += [(place, place.tensor.clone()) for place in untried]
        for place in [*untried, *(place for place in places if self._is_read.get(place.key) is False)]:
            fill(place.tensor)

    def spoil_free(self, expected: list[torch.Tensor]) -> None:
        """Fill memory with NaN that an allocator would give to the next result: one like the last, or like what is expected."""
        regions = self._latest or ([] if self.outputs else [each for each in map(Region.of, expected) if each is not None])
        n_sets = 2 if sum(region.n_bytes for region in regions) < _SMALL_BYTES else 1
        with suppress(torch.OutOfMemoryError):
            blocks = [(torch.empty(each.n_bytes, dtype=torch.uint8, device=each.device), _real(each.dtype)) for each in regions * n_sets]
            for block, dtype in blocks:
                if dtype in _SPOILT:
                    fill(block[: block.numel() // dtype.itemsize * dtype.itemsize].view(dtype))
                elif dtype != torch.bool:
                    block.fill_(_SPOILT_BYTE)

    def settle(self, results: list[torch.Tensor], wrong: str, *, is_independent: bool) -> tuple[str, bool]:
        """The verdict on a run in the light of what was spoiled before it, and whether that may be what made it wrong.

        Puts back what is read, or may be. ``is_independent``: what is expected does not depend on what the arguments held.
        """
        copies, self._copies = self._copies, []
        suspected, self._suspected = self._suspected, []
        is_mine = [is_one_of(place.tensor, results) for place, _ in copies]
        mine = [place for (place, _), yes in zip(copies, is_mine, strict=True) if yes]
        if not wrong:
            self._is_read |= {place.key: False for place in mine}
            _put_back([each for each, yes in zip(copies, is_mine, strict=True) if not yes])
            return "", False
        if not mine:  # wrong by itself, and so may have been the run before
            for place in suspected:
                del self._is_read[place.key]
        is_wrong_anyhow = any(_is_unwritten(place) if is_independent and place.is_argument else _is_untouched(place) for place in mine)
        _put_back(copies)
        if is_wrong_anyhow or not mine:
            return wrong, False
        if len({place.key for place in mine}) > 1:
            self._has_mixed = True
        else:
            self.leave(mine)
            self._suspected = mine
        return "", True

    def leave(self, places: list[Place]) -> None:
        """Never spoil these again: the function reads what lies there."""
        self._is_read |= {place.key: True for place in places}

    def has_untried(self, arguments: Mapping[Path, torch.Tensor]) -> bool:
        """Whether a result is an argument of which it is not known yet if the function reads it."""
        return any(place.is_argument and place.key not in self._is_read for place in self.held(arguments, ()))

    def restore(self) -> None:
        """Put back what was spoiled for a run that has not been settled."""
        copies, self._copies = self._copies, []
        _put_back(copies)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def fill(tensor: torch.Tensor) -> bool:
    """Fill a tensor with NaN; False if its format has none."""
    if tensor.dtype not in _SPOILT:
        return False
    integer, pattern = _SPOILT[tensor.dtype]
    tensor.view(integer).fill_(pattern)
    return True


def _n_left(place: Place) -> int:
    integer, pattern = _SPOILT[place.tensor.dtype]
    return int((place.tensor.view(integer) == pattern).sum())


def _is_unwritten(place: Place) -> bool:
    """Whether an argument that nothing should have been read from has been written in part, or without having been read."""
    tensor = place.tensor.float() if place.tensor.dtype.itemsize == 1 else place.tensor
    return _n_left(place) > 0 or not bool(tensor.isnan().any())


def _is_untouched(place: Place) -> bool:
    """Whether nothing at all was written; not of an argument, which may be handed through."""
    return not place.is_argument and _n_left(place) == place.tensor.numel()


def _put_back(copies: list[tuple[Place, torch.Tensor]]) -> None:
    for place, copy in reversed(copies):
        place.tensor.copy_(copy)
