"""One candidate on its way from source to device, in steps that other threads and other ranks can take part in.

The only user of what Triton's compiler is made of; knows a ``Launch``, and nothing of ranks or search. A launch is asked once
for each candidate what Triton would compile for it: that gives the key of the result in Triton's disk cache, and a function
that compiles, touches no device and may run in any thread. What that function needs of the arguments is kept, not the
tensors. Loading checks registers and threads without a launch, on the main thread, and must not happen later: CUDA may wait
for running kernels while it loads a module, and one of them may be waiting for us.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.runtime import _async_compile
from triton.runtime.cache import get_cache_manager

from dist_tune.launch import Launch
from dist_tune.shared_memory import shared_limit
from dist_tune.terminal import quiet_terminal

_FACTS_FILE = "dist_tune.json"
"""In a kernel's folder of Triton's disk cache: that it needs more shared memory than some device has, for all who need it later."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a loaded kernel takes of a multiprocessor."""

    shared_bytes: int
    n_regs: int | None
    """Registers per thread; None of what was never assembled."""
    n_spills: int | None
    """Bytes of registers spilled to local memory, per thread."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a candidate cannot run on this rank."""

    reason: str
    """"ExceptionType: message" on one line."""
    output: str = ""
    """What the compiler wrote to the terminal while it failed: PTX, MLIR."""
    shared_bytes: int | None = None
    """What it would need, where that is the reason."""


