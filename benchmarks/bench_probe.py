"""What deciding on replays costs a tuning, and whether steps on a GPU are judged rightly.

- steps: training steps and kernels that must not be repeated, beside the plain step, to the bit; and steps that are to be tuned
- cost: forward and backward of flash-linear-attention's ``chunk_gla`` (fla-core), a public library: milliseconds of both looks, by part,
  in a cold tuning, beside its seconds

    .venv/bin/python benchmarks/bench_probe.py
    .venv/bin/python benchmarks/bench_probe.py --case cost
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton
import triton.language as tl
from torch import nn

from dist_tune import contextual_autotune
from dist_tune.measure import StepState
from dist_tune.replays import FirstRun

CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (256, 1024) for warps in (4, 8)]
_hidden: list[torch.Tensor] = []


@triton.jit
def scale_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Two times x."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, 2.0 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


@triton.jit
def add_to_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Adds x to y."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(y_ptr + at, mask=at < n) + tl.load(x_ptr + at, mask=at < n), mask=at < n)


class Layer(nn.Module):
    """A linear layer and a kernel beside it."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(512, 512, device="cuda"), nn.BatchNorm1d(512, device="cuda")
        self.kernel = kernel

    def forward(self, x: torch.Tensor) -> Any:
        """Of (rows, 512)."""
        y = torch.empty_like(x)
        self.kernel[lambda config: (triton.cdiv(x.numel(), config["BLOCK"]),)](x, y, x.numel())
        return (self.linear(x) * y).square().mean()


def _adds(x: torch.Tensor, y: torch.Tensor) -> None:
    add_to_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)


def make(kind: str, kernel: Any) -> tuple[Callable[[torch.Tensor], Any], Callable[[], Any]]:
    """A step, and the state to compare."""
    model = Layer(kernel)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler, total = torch.amp.GradScaler("cuda"), torch.zeros(64, 512, device="cuda")
    generator = torch.Generator("cuda").manual_seed(1) if kind == "own generator" else None
    _hidden[:] = [torch.zeros(64, 512, device="cuda")]
    model.linear.weight.grad = torch.zeros_like(model.linear.weight) if kind == "kernel into w.grad" else None

    def step(x: torch.Tensor) -> Any:
        if kind == "forward":
            return model(x)
        if kind == "batch norm":
            return model(x) + model.norm(x).sum()
        if kind == "kernel into w.grad":
            loss = model(x)
            globals()["_adds"](x, model.linear.weight.grad)
            return loss
        if kind == "kernel into hidden memory":
            globals()["_adds"](x, globals()["_" + "hidden"][0])
            return model(x)
        if kind == "add to an argument":
            total.add_(x)
            return model(x)
        if kind == "own generator":
            return model(x) * torch.rand(1, device="cuda", generator=generator)
        if kind == "dropout":
            return model(nn.functional.dropout(x))
        model.zero_grad()
        loss = model(x)
        if kind == "scaler":
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()
        loss.backward()
        if kind == "fused AdamW":
            optimizer.step()
        return loss.detach()

    return step, lambda: [model.state_dict(), optimizer.state_dict(), total, [p.grad for p in model.parameters()], _hidden, torch.rand(1)]


KINDS = {
    "forward": 1, "forward and backward": 1, "dropout": 1, "fused AdamW": 0, "scaler": 0, "batch norm": 0, "kernel into w.grad": 0,
    "kernel into hidden memory": 0, "add to an argument": 0, "own generator": 0,
}  # fmt: skip
"""Step -> sites that are tuned."""


def plain(value: Any) -> Any:
    """Tensors as numbers."""
    if isinstance(value, torch.Tensor):
        return value.double().tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def outcome(kind: str, is_tuned: bool) -> tuple[Any, int]:
    """Values and state after three calls, and the number of records."""
    kernel = triton.autotune(CONFIGS if is_tuned else CONFIGS[:1], key=["n"])(scale_kernel)
    step, after = make(kind, kernel)
    tuned: Any = contextual_autotune(cache=False)(step) if is_tuned else step
    torch.manual_seed(4)
    xs = [torch.rand(64, 512, device="cuda") for _ in range(3)]
    values = [tuned(x).item() for x in xs]
    return (values, plain(after())), len(tuned.records) if is_tuned else 0


def steps() -> bool:
    """True if all steps are as they should be; one line for each."""
    is_good = True
    for kind, n_sites in KINDS.items():
        expected, _ = outcome(kind, is_tuned=False)
        found, n_tuned = outcome(kind, is_tuned=True)
        is_same = found == expected
        is_good &= is_same and n_tuned == n_sites
        print(f"{kind:28} {'as the plain step, to the bit' if is_same else 'ANOTHER RESULT'}, {n_tuned} of {n_sites} sites tuned")
    return is_good


def cost() -> None:
    """Milliseconds of both looks within one cold tuning."""
    from fla.ops.gla import chunk_gla  # a public library, which need not be there

    spent: defaultdict[str, float] = defaultdict(float)

    def timed(cls: Any, name: str) -> None:
        run = getattr(cls, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.synchronize()
            began = time.perf_counter()
            try:
                return run(*args, **kwargs)
            finally:
                torch.cuda.synchronize()
                spent[f"{cls.__name__}.{name}"] += time.perf_counter() - began

        setattr(cls, name, call)

    for name in ("__init__", "why_not", "keep", "compare", "accept", "changed"):
        timed(StepState, name)
    timed(FirstRun, "probe")
    q, k, v = (torch.randn(1, 4096, 16, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    g = nn.functional.logsigmoid(torch.randn(1, 4096, 16, 128, device="cuda")).requires_grad_()
    weights = nn.ParameterList([torch.randn(1 << 24, device="cuda") for _ in range(64)])  # 4 GiB of parameters beside them

    @contextual_autotune(cache=False)
    def step(q: Any, k: Any, v: Any, g: Any, weights: Any) -> Any:
        o, _ = chunk_gla(q, k, v, g)
        o.sum().backward()
        return o.detach()

    began = time.perf_counter()
    step(q, k, v, g, weights)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    looks_s = sum(each for name, each in spent.items() if name != "FirstRun.probe")
    print(
        f"chunk_gla: {len(step.records)} sites tuned in {seconds:.2f} s; both looks {1e3 * looks_s:.1f} ms, {100 * looks_s / seconds:.2f} %"
    )
    print("of these, ms: " + ", ".join(f"{name} {1e3 * each:.2f}" for name, each in spent.items()))
    runs = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step(q, k, v, g, weights)
        torch.cuda.synchronize()
        runs.append(time.perf_counter() - began)
    print(f"a later call: {1e3 * min(runs):.2f} ms")


def main() -> int:
    """Run the cases; 1 if a step was judged wrongly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("steps", "cost"), action="append")
    cases = parser.parse_args().case or ["steps", "cost"]
    is_good = steps() if "steps" in cases else True
    if "cost" in cases:
        cost()
    return not is_good


if __name__ == "__main__":
    sys.exit(main())
