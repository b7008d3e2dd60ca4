"""The message where no config of a site runs."""

from __future__ import annotations

import pytest

from dist_tune.sites.site import no_valid_config

pytestmark = pytest.mark.once

NO_DRIVER = "RuntimeError: 0 active drivers ([]). There should only be one."


@pytest.mark.parametrize(
    ("reason", "advice"), [(NO_DRIVER, "set TRITON_INTERPRET=1 before kernels are defined"), ("AssertionError", "Add a config that fits")]
)
def test_the_last_line_says_what_to_do(reason: str, advice: str):
    """Where Triton has found no GPU no config can help, and Triton's own words say nothing of GPUs."""
    message = no_valid_config("gemm[8]", ["BLOCK=1", "BLOCK=2"], dict.fromkeys(range(2), f"rank 0: {reason}"), "on rank 0")
    assert advice in message.splitlines()[-1]


def test_one_config_with_a_reason_of_its_own_may_be_mended():
    message = no_valid_config("gemm[8]", ["BLOCK=1", "BLOCK=2"], {0: NO_DRIVER, 1: "OutOfResources"}, "on rank 0")
    assert "TRITON_INTERPRET" not in message


def test_configs_without_a_reason_say_nothing_of_gpus():
    assert "TRITON_INTERPRET" not in no_valid_config("gemm[8]", ["BLOCK=1"], {}, "here")
