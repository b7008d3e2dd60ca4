"""Guided search on the recorded tables of the AllGather-GEMM: as good as the criterion by which it
is the default.
"""

from __future__ import annotations

import pytest

from benchmarks.guided_tables import LIMIT, kernels, line, n_compiled, runs_of


@pytest.mark.processes  # it lasts seconds
def test_guided_search_finds_the_best_of_the_recorded_tables():
    """In 95 % of runs within 1 % of the best, with at most 45 of 76 and 97 of 216 candidates
    compiled.
    """
    regrets = []
    for name, kernel in kernels().items():
        if len(kernel.ms) > 1000:  # minutes
            continue
        runs = runs_of(kernel, "guided", 8)
        regrets += [run.regret for run in runs]
        assert max(map(n_compiled, runs)) <= {76: 45, 216: 97}[len(kernel.ms)]
        assert "within_1%" in line(name, "guided", runs)
    assert len(regrets) == 32
    assert sum(regret <= LIMIT for regret in regrets) >= 0.95 * len(regrets)
