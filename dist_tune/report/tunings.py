"""Tunings, made of their records: sites that were tuned together. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dist_tune.log import closure_name, site_names
from dist_tune.records import TuningRecord, account


@dataclass(frozen=True)
class Tuning:
    """The records of one tuning, at least one."""

    records: Sequence[TuningRecord]

    @property
    def title(self) -> str:
        """The step's name without its module."""
        return closure_name(self.records[0].closure)

    @property
    def sites(self) -> dict[str, TuningRecord]:
        """By kernel and key for people, no two alike."""
        named = [(each.kernel, each.key) for each in self.records]
        otherwise = [f"{each.kernel} {each.key} ({k})" for k, each in enumerate(self.records, 1)]
        return dict(zip(site_names(named, otherwise), self.records, strict=True))

    @property
    def step_ms(self) -> tuple[float | None, float | None]:
        """The step with the first configs, and with the winners; None where it was not timed."""
        return account.step_times(self.records)


def tunings_of(records: Iterable[TuningRecord]) -> list[Tuning]:
    """Records by what the sites of one tuning have in common, the earliest tuning first."""
    together = defaultdict[str, list[TuningRecord]](list)
    for record in records:
        of = f"{record.closure} {record.spent!r} {record.n_replays} {record.environment!r}"
        together[of].append(record)
    return [Tuning(each) for each in sorted(together.values(), key=lambda each: each[0].tuned_at)]


def latest(records: Iterable[TuningRecord]) -> list[TuningRecord]:
    """Those of the last tuning; none of no records."""
    tunings = tunings_of(records)
    return [*tunings[-1].records] if tunings else []
