"""Agreement between the rounds of ranks that tune one problem together, so that all make the same rounds. Collective throughout."""

from __future__ import annotations

from collections.abc import Mapping

from dist_tune.distributed import Part, Ranks, Reduction, Result
from dist_tune.errors import RankMismatchError
from dist_tune.offline.journal import Progress


class Lockstep:
    """The ranks of one problem."""

    def __init__(self, problem: str, ranks: Ranks) -> None:
        self._problem = problem
        self._ranks = ranks

    @property
    def is_first(self) -> bool:
        """True on the rank that keeps the journal."""
        return self._ranks.is_first

    def round(self, elapsed_s: float, n_configs: int) -> tuple[float, int]:
        """Seconds so far on the slowest rank, and configs of the next round on the rank that can hold fewest."""
        return self._reduce("round", (elapsed_s, n_configs), _slowest)

    def proposal(self, candidates: list[int]) -> list[int]:
        """The first rank's proposal: a model's answer may depend on a machine's last bit."""
        return self._reduce("proposal", candidates, _first)

    def progress(self, digest: str, mine: Progress) -> Progress:
        """The progress in the first rank's journal.

        Raises:
            RankMismatchError: ranks have different configs.
        """
        differing, progress = self._reduce("journal", (digest, mine.to_json() if self.is_first else ""), _same)
        if differing:
            raise RankMismatchError(
                f"{self._problem}: ranks {differing} have other configs for it than rank {self._ranks.members[0]}. Build the "
                f"search space from values that are equal on all ranks."
            )
        return Progress.from_json(progress)

    def _reduce(self, topic: str, part: Part, fn: Reduction[Part, Result]) -> Result:
        self._ranks.enter(f"{self._problem}: {topic}", self._ranks.next_call(self._problem))
        return self._ranks.reduce(topic, part, fn)


@Reduction
def _slowest(parts: Mapping[int, tuple[float, int]]) -> tuple[float, int]:
    return max(elapsed_s for elapsed_s, _ in parts.values()), min(n for _, n in parts.values())


@Reduction
def _first(parts: Mapping[int, list[int]]) -> list[int]:
    return next(iter(parts.values()))


@Reduction
def _same(parts: Mapping[int, tuple[str, str]]) -> tuple[list[int], str]:
    """Ranks with another digest than the first, and the progress of the rank that has one."""
    (first, _), *_ = parts.values()
    return [rank for rank, (digest, _) in parts.items() if digest != first], next((each for _, each in parts.values() if each), "")
