"""The first run of a step, and whether others may follow: only where they give the same and leave
the same.

Two looks decide. The first needs no run: an optimizer has stepped, an iterator is at hand. The
second is the probe, another run with the configs of the first. A *no* of any rank is a no of all;
then the first run is the call's. Knows nothing of candidates or other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dist_tune.errors import DistTuneError, free_frames
from dist_tune.launches import noting_tensors, noting_training
from dist_tune.measure import RngState, Snapshot, StepState, difference, flat, sums_of
from dist_tune.ranks import is_secondary
from dist_tune.sites import LEFT, is_fatal


class FirstRun:
    """The first run of one call, before, while and after it is made."""

    def __init__(self, state: StepState | None = None, why_not: str = "") -> None:
        """``state``: what the call can reach, before the run; None where ``reset`` or fresh
        arguments answer for it.

        ``why_not``: known before.
        """
        self.why_not = why_not
        """Why no other run may follow, as found on this rank."""
        self.is_probed = False
        """True once a second run has been made."""
        self._state = state
        self._after = RngState()
        self._is_prepared = self._is_accepted = False
        self._error: BaseException | None = None
        self._held: list[Any] = []
        """Its value, alone in a list, so that it can be freed."""
        self._undo: Snapshot | None = None
        """What it has changed under ``restore_value``."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The run is made in this block, and heard from its beginning."""
        if self._state is None:
            yield
            return
        with noting_training() as stepped, noting_tensors(self._state.add_given):
            yield
        self.why_not = self.why_not or self._state.why_not(stepped)

    def end(self, held: list[Any], error: BaseException | None = None) -> None:
        """Take the value, in a list from which it can be freed; or the ``error`` by which there is
        none on this rank.
        """
        self._held, self._error = held, error
        self._after = RngState()

    def changed(self) -> str:
        """Names of what the run has changed so far."""
        return self._state.changed() if self._state is not None else ""

    def prepare(self) -> None:
        """Before ranks decide on the probe: copy what it may change."""
        if not self._is_prepared and self._state is not None:
            self._is_prepared = True
            self.why_not = self.why_not or self._state.keep()

    @property
    def is_undecided(self) -> bool:
        """True as long as a second run is to show whether others may follow."""
        return self._state is not None and not self.is_probed

    @property
    def value(self) -> Any:
        """The value, as long as it is held."""
        return self._held[0] if self._held else None

    def take(self, undo: Snapshot) -> None:
        """Take what the run has changed under ``restore_value``; the first time counts.

        Put it back if others may follow already.
        """
        if self._is_accepted:
            undo.put_back()
        else:
            self._undo = self._undo or undo

    def probe(self, run: Callable[[], Any], before: RngState) -> None:
        """Run the step again, from the generators ``before`` and memory under ``restore_value`` as
        the first run found them; compare.

        An error of that run is a no; one that loses the device, or says that another rank has left,
        is raised.
        """
        self.is_probed = True
        state = self._state
        if state is not None:
            self.prepare()
            state.begin_replay()
            first = flat(self.value)  # now, because the run may add to a list that is the value
            sums = sums_of(first)
        if self._undo is not None:
            self._undo.exchange()
        # Any run is as good as the first, whose value is not to lie beside this one's.
        if state is None:
            self._held.clear()
            self._held.append(run())
            return
        before.restore()
        try:
            with noting_training() as stepped, noting_tensors(state.keep_given):
                value = run()
        # Any error of a second run is a reason against a third: the size of a cache, an iterator at
        # its end, memory.
        except Exception as error:
            if is_fatal(error) or isinstance(error, DistTuneError):
                raise
            free_frames(error)
            how = (
                f"raises {type(error).__name__} when it runs again"
                f" ({str(error).partition(chr(10))[0]})"
            )
            self.why_not = self.why_not or (
                f"{LEFT} when it runs again" if is_secondary(error) else how
            )
        else:
            self.why_not = (
                self.why_not
                or state.why_not(stepped)
                or self._another(value, first, sums)
                or state.compare()
            )
        finally:
            self._after.restore()

    def accept(self) -> list[str]:
        """All ranks say yes: free the value and the copies.

        Names of what each replay changes in plain objects.
        """
        self._is_accepted = True
        self._held.clear()
        self._undo = None
        if self._state is None:
            return []
        self._state.accept()
        return self._state.repeated

    def begin_replay(self) -> None:
        """Before each run that follows."""
        if self._state is not None and self.is_probed:
            self._state.begin_replay()

    def refuse(self) -> Any:
        """This is the run that counts: its value, with the state that it has left.

        Raises:
            Exception: that of the run, if it gave no value.
        """
        self.go_back()
        if self._error is not None and not self._is_accepted:
            raise self._error
        return self._held.pop() if self._held else None

    def go_back(self) -> None:
        """To the state that the run has left."""
        if not self.is_probed:
            return
        # Else an error, and what it was about may never let the device go on.
        if not self._is_accepted:
            if self._state is not None:
                self._state.put_back()
            # After it: the probe's copies of such memory are of before the first run.
            if self._undo is not None:
                self._undo.exchange()
        self._after.restore()

    def finish(self) -> str:
        """After the last run: names of what other configs than the first have changed."""
        if self._state is None:
            return ""
        self._after.restore()
        return self._state.changed()

    def _another(self, value: Any, first: Any, sums: list[int]) -> str:
        """How a second value differs from the first beyond rounding; empty if it does not.

        ``sums``: of the first one's bits before.
        """
        if self._error is not None:
            return ""
        wrong = difference(flat(value), first)
        if not wrong and sums_of(first) != sums:
            wrong = "in the same memory"
        return f"returns another value when it runs again ({wrong})" if wrong else ""
