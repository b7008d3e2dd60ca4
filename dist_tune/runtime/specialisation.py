"""The specialisation of a launch: the classes of its arguments that Triton compiles a kernel of its own for.

An int that is 1, a multiple of 16 or neither, a tensor that is aligned to 16 bytes or not, the value of a ``tl.constexpr``. Triton's own
function tells them apart. Knows nothing of configs, candidates or ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import triton
from triton.runtime.autotuner import Heuristics
from triton.runtime.jit import JITFunction

from dist_tune.runtime.kernel_launch import Launch
from dist_tune.runtime.tunable import Tunable

_INTS = (1, 16, 3)
"""Ints of the classes that Triton knows."""
_MAX_CHARS = 40

Kind = Literal["int", "tensor", "constexpr", "other"]


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a launch as the compiler sees it."""

    kind: Kind
    compiled: str
    """Equal for arguments that share a kernel."""
    text: str
    """The value and its class, for people."""


def specialisation(launch: Tunable) -> dict[str, Argument]:
    """Name -> argument, without those of the config; empty where nothing is compiled, or the kernel is not Triton's own."""
    if not isinstance(launch, Launch) or (kernel := _jit_function(launch.kernel)) is None:
        return {}
    named = {**dict(zip(launch.kernel.arg_names, launch.arguments[0], strict=False)), **launch.arguments[1]}
    # Triton raises what it likes for arguments that it cannot take: the launch itself will say so.
    with suppress(Exception):
        device = triton.runtime.driver.active.get_current_device()
        _, classes, _ = kernel.device_caches[device][-1](**{each.name: named.get(each.name) for each in kernel.params})
        given = zip(kernel.params, classes, strict=True)
        return {each.name: _argument(each, named[each.name], found) for each, found in given if each.name in named}
    return {}


def foreseen(launch: Tunable, names: list[str]) -> Iterator[Tunable]:
    """The launch with other classes of these arguments, one argument at a time; only plain ints have foreseeable ones."""
    assert isinstance(launch, Launch)
    args, kwargs = launch.arguments
    for name in names:
        at = launch.kernel.arg_names.index(name)
        for value in _INTS:
            if at < len(args):
                yield Launch(launch.kernel, (*args[:at], value, *args[at + 1 :]), kwargs)
            else:
                yield Launch(launch.kernel, args, {**kwargs, name: value})


def has_heuristics(launch: Tunable) -> bool:
    """True if constants of the kernel follow from arguments and config, so that launches of one specialisation may differ."""
    return isinstance(launch, Launch) and isinstance(getattr(launch.kernel, "fn", None), Heuristics)


def _jit_function(kernel: Any) -> JITFunction[Any] | None:
    while kernel is not None and not isinstance(kernel, JITFunction):
        kernel = getattr(kernel, "fn", None)
    return kernel


def _argument(param: Any, value: Any, found: Any) -> Argument:
    if hasattr(value, "block_shape"):  # the config's hook sets the blocks, later
        return Argument("other", f"descriptor {getattr(value.base, 'dtype', '')}", "a descriptor")
    compiled = str(found)
    if param.is_constexpr:
        return Argument("constexpr", compiled, _shown(value))
    if hasattr(value, "data_ptr"):
        is_aligned = value.data_ptr() % 16 == 0
        return Argument("tensor", compiled, "aligned to 16 bytes" if is_aligned else f"at an address of {value.data_ptr() % 16} modulo 16")
    if type(value) is int:
        kind = "1, a constant" if value == 1 else "a multiple of 16" if value % 16 == 0 else "no multiple of 16"
        return Argument("int", compiled, f"{value} ({kind})")
    return Argument("other", compiled, _shown(value))


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, bool | int | float | str | None) else getattr(value, "__name__", type(value).__name__)
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."
