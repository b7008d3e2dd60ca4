"""Train a hybrid of gated linear attention and DeltaNet with DDP, on random tokens.

As: torchrun --nproc-per-node 2 train.py --dim 1024 --batch 4 --tokens 2048
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from hybrid import HybridLM, Trainer  # beside this script


def main() -> None:
    """Train for ``--steps`` steps, and read the loss every tenth."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=4, help="sequences of each rank")
    parser.add_argument("--tokens", type=int, default=2048, help="of each sequence")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--times", default="times", help="file of steps, times and losses")
    options = parser.parse_args()

    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")

    torch.manual_seed(0)
    model = HybridLM(options.vocab, options.dim, options.layers, options.heads)
    trainer = Trainer(model, device, lr=options.lr, n_steps=options.steps)

    torch.manual_seed(rank)
    shape = options.batch, options.tokens + 1
    with open(f"{options.times}.{rank}", "w", buffering=1) as times:
        for step in range(1, options.steps + 1):
            tokens = torch.randint(options.vocab, shape, device=device)
            began = time.perf_counter()
            loss = trainer.step(tokens[:, :-1], tokens[:, 1:])
            if step == 1 or step % options.log_every == 0 or step == options.steps:
                value = loss.item()
                print(step, began, value, time.perf_counter(), file=times)
                if rank == 0:
                    print(f"step {step} loss {value:.4f}", flush=True)
            else:
                print(step, began, file=times)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
