"""The first run of a step, made before it is known that there is something to tune: is it the one that counts?

It is not, where the step leaves all it can reach as it was: what its kernels changed is undone, and the last run counts, with the winners.
It is, where the step acts in place: torch writes to a tensor that it did not make, or a kernel to an argument. Then replays begin from
the state that the first run has left, and that state and the first run's value are the call's. Knows nothing of candidates or ranks.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dist_tune.measure import StepState, tensors_in
from dist_tune.runtime import Undo, changed

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from dist_tune.measure import Region
    from dist_tune.output import Logger

_BYTES = re.compile(r"\((\d+) bytes\)")


class FirstRun:
    """The first run of one call, after it was made."""

    def __init__(self, held: list[Any], state: StepState | None, closure: str, log: Logger) -> None:
        """``held``: its value, alone in a list, so that it can be freed. ``state``: None where the user's ``reset`` puts all back."""
        self._held = held
        self._state = state
        self._closure = closure
        self._log = log
        self._undo, self._has_taken = Undo(), False
        self._put_back: Mapping[Region, torch.Tensor] = {}
        """Memory under ``restore_value`` as the second run found it."""
        self._is_decided = False
        if state is not None:
            state.note_first_run()

    @property
    def counts(self) -> bool:
        """True if its value is the call's; also as long as no second run has shown whether kernels change anything."""
        return self._state is not None and (self._state.has_changed or not self._is_decided)

    def take(self, undo: Undo) -> None:
        """Take what the run changed under ``restore_value``, until it is decided; the first time counts."""
        if not self._has_taken:
            self._undo, self._has_taken = undo, True

    def restart(self) -> None:
        """Before a further run: put back what the step changes.

        Raises:
            InPlaceError: it acts in place, and may not or cannot be restored.
        """
        state = self._state
        if state is None:
            self._decide()
            return
        if not state.is_kept:
            self._warn(state.not_kept)
            # A value with its graph holds all activations: until the end of the next run they would be there twice.
            has_graph = any(each.grad_fn is not None for each in tensors_in(self._held).values())
            self._tell(state.keep(is_comparing=state.has_changed or not has_graph))
            if state.has_changed or not state.is_comparing:
                self._decide()
            else:
                self._put_back = self._undo.exchange()
        elif state.is_comparing:  # also if it is decided: kernels may change what torch does not
            written: list[torch.Tensor] = []
            if not self._is_decided:
                # Undone, but not as it was before that run: other launches write there before the one that restores.
                written = changed(self._put_back)
                self._put_back = {}
                self._undo.exchange()
            self._tell(state.compare(written))
            self._decide()
        state.put_back()

    def finish(self) -> Any:
        """The value, with the state that the run has left."""
        if self._state is not None and self._state.is_kept and not self._is_decided:
            self._undo.exchange()
        self._undo.forget()
        if self._state is not None:
            self._state.put_back(is_last=True)
            self._state.forget()
        return self._held.pop() if self._held else None

    def _decide(self) -> None:
        if not self._is_decided:
            self._is_decided = True
            if self.counts:
                self._undo.forget()
            else:
                self._undo.restore()
                self._held.clear()

    def _warn(self, names: list[str]) -> None:
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            self._log.bind(progress=True).warning(
                f"closure={self._closure} changes {shown} in place, and every replay does so again: attributes of objects are not put "
                f"back, because peers may read them. Pass reset= with a function that puts them back, or pass them as arguments"
            )

    def _tell(self, names: str) -> None:
        if names:
            told = "closure=%s acts in place on %s: its first run counts, replays are undone"
            shown = _BYTES.sub(lambda found: f"({_size(int(found[1]))})", names)
            self._log.bind(progress=told % (self._closure, shown)).info(told % (self._closure, names))


def _size(n_bytes: int) -> str:
    unit, n_unit = next((each for each in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)) if n_bytes >= each[1]), ("bytes", 1))
    return f"{n_bytes / n_unit:.4g} {unit}"
