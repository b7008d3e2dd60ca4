"""Launches of `triton.jit` kernels that Triton looks up once: a look-up of some 20 arguments takes
the host four times what a launch takes.

Knows compiled kernels; knows nothing of steps. For launches for which no tuner chooses a config.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver, jit
from triton.runtime.jit import JITFunction

ALIGNMENT_BYTES = 16
"""Triton compiles another kernel where an address is no multiple of this."""
_compiled: dict[Hashable, tuple[Any, Any, tuple[Any, ...]]] = {}
"""Kernel, device, knobs, key and alignments -> that kernel, its compiled form, and the values of
its constexpr arguments.
"""


def launch(
    kernel: Any,
    n_programs: tuple[int, ...],
    args: tuple[Any, ...],
    fixed: dict[str, Any],
    *,
    key: Hashable,
) -> None:
    """Queue a kernel on the current stream; `args` in its order, among them tensors, and `fixed`:
    what it takes by name.

    `key` is to say all that Triton compiles for but the alignment of tensors: dtypes, numbers that
    are specialised on, and `fixed`. Tensor descriptors are taken to start at multiples of 16 bytes,
    as they have to.
    """
    if not isinstance(kernel, JITFunction) or _has_more_to_do(kernel):
        kernel[n_programs](*args, **fixed)
        return
    aligned = tuple(
        [arg.data_ptr() % ALIGNMENT_BYTES == 0 for arg in args if isinstance(arg, torch.Tensor)]
    )
    # Of the current device, which need not be that of the tensors: a compiled kernel is loaded
    # there.
    whole_key = id(kernel), driver.active.get_current_device(), _knobs(), key, aligned
    known = _compiled.get(whole_key)
    if known is not None:
        _, compiled, constants = known
        compiled[(*n_programs, 1, 1)[:3]](*args, *constants)
        return
    compiled = kernel[n_programs](*args, **fixed)
    if compiled is not None:  # a `jit_cache_hook` may prevent the launch
        _compiled[whole_key] = (
            kernel,
            compiled,
            tuple(fixed[name] for name in kernel.arg_names[len(args) :]),
        )


def _has_more_to_do(kernel: JITFunction[Any]) -> bool:
    """True where a launch is to pass through Triton's look-up, and what that answers is not to be
    kept.

    As where the look-up is replaced, in replays of a tuner, which may note launches or leave them
    out; and where it calls hooks.
    """
    is_own = getattr(JITFunction.run, "__globals__", None) is vars(jit)
    return (
        not is_own
        or bool(kernel.pre_run_hooks)
        or knobs.runtime.add_stages_inspection_hook is not None
    )


def _knobs() -> Hashable:
    """The knobs that Triton reads at each launch and compiles for: debugging, instruments of a
    profiler, and one of Triton 3.9.
    """
    compilation = knobs.compilation
    return (
        knobs.runtime.debug,
        compilation.instrumentation_mode,
        getattr(compilation, "fpsan_homomorphic_casts", None),
    )
