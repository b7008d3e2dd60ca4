"""Candidates: the configs of a site, without repeats, in an order that is an identity.

Knows ``triton.Config`` as a value and nothing of how Triton tunes. The index of a candidate is what ranks compare and
reduce over, so two ranks must hold equal lists; ``describe`` is the form in which lists are compared and logged.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import triton

# Addresses differ between processes; two ranks must render one value the same way.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def stable_repr(value: object) -> str:
    """``repr`` without memory addresses: equal values read the same on every rank."""
    return _ADDRESS.sub("", repr(value))


def config_fields(config: triton.Config) -> dict[str, Any]:
    """All that tells one config from another, as plain values.

    ``str(Config)`` leaves out ``pre_hook``, and ``ir_override`` before Triton 3.9.
    """
    fields: dict[str, Any] = {name: _plain(value) for name, value in config.kwargs.items()}
    fields |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
    for name, default in (("num_ctas", 1), ("maxnreg", None), ("ir_override", None)):
        value = getattr(config, name, default)
        if value != default:
            fields[name] = _plain(value)
    if config.pre_hook is not None:
        hook = config.pre_hook
        fields["pre_hook"] = f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', type(hook).__qualname__)}"
    return fields


def describe(config: triton.Config) -> str:
    """A config on one line, "BLOCK_M=128 BLOCK_N=64 num_warps=4 num_stages=3", the same on every rank."""
    fields = config_fields(config)
    hook = fields.pop("pre_hook", None)
    return " ".join([f"{name}={value!r}" for name, value in fields.items()] + ([f"pre_hook={hook}"] if hook else []))


def unique(configs: Iterable[triton.Config]) -> list[triton.Config]:
    """The configs without repeats, in their order. Hooks compare by identity, as Triton compares them."""
    seen: dict[tuple[str, int], triton.Config] = {}
    for config in configs:
        seen.setdefault((describe(config), id(config.pre_hook)), config)
    return list(seen.values())


def digest(texts: Sequence[str]) -> str:
    """Short identity of a list of described configs."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _plain(value: object) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else stable_repr(value)
