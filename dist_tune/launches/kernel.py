"""A kernel of ``triton.autotune``: one launch of it, what it is told apart by, its place for a
config, the classes of its arguments.

Knows the attributes of Triton's ``Autotuner`` (configs, key, cache, hooks, tensors to zero and
restore) and Triton's knobs. Knows nothing of ranks, times or search, and does not patch anything.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import isfunction
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import triton
from triton import knobs
from triton.runtime import autotuner
from triton.runtime.errors import AutotunerError, InterpreterError
from triton.runtime.jit import JITFunction

from dist_tune.compiler import NotLoaded
from dist_tune.configs import describe_all, distinct, stable_repr
from dist_tune.errors import NoValidConfigError
from dist_tune.launches.buckets import NO_BUCKETS, Bucketing
from dist_tune.launches.fingerprints import Code, read_code
from dist_tune.launches.libraries import own_key
from dist_tune.launches.tunable import Fits, Slot, Timings, Tunable, name_of, rule_error
from dist_tune.measure import Snapshot, Span, tensor_of
from dist_tune.records import digest

_IN_BUCKETS = ("in buckets",)
"""Ends the key of a bucket: a launch elsewhere of the size that names it is no launch in it."""
_PLAIN_WORD = re.compile(r"(?!(None|True|False|Ellipsis|inf|nan)$)[A-Za-z_][\w.-]*", re.ASCII)
_codes: WeakKeyDictionary[Any, Code] = WeakKeyDictionary()
_identities: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()
_texts: WeakKeyDictionary[Any, dict[int, tuple[ref[triton.Config], str]]] = WeakKeyDictionary()
"""Kernel -> its configs by id, with their descriptions."""


class Launch(Tunable):
    """One call of an autotuned kernel."""

    is_compiled = True

    def __init__(
        self,
        kernel: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        buckets: Bucketing = NO_BUCKETS,
    ) -> None:
        self.owner = self.kernel = kernel
        self.arguments = args, kwargs
        key = tuning_key(kernel, args, kwargs, buckets)
        self.name, self.key_text = name_of(kernel.base_fn), _text(key)
        if buckets:
            self.exact = tuning_key(kernel, args, kwargs)
            buckets.remember(self.exact, key)
        self.slot = KernelSlot(kernel, key, buckets.fits if buckets else None)
        self.identify = partial(_identity_of, kernel)
        # At once, because what a kernel of a factory has captured may change.
        if "<locals>" in kernel.base_fn.__qualname__:
            self.identify()

    def code(self) -> str:
        """Digest of the code with heuristics and hooks, and of what it calls."""
        return _code_of(self.kernel).digest

    def candidates(self) -> tuple[list[triton.Config], list[str], int]:
        """The configs after the kernel's own pruning."""
        self._check_declared()
        before: list[triton.Config] = self.kernel.configs
        self.kernel.nargs = self._named()
        try:
            # Triton goes through them once: a rule may be a generator.
            configs = list(self.kernel.prune_configs(self.arguments[1]))
            if not configs:
                raise AutotunerError(
                    f"No valid autotuner configs after pruning of {self.name}: its rules yield none"
                )
        except AutotunerError:  # Triton's own words: a rule keeps none
            raise
        except Exception as error:
            rule, where = _rule_in(error, self.kernel)
            raise rule_error(rule, self.name, error, where) from error
        finally:
            self.kernel.nargs = None
        texts = self._describe([*before, *configs])
        kept, kept_texts = distinct(configs, texts[len(before) :])
        return kept, kept_texts, len({*texts[: len(before)]}) - len(kept)

    def describe(self, config: triton.Config) -> str:
        """A candidate on one line; of the kernel's configs that read alike the second and later
        ones with a number.
        """
        known = _texts.get(self.kernel, {}).get(id(config))
        if known is None or known[0]() is not config:
            self._describe([*self.kernel.configs, config])
        return _texts[self.kernel][id(config)][1]

    def run(
        self,
        config: triton.Config,
        undo: Snapshot | None,
        span: Span | None = None,
        *,
        is_trial: bool = True,
    ) -> Any:
        """Launch with ``config``.

        Hooks, zeroing and copies are outside the span; a failed launch is undone.

        Without ``is_trial`` as Triton launches a known config: no zeroing, none of the kernel's own
        hooks. Without ``undo`` it counts. Hooks and the grid find ``best_config`` and ``nargs`` of
        this launch.

        Raises:
            Exception: from a hook or the launch.
        """
        kernel = self.kernel
        kernel.nargs, kernel.best_config = self._named(), config
        try:
            return self._run(config, undo, span, is_trial)
        finally:
            kernel.nargs = None  # would keep the tensors alive

    def _run(
        self, config: triton.Config, undo: Snapshot | None, span: Span | None, is_trial: bool
    ) -> Any:
        full, kernel, (args, kwargs) = self._full(config), self.kernel, self.arguments
        pre_hook, post_hook = (
            own_hook(kernel, name) if is_trial else None for name in ("pre_hook", "post_hook")
        )
        if config.pre_hook is not None:
            config.pre_hook(full)
        before = Snapshot()
        if own_hook(kernel, "pre_hook") is None:
            if undo is not None:
                before.copy(full[name] for name in kernel.restore_value if full[name] is not None)
                undo.take(before)
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
        except (
            Exception,
            NotLoaded,
            # Undone, and raised again: the caller turns it into a vote, or into another launch
        ) as error:
            before.put_back()
            if post_hook is not None:
                post_hook(full, exception=error)
            raise
        if post_hook is not None:
            post_hook(full, exception=None)
        return result

    def keep(self, undo: Snapshot) -> None:
        """Keep the tensors that the kernel restores or zeroes while it is tuned: what a config in
        use does to them counts once.
        """
        names = dict.fromkeys([*self.kernel.restore_value, *self.kernel.reset_to_zero])
        if names and (len(self.kernel.configs) < 2 or self.slot.config is not None):
            given = {**self._named(), **self.arguments[1]}
            undo.copy(given[name] for name in names if hasattr(given.get(name), "clone"))

    def unrestored(self, error: Exception) -> list[str]:
        """Of an interpreted kernel that failed half way the tensors that are neither restored nor
        zeroed; a GPU is lost then.
        """
        if not isinstance(error, InterpreterError):
            return []
        named = {**self._named(), **self.arguments[1]}
        restored = {*self.kernel.restore_value, *self.kernel.reset_to_zero}
        return [
            name
            for name, value in named.items()
            if name not in restored and tensor_of(value) is not None
        ]

    def compile(self, config: triton.Config) -> Any:
        """Triton's compiled kernel for ``config``, not launched; None under the interpreter."""
        if config.pre_hook is not None and any(
            hasattr(value, "block_shape") for value in self._named().values()
        ):
            # The hooks of tensor-descriptor kernels set the block shape, which is compiled in.
            self.kernel.nargs = self._named()
            try:
                config.pre_hook(self._full(config))
            finally:
                self.kernel.nargs = None
        args, kwargs = self.arguments
        return self.kernel.fn.run(*args, **{**kwargs, "warmup": True}, **config.all_kwargs())

    def reset_only(self, config: triton.Config) -> None:
        """Zero ``reset_to_zero`` as vanilla Triton does once after tuning, before the launch that
        counts.
        """
        full, pre_hook = self._full(config), own_hook(self.kernel, "pre_hook")
        if pre_hook is not None:
            pre_hook(full, reset_only=True)
        else:
            self._zero(full)

    def _check_declared(self) -> None:
        """Refuse what no config can cure.

        Raises:
            TypeError: the kernel is autotuned twice.
            ValueError: it is to restore or zero what it has not.
        """
        kernel = self.kernel
        inner = next(
            (each for each in _layers(kernel)[1:] if isinstance(each, autotuner.Autotuner)), None
        )
        twice = (
            kernel.configs[0].all_kwargs().keys() & inner.configs[0].all_kwargs().keys()
            if inner is not None
            else ()
        )
        if twice:
            raise TypeError(
                f"kernel {self.name} is decorated with triton.autotune twice, and Triton cannot"
                f" launch it: both decorators pass {' and '.join(sorted(twice))}. Give one"
                " decorator the configs of both, as their product"
            )
        given = self._full(kernel.configs[0])
        if own_hook(kernel, "pre_hook") is not None:
            return
        for option in ("restore_value", "reset_to_zero"):
            for name in getattr(kernel, option):
                if name not in kernel.arg_names:
                    raise ValueError(
                        f"{option} of kernel {self.name} names {name!r}, and its arguments are"
                        f" {', '.join(kernel.arg_names)}"
                    )
                if name not in given:
                    raise ValueError(
                        f"{option} of kernel {self.name} names {name!r}, which this launch leaves"
                        f" out: pass it, None if there is none, or take it off {option}"
                    )

    def _describe(self, configs: Sequence[triton.Config]) -> list[str]:
        texts = describe_all(configs)
        _texts[self.kernel] = {
            id(config): (ref(config), text) for config, text in zip(configs, texts, strict=True)
        }
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


