"""Launches of `triton.jit` kernels that Triton looks up once: a look-up of some 20 arguments takes the host four times what a launch takes.

Knows compiled kernels; knows nothing of steps. For launches for which no tuner chooses a config.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from triton.runtime.jit import JITFunction

ALIGNMENT_BYTES = 16
"""Triton compiles another kernel where an address is no multiple of this."""
_look_up = JITFunction.run  # Triton's own
_compiled: dict[Hashable, tuple[Any, Any, tuple[Any, ...]]] = {}
"""Kernel, device, key and alignments -> that kernel, its compiled form, and the values of its constexpr arguments."""


def launch(kernel: Any, n_programs: tuple[int, ...], args: tuple[Any, ...], fixed: dict[str, Any], *, key: Hashable) -> None:
    """Queue a kernel on the current stream; `args` in its order, among them tensors, and `fixed`: what it takes by name.

    `key` is to say all that Triton compiles for but the alignment of tensors: dtypes, numbers that are specialised on, and `fixed`. Tensor
    descriptors are taken to start at multiples of 16 bytes, as they have to.
    """
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    aligned = tuple([tensor.data_ptr() % ALIGNMENT_BYTES == 0 for tensor in tensors])
    whole_key = id(kernel), tensors[0].device, key, aligned
    known = _compiled.get(whole_key)
    # Where the look-up is replaced, as in a tuner's replays, launches are to pass through it: it may note them, or leave them out.
    if known is not None and JITFunction.run is _look_up:
        _, compiled, constants = known
        compiled[(*n_programs, 1, 1)[:3]](*args, *constants)
        return
    compiled = kernel[n_programs](*args, **fixed)
    if compiled is not None:  # the interpreter compiles nothing
        _compiled[whole_key] = kernel, compiled, tuple(fixed[name] for name in kernel.arg_names[len(args) :])
