"""Steps and kernels to tune.

Without a GPU the Triton interpreter runs them, unless TRITON_INTERPRET says otherwise.
"""

import os

import torch

if not torch.cuda.is_available():
    # Read where a kernel is defined, so before any module of this package.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# NVLink multicast is of no use here, and torch and NCCL would set it up: a crash with it open can
# cost a host its GPUs.
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
