"""Whether running a step again gives the same and leaves the same: what a run changes is found,
copied, compared, and put back.

The first run shows what a step changes: by version counters, and by sums of bits for writes that
torch does not count (``.data``, collectives, statistics of a batch norm, kernels). Only of that a
copy is made before the second run, the probe. Gradients are set aside. Knows tensors and who holds
them; nothing of candidates or ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dist_tune.accelerator import api
from dist_tune.measure.differences import difference, flat
from dist_tune.measure.memory import (
    Region,
    Snapshot,
    bits_of,
    memory_of,
    n_bytes_of,
    plain_tensors,
    tensors_in,
    version_of,
)
from dist_tune.measure.reachable import Holder, Leaf, Reachable, reachable

_MAX_NAMED = 5
_PIECE = 1 << 21
"""Elements that are summed at once."""


class _Look(NamedTuple):
    """What tells without a copy whether a tensor was changed."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    sum: int | None
    """Of its bits, weighed by place; of a tensor without memory of its own the number of torch's
    writes.
    """

    @classmethod
    def at(cls, tensor: torch.Tensor) -> _Look:
        """Now. Waits for the device."""
        memory = memory_of(tensor)
        if memory is None:
            return cls(0, (), (), version_of(tensor))
        return cls(memory.data_ptr(), memory.shape, memory.stride(), int(_sum_of_bits(memory)))

    def is_changed(self, before: _Look) -> bool:
        """True if the contents are others than before, wherever they lie."""
        return self[1:] != before[1:]


class _Gradient(NamedTuple):
    name: str
    parameter: torch.Tensor
    grad: torch.Tensor | None
    """That the first run has left."""
    is_made: bool
    """True if it was made by the first run: each run makes its own."""


