"""The attributes that vanilla tuning leaves on a ``triton.autotune`` kernel, set and told of as Triton does.

Knows ``Autotuner`` and Triton's knobs; nothing of launches, ranks or search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import triton
from triton import knobs
from triton.runtime import autotuner

from dist_tune.runtime.tunable import Timings


class KernelSlot:
    """Triton's config of a kernel for one key. A ``Slot``."""

    def __init__(self, kernel: Any, key: tuple[Any, ...]) -> None:
        self._kernel = kernel
        self._key = key

    def fill(self, config: triton.Config, timings: Timings) -> None:
        """Make Triton launch with ``config``, and set what vanilla tuning would set before its last launch, which sets ``best_config``."""
        cache = self._kernel.cache
        cache[self._key] = config
        if type(cache) is _Hiding and not cache.hidden:
            self._kernel.cache = cache.mapping
        self._kernel.configs_timings = {each: list(quantiles_ms) for each, quantiles_ms in timings.quantiles_ms}
        self._kernel.bench_time = timings.seconds

    def tell(self, *, is_hit: bool) -> None:
        """Call Triton's listener, and print its line of ``TRITON_PRINT_AUTOTUNING``; of a hit as of one in Triton's cache on disk."""
        kernel, timings_ms = self._kernel, self._kernel.configs_timings
        has_listener = hasattr(knobs.autotuning, "listener")
        if has_listener and len(timings_ms) < 2:
            return  # The Tritons that have a listener do not tune where pruning leaves one config.
        best = kernel.cache[self._key]
        if has_listener and knobs.autotuning.listener is not None:
            try:
                knobs.autotuning.listener(
                    fn=_innermost(kernel), key=self._key, best_config=best, configs_timings=timings_ms,
                    duration=None if is_hit else kernel.bench_time, cache_hit=is_hit,
                )  # fmt: skip
            except Exception as error:
                error.add_note(f"raised by knobs.autotuning.listener, told of {kernel.base_fn.__name__} with key {self._key}")
                raise
        if knobs.autotuning.print and not is_hit:
            print(  # noqa: T201  # Triton's own line, for those who read it from there
                f"Triton autotuning for function {kernel.base_fn.__name__},\nwith key as {self._key},\n"
                f"finished after {kernel.bench_time:.2f}s,\nbest config selected: {best};"
            )

    def clear(self) -> None:
        """Make the next launch a miss."""
        cache = self._kernel.cache
        if self._key not in cache:
            return
        with suppress(TypeError, AttributeError, KeyError, NotImplementedError):  # it knows no deletion
            del cache[self._key]
        if self._key in cache:  # still, or it has the config from elsewhere
            self._kernel.cache = _Hiding(cache, self._key)


class _Hiding:
    """Stands for a library's mapping that cannot forget, until it is filled again: hides keys."""

    def __init__(self, mapping: Any, key: Any) -> None:
        self.mapping, self.hidden = mapping, {key}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mapping, name)

    def __contains__(self, key: Any) -> bool:
        return key not in self.hidden and key in self.mapping

    def __getitem__(self, key: Any) -> Any:
        if key in self.hidden:
            raise KeyError(key)
        return self.mapping[key]

    def get(self, key: Any, default: Any = None) -> Any:
        """As of any mapping."""
        return default if key in self.hidden else self.mapping.get(key, default)

    def __setitem__(self, key: Any, config: Any) -> None:
        self.mapping[key] = config
        self.hidden.discard(key)

    def __delitem__(self, key: Any) -> None:
        self.hidden.add(key)

    def __iter__(self) -> Iterator[Any]:
        return (key for key in self.mapping if key not in self.hidden)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def config_for(kernel: Any, key: tuple[Any, ...]) -> triton.Config | None:
    """The config in a kernel's cache, asked as Triton asks: a library may have put its own mapping there."""
    cache = kernel.cache
    config: triton.Config | None = cache[key] if key in cache else None  # noqa: SIM401  # it may have no get, or another one
    return config


def own_hook(kernel: Any, name: str) -> Callable[..., Any] | None:
    """The ``pre_hook`` or ``post_hook`` that a kernel was given, or that was set on it later; None for Triton's own.

    None also for hooks that a subclass puts in place of Triton's to copy and restore ``restore_value``: a tensor is restored at the end
    of a replay, because later launches read it.
    """
    hook: Callable[..., Any] = getattr(kernel, name)
    if getattr(kernel, f"user_defined_{name}"):
        return hook
    return None if kernel.restore_value or hook.__module__ == autotuner.__name__ else hook


def _innermost(kernel: Any) -> Any:
    """The function that ``triton.jit`` has made."""
    layer = kernel.fn
    while layer.fn is not kernel.base_fn:
        layer = layer.fn
    return layer
