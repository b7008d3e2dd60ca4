"""Tensors that launches change and that a replay puts back at its end.

At the end of a replay and not after each launch, because later kernels read what the launch wrote. Tensors that die before it are forgotten
with their copies: a step of many layers has temporaries in each. Knows tensors and nothing of kernels.
"""

from __future__ import annotations

import torch

from dist_tune.measure import Region, overwrite

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors, each with a copy of its values."""


class Undo:
    """The tensors that one replay has changed."""

    def __init__(self) -> None:
        self._saved: dict[Region, torch.Tensor] = {}

    def keep(self, copies: Copies) -> None:
        """Keep the copies of tensors' values; the first of a replay counts."""
        for dead in [each for each in self._saved if each.storage is not None and each.storage.expired()]:
            del self._saved[dead]
        for tensor, copy in copies:
            region = Region.of(tensor)
            if region is not None:
                self._saved.setdefault(region, copy)

    def restore(self) -> None:
        """Put all back and forget them."""
        put_back(self._alive())
        self.forget()

    def exchange(self) -> None:
        """Put all back, and keep the values that were there instead."""
        alive = self._alive()
        values = [memory.clone() for memory, _ in alive]
        put_back(alive)
        regions = [region for region in self._saved if region.tensor() is not None]
        self._saved = dict(zip(regions, values, strict=True))

    def _alive(self) -> Copies:
        return [(memory, _real(copy)) for region, copy in self._saved.items() if (memory := region.tensor()) is not None]

    def forget(self) -> None:
        """Let what was written stand."""
        self._saved.clear()


def _real(copy: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(copy) if copy.is_complex() else copy


def copies_of(tensors: list[torch.Tensor]) -> Copies:
    """Tensors with copies of their values."""
    return [(tensor, tensor.detach().clone()) for tensor in tensors]


def put_back(copies: Copies) -> None:
    """Copy each second tensor into the first, the last pair first."""
    for tensor, copy in reversed(copies):
        overwrite(tensor, copy)
