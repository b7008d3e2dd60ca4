"""One launch of an autotuned kernel, with its arguments.

Knows the attributes of Triton's ``Autotuner``: configs, key, cache, hooks, and the tensors to zero and restore. Knows nothing of
ranks, times or search, and does not patch anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import triton

from dist_tune.cache import Code, nearest_key, read_code
from dist_tune.compiler import NotLoaded
from dist_tune.configs import describe_all, distinct, stable_repr
from dist_tune.errors import NoValidConfigError
from dist_tune.measure import Span
from dist_tune.runtime.kernel_identity import identity_of
from dist_tune.runtime.kernel_slot import KernelSlot, config_for, own_hook
from dist_tune.runtime.libraries.own_runs import own_key, own_run_of
from dist_tune.runtime.tunable import Slot
from dist_tune.runtime.undo import Copies, Undo, copies_of, put_back

_PLAIN_WORD = re.compile(r"(?!(None|True|False|Ellipsis|inf|nan)$)[A-Za-z_][\w.-]*", re.ASCII)
_codes: WeakKeyDictionary[Any, Code] = WeakKeyDictionary()
_texts: WeakKeyDictionary[Any, dict[int, tuple[ref[triton.Config], str]]] = WeakKeyDictionary()
"""Kernel -> its configs by id, with their descriptions."""


class Launch:
    """One call of an autotuned kernel. A ``Tunable``."""

    is_compiled = True
    is_whole = False
    is_recorded = False
    prepare = dry_run = None

    def __init__(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.owner = self.kernel = kernel
        self.key = tuning_key(kernel, args, kwargs)
        self.arguments = args, kwargs
        self.slot: Slot = KernelSlot(kernel, self.key)

    @property
    def name(self) -> str:
        """Name of the kernel function with its module, the same on all ranks."""
        function = self.kernel.base_fn
        return f"{function.__module__}.{function.__qualname__.rpartition('<locals>.')[2]}".removeprefix("__main__.")

    @property
    def identity(self) -> Mapping[str, str]:
        """All that decides code and candidates; equal for launches of one kernel, even if the decorated object is made anew."""
        return identity_of(self.kernel)

    def source(self) -> str:
        """Digest of the code, and of all it calls; made once for each kernel object."""
        return self._code().digest

    def not_followed(self) -> list[str]:
        """Imports whose code is not in that digest."""
        return self._code().not_followed

    def _code(self) -> Code:
        if self.kernel not in _codes:
            _codes[self.kernel] = read_code(self.kernel)
        return _codes[self.kernel]

    def checker(self) -> None:
        """None: the result of a kernel is unknown here."""

    @property
    def key_text(self) -> str:
        """The tuning key, the same on all ranks for equal keys."""
        return _text(self.key)

    def nearest_config(self) -> triton.Config | None:
        """The config in use for the nearest other key."""
        cache = self.kernel.cache
        known = {_text(key): cache[key] for key in cache if isinstance(key, tuple | str)} if isinstance(cache, Mapping) else {}
        return known.get(nearest_key(self.key_text, list(known)))

    @property
    def n_configs(self) -> int:
        """Configs before pruning, without repeats."""
        return len({self.describe(config) for config in self.kernel.configs})

    def known_config(self) -> triton.Config | None:
        """The config that Triton would launch; None for a miss and for kernels with one config."""
        return config_for(self.kernel, self.key) if len(self.kernel.configs) > 1 else None

    def candidates(self) -> list[triton.Config]:
        """The configs after the kernel's own pruning, without repeats."""
        self.kernel.nargs = self._named()
        try:
            configs = self.kernel.prune_configs(self.arguments[1])
        finally:
            self.kernel.nargs = None
        return distinct(configs, self._describe([*self.kernel.configs, *configs])[len(self.kernel.configs) :])[0]

    def describe(self, config: triton.Config) -> str:
        """A candidate on one line; of the kernel's configs that read alike the second and later ones with a number."""
        known = _texts.get(self.kernel, {}).get(id(config))
        if known is None or known[0]() is not config:
            self._describe([*self.kernel.configs, config])
        return _texts[self.kernel][id(config)][1]

    def run(self, config: triton.Config, undo: Undo | None, span: Span | None = None, *, is_trial: bool = True) -> Any:
        """Launch with ``config``. Hooks, zeroing and copies are outside the span; a failed launch is undone.

        Without ``is_trial`` as Triton launches a known config: no zeroing, none of the kernel's own hooks. Without ``undo`` it counts.
        Hooks and the grid find ``best_config`` and ``nargs`` of this launch.

        Raises:
            Exception: from a hook or the launch.
        """
        kernel = self.kernel
        kernel.nargs, kernel.best_config = self._named(), config
        try:
            return self._run(config, undo, span, is_trial)
        finally:
            kernel.nargs = None  # would keep the tensors alive

    def _run(self, config: triton.Config, undo: Undo | None, span: Span | None, is_trial: bool) -> Any:
        full, kernel, (args, kwargs) = self._full(config), self.kernel, self.arguments
        pre_hook, post_hook = (own_hook(kernel, name) if is_trial else None for name in ("pre_hook", "post_hook"))
        if config.pre_hook is not None:
            config.pre_hook(full)
        copies: Copies = []
        if own_hook(kernel, "pre_hook") is None:
            if undo is not None:
                copies = copies_of([full[name] for name in kernel.restore_value if full[name] is not None])
                undo.keep(copies)
            if is_trial:
                self._zero(full)
        elif pre_hook is not None:
            pre_hook(full)  # takes the place of zeroing and copying, as in vanilla Triton
        try:
            if span is not None:
                span.begin()
            result = kernel.fn.run(*args, **kwargs, **config.all_kwargs())
            if span is not None:
                span.end()
        except (Exception, NotLoaded) as error:  # undone, and raised again: the caller turns it into a vote, or into another launch
            put_back(copies)
            if post_hook is not None:
                post_hook(full, exception=error)
            raise
        if post_hook is not None:
            post_hook(full, exception=None)
        return result

    def keep(self, undo: Undo) -> None:
        """Keep the tensors that the kernel restores or zeroes while it is tuned: what a known config does to them counts once."""
        given = {**self._named(), **self.arguments[1]}
        names = dict.fromkeys([*self.kernel.restore_value, *self.kernel.reset_to_zero])
        undo.keep(copies_of([given[name] for name in names if isinstance(given.get(name), torch.Tensor)]))

    def compile(self, config: triton.Config) -> Any:
        """Triton's compiled kernel for ``config``, not launched; None under the interpreter."""
        if config.pre_hook is not None and any(hasattr(value, "block_shape") for value in self._named().values()):
            # The hooks of tensor-descriptor kernels set the block shape, which is compiled in.
            self.kernel.nargs = self._named()
            try:
                config.pre_hook(self._full(config))
            finally:
                self.kernel.nargs = None
        args, kwargs = self.arguments
        return self.kernel.fn.run(*args, **{**kwargs, "warmup": True}, **config.all_kwargs())

    @property
    def is_hit(self) -> bool:
        """True if Triton launches it without a choice."""
        return len(self.kernel.configs) < 2 or self.key in self.kernel.cache

    def reset_only(self, config: triton.Config) -> None:
        """Zero ``reset_to_zero`` as vanilla Triton does once after tuning, before the launch that counts."""
        full, pre_hook = self._full(config), own_hook(self.kernel, "pre_hook")
        if pre_hook is not None:
            pre_hook(full, reset_only=True)
        else:
            self._zero(full)

    def _describe(self, configs: Sequence[triton.Config]) -> list[str]:
        texts = describe_all(configs)
        _texts[self.kernel] = {id(config): (ref(config), text) for config, text in zip(configs, texts, strict=True)}
        return texts

    def _named(self) -> dict[str, Any]:
        return dict(zip(self.kernel.arg_names, self.arguments[0], strict=False))

    def _full(self, config: triton.Config) -> dict[str, Any]:
        return {**self._named(), **self.arguments[1], **config.all_kwargs()}

    def _zero(self, full: dict[str, Any]) -> None:
        with torch.no_grad():
            for name in self.kernel.reset_to_zero:
                if full[name] is not None:
                    full[name].zero_()


