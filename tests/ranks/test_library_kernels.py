"""Kernels as libraries make them: subclasses of the autotuner, caches and hooks of their own."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner

from dist_tune import contextual_autotune
from dist_tune.testing import values
from tests.ranks.kernels import accumulate_kernel, add_kernel, autotuned, configs, launch
from tests.ranks.world import same_error
from tests.ranks.worlds import on_ranks

N = 64
QUICK: Any = {"is_dist": True, "n_repeat": 1, "n_warmup": 0}


class _Cached(Autotuner):  # type: ignore[misc]  # Triton is not typed
    """As flash-linear-attention's: looks for a file's config before Triton does, and has hooks of its own that stand for Triton's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.n_runs = 0
        if self.restore_value:
            self.pre_hook, self.post_hook = self._copy, self._put_back

    def _copy(self, kwargs: dict[str, Any], reset_only: bool = False) -> None:
        self.restore_copies = {} if reset_only else {name: kwargs[name].clone() for name in self.restore_value}

    def _put_back(self, kwargs: dict[str, Any], exception: Exception | None) -> None:
        for name, copy in self.restore_copies.items():
            kwargs[name].copy_(copy)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.n_runs += 1
        return super().run(*args, **kwargs)


class _Property(Autotuner):  # type: ignore[misc]  # Triton is not typed
    """Keeps all configs that it was launched with."""

    @property
    def best_config(self) -> Any:
        return self.history[-1]

    @best_config.setter
    def best_config(self, config: Any) -> None:
        self.__dict__.setdefault("history", []).append(config)


class _Slots(Autotuner):  # type: ignore[misc]  # Triton is not typed
    __slots__ = ("best_config", "nargs")


class _Own(MutableMapping[Any, Any]):
    """A cache that writes down what it is asked for."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    def __getitem__(self, key: Any) -> Any:
        return self.kept[key]

    def __setitem__(self, key: Any, config: Any) -> None:
        self.kept[key] = config

    def __delitem__(self, key: Any) -> None:
        del self.kept[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.kept)

    def __len__(self) -> int:
        return len(self.kept)


class _Bare:
    """A cache with no more than Triton asks for."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    def __contains__(self, key: object) -> bool:
        return key in self.kept

    def __getitem__(self, key: Any) -> Any:
        return self.kept[key]

    def __setitem__(self, key: Any, config: Any) -> None:
        self.kept[key] = config


class _Refusing(_Bare):
    """One whose author has left deletion to others."""

    def __delitem__(self, key: Any) -> None:
        raise NotImplementedError


class _Layered(_Own):
    """A mapping in memory above one on disk, which deletion leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.disk: dict[Any, Any] = {}

    def __contains__(self, key: object) -> bool:
        return key in self.disk

    def __getitem__(self, key: Any) -> Any:
        return self.kept.setdefault(key, self.disk[key])

    def __setitem__(self, key: Any, config: Any) -> None:
        self.kept[key] = self.disk[key] = config

    def __delitem__(self, key: Any) -> None:
        self.kept.pop(key, None)


class _Default(dict[Any, Any]):
    """A cache that knows a config for every key, as a library that routes keys to recorded configs."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: object) -> Any:
        return configs(32)[0]


def made(kind: str, **options: Any) -> Any:
    """A kernel as a library makes it."""
    classes: dict[str, Any] = {"cached": _Cached, "property": _Property, "slots": _Slots}
    if kind in classes:
        restored = options.pop("restore_value", None)
        kernel = options.pop("kernel", add_kernel)
        return classes[kind](kernel, kernel.arg_names, configs(16, 32, 64), ["n"], None, restored, **options)
    kernel = autotuned(options.pop("kernel", add_kernel), blocks=(16, 32, 64), **options)
    kernel.cache = {"own": _Own, "bare": _Bare, "default": _Default, "refusing": _Refusing, "layered": _Layered}[kind]()
    return kernel


