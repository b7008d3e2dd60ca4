"""The error where no config of a site runs, and errors after which none can."""

from __future__ import annotations

import pytest

from dist_tune.errors import CandidateFailure, FailureKind
from dist_tune.sites import is_fatal, none_left

NO_DRIVER = "RuntimeError: 0 active drivers ([]). There should only be one."
FITS, NO_GPU = "Add a config that fits", "set TRITON_INTERPRET=1 before kernels are defined"


@pytest.mark.parametrize(
    ("reasons", "advice"),
    [
        ([f"rank 0: {NO_DRIVER}"] * 2, NO_GPU),
        (["KeyError: 'z_ptr'"] * 2, "No config cures that"),
        (["OutOfResources: 9 of 8"] * 2, FITS),
        ([NO_DRIVER, "OutOfResources"], FITS),
        (["AssertionError"], FITS),
        ([], FITS),
    ],
)
def test_the_last_line_says_what_to_do(reasons: list[str], advice: str):
    """Where Triton has found no GPU no config can help, and Triton's own words say nothing of GPUs;
    one reason of its own may be mended.
    """
    failures = {i: CandidateFailure(FailureKind.LAUNCH, reason) for i, reason in enumerate(reasons)}
    text = str(none_left("gemm[8]", ["BLOCK=1", "BLOCK=2"], failures, "on rank 0"))
    assert advice in text.splitlines()[-1]
    assert text.count("KeyError") == ("No config cures" in advice)


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        ("device-side assert triggered", True),
        ("an illegal memory access was encountered", True),
        ("operation not permitted when stream is capturing", False),
        ("invalid configuration argument", False),
    ],
)
def test_an_error_of_the_device_is_fatal_where_its_context_is_gone(error: str, is_lost: bool):
    """The advice that torch adds to each of its errors speaks of assertions."""
    advice = (
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA`"
        " to enable device-side assertions.\n"
    )
    assert is_fatal(RuntimeError(f"CUDA error: {error}\n{advice}")) is is_lost
