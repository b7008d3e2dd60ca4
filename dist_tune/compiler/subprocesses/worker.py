"""The process that runs Triton's compiler passes for a rank: from TTIR to the cubin, one stage per request.

Run as a script; imports Triton's compiler and nothing of dist_tune, torch or the user's, so that it starts in 0.2 s. Requests and
replies are pickles, of a length that goes before, on the standard input and output that it was started with; what the compiler itself
prints goes to a file, and with the reply. It never touches a GPU. It ends with its rank, or when it has had nothing to do for a while.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import resource
import select
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, Any, NamedTuple

MAX_CHARS = 200_000
"""Kept of the output of one stage: half from its beginning, half from its end."""
LENGTH = struct.Struct("<Q")


def send(stream: IO[bytes], value: object) -> None:
    """Write one message."""
    text = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(LENGTH.pack(len(text)) + text)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read one message.

    Raises:
        EOFError: the other process has ended.
    """
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError("the other process has ended")
    text = stream.read(LENGTH.unpack(head)[0])
    return pickle.loads(text)  # from the process that has started this one, or that this one has started


class StageResult(NamedTuple):
    """The result of a stage, and all else that it depends on and changes."""

    text: str | bytes
    written: dict[str, Any]
    """Metadata."""
    read: set[str] | None
    """Names of metadata; None if it was used in other ways."""
    read_options: set[str]


class Observed(dict[str, Any]):
    """A kernel's metadata, and what a stage reads and writes of it."""

    def begin(self) -> None:
        """Observe the next stage."""
        self.written: dict[str, Any] = {}
        self.read: set[str] | None = set()

    def __getitem__(self, name: str) -> Any:
        if name not in self.written and self.read is not None:
            self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        try:
            return self[name]
        except KeyError:
            return default

    def __contains__(self, name: object) -> bool:
        if name not in self.written and self.read is not None:
            self.read.add(str(name))
        return super().__contains__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.written[name] = value
        super().__setitem__(name, value)

    def __iter__(self) -> Iterator[str]:
        self.read = None
        return super().__iter__()


class ObservedOptions:
    """A backend's options, and those of them that were read."""

    def __init__(self, options: Any) -> None:
        self.__dict__.update(_options=options, _read=set())

    def __getattr__(self, name: str) -> Any:
        self._read.add(name)
        return getattr(self._options, name)


class Pipeline:
    """The stages of one kernel."""

    def __init__(self, ttir: str, target: Any, options: Any) -> None:
        from triton._C.libtriton import ir
        from triton.backends.compiler import Language
        from triton.backends.nvidia.compiler import CUDABackend

        self._metadata = Observed({"target": target, **vars(options)})
        self._stages: dict[str, Any] = {}
        backend = CUDABackend(target)
        self._options = ObservedOptions(options)
        backend.add_stages(self._stages, self._options, Language.TRITON)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        with tempfile.NamedTemporaryFile("w", suffix=".ttir") as file:
            file.write(ttir)
            file.flush()
            self._module: Any = ir.parse_mlir_module(file.name, context)
        self._module.context = context  # the module keeps it alive, as Triton's own modules do

    def run(self, stage: str) -> StageResult:
        """Run the next stage."""
        self._metadata.begin()
        self._options.__dict__["_read"] = set()
        self._module = self._stages[stage](self._module, self._metadata)
        text = self._module if isinstance(self._module, bytes) else str(self._module)
        return StageResult(text, self._metadata.written, self._metadata.read, self._options._read)


def main(idle_s: float, niceness: int, paths: list[str]) -> None:
    """Serve until the input ends. ``paths``: where the rank imports from."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank, which closes the input
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    output = os.fdopen(os.dup(2), "rb")  # a file of the rank's, which finds the last words there if this process crashes
    os.dup2(2, 1)
    faulthandler.enable(output.fileno())  # the stage and Python's stack are among the last words
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.nice(niceness)
    threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    sys.path[:] = paths  # not before: a module of the user's may have the name of one that is imported here
    pipeline: Pipeline | None = None
    import triton

    send(replies, triton.__file__)
    _prepare()
    while select.select([requests], [], [], idle_s)[0]:
        try:
            begun, stage = receive(requests)
        except EOFError:
            os.killpg(0, signal.SIGKILL)  # the rank has ended, and so does what was started for it
        began_s = _cpu_s()
        result: Any
        try:
            if begun is not None:
                pipeline = None  # frees the one before first
                pipeline = Pipeline(*begun)
            assert pipeline is not None
            result = tuple(pipeline.run(stage))
        except Exception as error:  # noqa: BLE001  # the rank raises it again, in the thread that waits for this kernel: it is a vote
            result = type(error).__module__, type(error).__name__, str(error)
        send(replies, (result, _cpu_s() - began_s, _taken(output)))


def _prepare() -> None:
    """Do what the first kernel would wait for: imports, and asking ptxas for its version, which Triton does once a process."""
    from triton import knobs
    from triton.backends.nvidia import compiler  # noqa: F401  # for the first kernel

    with suppress(RuntimeError, OSError):  # no ptxas: the first kernel says so
        knobs.nvidia.ptxas.version  # noqa: B018  # asks for it


def _end_with(parent: int) -> None:
    """End with the rank, in the middle of a compilation, and ptxas with this process."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _taken(output: IO[bytes]) -> str:
    """The text in the file, which is emptied."""
    sys.stdout.flush()
    sys.stderr.flush()
    if not (length := os.fstat(output.fileno()).st_size):
        return ""
    text = os.pread(output.fileno(), length, 0).decode(errors="replace")
    os.ftruncate(output.fileno(), 0)
    os.lseek(output.fileno(), 0, os.SEEK_SET)
    if len(text) > MAX_CHARS:
        text = f"{text[: MAX_CHARS // 2]}\n... {len(text) - MAX_CHARS} characters left out ...\n{text[-MAX_CHARS // 2 :]}"
    return text


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
