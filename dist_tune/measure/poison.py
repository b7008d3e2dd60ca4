"""Poison: other values in the memory of earlier results before a run, so that elements which the
run does not write show.

Knows tensors and who holds their memory; nothing of checks, candidates or ranks. An allocator gives
a candidate that writes nothing the memory that still holds the last right answer, and so does a
function that is given its output. The poison is NaN, because what is computed from it is NaN, too.
Integers and memory that objects hold are left alone: they may be flags, and peers may write to
symmetric memory at any time. Only where no peer is, all memory that a result has lain in is
poisoned. All of it happens between runs: a fill between the function's own kernels, as by a mode
that fills fresh allocations, could wait for one that spins until a peer answers, and overtake a
write on another stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import torch

from dist_tune.measure.memory import Region, Snapshot, bits_of, memory_of, shares_memory

_SMALL_BYTES = 64 << 20
"""Up to this size of the results, free memory for two more sets of them is poisoned, beyond it for
one.
"""

# Signalling NaNs where a format has them: what is computed from one is another NaN, so an element
# that still is this one was not written. With a sign, because a run in place may leave positive
# numbers as they are.
NANS = {
    torch.float64: 0xFFF5A5A5A5A5A5A5 - (1 << 64),
    torch.float32: 0xFFA5A5A5 - (1 << 32),
    torch.float16: 0xFD5A - (1 << 16),
    torch.bfloat16: 0xFFA5 - (1 << 16),
    torch.float8_e4m3fn: -0x01,
    torch.float8_e5m2: -0x03,
    torch.float8_e4m3fnuz: -0x80,
    torch.float8_e5m2fnuz: -0x80,
    torch.float8_e8m0fnu: -0x01,
}
"""Format -> the bits of its poison, as an integer."""
Place = tuple[str, str]
"""How memory is held, "argument", "captured" or "result", and its name."""


class ResultMemory:
    """Memory of the results of one function; one per tuning and rank."""

    def __init__(self, *, is_alone: bool) -> None:
        """``is_alone``: no peer is there, so that all memory of a result may be poisoned, integers
        and what objects hold, too.
        """
        self.held: dict[Place, bool] = {}
        """Arguments and captured tensors that results are part of -> True where a result is all of
        one.
        """
        self._is_alone = is_alone
        self._latest: list[Region] = []
        """Other results of the last run; all of them where no peer is."""
        self._is_read: bool | None = None
        """True if the function reads what lies where its results do, None if that is not known.

        One answer for all of them.
        """
        self._poisoned = Snapshot()

    @property
    def outputs(self) -> set[str]:
        """Arguments that results are part of, the same on all ranks."""
        return {name for kind, name in self.held if kind == "argument"}

    @property
    def is_poisoned(self) -> bool:
        """True while memory that somebody holds is poisoned."""
        return bool(self._poisoned.alive())

    def remember(self, results: list[torch.Tensor], tensors: Mapping[Place, torch.Tensor]) -> None:
        """Learn where the results of a run lie.

        ``tensors``: what its function was given, and has captured.
        """
        self._latest.clear()
        for result in results:
            places = (
                []
                if self._is_alone
                else [place for place, tensor in tensors.items() if shares_memory(result, [tensor])]
            )
            whole = [place for place in places if _is_all_of(tensors[place], result)]
            for place in whole or places[:1]:
                self.held[place] = self.held.get(place, False) or bool(whole)
            if not places and (region := Region.of(result)) is not None:
                self._latest.append(region)

    def forget(self) -> None:
        """Prepare for a call that is not similar: it may read what this one did not."""
        self._is_read = self._is_read or None

    def leave(self) -> None:
        """Put back what was poisoned, and poison nothing again that is held: the function reads
        it.
        """
        self._is_read = True
        self.restore()

    def poison_held(self, tensors: Mapping[Place, torch.Tensor]) -> None:
        """Poison what results were all of, unless the function reads it.

        What there is no room for a copy of is left alone.
        """
        known = (
            {}
            if self._is_read
            else {
                place: tensors[place]
                for place, is_whole in self.held.items()
                if is_whole and place in tensors
            }
        )
        for place, tensor in known.items():
            memory = memory_of(tensor)
            if memory is not None and memory.dtype in NANS:
                self._poisoned.keep(place, memory)
        for k, region in enumerate(self._latest * self._is_alone):
            if (memory := region.tensor()) is not None:
                self._poisoned.keep(("result", str(k)), memory)
        for memory, _ in self._poisoned.alive().values():
            _fill(memory)

    def poison_free(self, expected: list[torch.Tensor]) -> None:
        """Poison free memory that an allocator would give to the next result: one like the last, or
        like what is expected.
        """
        regions = self._latest or (
            [] if self.held else [each for each in map(Region.of, expected) if each is not None]
        )
        n_sets = 2 if sum(region.n_bytes for region in regions) < _SMALL_BYTES else 1
        with suppress(torch.OutOfMemoryError):
            # All of them before the first is freed, so that they are different blocks.
            blocks = [
                (torch.empty(each.n_bytes, dtype=torch.uint8, device=each.device), each.dtype)
                for each in regions * n_sets
            ]
            for block, dtype in blocks:
                real = dtype.to_real() if dtype.is_complex else dtype
                _fill(block[: block.numel() // real.itemsize * real.itemsize].view(real))

    def resolve(self, wrong: str, again: Callable[[], str], *, is_independent: bool) -> str:
        """Why a run is wrong, in the light of the poison before it: empty also where it may just
        have read that. Puts back what it read.

        Wrong with NaN and right without it means that the function reads its outputs. ``again``:
        asks another run, where no peer is. ``is_independent``: what is expected does not depend on
        what they held, so that poison which is left there was to be overwritten.
        """
        places = {place: memory for place, (memory, _) in self._poisoned.alive().items()}
        with_nan = [place for place, memory in places.items() if n_nan([memory])]
        # Masks of the elements that are poison still.
        left = (
            {place: bits_of(memory) == _poison_of(memory.dtype) for place, memory in places.items()}
            if wrong
            else {}
        )
        if not wrong:
            self._is_read = False if places else self._is_read
            self._poisoned.put_back(
                with_nan
                # A part that is kept from run to run, or NaN made of poison, at which a check did
                # not look
            )
            self._poisoned.forget()
            return ""
        self.restore()
        # A part of a captured cache may be kept from run to run, and an argument may be handed
        # through as it is.
        is_missing = all(place[0] == "captured" and each.all() for place, each in left.items()) or (
            is_independent
            and any(place[0] != "captured" and each.any() for place, each in left.items())
        )
        if left and is_missing:
            return wrong if wrong.endswith("?") else f"{wrong}: not written?"
        if left and self._is_alone:
            return (wrong := again()) and f"when repeated: {wrong}"
        if self._is_read is None and with_nan:
            wrong, self._is_read = "", True
        return wrong

    def restore(self) -> None:
        """Put back what was poisoned."""
        self._poisoned.put_back()
        self._poisoned.forget()


def _is_all_of(tensor: torch.Tensor, result: torch.Tensor) -> bool:
    whole, part = memory_of(tensor), memory_of(result)
    return (
        whole is not None
        and part is not None
        and (whole.data_ptr(), whole.numel()) == (part.data_ptr(), part.numel())
    )


def n_nan(tensors: Iterable[torch.Tensor]) -> int:
    """Elements that are poison, NaN that was computed from it, or other NaN.

    Waits for the device.
    """
    memories = [
        memory
        for tensor in tensors
        if (memory := memory_of(tensor)) is not None and memory.dtype in NANS
    ]
    return sum(
        int((each.float() if each.dtype.itemsize == 1 else each).isnan().sum()) for each in memories
    )


def _poison_of(dtype: torch.dtype) -> int:
    """The bits of an element; of integers a negative number."""
    return (
        1
        if dtype == torch.bool
        else NANS.get(dtype, int.from_bytes(b"\xaa" * dtype.itemsize, signed=True))
    )


def _fill(memory: torch.Tensor) -> None:
    bits_of(memory).fill_(_poison_of(memory.dtype))
