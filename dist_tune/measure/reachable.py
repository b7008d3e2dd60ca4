"""Tensors that a function can reach: its arguments, what it captures, and the modules and optimizers among these and their attributes.

Knows Python's functions, torch's modules and optimizers; nothing of replays. Runs no code of the user's objects.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from dist_tune.measure.memory import is_mapping

_MAX_DEPTH = 4
"""Of objects within objects."""
_MAX_OBJECTS = 10_000
"""Objects that are looked into; tensors of others are not known."""
_MAX_ITEMS = 1000
"""Items of a container in an attribute; longer ones hold data."""
_PLAIN_STATE = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
_STATEFUL = (torch.nn.Module, torch.optim.Optimizer, torch.Generator, *_PLAIN_STATE)
"""Kinds of attributes of an object that count. Not its tensors: in a context for communication they are flags and buffers of peers."""
_GLOBALS = (torch.Tensor, *_STATEFUL)
"""Kinds of globals that count; a module's other globals are rarely state of one step."""


class Reached(NamedTuple):
    """A tensor and the name that a user knows it by."""

    name: str
    tensor: torch.Tensor
    is_compared: bool
    """True if its values are compared, because a write to it may go uncounted: an argument, a captured value, in a container of these, too,
    or a module's buffer. Not a parameter, or a tensor of an optimizer."""


class Reachable(NamedTuple):
    """All that was found."""

    tensors: dict[int, Reached]
    """By identity."""
    states: list[dict[Any, Any]]
    """Dicts of optimizers, schedulers and scalers, with their plain values."""
    buffers: set[int]
    """Identities of tensors that are buffers of modules."""
    generators: list[torch.Generator]
    attributes: dict[int, Reached]
    """By identity: other tensors of objects and modules, which are not counted as state of the step."""


def named_roots(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> object, of a call: arguments by the function's parameters, the object of a bound method, captured values and globals."""
    roots: dict[str, Any] = {}
    while isinstance(function, partial):
        roots |= {f"argument {i}": value for i, value in enumerate(function.args)} | dict(function.keywords)
        function = function.func
    try:
        bound = inspect.signature(function).bind_partial(*args, **kwargs)
        bound.apply_defaults()
        roots |= bound.arguments
    except (TypeError, ValueError):  # a builtin, or arguments that do not fit, which the call will say
        roots |= {f"argument {i}": value for i, value in enumerate(args)} | dict(kwargs)
    if isinstance(function, MethodType):
        roots["self"] = function.__self__
        function = function.__func__
    elif not isinstance(function, FunctionType):
        roots["self"] = function
    return roots | _captured(inspect.unwrap(function))


def reachable(roots: Mapping[str, Any]) -> Reachable:
    """The tensors reached from these objects."""
    found = Reachable({}, [], set(), [], {})
    seen: set[int] = set()
    waiting = [(name, value, True, 0) for name, value in reversed(list(roots.items()))]
    while waiting and len(seen) < _MAX_OBJECTS:
        name, value, is_compared, depth = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.tensors.setdefault(id(value), Reached(name, value, is_compared))
            if value.is_leaf and value.grad is not None:
                found.tensors.setdefault(id(value.grad), Reached(f"{name}.grad", value.grad, is_compared=False))
        elif id(value) not in seen and depth <= _MAX_DEPTH:
            seen.add(id(value))
            if isinstance(value, torch.optim.Optimizer):
                found.states.extend([value.state, *value.state.values(), *value.param_groups])
            elif isinstance(value, _PLAIN_STATE):
                found.states.append(vars(value))
            elif isinstance(value, torch.Generator):
                found.generators.append(value)
            if isinstance(value, torch.nn.Module):  # torch does not count how a batch norm writes its statistics
                found.buffers.update(map(id, value.buffers()))
                waiting += [(f"{name}.{path}", each, True, depth + 1) for path, each in value.named_buffers()]
            found.attributes.update((id(each), Reached(f"{name}{path}", each, is_compared=False)) for path, each in _attributes(value))
            is_compared = is_compared and (isinstance(value, list | tuple | deque) or is_mapping(value))
            waiting += [(f"{name}{path}", each, is_compared, depth + 1) for path, each in _parts(value)]
    return found


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module):
        yield from ((f".{path}", each) for path, each in value.named_parameters())
    elif isinstance(value, torch.optim.Optimizer):
        yield from ((".params", each) for group in value.param_groups for each in group["params"])
        yield from ((f".state.{key}", each) for state in value.state.values() for key, each in state.items())
    elif isinstance(value, _PLAIN_STATE):
        yield from ((f".{name}", each) for name, each in vars(value).items() if isinstance(each, torch.Tensor | torch.optim.Optimizer))
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{i}]", each) for i, each in enumerate(value))
    elif is_mapping(value):
        yield from ((f"[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, FunctionType):
        yield from ((f".{name}", each) for name, each in _captured(value).items())
    elif isinstance(value, MethodType):
        yield from ((".self", value.__self__), (".function", value.__func__))
    elif isinstance(value, partial):
        yield from ((f".{name}", each) for name, each in (("func", value.func), ("args", value.args), ("keywords", value.keywords)))
    elif _is_object(value):
        yield from ((f".{name}", each) for name, each in vars_of(value).items() if isinstance(each, _STATEFUL))


def _attributes(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in attributes of a module's parts or of an object, also in containers there."""
    owners = value.named_modules() if isinstance(value, torch.nn.Module) else [("", value)] if _is_object(value) else []
    for path, owner in owners:
        for name, each in vars_of(owner).items():
            if not name.startswith("_"):  # those of a module hold its parameters and buffers
                place = f".{path}.{name}" if path else f".{name}"
                yield from ((f"{place}{at}", tensor) for at, tensor in _within(each) if isinstance(tensor, torch.Tensor))


def _within(value: Any) -> Iterator[tuple[str, Any]]:
    """A value, or what a short plain container holds."""
    if type(value) in (list, tuple, dict) and len(value) <= _MAX_ITEMS:
        yield from ((f"[{key!r}]", each) for key, each in (value.items() if isinstance(value, dict) else enumerate(value)))
    else:
        yield "", value


def _is_object(value: Any) -> bool:
    """True for an object of a class of the user's."""
    return type(value).__module__.partition(".")[0] not in ("builtins", "torch", "triton", "numpy") and isinstance(vars_of(value), dict)


def vars_of(value: object) -> Any:
    """An object's own attributes; None if it has none."""
    return getattr(value, "__dict__", None)


def _captured(function: Any) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    cells = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells[name] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    named = {name: function.__globals__.get(name) for name in code.co_names}
    return cells | {name: value for name, value in named.items() if isinstance(value, _GLOBALS)}