def _of_a_library(rank: int, kind: str) -> Any:
    kernel, n_wrong = made(kind), []

    @contextual_autotune(**QUICK)
    def step(x: torch.Tensor) -> float:
        launched: list[int] = []

        def grid(meta: dict[str, Any]) -> tuple[int]:
            launched.append(meta["BLOCK"])
            return (triton.cdiv(N, meta["BLOCK"]),)

        y = torch.empty_like(x)
        kernel[grid](x, y, N)
        n_wrong.append(kernel.best_config.kwargs["BLOCK"] != launched[-1])
        return y[0].item()

    got = [step(torch.zeros(N)) for _ in range(3)]
    return got, sum(n_wrong), kernel.nargs, len(n_wrong) > 3, len(getattr(kernel.cache, "kept", kernel.cache))


@pytest.mark.parametrize("kind", ["cached", "property", "slots", "own", "bare", "default"])
def test_kernels_with_attributes_of_a_librarys_own(kind: str):
    """Subclasses with a run, a property or slots, and caches that are no plain dict."""
    runs_once = kind == "default"  # nothing to tune
    got = values(on_ranks(2, _of_a_library, kind))
    assert got == [([1.0] * 3, 0, None, not runs_once, 0 if runs_once else 1)] * 2


class _ReadOnly(Autotuner):  # type: ignore[misc]  # Triton is not typed
    @property
    def best_config(self) -> Any:
        return self.configs[0]


def _refused(rank: int, kind: str) -> Any:
    other = autotuned(blocks=(16, 32))
    if kind == "read-only":
        kernel = _ReadOnly(add_kernel, add_kernel.arg_names, configs(16, 32), ["n"], None, None)
    else:
        kernel = autotuned(configs=configs(16, 32, pre_hook=lambda full: other.best_config))
    return contextual_autotune(**QUICK)(lambda x: launch(kernel, x))(torch.zeros(N))


@pytest.mark.parametrize("kind", ["read-only", "not launched"])
def test_what_no_launch_can_do_is_told_with_tritons_reason(kind: str):
    """A ``best_config`` that cannot be set, and a hook that reads it from a kernel that was not launched, fail on all ranks."""
    words = ("no setter",) if kind == "read-only" else ("AttributeError", "has no attribute 'best_config'")
    same_error(on_ranks(2, _refused, kind), "NoValidConfigError", "add_kernel[64,", *words)


def _disputed(rank: int, kind: str) -> Any:
    kernel = made(kind)
    key, own = (N, "torch.float32", "torch.float32"), kernel.cache
    if kind != "default":
        own[key] = kernel.configs[rank]
    elif rank == 1:
        kernel.cache = own = {}
    step = contextual_autotune(**QUICK)(lambda x: launch(kernel, x)[0].item())
    called = [step(torch.zeros(N)) for _ in range(2)]
    return called, own[key].kwargs["BLOCK"], len(step.records), kernel.cache is own


@pytest.mark.parametrize("kind", ["own", "bare", "default", "refusing", "layered"])
def test_a_cache_of_a_librarys_own_is_tuned_anew_where_ranks_differ(kind: str):
    """Also one that cannot forget a key: it is hidden until it has the ranks' common config, and the library's mapping is back then."""
    first, second = values(on_ranks(2, _disputed, kind))
    assert first == second == ([1.0, 1.0], first[1], 1, True)


def _hooked(rank: int, kind: str) -> Any:
    x, y = torch.ones(N), torch.full((N,), 0.0 if kind == "restored" else 5.0)
    if kind == "restored":
        kernel = made("cached", kernel=accumulate_kernel, restore_value=["y_ptr"])
    else:
        kernel = autotuned(accumulate_kernel, blocks=(16, 32, 64))
        kernel.pre_hook = lambda full, reset_only=False: full["y_ptr"].zero_()
    other = autotuned(blocks=(16, 32))

    @contextual_autotune(**QUICK)
    def step(x: torch.Tensor) -> float:
        return launch(other, launch(kernel, x, y))[0].item()

    return [step(x) for _ in range(2)], y[0].item()


@pytest.mark.parametrize("kind", ["restored", "assigned"])
def test_hooks_that_a_library_puts_in_place_of_tritons(kind: str):
    """Hooks that copy and restore leave later launches what the kernel wrote; a hook that is assigned to a kernel is called."""
    assert values(on_ranks(2, _hooked, kind)) == [([2.0, 3.0], 2.0)] * 2
