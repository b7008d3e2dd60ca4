"""Records of finished tunings on disk, found again by a key of code, candidates, arguments and machine.

The only user of the cache directory: fingerprints, files, lookup, differences between keys.
A failure here costs a warning and a repeated tuning, never the tuning itself.
"""

from typing import TYPE_CHECKING

from dist_tune import found_on_use
from dist_tune.cache.account import (
    cause,
    differing,
    fates,
    gain,
    lead,
    reason,
    short_config,
    skew,
    step_times,
    weighing,
    why_not,
)
from dist_tune.cache.digests import digest, sealed_line, text_of
from dist_tune.cache.files import LOCK_NAME, TEMPORARY_SUFFIX, sweep, write_whole
from dist_tune.cache.folder import BROKEN_SUFFIX, LOCKS, Cache, Entry
from dist_tune.cache.journal import JOURNALS, LINES_SUFFIX, QUARANTINE, Journal, QuarantinedConfig, quarantine, read_quarantine
from dist_tune.cache.journal_file import JournalFile, is_held
from dist_tune.cache.key_diff import nearest_key, nearest_shape
from dist_tune.cache.lookup import CacheLookup, LookupResult
from dist_tune.cache.record_file import BrokenRecordError, read_record, seal, unseal
from dist_tune.cache.records import HARDWARE, SOFTWARE, CacheKey, CandidateRecord, Environment, Seconds, TuningRecord, environment

if TYPE_CHECKING:
    from dist_tune.cache.code.captured import plain_values
    from dist_tune.cache.code.code_anatomy import anatomy
    from dist_tune.cache.code.fingerprints import Code, fingerprint, read_code
else:  # these import torch, and reading records does not need it
    __getattr__, __dir__ = found_on_use(
        __name__,
        {
            "code.captured": ("plain_values",),
            "code.code_anatomy": ("anatomy",),
            "code.fingerprints": ("Code", "fingerprint", "read_code"),
        },
    )

__all__ = [
    "BROKEN_SUFFIX", "HARDWARE", "JOURNALS", "LINES_SUFFIX", "LOCKS", "LOCK_NAME", "QUARANTINE", "SOFTWARE", "TEMPORARY_SUFFIX",
    "BrokenRecordError", "Cache", "CacheKey", "CacheLookup", "CandidateRecord", "Code", "Entry", "Environment", "Journal",
    "JournalFile", "LookupResult", "QuarantinedConfig", "Seconds", "TuningRecord", "anatomy", "cause", "differing", "digest", "environment",
    "fates", "fingerprint", "gain", "is_held", "lead", "nearest_key", "nearest_shape", "plain_values", "quarantine", "read_code",
    "read_quarantine", "read_record", "reason", "seal", "sealed_line", "short_config", "skew", "step_times", "sweep",
    "text_of", "unseal", "weighing", "why_not", "write_whole",
]  # fmt: skip
