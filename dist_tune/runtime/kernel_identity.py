"""What tells a kernel from another of its name and key: its code, all that decides its candidates, and the values these have captured.

Knows the attributes of Triton's ``Autotuner``; nothing of launches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from dist_tune.cache import anatomy, digest
from dist_tune.configs import describe_all
from dist_tune.runtime.kernel_slot import own_hook

_identities: WeakKeyDictionary[Any, Mapping[str, str]] = WeakKeyDictionary()


class Later(Mapping[str, str]):
    """A mapping that is made when it is first read, which may never be: one kernel alone with its name and key needs no identity."""

    def __init__(self, make: Callable[[], Mapping[str, str]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> Mapping[str, str]:
        return self._make()

    def __getitem__(self, name: str) -> str:
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def identity_of(kernel: Any) -> Mapping[str, str]:
    """All that decides code and candidates; equal for one kernel, even if the decorated object is made anew.

    The code with its callees, heuristics, hooks and tensors to zero and restore; the rules that prune, the names of the key and the configs
    before pruning; and each value that any of these has captured. Made once for each kernel object: of a kernel of a module when it is
    read, of one that a function makes at once, because what that captures may change.
    """
    if kernel not in _identities:
        if "<locals>" not in kernel.base_fn.__qualname__:
            return Later(lambda: _keep(kernel))
        _keep(kernel)
    return _identities[kernel]


def _keep(kernel: Any) -> Mapping[str, str]:
    if kernel not in _identities:
        _identities[kernel] = {**anatomy(_parts_of(kernel)), "configs": digest(describe_all(kernel.configs))}
    return _identities[kernel]


def _parts_of(kernel: Any) -> dict[str, Any]:
    """All that decides code and candidates of a kernel, by name; "code" is that of the kernel itself and of its callees."""
    layer, heuristics = kernel.fn, []
    while layer.fn is not kernel.base_fn:
        heuristics += [part for pair in sorted(getattr(layer, "values", {}).items()) for part in pair]
        layer = layer.fn
    hooks = [hook for name in ("pre_hook", "post_hook") if (hook := own_hook(kernel, name)) is not None]
    config_hooks = {id(config.pre_hook): config.pre_hook for config in kernel.configs if config.pre_hook is not None}
    return {
        "code": layer,
        "heuristics": tuple(heuristics),
        "hooks": (own_hook(kernel, "pre_hook") is not None, *hooks),
        "config_hooks": tuple(config_hooks.values()),
        **{name: getattr(kernel, name, None) for name in ("early_config_prune", "perf_model", "configs_top_k")},
        **{name: ",".join(map(str, getattr(kernel, name))) for name in ("keys", "reset_to_zero", "restore_value")},
    }
