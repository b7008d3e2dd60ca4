"""What agreement costs: bytes of the real messages, time of the real reduction, and a model of the
store between.

Knows nothing of how times come about. The store's constants are measured ones, each with its
source.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from typing import Any

from dist_tune.ranks.messages import Reduction
from dist_tune.records import digest
from dist_tune.search.times import Report
from dist_tune.sites.manifest import RankManifest
from dist_tune.tuning.context import REPORTS
from dist_tune.tuning.discover import MANIFESTS

LATENCIES_MS = {4: 0.3, 8: 0.7, 64: 4.2, 256: 18.9}
"""Ranks -> one meeting with small parts, all ranks at once: measured on a c10d TCPStore, 2 cores,
so an upper bound.
"""
BYTES_PER_MS = 400e3
"""Of a store's one thread, in and out together: a c10d TCPStore on 2 cores moved 366-821 MB/s in
get() of 20 kB to 1 MB, 410-540 MB/s
in multi_get() of 64 to 1024 parts of 20 kB, and more in set().
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """One meeting, or the sum of several."""

    n_messages: int = 0
    """Parts and results; all ranks together."""
    up_bytes: int = 0
    """Parts, all ranks together; they cross the store twice, in and to the one that reduces."""
    down_bytes: int = 0
    """Results, all ranks together."""
    latency_ms: float = 0.0
    transfer_ms: float = 0.0
    reduce_ms: float = 0.0
    """On the rank that came last, of this machine's time."""

    @property
    def ms(self) -> float:
        """All of it, one after the other."""
        return self.latency_ms + self.transfer_ms + self.reduce_ms

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.n_messages + other.n_messages,
            self.up_bytes + other.up_bytes,
            self.down_bytes + other.down_bytes,
            self.latency_ms + other.latency_ms,
            self.transfer_ms + other.transfer_ms,
            self.reduce_ms + other.reduce_ms,
        )


def latency_ms(n_ranks: int) -> float:
    """Between the measured points along a power law, beyond them in proportion to the ranks."""
    points = sorted(LATENCIES_MS.items())
    if n_ranks >= points[-1][0]:
        return points[-1][1] * n_ranks / points[-1][0]
    for (n, ms), (more, more_ms) in pairwise(points):
        if n_ranks < more:
            return ms * exp(log(max(n_ranks, n) / n) * log(more_ms / ms) / log(more / n))
    raise AssertionError


def meeting(parts: Sequence[Any], n_ranks: int, kind: str) -> Cost:
    """One meeting of ``n_ranks``, which bring ``parts`` in turn; ``kind``: "report" or
    "manifest".
    """
    fns: dict[str, Reduction[Any, Any]] = {"report": REPORTS, "manifest": MANIFESTS}
    fn = fns[kind]
    distinct = [fn.dump(part) for part in parts]
    texts = [distinct[rank % len(distinct)] for rank in range(n_ranks)]
    began = time.process_time()
    result = fn.of_texts({rank: text.encode() for rank, text in enumerate(texts)})
    reduce_ms = (time.process_time() - began) * 1e3
    up_bytes = sum(len(text.encode()) for text in texts)
    down_bytes = n_ranks * len(result.encode())
    return Cost(
        2 * n_ranks,
        up_bytes,
        down_bytes,
        latency_ms(n_ranks),
        (2 * up_bytes + down_bytes) / BYTES_PER_MS,
        reduce_ms,
    )


def roll_calls(texts: dict[str, list[str]], n_ranks: int) -> Sequence[RankManifest]:
    """What ranks bring that have met the same sites: the first one spells their candidates out."""
    calls = []
    for rank in range(n_ranks):
        calls.append(
            RankManifest(
                {site: digest(each) for site, each in texts.items()}, texts if rank == 0 else {}
            )
        )
    return calls


def tuning(
    rungs: Sequence[tuple[dict[int, Report], Report]], texts: dict[str, list[str]], n_ranks: int
) -> dict[str, Cost]:
    """All meetings of one tuning, by kind: roll call, the vote, one report a rung or round, and the
    end.
    """
    vote = meeting([Report()], n_ranks, "report")
    costs = {"manifest": meeting(roll_calls(texts, n_ranks), n_ranks, "manifest"), "votes": vote}
    costs["reports"] = sum(
        (meeting(list(reports.values()), n_ranks, "report") for reports, _ in rungs), Cost()
    )
    costs["end"] = Cost(2 * n_ranks, latency_ms=latency_ms(n_ranks))
    return costs
