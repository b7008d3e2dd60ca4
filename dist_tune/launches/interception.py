"""The patch of Triton: a miss of a ``triton.autotune`` kernel becomes a ``Launch``, passed to the
thread's listener.

Only while a listener is in place, ``Autotuner.run`` runs its own source with one change:
``self.prune_configs``, which it calls on a miss and only then, may leave for the listener. A
look-up by the same key goes first, because Triton's own searches a list for every argument; that
saves about the cost of the patch. All else stays Triton's own code in Triton's own frame. The
function's code is exchanged and not the attribute of the class, because every assignment to a class
drops Python's caches of it.

A listener gets the launches of the thread that put it there, and of autograd's threads while it is
the only one. Knows nothing of ranks, times or search.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from threading import get_ident
from types import CodeType
from typing import Any, Protocol

import triton
from triton.runtime import autotuner
from triton.runtime.autotuner import Autotuner

from dist_tune.compiler import begin_digest
from dist_tune.errors import DistTuneError
from dist_tune.launches.buckets import NO_BUCKETS, Bucketing, Buckets
from dist_tune.launches.kernel import Launch, key_of
from dist_tune.launches.libraries import find_own_runs, own_key, own_runs, remember_wrappers
from dist_tune.launches.recording import here
from dist_tune.launches.tunable import Tunable


class Listener(Protocol):
    """The receiver of a thread's launches."""

    @property
    def members(self) -> frozenset[int]:
        """Global ranks that decide together; empty for a process that decides alone."""

    @property
    def buckets(self) -> Buckets | None:
        """Sizes that count as one in keys; None where each counts, as in Triton."""

    @property
    def launching(self) -> Callable[[Tunable], None] | None:
        """Called before launches of autotuned kernels and functions, hit or miss; None where only
        misses matter.
        """

    @property
    def is_watching(self) -> bool:
        """True to call it before all of them, and not only of those that restore or zero: reading a
        key costs some microseconds.
        """

    def missed(self, launch: Tunable) -> Any:
        """Called in place of a launch without a config for its key.

        Returns the result of the launch.
        """


DYNAMO_SKIPS = "_torchdynamo_disable"
"""Attribute of functions that torch.compile calls and does not trace, as torch.compiler.disable
sets it.
"""


class _Miss(BaseException):
    """Leaves ``Autotuner.run``; not an Exception, so that no ``except Exception`` on its way
    catches it.
    """