def _rule_in(error: Exception, kernel: Any) -> tuple[str, str]:
    """The rule of ``prune_configs_by`` that has raised, and at which config."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    codes = {
        getattr(getattr(kernel, name, None), "__code__", None): name
        for name in ("early_config_prune", "perf_model")
    }
    rule = next(
        (codes[frame.f_code] for frame in frames if frame.f_code in codes), "prune_configs_by"
    )
    texts = {
        id(config): text
        for config, text in zip(kernel.configs, describe_all(kernel.configs), strict=True)
    }
    at = [
        texts[id(value)]
        for frame in reversed(frames)
        for value in [*frame.f_locals.values()]
        if id(value) in texts
    ]
    return (
        rule,
        (
            f'it was at config "{at[0]}"'
            if at
            else f'it got {len(texts)} configs, the first "{next(iter(texts.values()))}"'
        ),
    )


def _text(key: Any) -> str:
    values = key if isinstance(key, tuple) else (key,)  # a library's own is often a string
    if values[-1:] == _IN_BUCKETS:
        values = values[:-1]
    return (
        "["
        + ",".join(
            _word(value) if isinstance(value, str) else stable_repr(value) for value in values
        )
        + "]"
    )


class NoFitError(NoValidConfigError, triton.OutOfResources):  # type: ignore[misc]  # untyped
    """Raised at a launch, also for a step that catches Triton's error to do without the kernel."""

    __init__ = Exception.__init__
    __str__ = Exception.__str__


