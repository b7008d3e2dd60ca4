"""A candidate's way from source to the device, ahead of its first launch.

The only user of Triton's compiler internals: threads, front end, shared memory, compiler output.
Knows which ranks of a host share compiled kernels, and nothing of how they agree.
"""

from dist_tune.compiler.compile import Candidate, Failure, Resources, reason_of
from dist_tune.compiler.compiler import Compiler, host_of_cache, n_compile_threads
from dist_tune.compiler.efforts import deal_configs, effort
from dist_tune.compiler.patches import replaced
from dist_tune.compiler.shares import Bench, Keyset, share
from dist_tune.compiler.terminal import quiet_terminal

__all__ = [
    "Bench", "Candidate", "Compiler", "Failure", "Keyset", "Resources", "deal_configs", "effort", "host_of_cache", "n_compile_threads",
    "quiet_terminal", "reason_of", "replaced", "share",
]  # fmt: skip
