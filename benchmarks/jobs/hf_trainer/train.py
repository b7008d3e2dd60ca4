"""Train a model of gated linear attention with transformers' Trainer, on random tokens.

As: torchrun --nproc-per-node 2 train.py --dim 1024 --batch 4 --tokens 2048
"""

from __future__ import annotations

import argparse
import time
from typing import Any, TextIO

import torch
from fla.models import GLAConfig, GLAForCausalLM
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens, the same for each index."""

    def __init__(self, n_sequences: int, n_tokens: int, vocab: int) -> None:
        self.n_sequences, self.n_tokens, self.vocab = n_sequences, n_tokens, vocab

    def __len__(self) -> int:
        return self.n_sequences

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.vocab, (self.n_tokens,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


class WriteTimes(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Writes when each step begins, and each loss that is logged."""

    def __init__(self, times: TextIO) -> None:
        self.times, self.began = times, 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Note the time."""
        self.began = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write the step's line with its loss, which has been read from the device."""
        if logs and "loss" in logs:
            now = time.perf_counter()
            print(state.global_step, self.began, logs["loss"], now, file=self.times)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write a line without a loss."""
        if state.global_step != 1 and state.global_step % args.logging_steps:
            print(state.global_step, self.began, file=self.times)


def main() -> None:
    """Train for ``--steps`` steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=4, help="sequences of each rank")
    parser.add_argument("--tokens", type=int, default=2048, help="of each sequence")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--times", default="times", help="file of steps, times and losses")
    parser.add_argument("--output", default="checkpoints")
    options = parser.parse_args()

    args = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=options.lr,
        lr_scheduler_type="cosine",
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=options.log_every,
        logging_first_step=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    config = GLAConfig(
        hidden_size=options.dim,
        num_heads=options.heads,
        num_hidden_layers=options.layers,
        use_short_conv=True,
        vocab_size=options.vocab,
        use_cache=False,
        fuse_cross_entropy=torch.cuda.is_available(),  # its loss takes no tensors of the CPU
    )
    torch.manual_seed(0)
    model = GLAForCausalLM(config)
    n_sequences = options.steps * options.batch * args.world_size
    data = RandomTokens(n_sequences, options.tokens, options.vocab)
    with open(f"{options.times}.{args.process_index}", "w", buffering=1) as times:
        trainer = Trainer(model, args, train_dataset=data, callbacks=[WriteTimes(times)])
        trainer.train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
