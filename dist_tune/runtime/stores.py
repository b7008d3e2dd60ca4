"""What a run does that must not be done twice: optimizers that step, and kernels that write to memory that was there before.

The first run shows which memory kernels are given; what of it lives on was there before the second run. Pointer arguments that stores
and atomics go to are read from Triton's IR. Knows Triton's launches and torch's optimizers; nothing of candidates or ranks.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from threading import get_ident
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from triton.runtime.jit import JITFunction

from dist_tune.compiler import SharedContext, replaced
from dist_tune.distributed import is_symmetric

_HEADER = re.compile(r"tt\.func public @\S+?\((?P<arguments>.*)\) (?:attributes|->|\{)")
_POINTER = re.compile(r"%([\w$.-]+): (?:!tt\.ptr|!tt\.tensordesc)")
_VALUE = re.compile(r"%[\w$.-]+")
_STORE = re.compile(r"\btt\.(store|atomic_\w+|descriptor_(store|reduce|scatter)\w*|call|elementwise_inline_asm|extern_elementwise)\b")
_FIRST_ONLY = ("tt.store", "tt.atomic", "tt.descriptor")
_LOAD = re.compile(r"= (?:tt\.load|tt\.descriptor_(?:load|gather)|tt\.atomic)")


def stored_arguments(ttir: str) -> set[str] | None:
    """Names of the pointer arguments that a kernel may write to; None if all of them may be. ``ttir``: its module as text.

    A value counts as made of all that its operation takes, so that some are found too many and none too few.
    """
    header = _HEADER.search(ttir)
    if header is None or "^bb" in ttir:
        return None
    made_of: dict[str, set[str]] = {f"%{name}": {f"%{name}"} for name in _POINTER.findall(header["arguments"])}
    body = ttir[header.end() :].partition("tt.func")[0].splitlines()
    lines = [line.rpartition(" loc(")[0] or line for line in body]
    stored: set[str] = set()
    while True:
        before = sum(map(len, made_of.values())) + len(stored)
        around: list[list[str]] = []
        """Results of the operations whose regions a line is in, the innermost last: a yield makes them."""
        for line in lines:
            if line.lstrip().startswith("}") and around:
                results = around.pop()
            else:
                results = _VALUE.findall(line.partition(" = ")[0]) if line.lstrip().startswith("%") else []
                results += re.findall(r"(%[\w$.-]+) = %", line)
            taken = [name for name in _VALUE.findall(line) if name not in results]
            sources = set().union(*(made_of.get(name, set()) for name in taken)) if taken else set()
            if found := _STORE.search(line):
                only = found[0].startswith(_FIRST_ONLY)
                stored.update(made_of.get(_VALUE.findall(line[found.end() :])[0], set()) if only else sources)
            if sources and not _LOAD.search(line):
                for name in around[-1] if "scf.yield" in line and around else results:
                    made_of.setdefault(name, set()).update(sources)
            if line.rstrip().endswith("{"):
                around.append(results)
        if before == sum(map(len, made_of.values())) + len(stored):
            return {name[1:] for name in stored}


class StoreWatch:
    """The launches of one call, in its first run and in the probe."""

    def __init__(self) -> None:
        self._given: dict[int, StorageWeakRef] = {}
        """Memory that kernels of the first run were given."""
        self._compiled: dict[Any, dict[int, Any]] = {}
        """Kernel -> what Triton has made of it."""
        self._stored: dict[int, set[str] | None] = {}

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Note what kernels are given meanwhile."""

        def around(run: Callable[..., Any], kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            for _, tensor in _tensors_of(kernel, args, kwargs):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._given:
                    self._given[storage._cdata] = StorageWeakRef(storage)
            compiled = run(kernel, *args, **kwargs)
            self._compiled.setdefault(kernel, {})[id(compiled)] = compiled
            return compiled

        with _around_launches(around):
            yield

    @contextmanager
    def probe(self, keep: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
        """Call ``keep(name, tensor)`` before kernels write to memory that was there before this block; not to that of peers."""
        there = {key for key, each in self._given.items() if not each.expired()}

        def around(run: Callable[..., Any], kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            names = self._names(kernel)
            for name, tensor in _tensors_of(kernel, args, kwargs):
                if (names is None or name in names) and tensor.untyped_storage()._cdata in there and not is_symmetric(tensor):
                    keep(f"{name} of {kernel.__name__}", tensor)
            return run(kernel, *args, **kwargs)

        with _around_launches(around):
            yield

    def _names(self, kernel: Any) -> set[str] | None:
        """Arguments that a kernel may write to; None for all, as of one that is interpreted."""
        names: set[str] = set()
        for key, compiled in self._compiled.get(kernel, {0: None}).items():
            if key not in self._stored:
                ttir = getattr(compiled, "asm", {}).get("ttir")
                found = stored_arguments(ttir) if isinstance(ttir, str) else None
                self._stored[key] = found if found is not None and found <= set(kernel.arg_names) else None
            if (found := self._stored[key]) is None:
                return None
            names |= found
        return names


@contextmanager
def _around_launches(around: Callable[..., Any]) -> Iterator[None]:
    """Call ``around(run, kernel, args, kwargs)`` in place of each launch in this thread's tuned call, also of autograd's threads."""
    with _launches(), _put(_around, around):
        yield


@contextmanager
def noting_training() -> Iterator[list[Any]]:
    """The optimizers, schedulers and scalers that step meanwhile in this thread's tuned call, or in autograd's hooks."""
    stepped: list[Any] = []
    with _training(), _put(_stepped, stepped):
        yield stepped


_around: dict[int, Callable[..., Any]] = {}
_stepped: dict[int, list[Any]] = {}
"""Thread -> what it hears."""


@contextmanager
def _put(heard: dict[int, Any], value: Any) -> Iterator[None]:
    heard[get_ident()] = value
    try:
        yield
    finally:
        del heard[get_ident()]


def _here(heard: dict[int, Any]) -> Any:
    """What this thread hears, or if it is one of autograd's the only thread that hears anything."""
    is_autograd = len(heard) == 1 and isinstance(threading.current_thread(), threading._DummyThread)
    return next(iter([*heard.values()]), None) if is_autograd else heard.get(get_ident())


def _launch(run: Callable[..., Any]) -> Callable[..., Any]:
    def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        around = None if kwargs.get("warmup") else _here(_around)
        return run(kernel, *args, **kwargs) if around is None else around(run, kernel, args, kwargs)

    return launch


@contextmanager
def _heard_launches() -> Iterator[None]:
    interpreter = sys.modules.get("triton.runtime.interpreter")
    with ExitStack() as stack:
        for cls in (JITFunction, *([interpreter.InterpretedFunction] if interpreter is not None else [])):
            stack.enter_context(replaced(cls, "run", _launch))
        yield


def _note(owner: Any) -> None:
    if (stepped := _here(_stepped)) is not None:
        stepped.append(owner)


def _noted(run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def step(owner: Any, *args: Any, **kwargs: Any) -> Any:
        _note(owner)
        return run(owner, *args, **kwargs)

    return step


@contextmanager
def _heard_training() -> Iterator[None]:
    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _note(optimizer)).remove)
        for cls in (*_with_subclasses(LRScheduler), *_with_subclasses(torch.amp.GradScaler)):
            for name in {"step", "update"} & vars(cls).keys():
                stack.enter_context(replaced(cls, name, _noted))
        yield


# Shared, because a second thread that makes a first call would put back the first one's wrappers.
_launches, _training = SharedContext(_heard_launches), SharedContext(_heard_training)


def _with_subclasses(cls: type) -> Iterator[type]:
    yield cls
    for each in cls.__subclasses__():  # type: ignore[var-annotated]
        yield from _with_subclasses(each)


def _tensors_of(kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of each pointer argument, also in tuples and descriptors."""
    for name, value in (*zip(kernel.arg_names, args, strict=False), *kwargs.items()):
        for each in value if isinstance(value, tuple | list) else (value,):
            tensor = getattr(each, "base", None) if hasattr(each, "block_shape") else each
            if isinstance(tensor, torch.Tensor):
                yield name, tensor
