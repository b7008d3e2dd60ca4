"""The state that a step changes in place, so that replays of it leave what its first run left.

The first run shows which tensors a step changes: torch counts its writes to them (``_version``), and arguments that kernels write have
other values after the next run. The state after the first run is kept and put back, so a step that acts in place acts once, by its first
run, whose value is the call's. Replays draw random numbers, too, and the generators are put back. Knows tensors and who can reach them;
nothing of candidates or ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dist_tune.distributed import is_symmetric
from dist_tune.errors import InPlaceError
from dist_tune.measure.memory import has_same_bits, leaves_of, memory_of, overwrite, room_bytes, shares_memory, version_of
from dist_tune.measure.reachable import Reachable, Reached, reachable

_HOST_LIMIT_BYTES = 2 << 30
_SMALL_BYTES = 64 << 20
_COMPARED_SHARE = 0.05
"""Share of a device's peak so far for copies of arguments that only might have been changed; larger ones are copied to the host."""


def _cuda_state() -> torch.Tensor | None:
    return torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def generators_in(value: Any) -> list[tuple[torch.Generator, torch.Tensor]]:
    """The generators in nested tuples, lists and dicts, with their states."""
    return [(leaf, leaf.get_state()) for _, leaf in leaves_of(value) if isinstance(leaf, torch.Generator)]


