"""Tuning keys of functions: from arguments to something hashable, to one line of text, and to
classes of sizes.

Knows tensors by shape, stride and dtype. Knows nothing of configs, kernels or where keys are kept.
"""

from __future__ import annotations

import dataclasses
import inspect
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any

import torch

from dist_tune.configs import stable_repr
from dist_tune.validation import spelled

_shape_and_dtype = attrgetter("shape", "dtype")
_MAX_TYPES = 1024
"""Types that are remembered at once."""
_SCALARS = frozenset({int, float, bool, str, bytes, type(None), torch.dtype})


def to_hashable(value: Any) -> Any:
    """``value`` as a key can hold it: ``(shape, stride, dtype)`` of a tensor, tuples of lists,
    dicts and sets, recursively.

    Of a nested tensor ``(sizes, layout, dtype)``, with None for ragged sizes.

    Dicts and sets come in one order however they were filled. A dataclass that cannot be hashed is
    its name and its fields. All else stays what it is.
    """
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return (
                tuple([_shared_size(value, k) for k in range(value.dim())]),
                str(value.layout),
                value.dtype,
            )
        return (
            value.shape,
            value.stride() if value.layout is torch.strided else str(value.layout),
            value.dtype,
        )
    kind = type(value)
    if kind in _SCALARS or kind is torch.Size:
        return value
    if isinstance(value, list | tuple):
        return tuple([to_hashable(each) for each in value])
    if isinstance(value, dict):
        return _in_order((to_hashable(name), to_hashable(each)) for name, each in value.items())
    if isinstance(value, set | frozenset):
        return _in_order(to_hashable(each) for each in value)
    if dataclasses.is_dataclass(kind) and not isinstance(value, Hashable):
        return kind.__qualname__, *[
            (field.name, to_hashable(getattr(value, field.name)))
            for field in dataclasses.fields(kind)
        ]
    return value


def _shared_size(nested: torch.Tensor, dimension: int) -> int | None:
    """Size of a nested tensor in a dimension; None where its parts may differ."""
    try:
        size = nested.size(dimension)
    except RuntimeError:  # of a strided one
        return None
    # A jagged one has a symbol, another one in each tensor.
    return size if type(size) is int else None


def signature_of(value: Any) -> Any:
    """The kind of an argument, by which calls are alike: tensors by shape, strides and dtype, other
    sizes and names by value.

    Floats count by type, because a config does not depend on them, and objects of all other kinds
    by identity.
    """
    if isinstance(value, torch.Tensor):
        return to_hashable(value)
    kind = type(value)
    if kind in _SCALARS or kind is torch.Size:
        return kind if kind is float else (kind, value)
    if isinstance(value, list | tuple):
        return kind, tuple([signature_of(each) for each in value])
    if isinstance(value, dict):
        return kind, tuple(
            [
                (id(name) if isinstance(name, torch.Tensor) else name, signature_of(each))
                for name, each in value.items()
            ]
        )
    return kind, id(value)


