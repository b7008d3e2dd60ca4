"""A kernel of ``triton.autotune`` without a config for its key becomes a ``Launch``, handed to whoever listens.

The only user of Triton's ``Autotuner`` internals; knows nothing of ranks, times or search. Triton is patched only while a
listener is in place, and in one function: ``Autotuner.run`` calls ``self.prune_configs`` on a miss and only then, so it
runs its own source with that call replaced by one that may leave for the listener. Hits, single-config kernels, hooks and
printing stay Triton's own code in Triton's own frame.

What is exchanged is the function's code and not the attribute of the class: every assignment to a class throws away what
Python has cached about it, which makes the next launch 10 us slower, and from Python 3.12 on a class that was assigned to
a thousand times is never cached again.

A listener hears the thread that put it there, and autograd's threads while it is the only one. Other threads are left
to Triton.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from threading import get_ident
from types import CodeType
from typing import Any, Protocol

import torch
import triton
from triton.runtime.autotuner import Autotuner

from dist_tune.errors import DistTuneError
from dist_tune.space import describe, digest, stable_repr, unique
from dist_tune.timing import Span


class Undo:
    """Tensors to put back as they were: Triton's ``restore_value``, at the end of a replay and not of a launch.

    Kernels later in the closure must read what the launch wrote, so values go back when the closure is through.
    """

    def __init__(self) -> None:
        self._saved: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """Remember what ``tensor`` held; the first copy of a replay is the one that counts."""
        self._saved.setdefault((tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()), (tensor, copy))

    def restore(self) -> None:
        """Put all back and forget them."""
        _put_back(list(self._saved.values()))
        self._saved.clear()


def _put_back(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for tensor, copy in reversed(copies):
            tensor.copy_(copy)


class Launch:
    """One call of an autotuned kernel, with the arguments of this call."""

    def __init__(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.kernel = kernel
        self.key = tuning_key(kernel, args, kwargs)
        self._args = args
        self._kwargs = kwargs

    @property
    def name(self) -> str:
        """The kernel function's name with its module, the same on all ranks."""
        function = self.kernel.base_fn
        return f"{function.__module__}.{function.__qualname__.rpartition('<locals>.')[2]}".removeprefix("__main__.")

    @property
    def code(self) -> CodeType:
        """What makes two launches launches of one kernel, also where the decorated object is made anew."""
        code: CodeType = self.kernel.base_fn.__code__
        return code

    @property
    def key_text(self) -> str:
        """The key, the same on all ranks for equal keys."""
        return "[" + ",".join(value if isinstance(value, str) else stable_repr(value) for value in self.key) + "]"

    def all_configs_digest(self) -> str:
        """Identity of the kernel's configs before pruning."""
        return digest([describe(config) for config in self.kernel.configs])

    def known_config(self) -> triton.Config | None:
        """The config that Triton would launch; None for a miss and for kernels with nothing to choose."""
        config: triton.Config | None = self.kernel.cache.get(self.key) if len(self.kernel.configs) > 1 else None
        return config

    def candidates(self) -> list[triton.Config]:
        """The kernel's configs after its own pruning, without repeats."""
        self.kernel.nargs = self._named()
        try:
            return unique(self.kernel.prune_configs(self._kwargs))
        finally:
            self.kernel.nargs = None

    def run(self, config: triton.Config, undo: Undo, span: Span | None = None) -> Any:
        """Launch with ``config``. Hooks, zeroing and copies are outside the span; if the launch fails, nothing it wrote stays.

        Raises:
            Exception: whatever a hook or the launch raises.
        """
        full = self._full(config)
        kernel = self.kernel
        if config.pre_hook is not None:
            config.pre_hook(full)
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        if kernel.user_defined_pre_hook:
            kernel.pre_hook(full)  # takes the place of zeroing and copying, as in vanilla Triton
        else:
            copies = [(full[name], full[name].clone()) for name in kernel.restore_value if full[name] is not None]
            for tensor, copy in copies:
                undo.keep(tensor, copy)
            self._zero(full)
        try:
            if span is not None:
                span.begin()
            result = kernel.fn.run(*self._args, **self._kwargs, **config.all_kwargs())
            if span is not None:
                span.end()
        except Exception as error:
            _put_back(copies)
            if kernel.user_defined_post_hook:
                kernel.post_hook(full, exception=error)
            raise
        if kernel.user_defined_post_hook:
            kernel.post_hook(full, exception=None)
        return result

    def compile(self, config: triton.Config) -> Any:
        """Triton's compiled kernel for ``config``, not launched; None under the interpreter."""
        if config.pre_hook is not None and any(hasattr(value, "block_shape") for value in self._named().values()):
            # The hooks of tensor-descriptor kernels set the block shape, and that is part of what is compiled.
            config.pre_hook(self._full(config))
        return self.kernel.fn.run(*self._args, **{**self._kwargs, "warmup": True}, **config.all_kwargs())

    def reset_only(self, config: triton.Config) -> None:
        """What vanilla Triton does once after tuning, before the launch that counts: zero ``reset_to_zero``."""
        full = self._full(config)
        if self.kernel.user_defined_pre_hook:
            self.kernel.pre_hook(full, reset_only=True)
        else:
            self._zero(full)

    def _named(self) -> dict[str, Any]:
        return dict(zip(self.kernel.arg_names, self._args, strict=False))

    def _full(self, config: triton.Config) -> dict[str, Any]:
        return {**self._named(), **self._kwargs, **config.all_kwargs()}

    def _zero(self, full: dict[str, Any]) -> None:
        with torch.no_grad():
            for name in self.kernel.reset_to_zero:
                if full[name] is not None:
                    full[name].zero_()