@dataclass(frozen=True)
class RngState:
    """State of this process's random generators when this object was made: Python's, numpy's, torch's on the CPU and the current GPU."""

    others: list[tuple[torch.Generator, torch.Tensor]] = field(default_factory=list)
    """Generators that a function is given, with their states."""

    python: Any = field(default_factory=random.getstate)
    numpy: Any = field(default_factory=np.random.get_state)
    torch_cpu: torch.Tensor = field(default_factory=torch.get_rng_state)
    torch_cuda: torch.Tensor | None = field(default_factory=_cuda_state)

    def restore(self) -> None:
        """Go back to that state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda is not None:
            torch.cuda.set_rng_state(self.torch_cuda)
        for generator, state in self.others:
            generator.set_state(state)


class StepState:
    """The state that one call's step can reach."""

    def __init__(self, roots: Mapping[str, Any], *, restores: bool, known: frozenset[str] | None = None) -> None:
        """Note the versions of tensors before the first run.

        ``restores``: False refuses a step that changes its state. ``known``: the first run has begun already, and these are the names of
        what it changes, as an earlier call has shown.
        """
        self.has_changed = known is not None
        """True if the first run counts, because the step acts in place, or because it is not known."""
        self._roots = roots
        self._restores = restores
        self._known = known
        self.names: set[str] = set()
        """Names of what the step was seen to change."""
        self._written: list[Reached] = []
        # The tensors are kept with their versions, so that no identity is given away again.
        reached = reachable(roots)
        self._before = {key: (each, version_of(each.tensor)) for key, each in reached.tensors.items()}
        self._buffers: dict[int, torch.Tensor] = {}
        """Identity of a module's buffer -> its values: torch does not count the writes of a batch norm to its statistics."""
        if known is None:
            buffers = [reached.tensors[key] for key in reached.buffers if not is_symmetric(reached.tensors[key].tensor)]
            self._buffers = {id(each.tensor): copy for each, copy in _small_copies(buffers)}
        self._attributes = [(each, version_of(each.tensor)) for key, each in reached.attributes.items() if key not in self._before]
        self.not_kept: list[str] = []
        """Names of tensors that the first run has changed and that replays change again: attributes of objects."""
        self._bare = {key for key, (each, _) in self._before.items() if each.tensor.is_leaf and each.tensor.grad is None}
        """Tensors without a gradient: one that a run makes is made again by the next."""
        self._graded = {key for key, (each, _) in self._before.items() if each.tensor.is_leaf} - self._bare
        self._changed: list[tuple[Reached, torch.Tensor]] = []
        """Tensors that the step changes, with copies of what its first run left."""
        self._versions: list[tuple[torch.Tensor, int]] = []
        """Of these tensors, as the first run left them: the graph of its value may have saved them."""
        self._compared: list[tuple[Reached, torch.Tensor]] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = []
        """Tensor, its gradient at the beginning of a replay, and the one that the first run left."""
        self._states: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        """Dicts of optimizers and the like, with copies."""
        self._generators = [(each, each.get_state()) for each in reached.generators]
        """Generators of random numbers of the step's own, at the beginning of a replay."""
        self._generators_left: list[tuple[torch.Generator, torch.Tensor]] = []
        """The same, as the first run left them."""
        self.is_kept = False
        """True after ``keep``."""
        self.is_comparing = True
        """False after ``keep`` if what kernels write shall not be found: the first run counts only if torch has written."""

    def note_first_run(self) -> None:
        """Find out what the first run has changed, by the versions."""
        self._after = reachable(self._roots)
        made = {id(each.tensor.grad) for key, each in self._after.tensors.items() if key in self._bare}
        written = [each for key, each in self._after.tensors.items() if key not in made and self._is_written(key, each)]
        self._written = [each for each in written if not is_symmetric(each.tensor)]
        self.has_changed |= bool(self._written)
        self.names |= {each.name for each in self._written}
        self._buffers.clear()
        changed = [each for each, version in self._attributes if version is not None and version != version_of(each.tensor)]
        changed = [each for each in changed if id(each.tensor) not in self._after.tensors and not is_symmetric(each.tensor)]
        # Views of one tensor count their writes together.
        self.not_kept = [each.name for each in changed if not shares_memory(each.tensor, [other.tensor for other in self._written])]
        self._attributes.clear()

    def keep(self, *, is_comparing: bool = True) -> str:
        """Before the second run: copy what the first one left; returns what is kept, for people.

        ``is_comparing``: False if ``compare`` is not worth the memory.

        Raises:
            InPlaceError: the step changes tensors, and may not or cannot be restored.
        """
        self.is_kept = True
        self.is_comparing = is_comparing and self._restores
        self._before.clear()
        n_bytes = _n_bytes(self._written)
        names = ", ".join(f"{each.name} ({_n_bytes([each])} bytes)" for each in self._written[:5])
        names += f" and {len(self._written) - 5} more" if len(self._written) > 5 else ""
        remedy = "pass reset= with a function that puts them back before each replay, or call the step once on copies to tune it"
        if self._written and not self._restores:
            raise InPlaceError(
                f"the step changes {names} in place, and tuning runs it many times: {remedy}, or leave restore= at its default."
            )
        if not _fits(self._written):
            raise InPlaceError(f"the step changes {names} in place, {n_bytes} bytes in all, too much for copies in free memory: {remedy}.")
        self._changed = [(each, each.tensor.detach().clone()) for each in self._written]
        self._versions = [(each.tensor, version) for each in self._written if (version := version_of(each.tensor)) is not None]
        if self.is_comparing:
            mine = {id(each.tensor) for each in self._written}
            rest = [each for each in self._after.tensors.values() if each.is_compared and id(each.tensor) not in mine]
            self._compared = _small_copies([each for each in rest if not is_symmetric(each.tensor)])
        self._keep_objects(self._after)
        self._generators_left = [(each, each.get_state()) for each, _ in self._generators]
        del self._after
        return names

    def compare(self, written: list[torch.Tensor]) -> str:
        """After the second run: find arguments with other values than the first one left, which kernels have written; their names.

        ``written``: memory that holds what the first run left, and that the second has changed as well.
        """
        found = [(each, copy) for each, copy in self._compared if shares_memory(each.tensor, written) or not _is_same(each.tensor, copy)]
        self._compared.clear()
        self.is_comparing = False
        self._changed += found
        self.names |= {each.name for each, _ in found}
        self.has_changed |= bool(found)
        if not self.has_changed:
            self._gradients = [(tensor, at_first, None) for tensor, at_first, _ in self._gradients]
        return ", ".join(f"{each.name} ({_n_bytes([each])} bytes)" for each, _ in found)

    def put_back(self, *, is_last: bool = False) -> None:
        """Put back what the first run left, if the step changes it. Gradients that it made are left out, until the end."""
        for tensor, at_first, left in self._gradients:
            tensor.grad = left.to(tensor.device) if is_last and left is not None else at_first
        for generator, state in self._generators_left if is_last else self._generators:
            generator.set_state(state)
        if self.has_changed or is_last:
            # Those that were not compared yet at the end, because there was one run too few, may have changed, too.
            for each, copy in [*self._changed, *(self._compared if is_last else [])]:
                overwrite(each.tensor, copy)
            if is_last and self._versions:
                torch._C._autograd._unsafe_set_version_counter(*zip(*self._versions, strict=True))
            for mine, kept in self._states:
                mine.clear()
                mine.update(kept)

    def forget(self) -> None:
        """Free the copies."""
        for kept in (self._written, self._changed, self._versions, self._compared, self._gradients, self._states, self._before):
            kept.clear()

    def _is_written(self, key: int, each: Reached) -> bool:
        if self._known is not None:
            return each.name in self._known
        if key not in self._before:
            return True  # made by the run: an optimizer's state
        version = version_of(each.tensor)
        if version is not None and version != self._before[key][1]:
            return True
        copy = self._buffers.get(key)
        return copy is not None and (copy.shape != each.tensor.shape or not _is_same(each.tensor, copy))

    def _keep_objects(self, reached: Reachable) -> None:
        """Gradients, and plain values of optimizers and the like, which replays replace."""
        leaves = [(key, each.tensor) for key, each in reached.tensors.items() if each.tensor.is_leaf]
        made = [(leaf, leaf.grad) for key, leaf in leaves if key in self._bare and leaf.grad is not None]
        if not self.has_changed:  # most likely they are not needed, and the next run makes them again
            n_bytes = sum(grad.numel() * grad.element_size() for _, grad in made)
            self.is_comparing = self.is_comparing and n_bytes <= _HOST_LIMIT_BYTES
            made = [(leaf, grad.cpu() if self.is_comparing else grad) for leaf, grad in made]
        keeps = self.is_comparing or self.has_changed
        self._gradients = [(leaf, None, grad if keeps else None) for leaf, grad in made]
        # Not those of tensors that the run has made: the gradients themselves among them.
        self._gradients += [(leaf, leaf.grad, leaf.grad) for key, leaf in leaves if key in self._graded]
        self._states = [(each, dict(each)) for each in reached.states]


