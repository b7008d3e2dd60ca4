"""Compile phase in the log: CPU-seconds by stage, the slowest candidate, threads at work."""

from __future__ import annotations

from dist_tune.compiler import PTXAS
from dist_tune.tuning.context import TuningContext


def tell_of_work(context: TuningContext) -> None:
    """Two lines on the compilations since the last call of this; none if nothing was compiled."""
    work = context.compiler.take_work()
    if work is None:
        return
    context.expenses.seconds.compile_cpu += work.cpu_s
    stages = " ".join(f"{name}={seconds:.3f}{' (wall)' if name == PTXAS else ''}" for name, seconds in work.stage_s.items())
    context.log.info(
        f"closure={context.name} kernels: compiled={work.n_compiled} equal={work.n_equal} on_disk={work.n_found} failed={work.n_failed} "
        f"cpu_seconds: {stages} threads_at_work={work.n_at_work:.1f} of {context.compiler.n_threads} in {work.wall_s:.3f} s"
    )
    place = context.compiler.place(work.slowest) if work.slowest is not None else None
    if place is not None and work.n_compiled + work.n_failed:
        label, candidate = place
        site = context.sites.met.get(label.partition(" > ")[0])  # of a kernel inside a function, the function
        config = f' config="{site.texts[candidate]}"' if site is not None else ""
        context.log.info(
            f"closure={context.name} slowest compilation: seconds={work.slowest_s:.3f} site={label} candidate={candidate}{config}"
        )