def _text(key: Any) -> str:
    values = key if isinstance(key, tuple) else (key,)  # a library's own is often a string
    return "[" + ",".join(_word(value) if isinstance(value, str) else stable_repr(value) for value in values) + "]"


class NoFitError(NoValidConfigError, triton.OutOfResources):  # type: ignore[misc]  # untyped
    """Raised at a launch, also for a step that catches Triton's error to do without the kernel."""

    __init__ = Exception.__init__
    __str__ = Exception.__str__


NoFitError.__name__ = NoFitError.__qualname__ = NoValidConfigError.__name__  # as the other ranks raise it


def is_out_of_resources(error: BaseException | None) -> bool:
    """True for Triton's error of a launch that does not fit the device."""
    return isinstance(error, triton.OutOfResources)


def tuning_key(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The key of ``Autotuner.run`` into ``kernel.cache``; the same in Triton 3.3 to 3.9. Empty for kernels with one config.

    A tuple, or what a library's own ``run`` looks up.
    """
    if len(kernel.configs) < 2:
        return ()
    if (own := own_run_of(kernel)) is not None and (key := own_key(own, kernel, args, kwargs)):
        return key[0]
    return key_of(kernel, dict(zip(kernel.arg_names, args, strict=False)), kwargs)


def key_of(kernel: Any, nargs: dict[str, Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The key of a kernel with several configs. ``nargs``: the positional arguments by name."""
    names, named = kernel.arg_names, nargs
    for name, value in kwargs.items():
        if name in names:
            named = {**named, name: value}
    values = [named[name] for name in kernel.keys if name in named]
    return tuple(values + [_dtype_texts[value.dtype] for value in named.values() if hasattr(value, "dtype")])


@lru_cache(maxsize=1024)
def _word(text: str) -> str:
    """A string in a key: a plain word as it is; in quotes what reads like another value, or like several."""
    return text if _PLAIN_WORD.fullmatch(text) else ascii(text)


class _DtypeTexts(dict[Any, str]):
    """``str(dtype)``, each made once, because each launch needs it for each tensor."""

    def __missing__(self, dtype: Any) -> str:
        self[dtype] = text = str(dtype)
        return text


_dtype_texts = _DtypeTexts()
