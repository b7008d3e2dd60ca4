"""A change to somebody else's code that several users need at once: made for the first of them, undone behind the last.

Knows nothing of what is changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager


class OnceForAll:
    """A context that the first of several users enters and the last one leaves, on whichever threads they are."""

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
def replaced(owner: type, name: str, wrap: Callable[[Callable[..., object]], Callable[..., object]]) -> Iterator[None]:
    """A method of a class, wrapped meanwhile; a wrapper that somebody has put around ours since is left where it is."""
    own = getattr(owner, name)
    ours = wrap(own)
    setattr(owner, name, ours)
    try:
        yield
    finally:
        if getattr(owner, name) is ours:
            setattr(owner, name, own)
