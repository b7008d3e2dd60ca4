"""What untimed runs of a function's candidates say of its speed."""

from __future__ import annotations

from dist_tune.search.times import Samples


def test_a_run_that_compiled_says_nothing_of_the_speed() -> None:
    """The shortest run without a compilation counts; where each one compiled, it is as one run, which no candidate is dropped for."""
    samples = Samples()
    for candidate, runs in {0: [(90.0, False), (80.0, False)], 1: [(70.0, False), (2.0, True)], 2: [(3.0, True), (4.0, True)]}.items():
        for ms, is_clean in runs:
            samples.add_warm_up("f", candidate, ms, is_clean=is_clean)
    times = samples.report_warm_ups({}).times["f"]
    assert {i: (each.kernel_ms, each.n_timed) for i, each in times.items()} == {0: (80.0, 1), 1: (2.0, 2), 2: (3.0, 2)}
