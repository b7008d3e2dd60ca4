"""Triton's compiler passes for one kernel, from TTIR to the cubin, and the process that runs them
for a rank.

Imports Triton's compiler and nothing of dist_tune, torch or the user's: as a script it starts in
0.2 s. It never touches a GPU.
"""

from __future__ import annotations

import faulthandler
import fcntl
import hashlib
import io
import json
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from typing import IO, Any

STAGES = ("ttir", "ttgir", "llir", "ptx", "cubin")
IDLE_S = 20.0
"""A process without work ends after this time, with exit code ``os.EX_TEMPFAIL``."""
NICENESS = 3
"""The rank's own threads, front end and launches, go first."""
Made = tuple[dict[str, str | bytes], dict[str, Any], dict[str, float]]
"""Text of each stage, the metadata with what they have written, and the seconds of those that were
run.
"""


class Observed:
    """A backend's options, and those of them that were read."""

    def __init__(self, options: Any) -> None:
        self.__dict__.update(_options=options, read={})

    def __getattr__(self, name: str) -> Any:
        value = self.read[name] = getattr(self._options, name)
        return value


def timed(seconds: dict[str, float], stage: str, step: Callable[..., Any], *args: Any) -> Any:
    """The value of ``step``, whose CPU-seconds are noted; of ptxas, a process, the wall time."""
    clock = time.perf_counter if stage == STAGES[-1] else time.thread_time
    began = clock()
    try:
        return step(*args)
    finally:
        seconds[stage] = seconds.get(stage, 0.0) + clock() - began


@contextmanager
def _held(path: str, on_wait: Callable[[], None]) -> Iterator[IO[bytes]]:
    """A file, made if need be, that one process holds at a time; ``on_wait`` is called before
    waiting for another one.

    In memory where the file system has no locks or no room: each works for itself.
    """
    with ExitStack() as stack:
        file: IO[bytes]
        try:
            file = stack.enter_context(open(path, "a+b"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
        except OSError:
            file = io.BytesIO()
        yield file


def compile_kernel(
    on_wait: Callable[[], None],
    ttir: str,
    target: Any,
    options: Any,
    limit_bytes: int | None,
    folder: str | None,
) -> Made:
    """Run the stages of one kernel.

    ``limit_bytes``: shared memory of the device, beyond which the kernel is not assembled, if
    known.

    Kernels that differ in ``num_stages`` alone come to the same TTGIR where no loop is pipelined:
    the second one takes the later stages of the first from a file in ``folder``, calls ``on_wait``
    and waits if they are under way.

    Raises:
        Exception: of the compiler.
    """
    # Here, because the process imports them after it has the rank's path.
    from triton._C.libtriton import ir
    from triton.backends.compiler import Language
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.errors import OutOfResources

    backend, observed, stages = CUDABackend(target), Observed(options), dict[str, Any]()
    backend.add_stages(stages, observed, Language.TRITON)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttir", dir=folder) as source:
        source.write(ttir)
        source.flush()
        module: Any = ir.parse_mlir_module(source.name, context)
    module.context = context  # the module keeps it alive, as Triton's own modules do
    metadata: dict[str, Any] = {"target": target, **vars(options)}
    texts, seconds = dict[str, str | bytes](), dict[str, float]()

    def run(names: tuple[str, ...]) -> None:
        nonlocal module
        for name in names:
            needed = metadata.get("shared")
            if (
                name == "ptx"
                and limit_bytes is not None
                and isinstance(needed, int)
                and needed > limit_bytes
            ):
                raise OutOfResources(needed, limit_bytes, "shared memory")
            module = timed(seconds, name, stages[name], module, metadata)
            texts[name] = module if isinstance(module, bytes) else str(module)

    run(STAGES[:2])
    facts = sorted((name, value) for name, value in metadata.items() if name != "num_stages")
    digest = hashlib.sha256(repr((texts["ttgir"], facts)).encode()).hexdigest()
    observed.read.clear()
    with _held(os.path.join(folder or os.devnull, f"{digest}.stages"), on_wait) as kept:
        with suppress(EOFError, pickle.UnpicklingError):  # empty, or cut short
            later, written = pickle.loads(kept.read())
            texts.update(later)
            metadata.update(written)
        if STAGES[-1] not in texts:
            run(STAGES[2:])
            if "num_stages" not in observed.read:
                with suppress(OSError):  # no room: the next one runs them itself
                    kept.truncate(0)
                    written = {
                        name: value for name, value in metadata.items() if name != "num_stages"
                    }
                    kept.write(pickle.dumps(({name: texts[name] for name in STAGES[2:]}, written)))
                    kept.flush()
    return texts, metadata, seconds


def main(descriptor: int, paths: list[str]) -> None:
    """Serve until the rank ends, or there is no work for long. ``paths``: where it imports from."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank
    faulthandler.enable()  # the stage and Python's stack are among the last words
    os.nice(NICENESS)
    threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    sys.path[:] = (
        paths  # not before: a module of the user's may have the name of one that is imported here
    )
    import triton

    connection = Connection(descriptor)
    with suppress(EOFError, OSError):  # the rank has ended, and so does what was started for it
        connection.send(triton.__file__)
        while connection.poll(IDLE_S):
            request = connection.recv()
            try:
                reply: Any = compile_kernel(lambda: connection.send(None), *request)
            except Exception as error:  # noqa: BLE001  # the rank raises it again, in the thread that waits for this kernel: it is a vote
                reply = error
            try:
                connection.send(reply)
            except (pickle.PicklingError, TypeError, AttributeError):
                # An error that holds what cannot travel.
                connection.send(RuntimeError(f"{type(reply).__name__}: {reply}"))
        os._exit(os.EX_TEMPFAIL)
    os.killpg(0, signal.SIGKILL)


def _end_with(parent: int) -> None:
    """End with the rank, in the middle of a compilation, and ptxas with this process."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
