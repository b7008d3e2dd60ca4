"""Whether a run without arguments returns what it should, and writes all of it.

Knows tensors, and that a run may be repeated; nothing of candidates, ranks or times. A run that writes nothing returns what the one before
it has left in the same memory, which may be the right answer. So what a run returned is spoiled, and the run repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dist_tune.measure.compare import difference
from dist_tune.measure.result_memory import fill
from dist_tune.measure.rng import RngState
from dist_tune.measure.tensor_memory import is_one_of, tensors_in

_NOT_RUN = object()
_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def wrong_output(run: Callable[[], Any], ground_truth: Any, atol: float, rtol: float, result: Any = _NOT_RUN) -> str:
    """Why what ``run()`` returns is not ``ground_truth``, on one line; empty if it is. Runs it once more for each tensor returned.

    A tensor in which ``run`` leaves elements as they were is wrong there, whatever stood there before. One that ``run`` reads before it
    writes (``x.relu_()``) is left as it was found. ``result``: of a run that has been made; hold no other reference to it.

    Raises:
        Exception: whatever ``run`` raises.
        TypeError: ``run`` returns the memory of ``ground_truth`` itself.
    """
    with torch.no_grad():
        state = RngState()
        result = run() if result is _NOT_RUN else result
        if wrong := difference(result, ground_truth, rtol, atol):
            return wrong
        tensors = tensors_in(result)
        del result
        expected = list(tensors_in(ground_truth).values())
        if any(is_one_of(tensor, expected) for tensor in tensors.values()):
            raise TypeError("run() returns the memory of its ground truth, so nothing would ever be wrong: copy one of them")
        for path in list(tensors):
            memory = tensors.pop(path)
            state.restore()
            if not _is_writable(memory):
                continue
            before = memory.clone()
            _put(memory, _spoil)
            if difference(run(), ground_truth, rtol, atol):
                if wrong := _unwritten_elements(run, memory, before, path):
                    return wrong
                memory.copy_(before)  # it reads what it writes
                state.restore()
                if wrong := difference(run(), ground_truth, rtol, atol):  # and with that it is to be right again
                    return f"when repeated: {wrong}"
    return ""


def _spoil(memory: torch.Tensor) -> None:
    if not fill(memory):
        memory.copy_(_poison(memory))


def _put(memory: torch.Tensor, write: Callable[[torch.Tensor], Any]) -> None:
    """Write to a result's memory, and to memory that the next result may lie in: functions and allocators take turns with two."""
    write(memory)
    write(torch.empty_like(memory))


def _unwritten_elements(run: Callable[[], Any], memory: torch.Tensor, before: torch.Tensor, path: Any) -> str:
    """How many elements of a result are left as they were found; empty if none is.

    Values that come out as they were put in may be made of them, as the larger of them and 0. With the opposite put in they are not, then.
    """
    left = torch.ones((), dtype=torch.bool, device=memory.device)
    for values in (poison := _poison(before), _opposite(poison)):
        _put(memory, lambda tensor, values=values: tensor.copy_(values))  # type: ignore[misc]
        tensor = tensors_in(run()).get(path)
        if tensor is None or tensor.shape != values.shape or tensor.dtype != values.dtype:
            return ""
        is_same = _bits(tensor) == _bits(values)
        left = left & (is_same.all(-1) if tensor.is_complex() else is_same)
    memory.copy_(before)
    return f"{int(left.sum())} of {left.numel()} elements are not written: they are what was there before" if left.any() else ""


def _is_writable(tensor: torch.Tensor) -> bool:
    """Whether something can be put there: not where elements share memory, nor outside inference mode, if made in it."""
    try:
        tensor.copy_(tensor.clone())
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).contiguous().view(torch.int64 if tensor.dtype == torch.complex128 else torch.int32)
    tensor = tensor.contiguous()
    return tensor if tensor.dtype == torch.bool else tensor.view(_BYTES[tensor.dtype.itemsize])


def _poison(like: torch.Tensor) -> torch.Tensor:
    """Finite values, none of them by chance where they should be: far from all that is right, each another one."""
    if like.dtype == torch.bool:
        return like.logical_not()
    if like.dtype.is_floating_point or like.dtype.is_complex:
        scale = (like if like.is_complex() else like.float()).abs().nan_to_num(0.0, 0.0, 0.0).max().clamp(min=1.0) if like.numel() else 1.0
        noise = torch.randn(like.shape, device=like.device)
        values = (noise + noise.sign()) * 8 * scale
        largest = min(torch.finfo(like.dtype).max, torch.finfo(torch.float32).max)
        return values.clamp(-largest, largest).to(like.dtype)
    return like.view(_BYTES[like.dtype.itemsize]).bitwise_not().view(like.dtype)  # torch does not compute with uint16 and wider ones


def _opposite(poison: torch.Tensor) -> torch.Tensor:
    if poison.dtype == torch.bool:
        return poison.logical_not()
    if poison.dtype.is_floating_point or poison.dtype.is_complex:
        return (-poison.float() if not poison.dtype.is_complex else -poison).to(poison.dtype)
    integers = poison.view(_BYTES[poison.dtype.itemsize]).bitwise_not()
    return (integers ^ 1 if poison.dtype == torch.uint8 else integers + 1).view(poison.dtype)
