"""``release=``: what lets a kernel or config that waits for ever go on, written or called from another thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from dist_tune.validation import spelled

Releases = Sequence["torch.Tensor | Callable[[], object]"]
"""Flags that spinning kernels wait for, which are filled with ones, and functions, which are called."""


def check_release(given: object) -> None:
    """Refuse what is no sequence of tensors and functions.

    Raises:
        TypeError: it is none, or holds something else.
    """
    if not isinstance(given, list | tuple):
        raise TypeError(f"release must be a list of tensors and functions, got {spelled(given)}")
    for each in given:
        if not isinstance(each, torch.Tensor) and not callable(each):
            raise TypeError(f"release must hold tensors, which are filled with ones, and functions, got {spelled(each)}")


class Release:
    """The releases of one tuning, made ready before anything hangs: a kernel that spins may hold up allocations and new streams."""

    def __init__(self, given: Releases) -> None:
        self._given = given
        flags = [each for each in given if isinstance(each, torch.Tensor)]
        on_gpu = [each for each in flags if each.is_cuda]
        # From pinned memory the copy engine writes them; a kernel that fills them might find no free multiprocessor.
        self._ones = {id(each): torch.ones_like(each, device="cpu", pin_memory=each.is_cuda) for each in flags}
        self._device = on_gpu[0].device if on_gpu else torch.device("cuda") if torch.cuda.is_initialized() else None
        self._stream = torch.cuda.Stream(self._device) if self._device is not None and given else None

    def __bool__(self) -> bool:
        return bool(self._given)

    def __call__(self) -> None:
        """Write all flags and call all functions, on a stream beside the one that hangs."""
        with ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            for each in self._given:
                if isinstance(each, torch.Tensor):
                    each.copy_(self._ones[id(each)], non_blocking=True)
                else:
                    each()
