"""Steps as their users write them.

Without a GPU the Triton interpreter runs their kernels, unless TRITON_INTERPRET says otherwise.
"""

import os

import torch

if not torch.cuda.is_available():
    # Read where a kernel is defined, so before any module of this package.
    os.environ.setdefault("TRITON_INTERPRET", "1")
