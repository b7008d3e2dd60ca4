"""A language model of Mamba-2 blocks, and the trainer of its fully sharded job.

Mixer, block and norm are those of mamba-ssm, used as they are. Its Triton kernels are enough:
the package imports here without the CUDA extensions that its own ``__init__`` asks for.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

if importlib.util.find_spec("selective_scan_cuda") is None:
    package = ModuleType("mamba_ssm")
    package.__path__ = [f"{folder}/mamba_ssm" for folder in sys.path]
    sys.modules["mamba_ssm"] = package

from mamba_ssm.modules.block import Block
from mamba_ssm.modules.mamba2 import Mamba2
from mamba_ssm.ops.triton.layer_norm import RMSNorm, layer_norm_fn


class Mamba2LM(nn.Module):
    """Mamba-2 blocks between an embedding and a head."""

    def __init__(self, vocab: int, dim: int, n_layers: int, *, state: int, head_dim: int) -> None:
        super().__init__()
        mixer = partial(
            Mamba2,
            d_state=state,
            headdim=head_dim,
            chunk_size=256,
            use_mem_eff_path=False,  # the other one needs causal_conv1d
        )
        self.embedding = nn.Embedding(vocab, dim)
        block = partial(Block, fused_add_norm=True, residual_in_fp32=True)
        blocks = [block(dim, mixer, nn.Identity, RMSNorm) for _ in range(n_layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """[batch, tokens] twice to the mean loss."""
        x, residual = self.embedding(tokens), None
        for block in self.blocks:
            x, residual = block(x, residual)
        x = layer_norm_fn(
            x,
            self.norm.weight,
            None,
            residual=residual,
            eps=self.norm.eps,
            is_rms_norm=True,
        )
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


class Trainer:
    """The model, sharded over all ranks, with its optimizer."""

    def __init__(self, model: Mamba2LM, device: torch.device, *, n_ranks: int, lr: float) -> None:
        mesh = init_device_mesh(device.type, (n_ranks,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.model = model.to(device)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """One step of training. Returns the loss, which is still on the device."""
        loss: torch.Tensor = self.model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()