def reason_of(error: BaseException) -> str:
    """An exception on one line, in log and vote."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"


class Compilation:
    """One candidate on its way from source to device. ``run`` in any thread; all else on the thread that made it."""

    def __init__(self, launch: Launch, config: triton.Config) -> None:
        self.key = ""
        """Identity of the result in Triton's disk cache, in hex; empty where nothing is compiled."""
        self.done = threading.Event()
        self.outcome: Any = None
        """Triton's compiled kernel, a ``Failure``, or None where nothing is compiled: under the interpreter."""
        self._compile: Callable[[], Any] | None = None
        self._finalize: Callable[[Any], None] | None = None
        self._forget: Callable[[Any], None] | None = None
        self._loaded: Resources | Failure | None = None
        self._claim = threading.Lock()
        self._followers: list[Compilation] = []
        self._leader: Compilation | None = None
        self._began: float | None = None
        self._request(launch, config)

    def _request(self, launch: Launch, config: triton.Config) -> None:
        token = _async_compile.active_mode.set(self)
        try:
            with quiet_terminal.notes() as notes:
                found = launch.compile(config)
        # Whatever a compiler's front end or a hook of the user's raises becomes a vote: this config cannot run here.
        except Exception as error:  # noqa: BLE001
            self._end(Failure(reason_of(error), "".join(notes)))
            return
        finally:
            _async_compile.active_mode.reset(token)
        if isinstance(found, Compilation):
            if found is not self:  # Triton 3.7 and later: requested for another site, and not compiled yet
                self.key = found.key
                self.follow(found)
        else:  # compiled in this process before; or never, under the interpreter
            self.key = getattr(found, "hash", "")
            self._end(found)

    def submit(self, key: str, compile_: Callable[[], Any], finalize: Callable[[Any], None], *cleanup: Callable[[Any], None]) -> Any:
        """Called by Triton in place of compiling; what it gets back stands for the kernel. The same in Triton 3.6 to 3.9."""
        self.key = hashlib.sha256(key.encode()).hexdigest()
        self._compile, self._finalize = compile_, finalize
        if cleanup:
            self._forget = cleanup[0]
        return self

    def result(self, ignore_errors: bool = False) -> Any:
        """Asked by Triton if the kernel is launched before it is loaded."""
        self.run(None)
        self.done.wait()
        self._settle()
        if isinstance(self.outcome, Failure) and not ignore_errors:
            raise RuntimeError(self.outcome.reason)
        return self.outcome

    @property
    def began(self) -> float | None:
        """When a thread took it up, on the monotonic clock; None if it waits."""
        return self._began if self._leader is None else self._leader.began

    def follow(self, other: Compilation) -> None:
        """Take over what ``other``, of the same key, becomes; nothing new if it follows already."""
        if self._leader is not None:
            return
        self._leader = other
        self._claim.acquire()
        other._followers.append(self)
        if other.done.is_set():
            self._end(other.outcome)

    def run(self, shared_limit_bytes: int | None) -> None:
        """Compile, or find the result in Triton's disk cache; unless somebody has taken that up already."""
        if self.done.is_set() or not self._claim.acquire(blocking=False):
            return
        self._began = time.monotonic()
        with quiet_terminal.notes() as notes:
            try:
                self._check_facts(shared_limit_bytes)
                with shared_limit(shared_limit_bytes):
                    outcome = self._compile() if self._compile is not None else None
            # As above: a vote. Raised here it would end the thread and leave everybody waiting.
            except Exception as error:  # noqa: BLE001
                needed = error.required if isinstance(error, triton.OutOfResources) and error.name == "shared memory" else None
                if needed is not None:
                    self._keep_facts(needed)
                outcome = Failure(reason_of(error), "".join(notes) + quiet_terminal.unread(), needed)
        self._end(outcome)

    def give_up(self, reason: str) -> None:
        """Let it fail from outside: it may never end."""
        self._end(Failure(reason))

    def load(self) -> Resources | Failure | None:
        """The kernel on the device, not launched; waits for nothing, so ask when ``done`` is set."""
        if self._loaded is None:
            self._settle()
            self._loaded = self.outcome if isinstance(self.outcome, Failure) or self.outcome is None else _load(self.outcome)
        return self._loaded

    def known_need(self) -> int | None:
        """Bytes of shared memory it needs, where that was found to be too much for some device."""
        with suppress(OSError, ValueError, TypeError, KeyError):  # no facts, or unreadable ones
            path = get_cache_manager(self.key).get_file(_FACTS_FILE) if self.key else None
            needed = json.loads(Path(path).read_text())["shared_bytes"] if path is not None else None
            return needed if isinstance(needed, int) else None
        return None

    def abandon(self) -> None:
        """Leave nothing of it in Triton's caches, if it has not become a kernel."""
        if not self.done.is_set() or isinstance(self.outcome, Failure):
            if self._forget is not None:
                self._forget(self)
            self._finalize = self._forget = None

    def _end(self, outcome: Any) -> None:
        if not self.done.is_set():
            self.outcome = outcome
            self.done.set()
            self._compile = None
        for each in self._followers:
            each._end(self.outcome)

    def _settle(self) -> None:
        """Hand the kernel to Triton, or take our stand-in for it away."""
        if isinstance(self.outcome, Failure):
            self.abandon()
        elif self._finalize is not None:
            self._finalize(self.outcome)
            self._finalize = None

    def _check_facts(self, shared_limit_bytes: int | None) -> None:
        needed = self.known_need() if shared_limit_bytes is not None else None
        if needed is not None and shared_limit_bytes is not None and needed > shared_limit_bytes:
            raise triton.OutOfResources(needed, shared_limit_bytes, "shared memory")

    def _keep_facts(self, needed: int) -> None:
        with suppress(OSError):  # a cache that cannot be written costs the next run some time
            get_cache_manager(self.key).put(json.dumps({"shared_bytes": needed}), _FACTS_FILE, binary=False)


def _load(compiled: Any) -> Resources | Failure:
    shared_bytes = _int(compiled.metadata, "shared")
    try:
        with quiet_terminal.notes() as notes:
            compiled._init_handles()
    # As above: what does not load gets a vote against it.
    except Exception as error:  # noqa: BLE001
        return Failure(reason_of(error), "".join(notes) + quiet_terminal.unread(), shared_bytes)
    return Resources(shared_bytes, _int(compiled, "n_regs"), _int(compiled, "n_spills"))


def _int(holder: Any, name: str) -> int:
    value = getattr(holder, name, 0)
    return value if isinstance(value, int) else 0
