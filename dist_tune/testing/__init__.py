"""Ranks on one machine and a fake driver, so that steps can be tested without a cluster and without
a GPU.

    def step_on(rank: int) -> float:  # in a module that the ranks can import
        return tuned_step(torch.full((64,), float(rank)))[0].item()

    assert values(on_ranks(2, step_on)) == [3.0, 3.0]

Ranks are processes forked from a server that has imported torch, Triton, dist_tune and test
libraries, because those imports take longer than most tests. A rank that does not end in time is
killed and reported, so that no test hangs.
"""

from dist_tune.testing.fake_gpu import ExactTime, FakeH200, install_fake_driver
from dist_tune.testing.ranks import (
    Clock,
    Mode,
    Outcome,
    choose_interpreter,
    fork_context,
    on_ranks,
    values,
)

__all__ = [
    "Clock",
    "ExactTime",
    "FakeH200",
    "Mode",
    "Outcome",
    "choose_interpreter",
    "fork_context",
    "install_fake_driver",
    "on_ranks",
    "values",
]
