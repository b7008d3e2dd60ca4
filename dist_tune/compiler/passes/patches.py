"""Changes to other people's code that several users need at once: made for the first user, undone after the last.

Knows nothing of what is changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any


class SharedContext:
    """A context that the first of several users enters and the last one leaves, on any threads."""

    def __init__(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._n_users = 0
        self._exit = ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Be one of the users meanwhile."""
        with self._lock:
            if self._n_users == 0:
                self._exit.enter_context(self._context())
            self._n_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._n_users -= 1
                if self._n_users == 0:
                    self._exit.close()


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """A method of a class or object, or a name of a module, wrapped meanwhile. If the user has put a wrapper around ours, that stays."""
    before, ours = vars(owner).get(name), wrap(getattr(owner, name, None))
    setattr(owner, name, ours)
    try:
        yield
    finally:
        if getattr(owner, name) is ours:
            delattr(owner, name) if before is None else setattr(owner, name, before)
