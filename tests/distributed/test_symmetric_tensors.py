"""The question whether peers can reach a tensor's memory."""

from __future__ import annotations

import sys

import pytest
import torch

from dist_tune.distributed import is_symmetric

pytestmark = pytest.mark.once

MODULE = "torch.distributed._symmetric_memory"


def test_ordinary_memory_is_told_without_an_import(monkeypatch: pytest.MonkeyPatch):
    """Torch's module of symmetric memory takes 0.1 s to import, in the first tuning of each rank."""
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    assert not is_symmetric(torch.zeros(4))
    assert MODULE not in sys.modules
