"""What a step can reach: tensors and plain values of its arguments, of what it captures, and of the
modules and objects among these.

Knows Python's functions and objects, torch's modules and optimizers, numpy's arrays; nothing of
runs. Runs no code of the user's objects.
"""

from __future__ import annotations

import inspect
import operator
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from io import IOBase
from itertools import islice
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from dist_tune.accelerator import api
from dist_tune.measure.differences import difference, flat
from dist_tune.measure.memory import is_mapping, plain_tensors, version_of
from dist_tune.ranks import is_symmetric

_MAX_DEPTH = 6
"""Of objects within objects."""
_MAX_OBJECTS = 50_000
"""Objects that are looked into."""
_MAX_ITEMS = 1000
"""Items of a container; longer ones hold data."""
_TRAINING = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_NOT_CAPTURED = (ModuleType, type, BuiltinFunctionType)
_OTHERS = sys.stdlib_module_names - {"types", "argparse"} | {
    "torch",
    "triton",
    "numpy",
    "dist_tune",
}
"""Packages whose objects are not looked into: locks, loggers, process groups, kernels."""
_OF_MODULES = vars(torch.nn.Module()).keys()
_ABSENT = object()

Kind = Literal["argument", "captured", "training", "object"]
"""How a value is held: by arguments and their containers, by captures and theirs, by an optimizer
and the like, by any other object.
"""


class Leaf(NamedTuple):
    """A tensor, or the memory of a numpy array, and the name that a user knows it by."""

    name: str
    tensor: torch.Tensor
    kind: Kind
    owners: tuple[int, ...]
    """Identities of the objects that lead to it."""
    version: int | None
    """Number of torch's writes to it so far."""
    node: Any
    """Its place in the graph of autograd."""

    @property
    def is_state(self) -> bool:
        """False for what plain objects hold: flags and buffers of a context for communication are
        the step's own business.
        """
        return self.kind != "object"


class Holder(NamedTuple):
    """A container or object whose items or attributes a step may exchange."""

    name: str
    value: Any
    is_state: bool
    """True for containers among the arguments, and for optimizers, schedulers and scalers."""

    def read(self) -> dict[Any, Any]:
        """The contents by key, place or name; the items of a set are keys."""
        value = self.value
        if isinstance(value, list | deque):
            return dict(enumerate(value))
        return (
            dict.fromkeys(value)
            if isinstance(value, set)
            else dict(value)
            if isinstance(value, dict)
            else _attributes(value)
        )

    def changes(self, before: dict[Any, Any]) -> list[str]:
        """Names of items or attributes that are others than before."""
        now = self.read()
        if isinstance(self.value, list | set | deque) and len(before) != len(now):
            return [self.name or "?"]
        others = [
            key
            for key in before.keys() | now.keys()
            if not _is_same(before.get(key, _ABSENT), now.get(key, _ABSENT))
        ]
        if isinstance(self.value, dict | list | set | deque):
            return [f"{self.name}[{key!r:.40}]" for key in others]
        return [
            f"{self.name}.{key}" if self.name and key else f"{self.name}{key}" for key in others
        ]

    def write(self, contents: dict[Any, Any]) -> None:
        """Put such contents back, where something was exchanged."""
        value, now = self.value, self.read()
        if len(now) == len(contents) and all(
            map(operator.is_, [*now, *now.values()], [*contents, *contents.values()])
        ):
            return
        kind: Any = next(
            (kind for kind in (OrderedDict, dict, set, list, deque) if isinstance(value, kind)),
            None,
        )
        if kind is not None:  # not value.clear(): a subclass has its own
            kind.clear(value)
            (kind.extend if kind in (list, deque) else kind.update)(
                value, contents.values() if kind in (list, deque) else contents
            )
        elif isinstance(value, CellType):
            value.cell_contents = contents[""]
        elif isinstance(value, _Globals):
            value.namespace.update(contents)
        else:  # past the object's own __setattr__
            for name, content in contents.items():
                if now.get(name, _ABSENT) is not content:
                    object.__setattr__(value, name, content)
            for name in now.keys() - contents.keys():
                object.__delattr__(value, name)


