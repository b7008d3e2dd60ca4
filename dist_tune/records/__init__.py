"""Records of finished tunings on disk, found again by a key of code, candidates, arguments and
machine.

The only user of the cache directory: fingerprints, files, lookup, differences between keys.
A failure here costs a warning and a repeated tuning, never the tuning itself.
"""

from dist_tune.records import words
from dist_tune.records.journal import (
    JOURNALS,
    LINES_SUFFIX,
    QUARANTINE,
    AnyLine,
    Journal,
    QuarantinedConfig,
    quarantine,
    read_quarantine,
)
from dist_tune.records.lookup import CacheLookup, LookupResult, differences, explain, nearest_key
from dist_tune.records.record import (
    HARDWARE,
    SOFTWARE,
    BrokenRecordError,
    CacheKey,
    CandidateRecord,
    Environment,
    Seconds,
    TuningRecord,
    digest,
    environment,
    record_bytes,
    record_in,
)
from dist_tune.records.store import Cache, Entry

__all__ = [
    "HARDWARE",
    "JOURNALS",
    "LINES_SUFFIX",
    "QUARANTINE",
    "SOFTWARE",
    "AnyLine",
    "BrokenRecordError",
    "Cache",
    "CacheKey",
    "CacheLookup",
    "CandidateRecord",
    "Entry",
    "Environment",
    "Journal",
    "LookupResult",
    "QuarantinedConfig",
    "Seconds",
    "TuningRecord",
    "differences",
    "digest",
    "environment",
    "explain",
    "nearest_key",
    "quarantine",
    "read_quarantine",
    "record_bytes",
    "record_in",
    "words",
]
