"""Records of finished tunings on disk, found again by a key of code, candidates, arguments and machine.

The only user of the cache directory: fingerprints, files, lookup, differences between keys.
A failure here costs a warning and a repeated tuning, never the tuning itself.
"""

from typing import TYPE_CHECKING

from dist_tune import found_on_use
from dist_tune.cache.account import (
    candidate_rows,
    fates,
    gain,
    gain_told,
    lead,
    parts_of,
    shared_fields,
    short_config,
    skew,
    slowest_rank,
    step_times,
    weighing,
)
from dist_tune.cache.journal import JOURNALS, LINES_SUFFIX, QUARANTINE, Journal, QuarantinedConfig, quarantine, read_quarantine
from dist_tune.cache.lookup import CacheLookup, LookupResult, differences, explain, nearest_key, nearest_shape
from dist_tune.cache.records import (
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
from dist_tune.cache.store import Cache, Entry

if TYPE_CHECKING:
    from dist_tune.cache.fingerprints import Code, anatomy, read_code
else:  # these import torch, and reading records does not need it
    __getattr__, __dir__ = found_on_use(__name__, {"fingerprints": ("Code", "anatomy", "read_code")})

__all__ = [
    "HARDWARE", "JOURNALS", "LINES_SUFFIX", "QUARANTINE", "SOFTWARE", "BrokenRecordError", "Cache", "CacheKey", "CacheLookup",
    "CandidateRecord", "Code", "Entry", "Environment", "Journal", "LookupResult", "QuarantinedConfig", "Seconds", "TuningRecord",
    "anatomy", "candidate_rows", "differences", "digest", "environment", "explain", "fates", "gain", "gain_told", "lead",
    "nearest_key", "nearest_shape", "parts_of", "quarantine", "read_code", "read_quarantine", "record_bytes", "record_in",
    "shared_fields", "short_config", "skew", "slowest_rank", "step_times", "weighing",
]  # fmt: skip
