"""One process that decides alone, with the interface of ``ranks.Group``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from dist_tune.distributed.liveness.outside import Asked
from dist_tune.distributed.protocol.calls import Calls, calls_of
from dist_tune.distributed.protocol.reduction import Part, Reduction, Result
from dist_tune.errors import StuckConfigError


class Solo:
    """One process that decides alone."""

    is_alone = True
    is_first = True

    def __init__(self) -> None:
        # Its rank names its log, also where other processes tune beside it.
        self.rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        self.members: tuple[int, ...] = (self.rank,)
        self.neighbours = (0, 1)

    @property
    def writes_progress(self) -> bool:
        """True on one of the processes that tune each alone beside one another."""
        return self.rank == 0

    def calls(self, closure: str) -> Calls:
        """The calls of ``closure`` that this process makes alone."""
        return calls_of((), closure)

    def next_call(self, closure: str) -> int:
        """Without peers calls need no number."""
        return 0

    def begin_first_run(self, closure: str, number: int) -> None:
        """Without peers there is nothing to say."""

    def enter(self, closure: str, number: int = 0, options: str = "", *, is_broken: bool = False) -> None:
        """Without peers there is nothing to say."""

    def reduce(self, topic: str, part: Part, fn: Reduction[Part, Result]) -> Result:
        """``fn`` of this rank's part alone."""
        return fn({self.rank: part})

    def gather(self, topic: str, part: Part, fn: Reduction[Part, Result], *, is_optional: bool = False) -> Result:
        """``fn`` of this rank's part alone."""
        return fn({self.rank: part})

    @contextmanager
    def beating(self, tell: Callable[[str], object], watch: Callable[[], object]) -> Iterator[None]:
        """Without peers no rank is late."""
        yield

    @contextmanager
    def running(self, number: int, doing: str) -> Iterator[None]:
        """Without peers there is nothing to say."""
        yield

    def watch_troubles(self, troubles: list[str]) -> None:
        """Without peers there is nothing to say."""

    def beat(self, doing: str, *, is_new: bool = False) -> None:
        """Without peers there is nothing to hear."""

    has_beaten = False
    absent: tuple[int, ...] = ()
    gather_s = 0.0
    asked: Asked | None = None
    unanswered_since: float | None = None
    """Without peers there is no store."""

    def last_signs(self) -> dict[int, str]:
        """Without peers there is nothing to hear."""
        return {}

    def end_from_outside(self, error: StuckConfigError) -> str:
        """Without peers there is nothing to end."""
        return ""

    def abort(self, error: BaseException) -> None:
        """Without peers there is nothing to end."""

    def align(self) -> None:
        """Without peers there is nothing to wait for."""

    @contextmanager
    def short_timeouts(self) -> Iterator[None]:
        """Collectives that the closure may hold are left as they are."""
        yield