# As the other ranks raise it.
NoFitError.__name__ = NoFitError.__qualname__ = NoValidConfigError.__name__


def tuning_key(
    kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], buckets: Bucketing = NO_BUCKETS
) -> Any:
    """The key of ``Autotuner.run`` into ``kernel.cache``; the same in Triton 3.3 to 3.9.

    Empty for kernels with one config.

    A tuple, or what a library's own ``run`` looks up.
    """
    if len(kernel.configs) < 2:
        return ()
    if key := own_key(kernel, args, kwargs):
        return key[0]
    return key_of(kernel, dict(zip(kernel.arg_names, args, strict=False)), kwargs, buckets)


def key_of(
    kernel: Any, nargs: dict[str, Any], kwargs: dict[str, Any], buckets: Bucketing = NO_BUCKETS
) -> tuple[Any, ...]:
    """The key of a kernel with several configs.

    ``nargs``: the positional arguments by name. ``buckets``: of what stands for a size.
    """
    names, named = kernel.arg_names, nargs
    if len(kwargs) > 2:  # beside grid and warmup, which each launch has
        for name, value in kwargs.items():
            if name in names:
                named = {**named, name: value}
    values = [named[name] for name in kernel.keys if name in named]
    if buckets:
        values = [
            buckets[name](named[name]) if name in buckets else named[name]
            for name in kernel.keys
            if name in named
        ]
    for value in named.values():
        if type(value) is not int and hasattr(value, "dtype"):
            values.append(_dtype_texts[value.dtype])
    return tuple(values) if not buckets else (*values, *_IN_BUCKETS)