@dataclass
class Reachable:
    """All that was found."""

    leaves: dict[int, Leaf] = field(default_factory=dict)
    """By identity of the tensor or array."""
    holders: list[Holder] = field(default_factory=list)
    is_cut: bool = False
    """True if there is more than was looked at."""
    training: str = ""
    """Name of an optimizer, scheduler or scaler."""
    once: list[str] = field(default_factory=list)
    """Iterators, DataLoaders, queues, files to read and private random generators, described: a run
    takes from them for good.
    """
    names: dict[int, str] = field(default_factory=dict)
    """Identity of an object -> its name."""
    parameters: dict[int, tuple[str, torch.Tensor]] = field(default_factory=dict)
    """Tensors that autograd makes gradients of, by identity, with their names."""
    shared: set[int] = field(default_factory=set)
    """Identities of objects that lead to memory which peers can reach: what else they hold may
    count for peers, too.
    """


@dataclass(frozen=True, eq=False)
class _Globals:
    """The globals that a function names."""

    namespace: dict[str, Any]
    names: frozenset[str]


class _Found(NamedTuple):
    name: str
    value: Any
    kind: Kind
    depth: int
    owners: tuple[int, ...]
    """Identities of the objects that lead to it."""


def reachable(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_deep: bool = True
) -> Reachable:
    """All that a call of a function can reach: its arguments, the object of a bound method,
    captured values and globals that it names.

    Not ``is_deep``: without what plain objects hold.
    """
    found = Reachable()
    seen: dict[int, Any] = {}  # kept, so that no identity is given away again
    roots, namespace = _roots(function, args, kwargs)
    waiting = roots[::-1]
    while waiting and len(seen) < _MAX_OBJECTS:
        name, value, kind, depth, owners = waiting.pop()
        if isinstance(value, torch.Tensor):
            if value.is_leaf and value.requires_grad:
                found.parameters.setdefault(id(value), (name, value))
                if value.grad is not None:
                    _enter(
                        found,
                        value.grad,
                        f"{name}.grad",
                        "captured" if kind == "object" else kind,
                        (),
                    )
            # And no wrapper, whose attributes are its parts.
            if type(value) in (torch.Tensor, torch.nn.Parameter):
                waiting += [
                    _Found(f"{name}.{path}", each, kind, depth + 1, owners)
                    for path, each in vars_of(value).items()
                ]
            _enter(found, value, name, kind, owners)
            continue
        is_too_deep = depth > _MAX_DEPTH and not isinstance(value, torch.nn.Module)
        if (
            is_too_deep
            or id(value) in seen
            or isinstance(value, int | float | complex | str | bytes | None)
        ):
            continue
        seen[id(value)] = value
        found.names[id(value)] = name
        if isinstance(value, np.ndarray):
            with suppress(TypeError, ValueError):  # of objects, or with negative strides
                if value.flags.writeable:
                    _enter(found, torch.from_numpy(value), name, kind, owners, key=value)
        elif (
            not is_deep
            and (kind == "object" or _is_object(value))
            and not isinstance(value, torch.nn.Module)
        ):
            continue
        elif _is_used_up(value):
            found.once.append(f"{name} ({type(value).__name__})")
        else:
            of_training = kind == "training" or isinstance(value, _TRAINING)
            if isinstance(value, _TRAINING):
                found.training = found.training or name
            if isinstance(value, torch.nn.Module):
                found.holders += [
                    Holder(f"{name}.{path}", getattr(value, path), True)
                    for path in ("_parameters", "_buffers")
                ]
            if isinstance(value, list | tuple | set | deque) or is_mapping(value):
                rest = islice(value, _MAX_ITEMS, None)
                found.is_cut |= any(
                    not isinstance(each, int | float | str | bytes | None) for each in rest
                )
            if (
                of_training
                or isinstance(value, list | dict | set | deque | CellType | _Globals)
                or _is_object(value)
            ):
                found.holders.append(
                    Holder(
                        name, value, of_training or (kind == "argument" and not _is_object(value))
                    )
                )
            inner = depth + (type(value) not in (list, tuple, dict, set))
            waiting += [
                _Found(
                    f"{name}{path}",
                    part,
                    of,
                    depth if isinstance(part, torch.nn.Module) else inner,
                    (*owners, id(value)),
                )
                for path, part, of in _parts(value, kind, namespace)
            ][::-1]
    found.is_cut |= bool(waiting)
    return found


