"""What ranks agree on, as values: each kind of meeting takes this rank's part and gives what follows from those of all.

Knows who meets and how parts are reduced; parts and results travel as JSON. Collective throughout: every rank calls the same
methods in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from pydantic import TypeAdapter

from dist_tune.distributed import Ranks
from dist_tune.errors import Failures
from dist_tune.search import BatchReport, ReducedReport, reduce_reports
from dist_tune.tuning.manifest import RankManifest, SiteManifest, reduce_manifests

if TYPE_CHECKING:
    import loguru

Part = TypeVar("Part")
Result = TypeVar("Result")

_ROLL_CALL, _ROLL = TypeAdapter(RankManifest), TypeAdapter(SiteManifest)
_TEXTS = TypeAdapter(dict[str, str])
_REPORT, _ACCOUNT = TypeAdapter(BatchReport), TypeAdapter(ReducedReport)


class Agreement:
    """The meetings of one tuning."""

    def __init__(self, ranks: Ranks, log: loguru.Logger) -> None:
        self.seconds: list[float] = []
        """What each meeting so far took this rank, waiting for others included."""
        self._ranks = ranks
        self._log = log

    def roll_call(self, call: RankManifest, *, is_optional: bool = False) -> SiteManifest:
        """Which sites there are anywhere, with their candidates and who has the same ones to compile."""
        return self._meet("roll call", call, reduce_manifests, _ROLL_CALL, _ROLL, is_optional=is_optional)

    def vote(self, topic: str, failures: Failures) -> Failures:
        """Candidates that cannot run on some rank, each with the first such rank and its reason."""
        told = self._meet(topic, BatchReport(failures=failures), reduce_reports, _REPORT, _ACCOUNT)
        return told.failures

    def records(self, records: dict[str, str]) -> dict[str, str]:
        """Site -> record as JSON, of all sites that any rank brings one of."""
        return self._meet(
            "records", records, lambda parts: {label: text for each in parts.values() for label, text in each.items()}, _TEXTS, _TEXTS
        )

    def report(self, report: BatchReport) -> ReducedReport:
        """What a batch of replays took on the slowest rank."""
        return self._meet("report", report, reduce_reports, _REPORT, _ACCOUNT)

    def part(self) -> None:
        """The end: nobody goes on before all have come so far."""
        began = time.monotonic()
        self._ranks.meet("done", "", lambda parts: "")
        self._note("done", time.monotonic() - began, 0)

    def _meet(
        self,
        topic: str,
        part: Part,
        reduce: Callable[[dict[int, Part]], Result],
        parts: TypeAdapter[Part],
        results: TypeAdapter[Result],
        *,
        is_optional: bool = False,
    ) -> Result:
        began = time.monotonic()

        def reduced(texts: dict[int, str]) -> str:
            return results.dump_json(reduce({rank: parts.validate_json(text) for rank, text in texts.items()})).decode()

        text = self._ranks.meet(topic, parts.dump_json(part).decode(), reduced, is_optional=is_optional)
        result = results.validate_json(text)
        self._note(topic, time.monotonic() - began, len(text))
        return result

    def _note(self, topic: str, seconds: float, n_bytes: int) -> None:
        self.seconds.append(seconds)
        self._log.debug(f"meeting={topic!r} seconds={seconds:.4f} bytes={n_bytes}")
