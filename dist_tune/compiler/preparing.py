"""What is in place in Triton and in this process while a tuning compiles.

Knows the parts of this folder that others share; nothing of candidates.
"""

from __future__ import annotations

from contextlib import ExitStack

from dist_tune.compiler.passes.cache_folder import spare
from dist_tune.compiler.passes.front_end import one_front_end
from dist_tune.compiler.passes.stages import watched_stages
from dist_tune.compiler.passes.triton_digest import await_digest, begin_digest
from dist_tune.compiler.shared_memory import early_check
from dist_tune.compiler.subprocesses import processes
from dist_tune.compiler.subprocesses.output import quiet_terminal
from dist_tune.compiler.subprocesses.workers import workers
from dist_tune.measure import is_interpreted


def prepare(n_workers: int, patches: ExitStack, use: ExitStack) -> bool:
    """Put all in place until ``patches`` is closed, and processes until ``use`` is; True if there are such processes.

    ``n_workers``: processes to start; 0 where the compilation stays in this one.
    """
    uses_processes = False
    if not is_interpreted():
        begin_digest()  # beside the start of the driver
        uses_processes = n_workers > 0 and processes.is_possible()
        if uses_processes:
            use.enter_context(workers.in_use())
            patches.enter_context(processes.other_processes())
            workers.start(n_workers)
        await_digest()
    for part in (spare.in_use, early_check, one_front_end, watched_stages, quiet_terminal.redirected):
        patches.enter_context(part())
    return uses_processes
