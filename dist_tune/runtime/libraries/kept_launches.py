"""Wrappers around kernels that keep what the first launch has compiled, and do not ask the tuner again, as flag_gems' LibEntry.

What such a wrapper keeps while its kernel has no config is taken from it after each run, so that it asks again. Knows nothing of listeners.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterator, MutableMapping
from threading import get_ident
from types import CodeType
from typing import Any

from triton.runtime.jit import KernelInterface

_MAX_FRAMES = 12
keepers: dict[int, dict[int, tuple[MutableMapping[Any, Any], frozenset[Any]]]] = {}
"""Thread -> id -> mapping of a wrapper, with the keys that it had before the launch."""


def note_keepers(kernel: Any, threads: Collection[int]) -> None:
    """Called in a launch of the kernel: note what the wrappers around it, which are in the middle of this launch, hold now.

    ``threads``: those with a run under way. The launch is of the calling one's, or, on a thread of autograd's, of the only one's.
    """
    thread = get_ident() if get_ident() in threads else next(iter(list(threads)), get_ident())
    frame, inner, before = sys._getframe(1), {id(kernel)}, keepers.setdefault(thread, {})
    for _ in range(_MAX_FRAMES):
        if (frame := frame.f_back) is None:  # type: ignore[assignment]  # the outermost one has none
            return
        # Reading the variables of a frame keeps them alive as long as it runs: of no frame of the step, which may have a "run" as well.
        wrapper = frame.f_locals.get("self") if _is_launch(frame.f_code) else None
        if isinstance(wrapper, KernelInterface) and any(id(each) in inner for each in vars(wrapper).values()):
            inner.add(id(wrapper))
            for each in _mappings(wrapper):
                before.setdefault(id(each), (each, frozenset(each)))


def forget_kept(thread: int) -> None:
    """After a run of this thread: take from wrappers what they have kept since."""
    for mapping, known in keepers.pop(thread, {}).values():
        for key in frozenset(mapping) - known:  # at once, because other threads may be launching
            mapping.pop(key, None)


def _is_launch(code: CodeType) -> bool:
    """True for the code of ``run`` in a class of kernels, or of wrappers around them."""
    classes: list[type] = [KernelInterface] if code.co_name == "run" else []
    for each in classes:
        classes += each.__subclasses__()
    return any(getattr(inspect.unwrap(getattr(each, "run", None)), "__code__", None) is code for each in classes)  # type: ignore[arg-type]


def _mappings(wrapper: Any) -> Iterator[MutableMapping[Any, Any]]:
    for value in vars(wrapper).values():
        for each in value if isinstance(value, tuple | list) else (value,):  # one for each device
            if isinstance(each, MutableMapping):
                yield each
