"""Candidates from source to the device, ahead of their first launch.

The only user of Triton's compiler internals: threads, processes, front end, shared memory.
Knows which rank of its host it runs on, and nothing of how ranks agree.
"""

from dist_tune.compiler.candidate import Candidate, Resources
from dist_tune.compiler.compilation import Failure, reason_of
from dist_tune.compiler.patches import (
    NotLoaded,
    Refusal,
    SharedContext,
    is_compiling,
    noted,
    refused,
    replaced,
)
from dist_tune.compiler.pool import Compiler, compile_cost, n_compile_threads, quickest
from dist_tune.compiler.triton_cache import await_digest, begin_digest

__all__ = [
    "Candidate",
    "Compiler",
    "Failure",
    "NotLoaded",
    "Refusal",
    "Resources",
    "SharedContext",
    "await_digest",
    "begin_digest",
    "compile_cost",
    "is_compiling",
    "n_compile_threads",
    "noted",
    "quickest",
    "reason_of",
    "refused",
    "replaced",
]