def held_by(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Leaf]:
    """The tensors that a call is given, in containers and modules, too, and those that its function
    captures; none of what objects hold.
    """
    leaves = reachable(function, args, kwargs, is_deep=False).leaves.values()
    return [leaf for leaf in leaves if leaf.kind in ("argument", "captured")]


def _is_same(mine: Any, other: Any) -> bool:
    """True for one value or equal ones, to the bit.

    Of objects of other kinds only the type is compared: a step may make them anew.
    """
    return mine is other or (
        type(mine) is type(other) and not difference(flat(mine), flat(other), 0.0, 0.0)
    )


def _enter(
    found: Reachable,
    value: torch.Tensor,
    name: str,
    kind: Kind,
    owners: tuple[int, ...],
    key: object = None,
) -> None:
    """Enter a tensor, or those that it is a wrapper of. ``key``: the array whose memory it is."""
    for k, tensor in enumerate(plain_tensors(value)):
        known = found.leaves.get(id(tensor if key is None else key))
        if is_symmetric(tensor):
            found.shared.update(owners)
        elif tensor.device.type != "meta" and (
            known is None or (known.kind == "object" and kind != "object")
        ):
            leaf = Leaf(
                f"{name}.{k}" if k else name,
                tensor,
                kind,
                owners,
                version_of(tensor),
                tensor.grad_fn,
            )
            found.leaves[id(tensor if key is None else key)] = leaf


def _roots(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[_Found], Any]:
    """What a call is given and what its function captures; the function's globals."""
    inner = function
    while isinstance(inner, partial | MethodType):
        inner = inner.func if isinstance(inner, partial) else inner.__func__
    namespace = getattr(inspect.unwrap(inner), "__globals__", None)
    try:
        bound = inspect.signature(function).bind_partial(*args, **kwargs)
        arguments = dict(bound.arguments)
        bound.apply_defaults()
        captured = [
            (name, value) for name, value in bound.arguments.items() if name not in arguments
        ]
    except (TypeError, ValueError):
        # A builtin, or arguments that do not fit, which the call will say.
        arguments, captured = (
            {f"argument {i}": value for i, value in enumerate(args)} | dict(kwargs),
            [],
        )
    roots = [_Found(name, value, "argument", 0, ()) for name, value in arguments.items()]
    roots += [_Found(name, value, "captured", 0, ()) for name, value in captured]
    if isinstance(function, FunctionType | MethodType | partial):
        parts = _parts(function, "captured", namespace)
        return roots + [
            _Found(name.lstrip("."), value, kind, 0, ()) for name, value, kind in parts
        ], namespace
    return [*roots, _Found("self", function, "captured", 0, ())], namespace


def _parts(value: Any, kind: Kind, namespace: Any) -> Iterator[tuple[str, Any, Kind]]:
    """The values in a value: name, value, how it is held.

    ``namespace``: the globals of the module whose functions' globals count, too.
    """
    if isinstance(value, torch.nn.Module):
        own = {**value._parameters, **value._buffers, **value._modules}
        yield from (
            (f".{name}", each, "captured" if kind == "object" else kind)
            for name, each in own.items()
        )
        if _is_object(value):
            yield from ((f".{name}", each, "object") for name, each in _attributes(value).items())
    elif isinstance(value, _TRAINING):
        yield from ((f".{name}", each, "training") for name, each in vars(value).items())
    elif isinstance(value, list | tuple | set | deque):
        yield from (
            (f"[{i}]", each, kind) for i, each in enumerate(value) if len(value) <= _MAX_ITEMS
        )
    elif is_mapping(value):
        yield from (
            (f"[{key!r:.40}]", each, kind)
            for key, each in value.items()
            if len(value) <= _MAX_ITEMS
        )
    elif isinstance(value, CellType | _Globals):
        yield from ((name, each, kind) for name, each in _attributes(value).items())
    elif isinstance(value, FunctionType):
        yield from ((f".{name}", each, "captured") for name, each in _captured(value, namespace))
    elif isinstance(value, MethodType):
        yield from (
            (".self", value.__self__, "captured"),
            (".function", value.__func__, "captured"),
        )
    elif isinstance(value, partial):
        yield from (
            (f".{name}", getattr(value, name), "captured") for name in ("func", "args", "keywords")
        )
    elif isinstance(value, BuiltinFunctionType | MethodWrapperType):  # a generator's __next__
        yield ".self", value.__self__, "captured"
    elif _is_object(value):
        yield from ((f".{name}", each, "object") for name, each in _attributes(value).items())


