"""The process that runs Triton's compiler passes for a rank: from TTIR to the cubin, one stage per request.

Run as a script; imports Triton's compiler and nothing of dist_tune, torch or the user's, so that it starts in 0.2 s. Requests and
replies are pickles, of a length that goes before, on the standard input and output that it was started with; what the compiler itself
prints goes to a file, and with the reply. It never touches a GPU. It ends with its rank, or when it has had nothing to do for a while.
"""

from __future__ import annotations

import os
import pickle
import resource
import select
import signal
import struct
import sys
import tempfile
import time
from typing import IO, Any

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


class Pipeline:
    """The stages of one kernel."""

    def __init__(self, path: str, target: Any, options: Any) -> None:
        from triton._C.libtriton import ir
        from triton.backends.compiler import Language
        from triton.backends.nvidia.compiler import CUDABackend

        self.metadata: dict[str, Any] = {"target": target, **vars(options)}
        self._stages: dict[str, Any] = {}
        backend = CUDABackend(target)
        backend.add_stages(self._stages, options, Language.TRITON)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        self._module: Any = ir.parse_mlir_module(path, context)
        self._module.context = context  # the module keeps it alive, as Triton's own modules do

    def run(self, stage: str) -> tuple[str | bytes, dict[str, Any]]:
        """The result of the next stage, and the metadata that it has changed."""
        before = dict(self.metadata)
        self._module = self._stages[stage](self._module, self.metadata)
        changed = {name: value for name, value in self.metadata.items() if name not in before or before[name] is not value}
        return self._module if isinstance(self._module, bytes) else str(self._module), changed


def main(idle_s: float, niceness: int) -> None:
    """Serve until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank, which closes the input
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    output = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.nice(niceness)
    pipeline: Pipeline | None = None
    import triton

    send(replies, triton.__file__)
    while select.select([requests], [], [], idle_s)[0]:
        try:
            begun, stage = receive(requests)
        except EOFError:
            return
        began_s, began_at = _cpu_s(), time.monotonic()
        result: Any
        try:
            if begun is not None:
                pipeline = None  # frees the one before first
                pipeline = Pipeline(*begun)
            assert pipeline is not None
            result = pipeline.run(stage)
        # The rank raises it again, in the thread that waits for this kernel, where it becomes a vote.
        except Exception as error:  # noqa: BLE001
            result = type(error).__module__, type(error).__name__, str(error)
        send(replies, (result, _cpu_s() - began_s, time.monotonic() - began_at, _taken(output)))


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
    main(float(sys.argv[1]), int(sys.argv[2]))
