"""The cache as one tuning uses it: this rank's record of a site, and the record that it stores.

Knows keys and records, and nothing of how ranks agree on them. A failure here costs a warning and a repeated tuning.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dist_tune.cache.account import ID_CHARS
from dist_tune.cache.key_diff import differences, explain, nearest
from dist_tune.cache.records import SOFTWARE, CacheKey, TuningRecord, digest, environment
from dist_tune.cache.store import Cache
from dist_tune.files import Rights
from dist_tune.search import PriorTimes, Times
from dist_tune.settings import Settings

if TYPE_CHECKING:
    from dist_tune.output import Story


class LookupResult(NamedTuple):
    """A rank's answer for one site when ranks compare their caches. A JSON array."""

    key: str
    """Digest of the cache key; empty on a rank without a cache."""
    winner: str = ""
    """The winner of its record, described; empty without a record."""
    miss: str = ""
    """The reason for having no record, if that is an error."""
    is_open: bool = True
    """Takes a config from a record; not if the rank must tune anyway, or if its record's config does not run here."""


class Miss(NamedTuple):
    """The reason why a site has no record."""

    reason: str
    is_near: bool = False
    """There is a record of the kernel, and the reason names the fields in which the nearest one differs."""
    is_new_shape: bool = False
    """It differs in the tuning key, and at most in the candidates that prune rules leave for it: no record is out of use."""


class Keyed(Protocol):
    """A launch as far as its cache key goes."""

    @property
    def name(self) -> str:
        """Name of the kernel or function with its module."""

    @property
    def key_text(self) -> str:
        """The tuning key."""

    def source(self) -> str:
        """Digest of the code, and of all it calls."""