@lru_cache(maxsize=1024)
def _word(text: str) -> str:
    """A string in a key: a plain word as it is; in quotes what reads like another value, or like
    several.
    """
    return text if _PLAIN_WORD.fullmatch(text) else ascii(text)


class _DtypeTexts(dict[Any, str]):
    """``str(dtype)``, each made once, because each launch needs it for each tensor."""

    def __missing__(self, dtype: Any) -> str:
        self[dtype] = text = str(dtype)
        return text


_dtype_texts = _DtypeTexts()


class KernelSlot(Slot):
    """Triton's config of a kernel for one key, in its cache, which may be a library's own
    mapping.
    """

    spelled = staticmethod(_text)

    def __init__(self, kernel: Any, key: tuple[Any, ...], fits: Fits | None = None) -> None:
        self._kernel, self.key, self.fits = kernel, key, fits

    @property
    def _configs(self) -> Any:
        return self._kernel.cache

    @property
    def config(self) -> triton.Config | None:
        """The config that Triton would launch, asked as Triton asks.

        None for a miss, and of one config.
        """
        cache = self._kernel.cache
        return cache[self.key] if len(self._kernel.configs) > 1 and self.key in cache else None

    def fill(self, config: triton.Config, timings: Timings) -> None:
        """Make Triton launch with ``config``, and set what vanilla tuning would set before its last
        launch, which sets ``best_config``.
        """
        if type(self._kernel.cache) is _Forgetful:
            self._kernel.cache = self._kernel.cache.mapping
        self._kernel.cache[self.key] = config
        self._kernel.configs_timings = {
            each: list(quantiles_ms) for each, quantiles_ms in timings.quantiles_ms
        }
        self._kernel.bench_time = timings.seconds
        if self.fits is not None:
            self.fits.rank(self.key, config, timings)

    def put(self, config: triton.Config) -> bool:
        """Let launches find a config, and leave all else; false where the cache is a library's own
        mapping.
        """
        is_plain = type(self._kernel.cache) is dict and len(self._kernel.configs) > 1
        if is_plain:
            self._kernel.cache[self.key] = config
        return is_plain

    def tell(self) -> None:
        """Call Triton's listener, and print its line of ``TRITON_PRINT_AUTOTUNING``."""
        kernel, timings_ms = self._kernel, self._kernel.configs_timings
        listener = getattr(knobs.autotuning, "listener", None)
        if len(timings_ms) < 2 and hasattr(knobs.autotuning, "listener"):
            return  # The Tritons that have a listener do not tune where pruning leaves one config.
        best = kernel.cache[self.key]
        if listener is not None:
            listener(
                fn=_layers(kernel)[-1],
                key=self.key,
                best_config=best,
                configs_timings=timings_ms,
                duration=kernel.bench_time,
                cache_hit=False,
            )
        if knobs.autotuning.print:
            print(  # noqa: T201  # Triton's own line, for those who read it from there
                f"Triton autotuning for function {kernel.base_fn.__name__},\nwith key as"
                f" {self.key},\nfinished after {kernel.bench_time:.2f}s,\nbest config selected:"
                f" {best};"
            )

    def clear(self) -> None:
        """Make the next launch a miss."""
        cache = self._kernel.cache
        if self.key not in cache:
            return
        # It knows no deletion.
        with suppress(TypeError, AttributeError, KeyError, NotImplementedError):
            del cache[self.key]
        if self.key in cache:  # still, or it has the config from elsewhere
            self._kernel.cache = _Forgetful(cache)


class _Forgetful(dict[Any, Any]):
    """An empty cache in the place of a library's mapping that cannot forget a key, until a winner
    is known.
    """

    def __init__(self, mapping: Any) -> None:
        self.mapping = mapping


