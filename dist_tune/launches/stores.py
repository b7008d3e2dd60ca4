"""What a run does that must not be done twice: training that steps, and kernels that write to
memory that was there before.

Knows Triton's launches and torch's optimizers; nothing of candidates or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from threading import _DummyThread, current_thread, get_ident
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dist_tune.compiler import SharedContext, replaced
from dist_tune.launches.recording import around_launches
from dist_tune.measure import tensor_of
from dist_tune.ranks import is_symmetric


@contextmanager
def noting_tensors(note: Callable[[str, torch.Tensor], object]) -> Iterator[None]:
    """Call ``note(name, tensor)`` of the tensors that kernels are given in this block, before each
    launch; not of peers' memory.
    """

    def around(
        run: Callable[..., Any], kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        for name, value in (*zip(kernel.arg_names, args, strict=False), *kwargs.items()):
            for each in value if isinstance(value, tuple | list) else (value,):
                tensor = tensor_of(each)
                if tensor is not None and not is_symmetric(tensor):
                    note(f"{name} of {kernel.__name__}", tensor)
        return run(kernel, *args, **kwargs)

    with around_launches(around):
        yield


@contextmanager
def noting_training() -> Iterator[list[Any]]:
    """The optimizers, LR schedulers and GradScalers that step meanwhile in this thread's tuned
    call, or in autograd's hooks.
    """
    stepped, thread = list[Any](), get_ident()

    def note(owner: Any) -> None:
        if get_ident() == thread or isinstance(current_thread(), _DummyThread):
            stepped.append(owner)

    _notes.append(note)
    try:
        with _training():
            yield stepped
    finally:
        _notes.remove(note)


_notes: list[Callable[[Any], None]] = []


def _noted(run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def step(owner: Any, *args: Any, **kwargs: Any) -> Any:
        for note in list(_notes):
            note(owner)
        return run(owner, *args, **kwargs)

    return step


@contextmanager
def _heard_training() -> Iterator[None]:
    """Schedulers and scalers by the methods of their classes: the probe compares those alone that
    the step leads to.
    """
    with ExitStack() as stack:
        stack.callback(
            register_optimizer_step_pre_hook(_noted(lambda optimizer, args, kwargs: None)).remove
        )
        classes = [LRScheduler, torch.amp.GradScaler]
        for cls in classes:
            classes += cls.__subclasses__()
            for name in {"step", "update"} & vars(cls).keys():
                stack.enter_context(replaced(cls, name, _noted))
        yield


# A second thread that makes a first call would put back the first one's methods.
_training = SharedContext(_heard_training)