class StepState:
    """The state that one call of a function can reach; made before its first run."""

    def __init__(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        is_watched: bool = True,
    ) -> None:
        """``is_watched``: False if the first run has been made already, so that what it has changed
        is not known.
        """
        self._call: tuple[Any, tuple[Any, ...], Mapping[str, Any]] = function, args, kwargs
        self._is_watched = is_watched
        self._reached = reachable(*self._call)
        self._looks = self._look() if is_watched else {}
        self._untouched: dict[int, Leaf] = {}
        """Tensors that the first run has left as they were."""
        self._gradients: list[_Gradient] = []
        self._values = Snapshot()
        self._copied: dict[Region, Leaf] = {}
        self._given: dict[int, StorageWeakRef] = {}
        """Memory that kernels of the first run were given: as long as this is held, its identity is
        that of no other.
        """
        self._unseen = ""
        """What kernels of the probe were given that only a copy would show a change of, where there
        is no room for one.
        """
        self._holders: list[tuple[Holder, Any]] = []
        self._by_storage: dict[int, Leaf] = {}
        self.repeated: list[str] = []
        """Names of what plain objects hold and the probe has changed: each replay does so again."""

    def _look(self) -> dict[int, _Look]:
        return {key: _Look.at(leaf.tensor) for key, leaf in self._reached.leaves.items()}

    def _changed(self) -> list[Leaf]:
        """What has changed since the last look."""
        before, leaves = self._looks, self._reached.leaves
        return [
            leaves[key]
            for key, look in self._look().items()
            if key in before and look.is_changed(before[key])
        ]

    def why_not(self, stepped: Iterable[Any]) -> str:
        """First look, after the first run: why it cannot be repeated; empty if nothing says so.

        ``stepped``: of ``noting_training``.
        """
        for each in stepped:
            return f"calls {self._reached.names.get(id(each), type(each).__name__)}.step()"
        if why := self._cannot():
            return why
        moved = [
            leaf.name
            for leaf in self._reached.leaves.values()
            if leaf.tensor.grad_fn is not leaf.node
        ]
        return f"changes the autograd graph of {_listed(moved)}" if moved else ""

    def _cannot(self) -> str:
        if self._reached.once:
            return f"can use up {_listed(self._reached.once)}"
        return "reaches more objects than can be looked at" if self._reached.is_cut else ""

    def keep(self) -> str:
        """Before the probe: copy what the first run has changed.

        Why that cannot be put back; empty if all is well.
        """
        # Held, so that no identity is given away again.
        before, known = (self._looks, self._reached.leaves)
        self._reached = reachable(*self._call)
        self._looks, leaves = self._look(), self._reached.leaves
        if why := self._cannot():
            return why
        moved = [
            leaves[key].name
            for key, look in self._looks.items()
            if leaves[key].is_state
            and key in before
            and look.is_changed(before[key])
            and look[:3] != before[key][:3]
        ]
        if moved:  # by resize_ or .data =: a probe would again
            return f"gives other memory to {_listed(moved)}"
        same = {
            key
            for key, look in self._looks.items()
            if before.get(key) == look and known[key].version == leaves[key].version
        }
        self._untouched = {key: leaves[key] for key in same}
        for name, parameter in self._reached.parameters.values():
            parts = (
                {id(each) for each in plain_tensors(parameter.grad)}
                if parameter.grad is not None
                else set()
            )
            is_made = bool(parts) and self._is_watched and not parts & before.keys()
            self._gradients.append(_Gradient(name, parameter, parameter.grad, is_made))
            same |= parts if is_made else set()
        changed = [
            leaf
            for key, leaf in leaves.items()
            if key not in same and (leaf.is_state or self._is_watched)
        ]
        for each in sorted(changed, key=lambda each: not each.is_state):
            if not self._copy(each.tensor, each) and each.is_state:
                return f"changes {each.name}, of which no copy can be made"
        self._by_storage = {
            leaf.tensor.untyped_storage()._cdata: leaf
            for key, leaf in leaves.items()
            if self._looks[key].address
        }
        self._holders = [(holder, holder.read()) for holder in self._reached.holders]
        for device in {leaf.tensor.device for leaf in leaves.values()}:
            self._values.spare(device)
        return ""

    def changed(self) -> str:
        """Names of what has changed since the last look; after a yes, of what the first run had
        left alone. Waits for the device.
        """
        return _listed(each.name for each in self._changed())

    def add_given(self, name: str, tensor: torch.Tensor) -> None:
        """Note memory that a kernel of the first run is given."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._given:
            self._given[storage._cdata] = StorageWeakRef(storage)

    def keep_given(self, name: str, tensor: torch.Tensor) -> None:
        """Before a kernel of the probe is given a tensor, which it may write to: copy that, if it
        was there before.
        """
        storage = tensor.untyped_storage()._cdata
        known = self._by_storage.get(storage)
        if known is not None:
            self._copy(tensor, known)
        elif storage in self._given and not self._copy(
            tensor, Leaf(name, tensor, "captured", (), None, None)
        ):
            self._unseen = name

    def compare(self) -> str:
        """Second look, after the probe: what it has left otherwise than the first run; empty if
        nothing. Waits for the device.
        """
        leaves = [*self._changed(), *(self._copied[key] for key in self._values.changed())]
        found = [(leaf.name, leaf.is_state) for leaf in leaves]
        found += [
            (name, each.is_state)
            for each, contents in self._holders
            for name in each.changes(contents)
        ]
        for name, parameter, before, is_made in self._gradients:
            if is_made and (
                parameter.grad is None or difference(flat(parameter.grad), flat(before))
            ):
                found.append((f"{name}.grad", True))
        self.repeated = list(dict.fromkeys(name for name, is_state in found if not is_state))
        changed = list(dict.fromkeys(name for name, is_state in found if is_state))
        if self._unseen and not changed:
            return f"may change {self._unseen}, of which no copy can be made"
        # A step of it may follow from a counter.
        if self.repeated and not changed and self._reached.training:
            return (
                f"changes {_listed(self.repeated)} each time it runs beside"
                f" {self._reached.training}"
            )
        return f"changes {_listed(changed)} each time it runs" if changed else ""

    def put_back(self) -> None:
        """After a no: what the first run has left, to the bit.

        Objects that lead to memory of peers stay as the probe has left them.
        """
        shared = self._reached.shared
        self._values.put_back(
            [
                key
                for key, each in self._copied.items()
                if each.is_state or shared.isdisjoint(each.owners)
            ]
        )
        for holder, contents in self._holders:
            if id(holder.value) not in shared:
                holder.write(contents)
        # The graph of the first run's value may have saved these versions.
        if written := [
            (leaf.tensor, leaf.version)
            for leaf in self._reached.leaves.values()
            if leaf.version is not None
        ]:
            torch._C._autograd._unsafe_set_version_counter(*zip(*written, strict=True))
        for gradient in self._gradients:
            gradient.parameter.grad = gradient.grad
        self._gradients.clear()
        self._forget()

    def _forget(self) -> None:
        for kept in (self._copied, self._given, self._holders, self._by_storage):
            kept.clear()
        self._values.forget()
        self._reached, self._call = Reachable(), (None, (), {})

    def accept(self) -> None:
        """After a yes: free the copies, and the gradients of the first run."""
        self._forget()
        self._reached.leaves = {key: each for key, each in self._untouched.items() if each.is_state}
        self._gradients = [
            gradient._replace(grad=None) for gradient in self._gradients if gradient.is_made
        ]

    def begin_replay(self) -> None:
        """Before each run but the first: gradients that a run makes are not there yet."""
        for gradient in self._gradients:
            if gradient.is_made:
                gradient.parameter.grad = None

    def _copy(self, tensor: torch.Tensor, leaf: Leaf) -> bool:
        """Copy a tensor's memory, if that is not copied yet; False if there is no room.

        ``leaf``: what it is known as.
        """
        region = Region.of(tensor)
        if region is not None and region not in self._copied and self._values.keep(region, tensor):
            self._copied[region] = leaf
        return region in self._copied if region is not None else tensor.numel() == 0


def written(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[int, int | None]:
    """Torch's counts of writes to all tensors that a call can reach.

    Waits for nothing, and sees no write of a kernel.
    """
    return {
        key: version_of(leaf.tensor)
        for key, leaf in reachable(function, args, kwargs).leaves.items()
    }


def sums_of(value: Any) -> list[int]:
    """The sums of the bits of a value's tensors, which tell whether they are written to.

    Waits for the device.
    """
    memories = [
        memory_of(each)
        for tensor in tensors_in(value, has_fields=True).values()
        for each in plain_tensors(tensor)
    ]
    return [int(_sum_of_bits(memory)) for memory in memories if memory is not None]


def _sum_of_bits(memory: torch.Tensor) -> torch.Tensor:
    """The sum of the elements as integers, each times a random number by its place, on their
    device; by pieces, because it widens them.
    """
    words = bits_of(
        memory.permute(sorted(range(memory.dim()), key=memory.stride, reverse=True))
    ).reshape(-1)
    if n_bytes_of(words) % 8 == 0 and words.data_ptr() % 8 == 0:
        words = words.view(torch.int64)
    pieces = words.split(_PIECE)
    weights = _weights(memory.device, 1 << (max(pieces[0].numel(), len(pieces)) - 1).bit_length())
    # Of eight bytes the upper half is added to the lower one: a multiplication loses what it
    # carries out of the top.
    wide = (
        piece + (piece >> 32) * 0x9E3779B1 if piece.dtype == torch.int64 else piece.long()
        for piece in pieces
    )
    sums = torch.stack([(each * weights[: each.numel()]).sum() for each in wide])
    return (sums * weights[: len(pieces)]).sum()


@lru_cache
def _weights(device: torch.device, n: int) -> torch.Tensor:
    """Random odd numbers."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(-(1 << 63), (1 << 63) - 1, (n,), generator=generator, device=device) | 1


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_MAX_NAMED]) + (
        f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    )


def peak_bytes() -> int:
    """Peak of the memory that this process has allocated on the current GPU; 0 without one."""
    return api.max_memory_allocated() if api.is_available() and api.is_initialized() else 0