def call_signature(args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Identity of a kind of call: names of keywords, shapes and dtypes of tensors, other types.

    Each steady call makes one. ``lasting_signature`` differs where types alone do not tell.
    """
    signature: list[object] = []
    values: Iterable[Any] = args
    if kwargs:
        signature += kwargs
        values = (*args, *kwargs.values()) if args else kwargs.values()
    try:
        for value in values:
            kind = type(value)
            if _is_tensor[kind]:
                signature.append(value.shape)
                signature.append(value.dtype)
            else:
                signature.append(kind)
    except (AttributeError, RuntimeError):  # a nested tensor may have no shape
        return lasting_signature(args, kwargs)
    return tuple(signature)


def exact_sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What tells apart two calls with one key, as rules of pruning see them: shapes, dtypes and
    plain values, also in containers.
    """
    if not kwargs:
        try:
            # Where all are tensors, in a third of the time.
            return tuple(map(_shape_and_dtype, args))
        except (AttributeError, RuntimeError):  # a nested tensor may have no shape
            pass
    return (*kwargs, *map(_exact, args), *map(_exact, kwargs.values()))


def _exact(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, tuple | list):
        return (type(value), *map(_exact, value))
    if isinstance(value, dict):
        return (dict, *map(_exact, value), *map(_exact, value.values()))
    return _kind(value)


def lasting_signature(args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """The signature without symbols that stand for the ragged sizes of one nested tensor alone.

    Objects with a shape and a dtype count as tensors if all positional arguments have both.
    """
    positional = list(map(_kind, args))
    values = (*args, *kwargs.values())
    if not any(isinstance(value, torch.Tensor) and value.is_nested for value in values):
        with suppress(AttributeError, RuntimeError):
            positional = list(map(_shape_and_dtype, args))
    return (*kwargs, *chain(*positional, *map(_kind, kwargs.values())))


def _kind(value: object) -> tuple[object, ...]:
    if not isinstance(value, torch.Tensor):
        return (type(value),)
    return (to_hashable(value),) if value.is_nested else (value.shape, value.dtype)


class _IsTensor(dict[type, bool]):
    """Type -> whether its objects are tensors: a module asked for its shape searches for 1 us."""

    def __missing__(self, kind: type) -> bool:
        if len(self) >= _MAX_TYPES:  # some programs make a class in each call
            self.clear()
        return self.setdefault(kind, issubclass(kind, torch.Tensor))


_is_tensor = _IsTensor()


_PLAIN = frozenset((int, float, str, bool))


def key_text(key: Any) -> str:
    """A key on one line, "[4096,4096,torch.bfloat16]": equal keys read the same in every process.

    Different scalars read differently, also where Python holds them equal: ``1``, ``1.0``,
    ``True``, ``'1'``. Lists read as tuples; an object by its ``repr`` without its address.
    """
    key = to_hashable(key)
    return f"[{_text(key)[1:-1]}]" if isinstance(key, tuple) else _text(key)


def named_key(
    names: object, function: Callable[..., Any], chosen: frozenset[str]
) -> Callable[..., Hashable]:
    """The key function of Triton's ``key=``: values of the named arguments, and dtypes of all
    tensors among the arguments.

    A named tensor counts with shape, strides and dtype. ``chosen``: arguments that configs hold.

    Raises:
        TypeError: it is no list of names.
        ValueError: a name is no argument of the function, or one that configs hold.
    """
    if callable(names):
        raise TypeError(
            f"key= takes names of arguments, got {spelled(names)}: a function is key_fn="
        )
    if isinstance(names, str | bytes | Mapping) or not isinstance(names, Iterable):
        raise TypeError(f"key must be a list of names of arguments, got {spelled(names)}")
    wanted = list(names)
    if wrong := [name for name in wanted if not isinstance(name, str)]:
        raise TypeError(
            f"key must be a list of names of arguments, got {spelled(wrong[0])} among them"
        )
    if both := [name for name in wanted if name in chosen]:
        raise ValueError(
            f"key names {both[0]!r}, which is an argument that the configs choose: name what the"
            " call brings"
        )
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if unknown := [name for name in wanted if name not in parameters and not takes_any]:
        raise ValueError(
            f"key names {unknown[0]!r}, which is no argument of {spelled(function)}; it has"
            f" {list(parameters)}"
        )
    places = {
        name: i
        for i, (name, each) in enumerate(parameters.items())
        if each.kind <= each.POSITIONAL_OR_KEYWORD
    }
    defaults = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not parameter.empty
    }

    def key_of(*args: Any, **kwargs: Any) -> Hashable:
        values = [
            (
                args[places[name]]
                if places.get(name, len(args)) < len(args)
                else kwargs.get(name, defaults.get(name))
            )
            for name in wanted
        ]
        dtypes = [
            each.dtype for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)
        ]
        return tuple([to_hashable(each) for each in (*values, *dtypes)])

    return key_of


def power_of_two(size: int) -> int:
    """The smallest power of two that is not smaller than ``size``; 0 and negative numbers stay what
    they are.
    """
    return 1 << (size - 1).bit_length() if size > 0 else size


def size_classes(*limits: int) -> Callable[[int], str]:
    """Names of size classes: ``size_classes(64, 1024)(100) == "<=1024"``, and ">1024" above the
    last limit.

    Raises:
        ValueError: no limits, or limits that are not positive and ascending.
    """
    if not limits or limits[0] <= 0 or any(low >= high for low, high in pairwise(limits)):
        raise ValueError(f"limits of size classes must be positive and ascending, got {limits}")
    names = [*[f"<={limit}" for limit in limits], f">{limits[-1]}"]
    return lambda size: names[bisect_left(limits, size)]


def bucketed(key: Any, bucket: Callable[[int], Hashable]) -> Any:
    """``key`` with ``bucket`` of every int in it: sizes, and strides, too, for they follow from
    sizes. Bools stay.
    """
    key = to_hashable(key)
    if isinstance(key, tuple):
        return tuple([bucketed(each, bucket) for each in key])
    return bucket(key) if type(key) is int else key


def _in_order(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(sorted(values, key=_text))


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({','.join([_text(each) for each in value])})"
    # A string in quotes and in ASCII: it may look like a number, hold a bracket, or what one
    # terminal shows and another does not.
    return ascii(value) if type(value) in (str, bytes) else stable_repr(value)