class CacheLookup:
    """The cache in one tuning on this rank. If it is not used, nothing is found and nothing stored."""

    def __init__(self, settings: Settings, log: Story, *, is_used: bool, world_size: int, ranks_per_host: int) -> None:
        self._settings = settings
        self._log = log
        self._is_used = is_used
        self._cache = Cache(settings.cache_folders, is_shared=settings.cache_shared)
        self._world = world_size, ranks_per_host
        self._keys: dict[str, CacheKey] = {}
        """By label of the site; none where the cache is not used."""

    @property
    def folder(self) -> str:
        """Identity of the cache folder, equal on ranks that share it; empty if no site was looked up."""
        return self._cache.identity if self._keys else ""

    @cached_property
    def _environment(self) -> dict[str, Any]:
        return environment(*self._world).keyed

    @property
    def is_required(self) -> bool:
        """A miss is an error."""
        return self._settings.require_cache

    def look_up(self, label: str, launch: Keyed, texts: list[str]) -> TuningRecord | None:
        """This rank's record of a site with the candidates ``texts``, or None."""
        if not self._is_used:
            return None
        began = time.perf_counter()
        key = self._keys[label] = CacheKey(
            name=launch.name, source=launch.source(), key=launch.key_text, candidates=digest(texts), **self._environment
        )
        if self._settings.always_tune:
            return None
        record = self._cache.find(key, any_software=not self._settings.version_check)
        if record is not None and (others := differences(key, record.cache_key)):
            versions = ", ".join(f"{name} {theirs}, here {mine}" for name, (mine, theirs) in others.items() if name in SOFTWARE)
            self._log.warning(f"site={label} uses a config that was tuned with {versions} (DIST_TUNE_VERSION_CHECK=0)", shown=True)
        found = "found" if record is not None else "not found"
        self._log.debug(f"site={label} {found} in {self._cache.path_of(key)} ms={(time.perf_counter() - began) * 1e3:.2f}")
        return record

    def rename(self, labels: Mapping[str, str]) -> None:
        """Give sites other labels: old -> new."""
        self._keys.update({labels[old]: self._keys.pop(old) for old in [*self._keys] if old in labels})

    def source(self, label: str) -> str:
        """Digest of the site's code; empty if it was not looked up."""
        return self._keys[label].source if label in self._keys else ""

    def ticket(self, label: str, record: TuningRecord | None, *, runs: bool = True) -> LookupResult:
        """The answer for the other ranks. ``runs``: the record's config was not found to fail here."""
        key = self._keys.get(label)
        if key is None:
            return LookupResult("", miss="It uses no cache." if self.is_required else "", is_open=False)
        name = digest([key.model_dump_json()])
        if self._settings.always_tune:
            return LookupResult(name, miss="DIST_TUNE_ALWAYS_TUNE is set." if self.is_required else "", is_open=False)
        if record is not None:
            return LookupResult(name, record.best.config, is_open=runs)
        return LookupResult(name, miss=explain(key, self._cache.of_name(key.name)) if self.is_required else "")

    @property
    def rights(self) -> Rights:
        """Permissions of files in the cache folder."""
        return self._cache.rights

    def place_of(self, label: str) -> tuple[Path, str] | None:
        """The cache folder, and the digest of a site's key; None without a cache."""
        key = self._keys.get(label)
        return (self._cache.folder, digest([key.model_dump_json()])) if key is not None else None

    def reason_of_miss(self, label: str) -> Miss:
        """The reason why a site without a record has none."""
        key = self._keys.get(label)
        if key is None or self._settings.always_tune:
            return Miss("no cache is used" if key is None else "DIST_TUNE_ALWAYS_TUNE is set")
        records = self._cache.of_name(key.name)
        record = nearest(key, records)
        if record is None or not (differing := differences(key, record.cache_key).keys()):
            return Miss("the cache has no record of this kernel")
        return Miss(explain(key, records), is_near=True, is_new_shape={"key"} <= differing <= {"key", "candidates"})

    def prior_times(self, label: str, texts: list[str]) -> PriorTimes:
        """Times from a record of the same site and environment with another candidate list.

        Of several records the one that measured the most of these candidates, and of equals the newest.
        """
        if label not in self._keys or self._settings.always_tune:
            return PriorTimes()
        found = [_times_of(record, texts) for record in self._cache.siblings(self._keys[label])]
        return max(found, key=lambda prior: len(prior.times), default=PriorTimes())

    def record_ids(self, records: Mapping[str, TuningRecord]) -> dict[str, str]:
        """Site -> the beginning of its record's file name that no other record of the kernel has; without those that are not kept."""
        paths = {label: self._cache.path_of(each.cache_key) for label, each in records.items() if self._is_used and self._is_kept(each)}
        stems, ids = {each.stem for each in paths.values()}, {}
        for label, path in paths.items():
            begin = path.stem[:ID_CHARS]
            others = (stems | self._cache.names_beside(path)) - {path.stem}
            ids[label] = path.stem if any(each.startswith(begin) for each in others) else begin
        return ids

    @staticmethod
    def _is_kept(record: TuningRecord) -> bool:
        had_choice = sum(each.failure is None and each.equal_to is None for each in record.candidates) > 1
        return bool(record.source) and (record.best.latency_ms is not None or not had_choice)

    def keep(self, record: TuningRecord) -> bool:
        """Store a record, unless its winner was chosen among several without being measured: that choice would be found for good.

        False if it is not stored.
        """
        path = self._cache.store(record) if self._is_used and self._is_kept(record) else None
        self._log.debug(f"site={record.kernel}{record.key} kept in {path}" if path else f"site={record.kernel}{record.key} not kept")
        return path is not None


def _times_of(record: TuningRecord, texts: list[str]) -> PriorTimes:
    """The record's times of these candidates, and its winner if it is one of them."""
    by_text, times = {each.config: each for each in record.candidates}, {}
    for i, text in enumerate(texts):
        each = by_text.get(text)
        if each is not None and each.latency_ms and each.closure_ms is not None:
            spread_ms, ranks_ms = each.spread_ms or 0.0, each.rank_latencies_ms
            times[i] = Times(each.latency_ms, each.closure_ms, spread_ms, n_replays=each.n_replays, rank_latencies_ms=ranks_ms)
    return PriorTimes(times, texts.index(record.best.config) if record.best.config in texts else None)