def _is_used_up(value: Any) -> bool:
    """True for what gives other values at each use: not torch's, numpy's and Python's global
    generators, which replays put back.
    """
    if isinstance(value, _GENERATORS):
        shared = (
            random._inst,
            np.random.mtrand._rand,
            torch.default_generator,
            *getattr(api, "default_generators", ()),
        )
        return all(value is not each for each in shared)
    if isinstance(value, IOBase):
        return not value.closed and value.readable()
    is_queue = type(value).__module__.partition(".")[0] in ("queue", "_queue", "multiprocessing")
    if isinstance(value, torch.utils.data.DataLoader) or (
        is_queue and hasattr(value, "get" if hasattr(value, "put") else "recv")
    ):
        return True
    return hasattr(type(value), "__next__")


def _is_object(value: Any) -> bool:
    """True for an object of a class that is neither Python's own nor of a library below this one,
    and for torch's layers.
    """
    if isinstance(value, (*_NOT_CAPTURED, FunctionType, torch.Tensor)) or is_mapping(value):
        return False
    module = type(value).__module__
    return module.partition(".")[0] not in _OTHERS or module.startswith("torch.nn.modules.")


def _attributes(value: Any) -> dict[str, Any]:
    """An object's own attributes, in slots, too; what a cell holds; the globals that a function
    names.
    """
    if isinstance(value, CellType):
        return {"": value.cell_contents} if value != CellType() else {}
    if isinstance(value, _Globals):
        return {
            name: each
            for name in sorted(value.names)
            if _may_count(each := value.namespace.get(name), value.namespace)
        }
    own = vars_of(value)
    found = (
        {name: each for name, each in own.items() if name not in _OF_MODULES}
        if isinstance(value, torch.nn.Module)
        else dict(own)
    )
    for slot in (
        each
        for cls in type(value).__mro__
        for each in vars(cls).values()
        if isinstance(each, MemberDescriptorType)
    ):
        with suppress(AttributeError):  # not filled
            found[slot.__name__] = slot.__get__(value)
    return found


def vars_of(value: Any) -> dict[str, Any]:
    """An object's ``__dict__``; not by getattr, which asks the object's own ``__getattr__`` where
    it has slots alone.
    """
    try:
        return dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        return {}


def _may_count(value: Any, namespace: Mapping[str, Any]) -> bool:
    """True for a global that may be state: no module, class, or function of another module."""
    is_foreign = (
        isinstance(value, FunctionType)
        and getattr(inspect.unwrap(value), "__globals__", None) is not namespace
    )
    return not isinstance(value, _NOT_CAPTURED) and not is_foreign


def _captured(function: Any, namespace: Any) -> Iterator[tuple[str, Any]]:
    """Name and value: cells, and the globals that the code names, if they are these."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        yield from zip(code.co_freevars, function.__closure__ or (), strict=True)
        if function.__globals__ is namespace or _is_own(sys.modules.get(function.__module__)):
            names, own = frozenset(_names_in(code)), function.__globals__
            yield "", _Globals(own, names)
            modules = {
                name: each for name in names if isinstance(each := own.get(name), ModuleType)
            }
            yield from (
                (name, _Globals(vars(module), names))
                for name, module in modules.items()
                if _is_own(module)
            )


def _is_own(module: ModuleType | None) -> bool:
    """True for a module of the program, which is installed by no package."""
    path = getattr(module, "__file__", None) or "-packages"
    return (
        module is not None
        and "-packages" not in path
        and module.__name__.partition(".")[0] not in _OTHERS
    )


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # a comprehension, a lambda
            yield from _names_in(constant)
