"""Calls that are traced and not run: under torch.compile and torch.export, and with fake, functional or meta tensors.

Knows torch's tracers by name, and imports none of them: they take a second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dist_tune.measure.memory import tensors_in

_TRACERS = frozenset({"FakeTensorMode", "FunctionalTensorMode", "ProxyTorchDispatchMode"})
_WITHOUT_DATA = frozenset({"FakeTensor", "FunctionalTensor"})


def is_traced(arguments: Any) -> bool:
    """True if a call with these arguments computes no values: its times mean nothing, and its results cannot be checked."""
    if torch.compiler.is_compiling() or any(_has_base(mode, _TRACERS) for mode in _get_current_dispatch_mode_stack()):
        return True
    return any(
        each.is_meta or _has_base(each, _WITHOUT_DATA) or torch._is_functional_tensor(each) for each in tensors_in(arguments).values()
    )


def _has_base(value: object, names: frozenset[str]) -> bool:
    return any(base.__name__ in names for base in type(value).__mro__)
