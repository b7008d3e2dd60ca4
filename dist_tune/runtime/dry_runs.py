"""What a run would launch, without launching it: to compile for it ahead, and to see whether it talks to other ranks.

Knows Triton's launches and torch's operators; nothing of search or files. All else in a run is done, with whatever its outputs hold, so a
dry run is for code that does not wait for what kernels write; one that launches too much is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from dist_tune.compiler import Compiler, Failure, replaced
from dist_tune.distributed import is_symmetric
from dist_tune.errors import DistTuneError
from dist_tune.measure import RngState, tensors_in
from dist_tune.runtime.precompile import OPTIONS, RecordedLaunch, light

_MAX_LAUNCHES = 64
"""Of one run; a loop that waits for a kernel's result has no end here."""
_TALKING = ("c10d", "_c10d_functional", "c10d_functional", "symm_mem")
"""Namespaces of torch's operators that other ranks take part in."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """What came of a dry run."""

    launches: tuple[RecordedLaunch, ...]
    talks: str = ""
    """How it communicates with other ranks; empty if it was not seen to. It was ended there."""


class _Ended(BaseException):
    """Ends a dry run; not an ``Exception``, which the run may catch."""


class TalkedError(DistTuneError):
    """Raised in a run in place of the first thing by which it would talk to other ranks."""


class Watch(TorchDispatchMode):
    """Ends a run where it would talk to other ranks, with a ``TalkedError``."""

    def see(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operator."""
        if func.namespace in _TALKING:
            raise TalkedError(f"it calls {func.namespace}.{func._schema.name.partition('::')[2]}")
        return func(*args, **(kwargs or {}))


# Here and not in the class: for what it finds there torch imports Dynamo, which takes seconds.
Watch.__torch_dispatch__ = Watch.see  # type: ignore[assignment, method-assign]


def dry_run(run: Callable[[], Any], *, is_watched: bool) -> DryRun:
    """Run without launching Triton's kernels. ``is_watched``: end it where it would talk to other ranks.

    Kernels of ``triton.autotune`` are passed over: which config they will have is not known.

    Raises:
        Exception: whatever the run raises, if only because nothing was computed.
    """
    launches: list[RecordedLaunch] = []
    talks = ""
    state = RngState()
    try:
        with ExitStack() as stack:
            stack.enter_context(_recording(launches, is_watched=is_watched))
            if is_watched:
                stack.enter_context(Watch())
            run()
    except _Ended:
        pass
    except TalkedError as error:
        talks = str(error)
    finally:
        state.restore()
    return DryRun(tuple(launches), talks)


@contextmanager
def _recording(launches: list[RecordedLaunch], *, is_watched: bool) -> Iterator[None]:
    ident = get_ident()

    def wrap(run: Callable[..., object]) -> Callable[..., object]:
        def recorded(kernel: Any, *args: Any, **kwargs: Any) -> object:
            if get_ident() != ident or kwargs.get("warmup"):
                return run(kernel, *args, **kwargs)
            if is_watched and any(map(is_symmetric, tensors_in((args, kwargs)).values())):
                raise TalkedError(f"it gives symmetric memory to {kernel.fn.__qualname__}")
            given = {name: light(value) for name, value in kwargs.items()} | {"grid": None}
            launches.append(RecordedLaunch("", 0, kernel, tuple(map(light, args)), given))
            if len(launches) >= _MAX_LAUNCHES:
                raise _Ended
            return None

        return recorded

    def skip(run: Callable[..., object]) -> Callable[..., object]:
        return lambda tuner, *args, **kwargs: None if get_ident() == ident else run(tuner, *args, **kwargs)

    with replaced(JITFunction, "run", wrap), replaced(Autotuner, "run", skip):
        yield


class DryLaunch(triton.Config):  # type: ignore[misc]  # untyped
    """A launch of a dry run, as a config of a site whose candidates are launches."""

    def __init__(self, seen: RecordedLaunch) -> None:
        self.seen = seen
        given = seen.kwargs
        constants = {name: value for name, value in given.items() if name not in OPTIONS and type(value) is int}
        options = {name: given[name] for name in ("num_warps", "num_stages") if isinstance(given.get(name), int)}
        super().__init__(constants, **options)


class _Planned:
    """A ``Compilable`` for planned launches."""

    def compile(self, config: DryLaunch) -> Any:
        """What Triton compiles for it, not launched."""
        seen = config.seen
        return seen.kernel.run(*seen.args, **{**seen.kwargs, "warmup": True})


def compile_ahead(planned: Sequence[tuple[int, DryRun]], compiler: Compiler) -> Iterator[tuple[int, Failure]]:
    """Compile and load what candidates will launch; yields those of which something cannot run, once each, with the reason.

    Pauses inside are as long as the compiler takes, so a caller that must show signs of life does so in a thread of its own.
    """
    launches = [(candidate, DryLaunch(seen)) for candidate, dry in planned for seen in dry.launches]
    if not launches:
        return
    compiler.begin("dry", _Planned(), [launch for _, launch in launches], range(len(launches)))
    for _ in compiler.wait("dry", range(len(launches))):
        pass
    failed: set[int] = set()
    for k, (candidate, _) in enumerate(launches):
        if candidate in failed:
            continue
        loaded = compiler.load("dry", k)
        if isinstance(loaded, Failure):
            failed.add(candidate)
            yield candidate, loaded
    compiler.close()
