"""What a run does that must not be done twice: optimizers that step, and kernels that write to memory that was there before.

Knows Triton's launches and torch's optimizers; nothing of candidates or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import _DummyThread, current_thread, get_ident
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dist_tune.distributed import is_symmetric
from dist_tune.runtime.recording import around_launches


@contextmanager
def noting_tensors(note: Callable[[str, torch.Tensor], object]) -> Iterator[None]:
    """Call ``note(name, tensor)`` of the tensors that kernels are given in this block, before each launch; not of peers' memory."""

    def around(run: Callable[..., Any], kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for name, value in (*zip(kernel.arg_names, args, strict=False), *kwargs.items()):
            for each in value if isinstance(value, tuple | list) else (value,):
                tensor = getattr(each, "base", None) if hasattr(each, "block_shape") else each
                if isinstance(tensor, torch.Tensor) and not is_symmetric(tensor):
                    note(f"{name} of {kernel.__name__}", tensor)
        return run(kernel, *args, **kwargs)

    with around_launches(around):
        yield


@contextmanager
def noting_training() -> Iterator[list[Any]]:
    """The optimizers that step meanwhile in this thread's tuned call, or in autograd's hooks."""
    stepped, thread = list[Any](), get_ident()

    def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if get_ident() == thread or isinstance(current_thread(), _DummyThread):
            stepped.append(optimizer)

    hook = register_optimizer_step_pre_hook(note)
    try:
        yield stepped
    finally:
        hook.remove()
