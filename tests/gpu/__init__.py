"""What only real GPUs show; on one GPU, tests that need a second one are skipped."""

import pytest
import torch

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two GPUs, and here are {torch.cuda.device_count()}")
