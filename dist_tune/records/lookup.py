"""The cache as one tuning uses it: this rank's record of a site, the record that it stores, and why
there is none, or which is near.

Knows keys and records, and nothing of how ranks agree on them. A failure here costs a warning and a
repeated tuning.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from dist_tune.records.record import SOFTWARE, CacheKey, TuningRecord, digest, environment
from dist_tune.records.store import Cache, Won
from dist_tune.search import PriorTimes, Times
from dist_tune.settings import NEAREST, Settings

if TYPE_CHECKING:
    from dist_tune.log import Story

_ID_CHARS = 6
"""Characters of a record's file name that name it in messages; ``dist-tune show`` takes any
beginning that is unique.
"""


_MAX_VALUE = 120
"""Characters of a value that an explanation quotes."""
_NUMBER = re.compile(
    r"(?<![\w.:'\"])(?:[0-9]{1,300}(\.[0-9]{0,300})?|(\.[0-9]{1,300}))([eE][+-]?[0-9]{1,3})?(?![\w.:'\"])"
)
"""No digits within a word or quotes, as of "bfloat16" or "cuda:0".

Bounded, so that a long text takes no long time.
"""


class LookupResult(NamedTuple):
    """A rank's answer for one site when ranks compare their caches. A JSON array."""

    key: str
    """Digest of the cache key; empty on a rank without a cache."""
    winner: str = ""
    """The winner of its record, described; empty without a record."""
    miss: str = ""
    """The reason for having no record, if that is an error."""
    is_open: bool = True
    """Takes a config from a record; not if the rank must tune anyway, or if its record's config
    does not run here.
    """


class Miss(NamedTuple):
    """The reason why a site has no record."""

    reason: str
    """A sentence."""
    is_stale: bool = False
    """There is a record of the kernel, which differs in more than the tuning key, and the
    candidates that prune rules leave for it.
    """


