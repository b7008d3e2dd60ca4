"""One call of a function that has configs, with its arguments.

Knows nothing of ranks that decide, times or search.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MethodType
from typing import Any, cast

import numpy as np
import torch

from dist_tune.configs import ConfigView, FunctionConfig, describe, distinct, functions_in
from dist_tune.errors import NoValidConfigError
from dist_tune.keys import bucketed, exact_sizes, key_text, to_hashable
from dist_tune.launches.fingerprints import read_code
from dist_tune.launches.tunable import Fits, Slot, Tunable, argument_texts, name_of, rule_error
from dist_tune.measure import Checker, Snapshot, Span
from dist_tune.records import digest
from dist_tune.validation import spelled


@dataclass(eq=False)
class TunableFunction:
    """A function and its configs."""

    function: Callable[..., Any]
    configs: list[FunctionConfig]
    """Without repeats, before pruning."""
    texts: list[str]
    """The configs described; no two are the same."""
    key_fn: Callable[..., Hashable] | None
    prune_fn: Callable[..., bool] | None
    check: Callable[..., Any] | None
    bucket: Callable[[int], Hashable] | None
    winners: dict[Hashable, FunctionConfig] = field(default_factory=dict)
    """Key -> config in use."""
    n_bound: int = 0
    """1 of a bound method whose calls bring the object, which may be a copy of the one that was
    decorated; rules are not given it.
    """

    def __post_init__(self) -> None:
        self.names = frozenset(name for config in self.configs for name in config)
        """Keyword arguments that come from configs."""
        self.body: Callable[..., Any] = (
            cast("MethodType", self.function).__func__ if self.n_bound else self.function
        )
        """What calls run."""
        self.text_of = {
            id(config): text for config, text in zip(self.configs, self.texts, strict=True)
        }
        self.fits = Fits() if self.prune_fn is not None else None
        """Of calls with one key, where ``prune_fn`` may see more than that."""
        self._codes: dict[type | None, str] = {}

    @property
    def name(self) -> str:
        """The function's name with its module, the same on all ranks."""
        function: Any = inspect.unwrap(self.function)
        while isinstance(function, partial):
            function = function.func
        return name_of(function)

    @cached_property
    def identity(self) -> Mapping[str, str]:
        """Digests of the functions that decide results and candidates, each value that they
        captured, and the configs.
        """
        rules = {
            "key_fn": self.key_fn,
            "prune_fn": self.prune_fn,
            "check": self.check,
            "bucket": self.bucket,
        }
        inner = {f"function{k}": each for k, each in enumerate(functions_in(self.configs))}
        others = {name: str(read_code(each).captured) for name, each in {**rules, **inner}.items()}
        return {**read_code(self.function).captured, **others, "configs": digest(self.texts)}

    def code_for(self, args: tuple[Any, ...]) -> str:
        """Digest of the code for a call: of the function, the functions in its configs and its
        check, and of what they call; of a method with its class, because it may call other methods
        through ``self``.

        With the check, because a winner that was chosen without one may be wrong.
        """
        cls = type(args[0]) if args else None
        if cls not in self._codes:
            member = (
                inspect.getattr_static(cls, getattr(self.function, "__name__", ""), None)
                if cls is not None
                else None
            )
            is_method = getattr(member, "__wrapped__", None) is self.function
            parts = [
                self.function,
                *functions_in(self.configs),
                *([self.check] if self.check else []),
            ]
            self._codes[cls] = read_code(*parts, *([cls] if is_method else [])).digest
        return self._codes[cls]

    def key(self, *args: Any, **kwargs: Any) -> Hashable:
        """The tuning key of a call whose keyword arguments are not those of a config."""
        try:
            key = self.key_fn(*args[self.n_bound :], **kwargs) if self.key_fn is not None else ()
        except Exception as error:
            raise self.key_error(error, args, kwargs) from error
        try:
            return key if self.bucket is None else bucketed(key, self.bucket)
        except Exception as error:
            raise rule_error(
                "bucket", self.name, error, f"it was asked of each size in the key {spelled(key)}"
            ) from error

    def key_error(
        self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Exception:
        """The error for what ``key_fn`` raised."""
        return rule_error(
            "key_fn", self.name, error, f"it was called with {argument_texts(args, kwargs)}"
        )

    def key_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """The tuning key of a call, which may pass some of the configs' arguments itself."""
        own, fixed = self.split(kwargs)
        return (self.key(*args, **own), describe(fixed)) if fixed else self.key(*args, **own)

    def split(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], FunctionConfig]:
        """Keyword arguments of a call: the function's own, and those that replace the configs'."""
        own = {name: value for name, value in kwargs.items() if name not in self.names}
        return own, {name: value for name, value in kwargs.items() if name in self.names}

    def check_overwrite(self, kwargs: dict[str, Any], *, is_allowed: bool) -> None:
        """Refuse config arguments from the caller, unless they were asked for.

        Raises:
            ValueError: there are some.
        """
        given = sorted(self.names & kwargs.keys())
        if not is_allowed:
            raise ValueError(
                f"{self.name} was called with {given}, which autotune chooses: pass"
                " autotune_allow_arg_overwrite=True to use yours, or leave them out"
            )

    def check_key(self, key: Hashable) -> None:
        """Refuse a key that cannot be looked up.

        Raises:
            TypeError: it cannot be hashed, holds a tensor, or can be gone through once.
        """
        if isinstance(key, Iterator):  # it has a hash, and is equal to no other
            raise TypeError(
                f"key_fn of {self.name} returned {spelled(key)}, which can be gone through once:"
                " return a tuple of it"
            )
        try:
            hash(key)
        except TypeError as error:
            raise TypeError(
                f"key_fn of {self.name} returned {spelled(key)}: {error}. Return a tuple, or"
                " to_hashable() of it"
            ) from error
        if _has_tensor(key):
            raise TypeError(
                f"key_fn of {self.name} returned a tensor, which is equal to no other: return"
                " to_hashable() of it"
            )

    def check_arguments(self, args: Any, kwargs: Any) -> None:
        """Refuse what does not fit the function's parameters: it fits with no config.

        Raises:
            TypeError: it does not fit.
        """
        try:
            signature = inspect.signature(self.body)
        except ValueError:  # a builtin
            return
        try:
            signature.bind(*args, **{**self.configs[0], **kwargs})
        except TypeError as error:
            raise TypeError(
                f"{self.name}: {error}; autotune passes {sorted(self.names)} as keywords"
            ) from None


