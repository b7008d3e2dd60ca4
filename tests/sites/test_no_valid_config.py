"""The error where no config of a site runs."""

from __future__ import annotations

import pytest

from dist_tune.errors import CandidateFailure, FailureKind
from dist_tune.sites import none_left

pytestmark = pytest.mark.once

NO_DRIVER = "RuntimeError: 0 active drivers ([]). There should only be one."
FITS, NO_GPU = "Add a config that fits", "set TRITON_INTERPRET=1 before kernels are defined"


@pytest.mark.parametrize(
    ("reasons", "advice"),
    [([f"rank 0: {NO_DRIVER}"] * 2, NO_GPU), (["AssertionError"] * 2, FITS), ([NO_DRIVER, "OutOfResources"], FITS), ([], FITS)],
)
def test_the_last_line_says_what_to_do(reasons: list[str], advice: str):
    """Where Triton has found no GPU no config can help, and Triton's own words say nothing of GPUs; one reason of its own may be mended."""
    failures = {i: CandidateFailure(FailureKind.LAUNCH, reason) for i, reason in enumerate(reasons)}
    assert advice in str(none_left("gemm[8]", ["BLOCK=1", "BLOCK=2"], failures, "on rank 0")).splitlines()[-1]
