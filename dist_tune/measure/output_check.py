"""The check of a run without arguments that may be repeated at will: it returns what it should, and writes all of it.

Knows tensors; nothing of candidates, ranks or times. A run that writes nothing returns what the one before it has left in the same memory,
which may be the right answer. So other values are put there, and the run is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from dist_tune.measure.compare import difference, tolerance
from dist_tune.measure.memory import Path, shares_memory, tensors_in
from dist_tune.measure.rng import RngState

_NOT_RUN = object()
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def wrong_output(run: Callable[[], Any], ground_truth: Any, atol: float, rtol: float, result: Any = _NOT_RUN) -> str:
    """Why what ``run()`` returns is not ``ground_truth``, on one line; empty if it is. Runs it once more for each tensor returned.

    A tensor in which ``run`` leaves elements as they were is wrong there, right values included. One that ``run`` reads before it
    writes (``x.relu_()``) is left as it was found. ``result``: of a run that has been made; hold no other reference to it.

    Raises:
        Exception: errors of ``run``.
        TypeError: ``run`` returns the memory of ``ground_truth`` itself.
    """
    random = RngState()

    def again() -> Any:
        random.restore()
        return run()

    with torch.no_grad():
        result = run() if result is _NOT_RUN else result
        if wrong := difference(result, ground_truth, rtol, atol):
            return wrong
        tensors = tensors_in(result)
        del result
        expected = list(tensors_in(ground_truth).values())
        if any(shares_memory(tensor, expected) for tensor in tensors.values()):
            raise TypeError("run() returns the memory of its ground truth, so nothing would ever be wrong: copy one of them")
        for path in list(tensors):
            memory = tensors.pop(path)
            if not _is_writable(memory):
                continue
            before = memory.clone()
            repeated, left = _overwritten(again, memory, before, path)
            if left.any():
                memory.copy_(before)
                return f"{int(left.sum())} of {left.numel()} elements are not written: they are what was there before"
            if difference(repeated, ground_truth, rtol, atol):  # it may read what it writes: then it is right with that put back
                memory.copy_(before)
                if wrong := difference(again(), ground_truth, rtol, atol):
                    return f"when repeated: {wrong}"
    return ""


def _overwritten(run: Callable[[], Any], memory: torch.Tensor, before: torch.Tensor, path: Path) -> tuple[Any, torch.Tensor]:
    """The result of ``run()`` after other values were put into the memory of one of its tensors, and a mask of those left there.

    Values that come out as they were put in may be made of them, as max(x, 0) is. With the opposite put in they are not, then.
    """
    left = torch.ones((), dtype=torch.bool, device=memory.device)
    for values in _unlike(before):
        memory.copy_(values)
        torch.empty_like(memory).copy_(values)  # an allocator may give this to the next result
        result = run()
        tensor = tensors_in(result).get(path)
        if tensor is None or tensor.shape != values.shape or tensor.dtype != values.dtype:
            return result, torch.zeros_like(left)
        left = left & (_bits(tensor) == _bits(values))
        if not left.any():
            break
    return result, left


def _is_writable(tensor: torch.Tensor) -> bool:
    """True if values can be put there: not where elements share memory, nor, outside inference mode, where they were made in it."""
    try:
        tensor.copy_(tensor.clone())
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _unlike(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Two sets of finite values: far from those of a right result, each another one, and the second the opposite of the first."""
    if tolerance(tensor.dtype):
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.dtype.is_complex else tensor.float()
        scale = real.abs().nan_to_num(0.0, 0.0, 0.0).max().clamp(min=1.0) if tensor.numel() else 1.0
        noise = torch.randn(tensor.shape, device=tensor.device)
        largest = min(torch.finfo(tensor.dtype).max, torch.finfo(torch.float32).max)
        values = ((noise + noise.sign()) * 8 * scale).clamp(-largest, largest)
        yield from (values.to(tensor.dtype), (-values).to(tensor.dtype))
    elif tensor.dtype == torch.bool:
        yield from (~tensor, tensor)
    else:  # other bits: torch does not compute with wide unsigned integers and packed formats
        integers = tensor.view(_INTEGERS[tensor.dtype.itemsize])
        yield from (each.view(tensor.dtype) for each in (~integers, integers + 1))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers."""
    tensor = torch.view_as_real(tensor.resolve_conj())[..., 0] if tensor.is_complex() else tensor
    return tensor if tensor.dtype == torch.bool else tensor.contiguous().view(_INTEGERS[tensor.dtype.itemsize])