class CacheLookup:
    """The cache in one tuning on this rank.

    If it is not used, nothing is found and nothing stored.
    """

    def __init__(
        self, settings: Settings, log: Story, *, is_used: bool, world_size: int, ranks_per_host: int
    ) -> None:
        self._settings = settings
        self.mode, self.may_tune = settings.effective_mode, settings.may_tune
        self._tunes_anew = settings.always_tune and settings.may_tune
        self._log = log
        self._is_used = is_used
        self.cache = Cache.of(settings)
        self._world = world_size, ranks_per_host
        self._keys: dict[str, CacheKey] = {}
        """By label of the site; none where the cache is not used."""

    @property
    def folder(self) -> str:
        """Identity of the cache folder, equal on ranks that share it; empty if no site was looked
        up.
        """
        return self.cache.identity if self._keys else ""

    @cached_property
    def _environment(self) -> dict[str, Any]:
        return environment(*self._world).keyed

    @property
    def is_required(self) -> bool:
        """A miss is an error."""
        return self.mode == "require"

    def look_up(
        self, label: str, named: tuple[str, str], source: Callable[[], str], texts: list[str]
    ) -> TuningRecord | None:
        """This rank's record of a site with the candidates ``texts``, or None.

        ``named``: kernel and key; ``source``: of its code.
        """
        if not self._is_used or self.mode == "first":
            return None
        name, key_text = named
        key = CacheKey(
            name=name, source=source(), key=key_text, candidates=digest(texts), **self._environment
        )
        self._keys[label] = key
        return self.look_again(label)

    def look_again(self, label: str) -> TuningRecord | None:
        """This rank's record of a site that was looked up, or None."""
        key, began = self._keys.get(label), time.perf_counter()
        if key is None or self._tunes_anew:
            return None
        record = self.cache.find(key, any_software=not self._settings.version_check)
        if record is not None and (others := differences(key, record.cache_key)):
            versions = ", ".join(
                f"{name} {theirs}, here {mine}"
                for name, (mine, theirs) in others.items()
                if name in SOFTWARE
            )
            self._log.warning(
                f"site={label} uses a config that was tuned with {versions}"
                " (DIST_TUNE_VERSION_CHECK=0)",
                shown=True,
            )
        found = "found" if record is not None else "not found"
        self._log.debug(
            f"site={label} {found} in {self.cache.path_of(key)}"
            f" ms={(time.perf_counter() - began) * 1e3:.2f}"
        )
        return record

    def source(self, label: str) -> str:
        """Digest of the site's code; empty if it was not looked up."""
        return self._keys[label].source if label in self._keys else ""

    def key_digest(self, label: str) -> str:
        """Digest of a site's key; empty without a cache."""
        return digest([self._keys[label].model_dump_json()]) if label in self._keys else ""

    def ticket(self, label: str, record: TuningRecord | None, *, runs: bool = True) -> LookupResult:
        """The answer for the other ranks.

        ``runs``: the record's config was not found to fail here.
        """
        if record is not None:
            return LookupResult(self.key_digest(label), record.best.config, is_open=runs)
        miss = self.reason_of_miss(label).reason if self.is_required else ""
        return LookupResult(
            self.key_digest(label), miss=miss, is_open=label in self._keys and not self._tunes_anew
        )

    def reason_of_miss(self, label: str) -> Miss:
        """The reason why a site without a record has none."""
        key = self._keys.get(label)
        if key is None or self._tunes_anew:
            return Miss("It uses no cache." if key is None else "DIST_TUNE_ALWAYS_TUNE is set.")
        records = self.cache.of_name(key.name)
        record = nearest(key, records)
        differing = {} if record is None else differences(key, record.cache_key)
        return Miss(
            explain(key, records),
            is_stale=bool(differing) and not {"key"} <= differing.keys() <= {"key", "candidates"},
        )

    def prior_times(self, label: str, texts: list[str]) -> PriorTimes:
        """Times from a record of the same site and environment with another candidate list.

        Of several records the one that measured the most of these candidates, and of equals the
        newest.
        """
        if label not in self._keys or self._tunes_anew:
            return PriorTimes()
        found = [_times_of(record, texts) for record in self.cache.siblings(self._keys[label])]
        return max(found, key=lambda prior: len(prior.times), default=PriorTimes())

    def nearest_config(self, label: str, texts: list[str]) -> int | None:
        """The candidate that won in the nearest record of the site's code; None without one."""
        key = self._keys.get(label)
        won = nearest_usable(key, self.cache.winners(key.name), texts) if key is not None else None
        if key is None or won is None:
            return None
        unlike = {
            name: theirs
            for name, (_, theirs) in differences(key, won.cache_key).items()
            if name != "candidates"
        }
        differing = (
            ", ".join(f"{name} {theirs}" for name, theirs in unlike.items())
            or "another list of candidates"
        )
        told = (
            f"site={label} has no record: the nearest is of {differing}, and its config is used:"
            f" {won.config}"
        )
        self._log.info(told, shown=self.mode == NEAREST)
        return texts.index(won.config)

    def record_id(self, record: TuningRecord) -> str:
        """Beginning of a record's file name, by which ``dist-tune show`` finds it; empty if it is
        not to be kept.

        As with a winner that was chosen among several without being measured: that choice would be
        found for good.
        """
        had_choice = (
            sum(
                candidate.failure is None and candidate.equal_to is None
                for candidate in record.candidates
            )
            > 1
        )
        is_kept = (
            self._is_used
            and record.source
            and (record.best.latency_ms is not None or not had_choice)
        )
        return self.cache.path_of(record.cache_key).stem[:_ID_CHARS] if is_kept else ""

    def keep(self, record: TuningRecord) -> bool:
        """Store a record, if it is to be kept. False if it is not stored."""
        path = self.cache.store(record) if self.record_id(record) else None
        self._log.debug(
            f"site={record.kernel}{record.key} kept in {path}"
            if path
            else f"site={record.kernel}{record.key} not kept"
        )
        return path is not None


def _times_of(record: TuningRecord, texts: list[str]) -> PriorTimes:
    """The record's times of these candidates, and its winner if it is one of them."""
    by_text, times = {candidate.config: candidate for candidate in record.candidates}, {}
    for i, text in enumerate(texts):
        each = by_text.get(text)
        if each is not None and each.latency_ms and each.closure_ms is not None:
            spread_ms, ranks_ms = each.spread_ms or 0.0, each.rank_latencies_ms
            times[i] = Times(
                each.latency_ms,
                each.closure_ms,
                spread_ms,
                n_replays=each.n_replays,
                rank_latencies_ms=ranks_ms,
            )
    return PriorTimes(
        times, texts.index(record.best.config) if record.best.config in texts else None
    )


