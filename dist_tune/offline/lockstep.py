"""What ranks that tune one problem together tell each other between rounds, so that all make the same ones.

Collective throughout, and a matter of course for a process that asks nobody. Knows meetings and plain values.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

from dist_tune.distributed import Ranks, Solo
from dist_tune.errors import RankMismatchError
from dist_tune.offline.journal import Progress

_n_calls: Counter[tuple[str, tuple[int, ...]]] = Counter()
"""(problem, ranks) -> calls so far in this process, by which ranks tell them apart."""


class Lockstep:
    """The ranks of one problem."""

    def __init__(self, problem: str, ranks: Ranks) -> None:
        self._problem = problem
        self._ranks = ranks

    @property
    def is_first(self) -> bool:
        """Whether this rank keeps the account."""
        return self._ranks.rank == self._ranks.members[0]

    def number(self) -> int:
        """Of the next call that all make."""
        _n_calls[self._problem, self._ranks.members] += 1
        return _n_calls[self._problem, self._ranks.members]

    def round(self, elapsed_s: float, n_configs: int) -> tuple[float, int]:
        """Seconds so far, on the slowest rank, and how many configs the next round has at most, on the rank that can do fewest."""
        elapsed_s, n_configs = json.loads(self._meet("round", json.dumps([elapsed_s, n_configs]), _slowest))
        return elapsed_s, n_configs

    def proposal(self, candidates: list[int]) -> list[int]:
        """What the first rank proposes: a model's answer may depend on a machine's last bit."""
        return list(json.loads(self._meet("proposal", json.dumps(candidates), _first)))

    def progress(self, digest: str, mine: Progress) -> Progress:
        """What the first rank's journal says.

        Raises:
            RankMismatchError: ranks have different configs.
        """
        if isinstance(self._ranks, Solo):
            return mine
        told = json.loads(self._meet("journal", json.dumps([digest, mine.to_json() if self.is_first else ""]), _same))
        if told["differing"]:
            raise RankMismatchError(
                f"{self._problem}: ranks {told['differing']} have other configs for it than rank {self._ranks.members[0]}. Build the "
                f"search space from values that are equal on all ranks."
            )
        return Progress.from_json(told["progress"])

    def _meet(self, topic: str, part: str, reduce: Callable[[dict[int, str]], str]) -> str:
        if isinstance(self._ranks, Solo):
            return reduce({self._ranks.rank: part})
        self._ranks.enter(f"{self._problem}: {topic}", self.number())
        return self._ranks.meet(topic, part, reduce)


def _slowest(parts: dict[int, str]) -> str:
    told = [json.loads(each) for each in parts.values()]
    return json.dumps([max(elapsed_s for elapsed_s, _ in told), min(n for _, n in told)])


def _first(parts: dict[int, str]) -> str:
    return next(iter(parts.values()))


def _same(parts: dict[int, str]) -> str:
    told = {rank: json.loads(part) for rank, part in parts.items()}
    (first, _), *_ = told.values()
    differing = [rank for rank, (digest, _) in told.items() if digest != first]
    return json.dumps({"differing": differing, "progress": next((progress for _, progress in told.values() if progress), "")})
