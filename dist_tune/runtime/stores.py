"""What a run does that must not be done twice: optimizers that step, and kernels that write to memory that was there before.

The first run shows which memory kernels are given; what of it lives on was there before the second run. Pointer arguments that stores
and atomics go to are read from Triton's IR. Knows Triton's launches and torch's optimizers; nothing of candidates or ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dist_tune.compiler import SharedContext, replaced
from dist_tune.distributed import is_symmetric
from dist_tune.runtime.recording import around_launches, heard, here

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

        with around_launches(around):
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

        with around_launches(around):
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
def noting_training() -> Iterator[list[Any]]:
    """The optimizers, schedulers and scalers that step meanwhile in this thread's tuned call, or in autograd's hooks."""
    stepped: list[Any] = []
    with _training(), heard(_stepped, stepped):
        yield stepped


_stepped: dict[int, list[list[Any]]] = {}


def _note(owner: Any) -> None:
    for stepped in here(_stepped) or []:
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


_training = SharedContext(_heard_training)


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
