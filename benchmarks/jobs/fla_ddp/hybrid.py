"""A language model of gated linear attention and DeltaNet blocks, and its trainer with DDP.

Layers, norms and the MLP are those of flash-linear-attention, used as they are.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from fla.layers import DeltaNet, GatedLinearAttention
from fla.modules import GatedMLP, RMSNorm
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    """A mixer of tokens and an MLP, each behind a norm and with a residual."""

    def __init__(self, dim: int, n_heads: int, *, is_delta: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.mixer: nn.Module
        if is_delta:
            self.mixer = DeltaNet(hidden_size=dim, num_heads=n_heads)
        else:
            self.mixer = GatedLinearAttention(hidden_size=dim, num_heads=n_heads)
        self.mlp = GatedMLP(hidden_size=dim, hidden_ratio=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, dim] to the same."""
        x = x + self.mixer(self.norm1(x))[0]
        change: torch.Tensor = self.mlp(self.norm2(x))
        return x + change


class HybridLM(nn.Module):
    """Blocks of gated linear attention and of DeltaNet in turn, between an embedding and a head."""

    def __init__(self, vocab: int, dim: int, n_layers: int, n_heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        blocks = [Block(dim, n_heads, is_delta=i % 2 == 1) for i in range(n_layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """[batch, tokens] twice to the mean loss."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Trainer:
    """The model under DDP with its optimizer and schedule."""

    def __init__(self, model: nn.Module, device: torch.device, *, lr: float, n_steps: int) -> None:
        self.device = device
        device_ids = [device.index] if device.type == "cuda" else None
        self.model = DistributedDataParallel(model.to(device), device_ids=device_ids)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=True)

        def cosine(step: int) -> float:
            return 0.5 * (1 + math.cos(math.pi * min(1.0, step / n_steps)))

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, cosine)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """One step of training. Returns the loss, which is still on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss: torch.Tensor = self.model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()
