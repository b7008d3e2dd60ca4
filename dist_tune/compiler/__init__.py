"""Candidates from source to the device, ahead of their first launch.

The only user of Triton's compiler internals: threads, front end, shared memory, compiler output.
Knows which ranks of a host share compiled kernels, and nothing of how they agree.
"""

from dist_tune.compiler.candidate import Candidate, Failure, Resources, reason_of
from dist_tune.compiler.leftovers import sweep
from dist_tune.compiler.output import quiet_terminal
from dist_tune.compiler.partition import (
    KEY_CHARS,
    CompileKeys,
    Placement,
    compile_cost,
    own_share,
    partition_configs,
    quickest,
    split_keys,
)
from dist_tune.compiler.patches import NotLoaded, Refusal, SharedContext, is_compiling, noted, refused, replaced
from dist_tune.compiler.pool import Compiler, n_compile_threads
from dist_tune.compiler.triton_cache import await_digest, begin_digest, host_of_cache, standing_in

__all__ = [
    "KEY_CHARS", "Candidate", "CompileKeys", "Compiler", "Failure", "NotLoaded", "Placement", "Refusal", "Resources",
    "SharedContext", "await_digest", "begin_digest", "compile_cost", "host_of_cache", "is_compiling", "n_compile_threads", "noted",
    "own_share", "partition_configs", "quickest", "quiet_terminal", "reason_of", "refused", "replaced", "split_keys", "standing_in",
    "sweep",
]  # fmt: skip