# -- keys that differ ------------------------------------------------------------------------------


def differences(wanted: CacheKey, recorded: CacheKey) -> dict[str, tuple[object, object]]:
    """Field -> (wanted, recorded), for each field that differs."""
    return {
        field: (value, other)
        for (field, value), (_, other) in zip(wanted, recorded, strict=True)
        if value != other
    }


def nearest(wanted: CacheKey, records: Sequence[TuningRecord]) -> TuningRecord | None:
    """The record of this kernel or function that differs in the fewest fields, of equals the
    newest; None if it has none.
    """
    own = [record for record in records if record.kernel == wanted.name]
    return max(
        own,
        key=lambda record: (-len(differences(wanted, record.cache_key)), record.tuned_at),
        default=None,
    )


def explain(wanted: CacheKey, records: Sequence[TuningRecord]) -> str:
    """The reason why none of the records has this key, in one or two sentences for an error
    message.
    """
    record = nearest(wanted, records)
    name = _short(wanted.name)
    if record is None:
        return f"There is no record of {name}."
    differing = differences(wanted, record.cache_key)
    when = f"{record.tuned_at:%Y-%m-%d %H:%M %Z}"
    if not differing:
        return f"There is a record of {name} that fits (tuned {when})."
    known = {"source": f"the code of {name}, or of something it calls, has changed"}
    known["candidates"] = "the list of configs to choose from is another"
    told = {
        field: f"{_short(str(here))} here, {_short(str(theirs))} in the record"
        for field, (here, theirs) in differing.items()
    }
    reasons = "; ".join(f"{field}: {known.get(field, words)}" for field, words in told.items())
    remedy = " DIST_TUNE_VERSION_CHECK=0 accepts it." if differing.keys() <= set(SOFTWARE) else ""
    return f"The nearest record of {name} (tuned {when}) differs in {reasons}.{remedy}"


def nearest_usable(wanted: CacheKey, records: Sequence[Won], texts: Sequence[str]) -> Won | None:
    """The nearest of records of the same code whose winner is one of the candidates ``texts``; None
    if there is none.

    Nearest is first the same GPU, then the nearest numbers of the tuning key, then the fewest other
    differences, then the newest.
    """
    fitting = [
        record
        for record in records
        if record.cache_key.source == wanted.source and record.config in texts
    ]
    unlike = {id(each): differences(wanted, each.cache_key).keys() for each in fitting}
    for is_other in (False, True):
        group = [each for each in fitting if ("device" in unlike[id(each)]) is is_other]
        if key := nearest_key(wanted.key, [each.cache_key.key for each in group]):
            alike = [each for each in group if each.cache_key.key == key]
            return min(alike, key=lambda each: (len(unlike[id(each)]), -each.tuned_at.timestamp()))
    return None


def nearest_key(wanted: str, known: Sequence[str]) -> str:
    """The key that differs only in its numbers, by the least distance, of equals the same text;
    empty if there is none.

    The distance is the sum over the numbers of ``|log2(a / b)|``. "float16" and "float32" are
    different keys, and so are -1 and 1, 1 and 1.0, and keys of different length.
    """
    shape, sizes = _numbers(wanted)
    fitting = [
        (_distance(sizes, numbers), key != wanted, key)
        for key in known
        for form, numbers in [_numbers(key)]
        if form == shape
    ]
    return min(fitting, default=(0.0, True, ""))[-1]


def _short(text: str) -> str:
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}..."


def _numbers(key: str) -> tuple[str, list[int | float]]:
    """The key with its numbers replaced by their kinds, and the numbers.

    Signs stay in the key, because -1 is rarely a size.
    """
    texts = [found.group() for found in _NUMBER.finditer(key)]
    form = _NUMBER.sub(lambda found: "<integer>" if found.group().isdecimal() else "<real>", key)
    return form, [int(text) if text.isdecimal() else float(text) for text in texts]


def _distance(sizes: Sequence[int | float], others: Sequence[int | float]) -> float:
    # Not log2(a / b), which may overflow or underflow. Zero is a factor of four less than 1,
    # because an empty dimension is a special case.
    def log2(size: float) -> float:
        return math.log2(size) if size else -2.0

    return sum(abs(log2(a) - log2(b)) for a, b in zip(sizes, others, strict=True) if a != b)
