"""Candidates: the configs of a site, without repeats, in an order that is an identity.

Knows ``triton.Config`` as a value and nothing of how Triton tunes. A config is one of these, or a
mapping of any values by the names of a function's keyword arguments. The index of a candidate is
what ranks compare and reduce over, so two ranks must hold equal lists; ``describe`` is the form in
which lists are compared, logged and kept.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeVar

import triton

from dist_tune.validation import check_names, spelled

FunctionConfig = dict[str, Any]
"""Values by the names of a function's keyword arguments."""
AnyConfig = TypeVar("AnyConfig", triton.Config, FunctionConfig)
# Addresses differ between processes; two ranks must render one value the same way.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Alike in two configs of a kind: a number by itself that is not 1, which turns something off, as
# the splits of K. Warps and stages change no argument.
_ALIKE = re.compile(
    r"num_(?:warps|stages)=\d+|(?<![\w.])(?!1(?![\w.]))-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)"
)


def stable_repr(value: object) -> str:
    """``repr`` without memory addresses: equal values read the same on every rank.

    A kernel that is interpreted reads as others do.
    """
    function = getattr(value, "fn", None)
    if isinstance(function, FunctionType) and type(value).__repr__ is object.__repr__:
        return f"{type(value).__name__}({function.__module__}:{function.__qualname__})"
    return _ADDRESS.sub("", repr(value))


def config_fields(config: triton.Config | Mapping[str, Any]) -> dict[str, Any]:
    """All that tells one config from another, as plain values; a mapping's as "name.field" where it
    holds a ``triton.Config``.

    ``str(Config)`` leaves out ``pre_hook``, and ``ir_override`` before Triton 3.9.
    """
    if not isinstance(config, triton.Config):
        plain: dict[str, Any] = {}
        for name, value in config.items():
            inner = config_fields(value) if isinstance(value, triton.Config) else None
            plain |= (
                {name: _plain(value)}
                if inner is None
                else {f"{name}.{field}": each for field, each in inner.items()}
            )
        return plain
    fields: dict[str, Any] = {name: _plain(value) for name, value in config.kwargs.items()}
    fields |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
    for name, default in (("num_ctas", 1), ("maxnreg", None), ("ir_override", None)):
        value = getattr(config, name, default)
        if value != default:
            fields[name] = _plain(value)
    if config.pre_hook is not None:
        hook = config.pre_hook
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        fields["pre_hook"] = f"{getattr(hook, '__module__', '')}.{name}"
    return fields


def describe(config: triton.Config | Mapping[str, Any]) -> str:
    """A config on one line, "BLOCK_M=128 BLOCK_N=64 num_warps=4 num_stages=3", the same on every
    rank.
    """
    if not isinstance(config, triton.Config):
        return " ".join(f"{name}={_describe_value(value)}" for name, value in config.items())
    fields = config_fields(config)
    hook = fields.pop("pre_hook", None)
    return " ".join(
        [f"{name}={value!r}" for name, value in fields.items()]
        + ([f"pre_hook={hook}"] if hook else [])
    )


def describe_all(configs: Iterable[triton.Config | Mapping[str, Any]]) -> list[str]:
    """Each described; of those that read alike and are not equal, the second and later ones have a
    number, in the order of the list.
    """
    alike: dict[str, list[Any]] = {}
    texts = []
    for config in configs:
        text = describe(config)
        others = alike.setdefault(text, [])
        at = next((i for i, other in enumerate(others) if _is_same(config, other)), len(others))
        if at == len(others):
            others.append(config)
        texts.append(f"{text} (#{at + 1})" if at else text)
    return texts


def distinct(
    configs: Sequence[AnyConfig], texts: Sequence[str] = ()
) -> tuple[list[AnyConfig], list[str]]:
    """The configs without repeats in their order, and their descriptions (``texts``, if they are
    known).
    """
    seen: dict[str, AnyConfig] = {}
    for text, config in zip(texts or describe_all(configs), configs, strict=True):
        seen.setdefault(text, config)
    return list(seen.values()), list(seen)


def kind_of(text: str) -> str:
    """A described config without its numbers, but for those that are 1: configs of one kind most
    likely launch alike.
    """
    return _ALIKE.sub("#", text)