def tuning_key(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The key under which ``Autotuner.run`` looks in ``kernel.cache``; the same in Triton 3.3 to 3.9. Empty if it does not look."""
    if len(kernel.configs) < 2:
        return ()
    named = {
        name: value for name, value in {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}.items() if name in kernel.arg_names
    }
    values = [named[name] for name in kernel.keys if name in named]
    return tuple(values + [str(value.dtype) for value in named.values() if hasattr(value, "dtype")])


def adopt(kernel: Any, key: tuple[Any, ...], config: triton.Config, timings_ms: dict[triton.Config, float]) -> None:
    """Make ``config`` what Triton launches for ``key``, and leave on the kernel what vanilla tuning would."""
    kernel.cache[key] = config
    kernel.best_config = config
    kernel.configs_timings = {each: [ms, ms, ms] for each, ms in timings_ms.items()}


def evict(kernel: Any, key: tuple[Any, ...]) -> None:
    """Make the next launch for ``key`` a miss."""
    kernel.cache.pop(key, None)


class Listener(Protocol):
    """Who hears of launches."""

    @property
    def is_watching(self) -> bool:
        """Whether to call ``launching``; reading the key of every launch costs some microseconds."""

    def launching(self, launch: Launch) -> None:
        """Before any launch of an autotuned kernel, hit or miss."""

    def missed(self, launch: Launch) -> Any:
        """Instead of the launch, when Triton has no config for its key. Returns what the launch returns."""


class _Miss(BaseException):
    """Leaves ``Autotuner.run``; not an Exception, so that no ``except Exception`` on its way keeps it."""


class _Patch:
    """What the patched ``Autotuner.run`` finds in place of the text "patch" in its code."""

    miss = _Miss

    def __init__(self, function: Any) -> None:
        self.function = function
        self.own_code: CodeType = function.__code__
        self.our_code = _listening_code(function, self)
        self.is_watched = False

    def announce(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a launch, while somebody watches all of them."""
        listener = listener_here()
        if listener is not None and listener.is_watching:
            listener.launching(Launch(kernel, args, kwargs))

    def prune_configs(self, kernel: Any, kwargs: dict[str, Any]) -> Any:
        """On a miss: leave, if this thread is heard."""
        if kwargs.get("warmup") is False and listener_here() is not None:
            raise _Miss
        return kernel.prune_configs(kwargs)

    def deliver(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """After leaving, when no exception is being handled: a user's traceback shall not begin with a miss."""
        listener = listener_here()
        assert listener is not None
        return listener.missed(Launch(kernel, args, kwargs))


_AROUND = """
def run():
    if "patch".is_watched:
        "patch".announce(self, args, kwargs)
    try:
        pass
    except "patch".miss:
        pass
    return "patch".deliver(self, args, kwargs)
"""


class _AskPatch(ast.NodeTransformer):
    """``self.prune_configs(...)`` becomes ``"patch".prune_configs(self, ...)``."""

    n_found = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if ast.unparse(node.func) == "self.prune_configs":
            self.n_found += 1
            node.func = ast.Attribute(ast.Constant("patch"), "prune_configs", ast.Load())
            node.args.insert(0, ast.Name("self", ast.Load()))
        return node


def _listening_code(function: Any, patch: _Patch) -> CodeType:
    """The code of ``Autotuner.run`` in which a miss can leave; files and lines are the original's."""
    lines, first_line = inspect.getsourcelines(function)
    original = ast.increment_lineno(ast.parse(textwrap.dedent("".join(lines))), first_line - 1).body[0]
    around = ast.parse(_AROUND).body[0]
    asking = _AskPatch()
    asking.visit(original)
    assert isinstance(original, ast.FunctionDef)
    assert isinstance(around, ast.FunctionDef)
    for node in ast.walk(around):
        if isinstance(node, ast.Try):
            node.body = original.body
    original.body = around.body
    module = compile(ast.fix_missing_locations(ast.Module([original], [])), function.__code__.co_filename, "exec")
    (code,) = (constant for constant in module.co_consts if isinstance(constant, CodeType))
    if asking.n_found != 1 or code.co_freevars != function.__code__.co_freevars:
        raise DistTuneError(
            f"dist_tune cannot listen to {function.__module__}.{function.__qualname__} of Triton {triton.__version__}: it is not the "
            f"function that looks up a config and prunes on a miss. Another package may have replaced it before dist_tune was imported."
        )
    # Exchanged code sees Triton's globals; a constant is how it finds us.
    return code.replace(co_consts=tuple(patch if constant == "patch" else constant for constant in code.co_consts))


listeners: dict[int, Listener] = {}
"""Thread -> who hears its launches."""
_patch = _Patch(Autotuner.run)


def push(listener: Listener) -> None:
    """Put a listener in place for this thread, and patch Triton."""
    listeners[get_ident()] = listener
    # After the listener is in: a thread that removes the patch at this moment has looked before, and this comes later.
    _patch.function.__code__ = _patch.our_code
    if listener.is_watching:
        _patch.is_watched = True


def pop() -> Listener:
    """Take this thread's listener away, and leave Triton as it was found if it was the last."""
    listener = listeners.pop(get_ident())
    # One expression and one assignment: Python changes threads between calls, and there is none here.
    if not listeners:
        _patch.function.__code__ = _patch.own_code
    if listener.is_watching:
        _patch.is_watched = any(other.is_watching for other in list(listeners.values()))
    return listener


def replace(old: Listener, new: Listener) -> None:
    """Let ``new`` hear, and be popped, in the place of ``old``; called from within a miss."""
    for ident, listener in list(listeners.items()):
        if listener is old:
            listeners[ident] = new
    _patch.is_watched = _patch.is_watched or new.is_watching


def is_listening() -> bool:
    """Whether the calling thread's launches are heard."""
    return listener_here() is not None


def listener_here() -> Listener | None:
    """Who hears the launches of the calling thread."""
    listener = listeners.get(get_ident())
    if listener is None and len(listeners) == 1 and isinstance(threading.current_thread(), threading._DummyThread):
        # A thread that Python did not start: autograd's, running a backward pass of the closure.
        return next(iter(listeners.values()))
    return listener