def own_hook(kernel: Any, name: str) -> Callable[..., Any] | None:
    """The ``pre_hook`` or ``post_hook`` that a kernel was given, or that was set on it later; None
    for Triton's own.

    None also for hooks that a subclass puts in place of Triton's to copy and restore
    ``restore_value``: a tensor is restored at the end of a replay, because later launches read it.
    """
    hook: Callable[..., Any] = getattr(kernel, name)
    if getattr(kernel, f"user_defined_{name}"):
        return hook
    return None if kernel.restore_value or hook.__module__ == autotuner.__name__ else hook


def _layers(kernel: Any) -> list[Any]:
    """The kernel with what it is decorated around, ending with the function that ``triton.jit`` has
    made.
    """
    layers = [kernel]
    while (inner := getattr(layers[-1], "fn", None)) is not None and not isfunction(inner):
        layers.append(inner)
    return layers


def _code_of(kernel: Any) -> Code:
    """The code of a kernel with its heuristics, hooks and tensors to zero and restore; read once
    for each kernel object.
    """
    if kernel not in _codes:
        _codes[kernel] = read_code(kernel, launches=True)
    return _codes[kernel]


def _identity_of(kernel: Any) -> Mapping[str, str]:
    """First the kernel's own code with what that has captured; then rules that prune, names of the
    key, and the configs before pruning.
    """
    if kernel not in _identities:
        rules = (
            *(
                getattr(kernel, name, None)
                for name in ("early_config_prune", "perf_model", "configs_top_k")
            ),
            *kernel.keys,
        )
        _identities[kernel] = {
            **read_code(_layers(kernel)[-1], launches=True).captured,
            "heuristics": str(_code_of(kernel).captured),
            "rules": str(read_code(*rules).captured),
            "configs": digest(describe_all(kernel.configs)),
        }
    return _identities[kernel]


_MAX_CHARS = 40


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a launch as the compiler sees it."""

    compiled: str
    """Equal for arguments that share a kernel."""
    text: str
    """The value and its class, for people."""
    is_constexpr: bool = False


def specialisation(launch: Tunable) -> dict[str, Argument]:
    """Name -> argument, without those of the config; empty where nothing is compiled, or the kernel
    is not Triton's own.
    """
    if not isinstance(launch, Launch) or not isinstance(
        kernel := _layers(launch.kernel)[-1], JITFunction
    ):
        return {}
    named = {
        **dict(zip(launch.kernel.arg_names, launch.arguments[0], strict=False)),
        **launch.arguments[1],
    }
    # Triton raises what it likes for arguments that it cannot take: the launch itself will say so.
    with suppress(Exception):
        device = triton.runtime.driver.active.get_current_device()
        _, classes, _ = kernel.device_caches[device][-1](
            **{param.name: named.get(param.name) for param in kernel.params}
        )
        given = zip(kernel.params, classes, strict=True)
        return {
            each.name: _argument(each, named[each.name], found)
            for each, found in given
            if each.name in named
        }
    return {}


def _argument(param: Any, value: Any, found: Any) -> Argument:
    if hasattr(value, "block_shape"):  # the config's hook sets the blocks, later
        return Argument(f"descriptor {getattr(value.base, 'dtype', '')}", "a descriptor")
    text = (
        repr(value)
        if isinstance(value, bool | int | float | str | None)
        else getattr(value, "__name__", type(value).__name__)
    )
    if hasattr(value, "data_ptr"):
        offset = value.data_ptr() % 16
        text = f"at an address of {offset} modulo 16" if offset else "aligned to 16 bytes"
    elif type(value) is int and not param.is_constexpr:
        text += (
            " (1, a constant)"
            if value == 1
            else " (a multiple of 16)"
            if value % 16 == 0
            else " (no multiple of 16)"
        )
    return Argument(
        str(found),
        text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}...",
        param.is_constexpr,
    )
