"""Candidates from source to the device, ahead of their first launch.

The only user of Triton's compiler internals: threads, front end, shared memory, compiler output.
Knows which ranks of a host share compiled kernels, and nothing of how they agree.
"""

from dist_tune.compiler.candidate import Candidate, Failure, Resources, reason_of
from dist_tune.compiler.lazy import NotLoaded, Refusal, is_compiling, noted, refused
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
from dist_tune.compiler.passes.patches import SharedContext, replaced
from dist_tune.compiler.passes.stages import PTXAS
from dist_tune.compiler.pool import Compiler, n_compile_threads
from dist_tune.compiler.subprocesses.leftovers import sweep
from dist_tune.compiler.subprocesses.output import quiet_terminal
from dist_tune.compiler.triton_cache import await_digest, begin_digest, host_of_cache, standing_in

__all__ = [
    "KEY_CHARS", "PTXAS", "Candidate", "CompileKeys", "Compiler", "Failure", "NotLoaded", "Placement", "Refusal", "Resources",
    "SharedContext", "await_digest", "begin_digest", "compile_cost", "host_of_cache", "is_compiling", "n_compile_threads", "noted",
    "own_share", "partition_configs", "quickest", "quiet_terminal", "reason_of", "refused", "replaced", "split_keys", "standing_in",
    "sweep",
]  # fmt: skip
