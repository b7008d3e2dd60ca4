"""Cases of parametrised tests."""

from __future__ import annotations

from typing import Any

import pytest


def further(*values: Any) -> Any:
    """A case that shows what another one shows; `make test` leaves it out, `make test-faults` runs it."""
    return pytest.param(*values, marks=pytest.mark.slow)