class FunctionLaunch(Tunable):
    """One call. A launch whose kernel is the whole function."""

    def __init__(
        self,
        tunable: TunableFunction,
        key: Hashable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        group: Any = None,
        *,
        is_whole: bool,
    ) -> None:
        """``group``: the process group that decides, where the call names one; it has winners of
        its own.
        """
        self.is_whole = is_whole
        self.owner, self.identify = tunable, lambda: tunable.identity
        self.slot = Slot(tunable.winners, key if group is None else (group, key), tunable.fits)
        self.exact = to_hashable(exact_sizes(args, kwargs)) if tunable.fits is not None else None
        text = key_text(key)
        self.name, self.key_text = tunable.name, text if text.startswith("[") else f"[{text}]"
        self.function: Callable[..., Any] = (
            MethodType(tunable.body, args[0]) if tunable.n_bound else tunable.body
        )
        args = args[tunable.n_bound :]
        self.given = args, kwargs
        """Arguments of the call, with those that replace a config's."""
        self._configs, self._text_of = tunable.configs, tunable.text_of
        own, fixed = tunable.split(kwargs)
        self.arguments = args, own
        if fixed:  # configs that differ in nothing else are one
            self._configs, texts = distinct([{**config, **fixed} for config in tunable.configs])
            self._text_of = {
                id(config): text for config, text in zip(self._configs, texts, strict=True)
            }

    def code(self) -> str:
        """Digest of the code, and of what it calls."""
        return self.owner.code_for(self.arguments[0])

    def candidates(self) -> tuple[list[FunctionConfig], list[str], int]:
        """The configs that ``prune_fn`` keeps.

        Raises:
            NoValidConfigError: it keeps none.
            TypeError: it returns anything but True or False, or raises a TypeError.
            ValueError: it raises another error.
        """
        prune_fn = self.owner.prune_fn
        args, kwargs = self.arguments
        kept = []
        for config in self._configs:
            try:
                verdict = prune_fn is None or prune_fn(ConfigView(config), *args, **kwargs)
            except Exception as error:
                where = (
                    f'it was asked of config "{self.describe(config)}" in a call with'
                    f" {argument_texts(args, kwargs)}"
                )
                raise rule_error("prune_fn", self.name, error, where) from error
            kept += [config] * self._keeps(verdict)
        if not kept:
            raise NoValidConfigError(
                f"{self.name}{self.key_text}: prune_fn keeps none of {len(self._configs)} configs."
                " It must return True for those to try."
            )
        return kept, [self.describe(config) for config in kept], len(self._configs) - len(kept)

    def _keeps(self, verdict: Any) -> bool:
        """The answer of ``prune_fn``, None being a rule without a return.

        A list is refused, since any that is not empty would be True.
        """
        is_bool = (
            verdict is None
            or isinstance(verdict, bool | np.bool_)
            or (isinstance(verdict, int) and verdict in (0, 1))
        )
        if not is_bool and not (
            isinstance(verdict, torch.Tensor)
            and verdict.dtype is torch.bool
            and verdict.numel() == 1
        ):
            raise TypeError(
                f"prune_fn of {self.name} returned {spelled(verdict)}: it is asked of each config,"
                " and must return True to keep it or False. A function that returns the configs to"
                " keep is early_config_prune of triton.autotune"
            )
        return bool(verdict)

    def describe(self, config: FunctionConfig) -> str:
        """A candidate on one line."""
        # Of another call that passed the same config arguments itself.
        return self._text_of.get(id(config)) or describe(config)

    def run(
        self,
        config: FunctionConfig,
        undo: Snapshot | None,
        span: Span | None = None,
        *,
        is_trial: bool = True,
    ) -> Any:
        """Call the function.

        Raises:
            Exception: from the function.
        """
        args, kwargs = self.arguments
        if span is not None:
            span.begin()
        result = self.function(*args, **{**config, **kwargs})
        if span is not None:
            span.end()
        return result

    def checker(self) -> Checker | None:
        """The user's check, if there is one."""
        return Checker(self.owner.check, self.function) if self.owner.check is not None else None


def _has_tensor(key: object) -> bool:
    return isinstance(key, torch.Tensor) or (
        isinstance(key, tuple | frozenset) and any(map(_has_tensor, key))
    )
