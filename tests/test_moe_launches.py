"""Launches of kernels/moe_reduce_rs.py on a GPU. None is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import triton

pytestmark = pytest.mark.once


@pytest.mark.parametrize("n_push_sms", [0, 132])
def test_push_on_none_or_all_multiprocessors_is_refused(n_push_sms: int, monkeypatch: pytest.MonkeyPatch):
    """Peers would wait for sums that nothing pushes, or the push on all SMs for a product that finds no room: before anything is queued."""
    from kernels import moe_reduce_rs

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)  # behind the import, which other tests share
    monkeypatch.setattr(moe_reduce_rs, "device_properties", lambda: {"multiprocessor_count": 132}, raising=False)
    step: Any = moe_reduce_rs.MoeReduceScatter.__call__
    with pytest.raises(ValueError, match=rf"n_push_sms.* 1 to 131 .* 132 SMs, got {n_push_sms}"):
        step(SimpleNamespace(n_ranks=2), None, None, None, 1, n_push_sms)
