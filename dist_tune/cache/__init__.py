"""Records of finished tunings on disk, found again by a key of code, candidates, arguments and machine.

The only user of the cache directory: fingerprints, files, lookup, differences between keys.
Every failure here costs a warning and the cache, never the tuning.
"""

from dist_tune.cache.atomic import LOCK_NAME, TEMPORARY_SUFFIX, locked, sweep, write_whole
from dist_tune.cache.cache import BROKEN_SUFFIX, BrokenRecordError, Cache, Entry, read_record
from dist_tune.cache.misses import nearest_shape
from dist_tune.cache.recall import Recall, Ticket
from dist_tune.cache.records import HARDWARE, SOFTWARE, CacheKey, CandidateRecord, Environment, Seconds, TuningRecord, environment
from dist_tune.cache.sealed import seal, unseal
from dist_tune.cache.source import fingerprint
from dist_tune.cache.surroundings import plain_values

__all__ = [
    "BROKEN_SUFFIX", "HARDWARE", "LOCK_NAME", "SOFTWARE", "TEMPORARY_SUFFIX", "BrokenRecordError", "Cache", "CacheKey",
    "CandidateRecord", "Entry", "Environment", "Recall", "Seconds", "Ticket", "TuningRecord", "environment", "fingerprint", "locked",
    "nearest_shape", "plain_values", "read_record", "seal", "sweep", "unseal", "write_whole",
]  # fmt: skip