def by_kind(texts: Mapping[int, str]) -> list[list[int]]:
    """Candidates of each kind, the largest kind first; of each kind the one with the most different
    numbers first.
    """
    kinds: dict[str, list[int]] = {}
    for i in sorted(texts, key=lambda i: -len({*_ALIKE.findall(texts[i])})):
        kinds.setdefault(kind_of(texts[i]), []).append(i)
    return sorted(kinds.values(), key=len, reverse=True)


def triton_version() -> str:
    """The version of the Triton that is imported."""
    return str(triton.__version__)


def as_configs(config_space: Any, function: Callable[..., Any]) -> list[FunctionConfig]:
    """A config space as mappings: a value that is none goes to the parameter ``config``, or to the
    one annotated ``triton.Config``.

    Raises:
        TypeError: a value has no parameter to go to, or a name is no parameter of the function.
        ValueError: the space is empty.
    """
    configs = [
        dict(each) if isinstance(each, Mapping) else {_config_parameter(function, each): each}
        for each in config_space
    ]
    for config in configs:
        check_names("config_space", config)
    if not configs:
        raise ValueError("config_space is empty: autotune needs at least one config")
    parameters = _parameters(function)
    if parameters and not any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    ):
        keywords = {
            name
            for name, parameter in parameters.items()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        }
        for config in configs:
            if unknown := [name for name in config if name not in keywords]:
                raise TypeError(
                    f"{spelled(function)} takes no keyword {unknown[0]!r}; a config in config_space"
                    f" has it: {describe(config)}"
                )
    return configs


def functions_in(configs: Iterable[FunctionConfig]) -> list[Any]:
    """The functions among the values of configs, and the hooks of each ``triton.Config``: without
    repeats, in their order.
    """
    values = [value for config in configs for value in config.values()]
    hooks = [value.pre_hook for value in values if isinstance(value, triton.Config)]
    return list({id(each): each for each in [*values, *hooks] if callable(each)}.values())


def _is_same(a: Any, b: Any) -> bool:
    """Equality of two configs, or two values in them, that read alike."""
    if isinstance(a, triton.Config) and isinstance(b, triton.Config):
        # All else is in their description.
        return a.pre_hook is b.pre_hook and _is_same(a.kwargs, b.kwargs)
    try:
        if isinstance(a, dict) and isinstance(b, dict):
            return all(a[name] is b[name] or _is_same(a[name], b[name]) for name in a)
        return bool(a == b)
    except Exception:  # noqa: BLE001  # a comparison of the user's values may raise anything: they count as different then
        return False


def _config_parameter(function: Callable[..., Any], value: object) -> str:
    parameters = _parameters(function)
    annotated = [
        name
        for name, parameter in parameters.items()
        if parameter.annotation in (triton.Config, "triton.Config", "Config")
    ]
    if "config" in parameters:
        return "config"
    if isinstance(value, triton.Config) and len(annotated) == 1:
        return annotated[0]
    raise TypeError(
        f"config_space holds {_describe_value(value)}, and {spelled(function)} has no parameter"
        " named config: write configs as mappings, {'parameter': value}"
    )


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin
        return {}


class ConfigView(Mapping[str, Any]):
    """A function's config as its ``prune_fn`` sees it: by keyword, and by the fields of the
    ``triton.Config`` in it.

    ``view["gemm_config"]`` is a ``triton.Config`` that can be indexed, too;
    ``view["BLOCK_SIZE_M"]`` and what else a config has, as ``view.num_stages`` and ``view.kwargs``,
    are those of the first one.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._values = {
            name: _IndexableConfig(value) if isinstance(value, triton.Config) else value
            for name, value in config.items()
        }
        self._inner = next(
            (value for value in self._values.values() if isinstance(value, triton.Config)), None
        )

    def __getitem__(self, name: str) -> Any:
        if name in self._values or self._inner is None:
            return self._values[name]
        return self._inner[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self._inner is None:
            raise AttributeError(f"this config has no {name}; it has {list(self._values)}")
        return getattr(self._inner, name)


class _IndexableConfig(triton.Config):  # type: ignore[misc]  # untyped
    def __init__(self, config: triton.Config) -> None:
        self.__dict__.update(config.__dict__)

    def __getitem__(self, name: str) -> Any:
        return self.all_kwargs()[name]


def _describe_value(value: object) -> str:
    if isinstance(value, triton.Config):
        return f"({describe(value)})"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    return stable_repr(value)


def _plain(value: object) -> Any:
    return value if value is None or isinstance(value, int | float | str) else stable_repr(value)