def _n_bytes(tensors: Iterable[Reached]) -> int:
    return sum(each.tensor.numel() * each.tensor.element_size() for each in tensors)


def _small_copies(tensors: list[Reached]) -> list[tuple[Reached, torch.Tensor]]:
    """Copies of the smaller tensors: on their device first, then on the host, as far as both have room for what may not be needed."""
    copies, n_bytes = [], 0
    on_device_bytes = max(_SMALL_BYTES, _COMPARED_SHARE * peak_bytes())
    for each in sorted(tensors, key=lambda each: _n_bytes([each])):
        n_bytes += _n_bytes([each])
        if n_bytes <= _HOST_LIMIT_BYTES and memory_of(each.tensor) is not None:
            copies.append((each, each.tensor.detach().clone() if n_bytes <= on_device_bytes else each.tensor.detach().cpu()))
    return copies


def peak_bytes() -> int:
    """Peak of the memory that this process has allocated on the current GPU; 0 without one."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() and torch.cuda.is_initialized() else 0


def _fits(tensors: list[Reached]) -> bool:
    """True if copies of the tensors fit into the free memory of their devices."""
    devices = {each.tensor.device for each in tensors}
    on = {device: _n_bytes(each for each in tensors if each.tensor.device == device) for device in devices}
    return all(on[device] <= room_bytes(device, _HOST_LIMIT_BYTES) for device in devices)


def _is_same(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """True if all bits are equal, NaN's too."""
    mine, theirs = (memory_of(each) for each in (tensor.detach().to(copy.device), copy))
    return mine is None or theirs is None or has_same_bits(mine, theirs)