class _Patch:
    """The object that replaces the text "patch" in the code of the patched ``Autotuner.run``."""

    miss = _Miss

    def __init__(self, function: Any) -> None:
        self.function = function
        self.own_code: CodeType = function.__code__
        self.our_code = _listening_code(function, self)
        _skip_in_dynamo(self.our_code)
        self.is_watched = self.has_buckets = False
        self.turns: dict[int, Callable[..., Any]] = {}
        """Launches to make in place of those with a config in a kernel's cache, by its identity: of
        calls that try candidates.
        """
        self.marks: dict[str, Any] = function.__dict__
        """Attributes of the function: while it listens ``DYNAMO_SKIPS``, because torch.compile
        cannot read our constant.
        """

    def leave(self) -> None:
        """Restore Triton if no listener is left."""
        # One expression and one assignment: Python changes threads between calls, and there is none
        # here.
        if not listeners:
            self.function.__code__ = self.own_code
            self.marks.pop(DYNAMO_SKIPS, None)
        leave_own_runs()
        self.is_watched = any(
            listener.launching is not None for listener in list(listeners.values())
        )

    def announce(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before a launch while a listener watches."""
        listener = listener_here()
        if listener is None or listener.launching is None or kwargs.get("warmup"):
            return
        if listener.is_watching:
            remember_wrappers()  # ranks may turn out to have different configs
        if listener.is_watching or kernel.restore_value or kernel.reset_to_zero:
            listener.launching(launch_of(kernel, args, kwargs))

    def known_config(self, kernel: Any, nargs: dict[str, Any], kwargs: dict[str, Any]) -> Any:
        """The config that Triton would find, found faster; None if it has a hook, or the cache is a
        library's own mapping.
        """
        cache = kernel.cache
        if len(kernel.configs) < 2:
            return None
        key = key_of(kernel, nargs, kwargs)
        if self.has_buckets and (buckets := self.buckets_of(kernel, kwargs)):
            config = buckets.known(cache, key)
            if config is None:  # Triton would look for the exact size
                raise _Miss
            return config
        config = cache.get(key) if type(cache) is dict else None
        return config if config is not None and config.pre_hook is None else None

    def buckets_of(self, kernel: Any, kwargs: dict[str, Any]) -> Bucketing:
        """Those that this thread's listener has for a launch."""
        listener = listener_here() if self.has_buckets and kwargs.get("warmup") is False else None
        return (
            NO_BUCKETS
            if listener is None or listener.buckets is None
            else listener.buckets.of(kernel)
        )

    def prune_configs(self, kernel: Any, kwargs: dict[str, Any]) -> Any:
        """Called on a miss: leave if this thread has a listener."""
        if kwargs.get("warmup") is False and listener_here() is not None:
            raise _Miss
        return kernel.prune_configs(kwargs)

    def deliver(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called after leaving, outside the handler, so that a user's traceback does not begin with
        a miss.
        """
        kernel.nargs = None  # Triton's run has set it, and would keep the tensors alive
        listener = listener_here()
        assert listener is not None
        launch = launch_of(kernel, args, kwargs)
        # Of a bucket, at another size or with a hook.
        if (config := launch.slot.config) is not None:
            if id(config) in self.turns and launch.keeps(config):
                # Else another thread has filled the slot meanwhile.
                if launch.slot.fits is not None:
                    launch.slot.fits.remember(launch, config, config)
                return self.turns[id(config)](kernel, args, kwargs)
            return launch.run_known(config)
        remember_wrappers()
        return listener.missed(launch)

    def hear(self, run: Any, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called in place of the ``run`` of a class that has its own."""
        if kwargs.get("warmup") is not False or listener_here() is None:
            return run(kernel, *args, **kwargs)
        if self.is_watched:
            self.announce(kernel, args, kwargs)
        key = own_key(kernel, args, kwargs) if len(kernel.configs) > 1 else ()
        return (
            run(kernel, *args, **kwargs)
            if not key or key[0] in kernel.cache
            else self.deliver(kernel, args, kwargs)
        )


_AROUND = """
def run():
    if "patch".is_watched:
        "patch".announce(self, args, kwargs)
    self.nargs = nargs = dict(zip(self.arg_names, args))
    try:
        try:
            config = "patch".known_config(self, nargs, kwargs)
            if config is not None:
                if "patch".turns and id(config) in "patch".turns:
                    return "patch".turns[id(config)](self, args, kwargs)
                self.best_config = config
                return self.fn.run(*args, **kwargs, **config.all_kwargs())
        finally:
            self.nargs = None
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
    """The code of ``Autotuner.run`` in which a miss can leave; files and lines are the
    original's.
    """
    lines, first_line = inspect.getsourcelines(function)
    original = ast.increment_lineno(
        ast.parse(textwrap.dedent("".join(lines))), first_line - 1
    ).body[0]
    around = ast.parse(_AROUND).body[0]
    asking = _AskPatch()
    asking.visit(original)
    assert isinstance(original, ast.FunctionDef)
    assert isinstance(around, ast.FunctionDef)
    for node in ast.walk(around):
        if isinstance(node, ast.Try) and node.handlers:
            node.body += original.body
    original.body = around.body
    module = compile(
        ast.fix_missing_locations(ast.Module([original], [])), function.__code__.co_filename, "exec"
    )
    (code,) = (constant for constant in module.co_consts if isinstance(constant, CodeType))
    if asking.n_found != 1 or code.co_freevars or function.__globals__ is not vars(autotuner):
        raise DistTuneError(
            f"dist_tune cannot listen to {function.__module__}.{function.__qualname__} of Triton"
            f" {triton.__version__}: it is not the function that looks up a config and prunes on a"
            " miss. Another package may have replaced it before dist_tune was imported."
        )
    # Exchanged code sees Triton's globals; a constant is how it finds us.
    return code.replace(
        co_consts=tuple(patch if constant == "patch" else constant for constant in code.co_consts)
    )


def _skip_in_dynamo(code: CodeType) -> None:
    """Let torch.compile run frames of this code, and all below them, as they are: it cannot read a
    constant that is an object.
    """
    with suppress(ImportError, AttributeError):  # a torch that names it otherwise
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))


listeners: dict[int, Listener] = {}
"""Thread -> its listener."""


@cache
def triton_patch() -> _Patch:
    """The one patch, made on first use, when a function is decorated.

    Raises:
        DistTuneError: ``Autotuner.run`` is not Triton's, or of an unknown version.
    """
    begin_digest()  # of Triton's files: the first launch needs it
    # Another package may have put a wrapper around it, which calls it.
    return _Patch(inspect.unwrap(Autotuner.run))


def push(listener: Listener) -> None:
    """Put a listener in place for this thread, and patch Triton."""
    patch = triton_patch()
    listeners[get_ident()] = listener
    try:
        # After the listener is in: a thread that removes the patch at this moment has looked
        # before, and this comes later.
        patch.marks[DYNAMO_SKIPS] = True
        patch.function.__code__ = patch.our_code
        for own in find_own_runs(patch.hear):
            own.__dict__[DYNAMO_SKIPS] = True
            _skip_in_dynamo(own.__code__)
        enter_own_runs()
        patch.is_watched |= listener.launching is not None
    except BaseException:
        # An interrupt of the user's: later calls would be taken for calls inside this one.
        pop()
        raise


def pop() -> Listener:
    """Take this thread's listener away, and restore Triton if it was the last."""
    patch = triton_patch()
    try:
        try:
            return listeners.pop(get_ident())
        finally:
            patch.leave()
    finally:
        patch.leave()  # once more: an interrupt of the user's may have come in the middle of it


def enter_own_runs() -> None:
    """Hear the tuners and wrappers that have a ``run`` of their own; called with a listener in
    place.
    """
    for cls, ours in list(own_runs.items()):
        cls.run = ours  # type: ignore[attr-defined]


def leave_own_runs() -> None:
    """Restore them, if no listener is left."""
    for cls, ours in list(own_runs.items()):
        # Asked each time: Python may change threads in between.
        if not listeners and cls.__dict__["run"] is ours:
            cls.run = ours.__wrapped__  # type: ignore[attr-defined]


def replace(old: Listener, new: Listener) -> None:
    """Put ``new`` in the place of ``old``, also for ``pop``; called from within a miss, which may
    be in a thread of autograd's.
    """
    mine = get_ident()
    for ident, listener in list(listeners.items()):
        # Not that of another thread in a call of the same closure.
        if listener is old and (ident == mine or mine not in listeners):
            listeners[ident] = new
    triton_patch().is_watched |= new.launching is not None


def launch_of(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """The launch of a call of ``Autotuner.run``, with the buckets of this thread's listener."""
    return Launch(kernel, args, kwargs, triton_patch().buckets_of(kernel, kwargs))


def listener_here() -> Listener | None:
    """The listener of the calling thread."""
    return here(listeners)
