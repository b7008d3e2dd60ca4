"""Wrappers around kernels that keep what the first launch has compiled, and do not ask the tuner again, as flag_gems' LibEntry.

What such a wrapper keeps while its kernel has no config is taken from it after each run, so that it asks again. Knows nothing of listeners.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, MutableMapping
from typing import Any

from triton.runtime.jit import KernelInterface

_MAX_FRAMES = 12
_before: dict[int, tuple[MutableMapping[Any, Any], frozenset[Any]]] = {}
"""Id -> mapping of a wrapper, with the keys that it had before the launch."""


def note_keepers(kernel: Any) -> None:
    """Called in a launch of the kernel: note what the wrappers around it, which are in the middle of this launch, hold now."""
    frame, inner = sys._getframe(1), {id(kernel)}
    for _ in range(_MAX_FRAMES):
        if (frame := frame.f_back) is None:  # type: ignore[assignment]  # the outermost one has none
            return
        code = frame.f_code
        # Reading the variables of a frame keeps them alive as long as it runs: of no frame of the step.
        wrapper = frame.f_locals.get("self") if code.co_name == "run" and "self" in code.co_varnames[: code.co_argcount] else None
        if isinstance(wrapper, KernelInterface) and any(id(each) in inner for each in vars(wrapper).values()):
            inner.add(id(wrapper))
            for each in _mappings(wrapper):
                _before.setdefault(id(each), (each, frozenset(each)))


def forget_kept() -> None:
    """After a run: take from wrappers what they have kept since."""
    while _before:
        mapping, known = _before.popitem()[1]
        for key in [each for each in mapping if each not in known]:
            mapping.pop(key, None)


def _mappings(wrapper: Any) -> Iterator[MutableMapping[Any, Any]]:
    for value in vars(wrapper).values():
        for each in value if isinstance(value, tuple | list) else (value,):  # one for each device
            if isinstance(each, MutableMapping):
                yield each
