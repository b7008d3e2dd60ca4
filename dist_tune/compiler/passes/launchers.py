"""Triton's launchers, built beside the compiler passes.

Up to Triton 3.6 a kernel's first load runs a C compiler on its launcher, 0.2 to 0.6 s while other kernels compile, and a launch may
wait for that. Kernels of one signature share it. Triton keeps it in its disk cache, where the load then finds it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_built: set[tuple[str, ...]] = set()
"""Signatures of this process."""
_lock = threading.Lock()


def build_ahead(source: Any) -> None:
    """Build the launcher of a kernel in a thread of its own, unless its form depends on what the compiler makes of the kernel."""
    try:
        from triton.backends.nvidia.driver import compile_module_from_src, include_dirs, libraries, library_dirs, make_launcher
    except ImportError:  # a Triton that needs none
        return
    signature = tuple(map(str, source.signature.values()))
    with _lock:
        if signature in _built or any(each.startswith("tensordesc") for each in signature):
            return
        _built.add(signature)

    def build() -> None:
        constants = {(source.fn.arg_names.index(at),) if isinstance(at, str) else at: value for at, value in source.constants.items()}
        text = make_launcher(constants, source.signature, None)
        compile_module_from_src(
            src=text, name="__triton_launcher", library_dirs=library_dirs(), include_dirs=include_dirs, libraries=libraries
        )

    threading.Thread(target=_attempt, args=[build], name="dist_tune launcher", daemon=True).start()


def _attempt(build: Callable[[], None]) -> None:
    with suppress(Exception):  # what fails here fails again where the kernel is loaded, and becomes a vote there
        build()
