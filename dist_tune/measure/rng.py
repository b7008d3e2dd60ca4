"""Random state of this process: Python's, numpy's, torch's on the CPU and on the current GPU.

Replays draw random numbers; after a tuning the generators must stand where one ordinary run would have left them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


def _cuda_state() -> torch.Tensor | None:
    return torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


@dataclass(frozen=True)
class RngState:
    """The state when this object was made."""

    python: Any = field(default_factory=random.getstate)
    numpy: Any = field(default_factory=np.random.get_state)
    torch_cpu: torch.Tensor = field(default_factory=torch.get_rng_state)
    torch_cuda: torch.Tensor | None = field(default_factory=_cuda_state)

    def restore(self) -> None:
        """Go back to that state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda is not None:
            torch.cuda.set_rng_state(self.torch_cuda)
