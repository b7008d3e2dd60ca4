# a script that prints
"""Steps of public libraries whose prune rules see the exact size, while the key holds a bucket of
it, on two CPU ranks of uneven sizes.

Each step runs without dist_tune, replayed, and online with an optimizer's step, and the results and
configs of the three are printed beside each other. What one way raises is printed, and the next way
follows. Kernels run under Triton's interpreter.

    pip install --no-deps --target FOLDER gemlite==0.4.7 cut-cross-entropy==25.1.1 mslk-cuda==1.1.0
    PYTHONPATH=FOLDER launch/launch.sh benchmarks/uneven_libraries.py NAME

NAME: gemlite, cut-cross-entropy, mslk, and mslk-apart --calls 0, where ranks have no candidate in
common.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import torch.distributed as dist
import triton.language as language
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver

from benchmarks.library_steps import pretend_a_gpu
from dist_tune import contextual_autotune

Tensors = list[torch.Tensor]
H200 = {
    "max_shared_mem": 232448,
    "multiprocessor_count": 132,
    "mem_clock_rate": 2619000,
    "mem_bus_width": 6144,
}


class Job(NamedTuple):
    """A step, with its inputs on this rank, one for each size."""

    step: Callable[..., Tensors]
    """Returns the loss of all ranks, a result of this rank, and the gradient of ``weight`` of all
    ranks.
    """
    weight: torch.nn.Parameter
    inputs: Sequence[tuple[Any, ...]]
    rate: float
    """Of learning."""


def patch_triton() -> None:
    """Answer what the libraries ask of a device, give the interpreter a function that it lacks, and
    time each config once.
    """

    def bench(run: Callable[[], object], *args: object, **kwargs: object) -> list[float]:
        began = time.perf_counter()
        run()
        return [(time.perf_counter() - began) * 1e3] * 3

    pretend_a_gpu()
    active: Any = driver.active
    active.utils = types.SimpleNamespace(get_device_properties=lambda device: H200)
    active.get_benchmarker = lambda: bench
    testing: Any = importlib.import_module("triton.testing")
    testing.nvsmi = lambda attributes: [1980]  # MHz
    device_functions: Any = importlib.import_module("triton.language.extra.libdevice")
    device_functions.log1p = lambda x: language.log(x + 1.0)
    torch.compiler.set_stance("force_eager")  # cut-cross-entropy compiles an argsort


def head_job(
    layers: Callable[[torch.Tensor], torch.Tensor], width: int, inputs: Sequence[torch.Tensor]
) -> Job:
    """A trained head on layers that are frozen, as libraries of quantised products have them."""
    head = torch.nn.Parameter(torch.full((width,), 0.1))

    def step(x: torch.Tensor) -> Tensors:
        features = layers(x).float()
        loss = (features @ head - 1.0).square().mean()
        (gradient,) = torch.autograd.grad(loss, head)
        loss = loss.detach()
        dist.all_reduce(loss)
        dist.all_reduce(gradient)
        return [loss, features, gradient]

    return Job(step, head, [(x,) for x in inputs], 0.01)


def gemlite_job(rank: int) -> Job:
    """A 4-bit and an 8-bit layer; in the last size a rank decodes one token."""
    library: Any = importlib.import_module("gemlite")
    scales, zeros = torch.rand(256, 1).half() * 0.02 + 0.01, torch.full((256, 1), 7.0).half()
    up = library.A16Wn(device="cpu").from_weights(
        torch.randint(0, 16, (128, 64)).byte(), scales, zeros, 4, 32
    )
    down = library.A16W8(device="cpu").from_weights(torch.randn(64, 128).half() * 0.1)
    sizes = (100, 120, 1), (120, 97, 30)
    return head_job(
        lambda x: down(torch.nn.functional.silu(up(x))),
        64,
        [torch.randn(n, 64).half() for n in sizes[rank]],
    )


def mslk_job(rank: int, width: int, sizes: Sequence[tuple[int, int]]) -> Job:
    """A product of fp8 blocks with scales."""
    for name in ("mslk", "mslk.gemm"):  # without their __init__, which loads CUDA code
        package: Any = types.ModuleType(name)
        package.__path__ = [f"{each}/{name.replace('.', '/')}" for each in sys.path]
        sys.modules[name] = package
    library: Any = importlib.import_module("mslk.gemm.triton.fp8_gemm")
    prepare = library.prep_matmul
    # The device "cpu" is refused.
    library.prep_matmul = lambda *args: (*prepare(*args)[:-1], torch.device("cpu", 0))
    weights, block = (torch.randn(width, 64) / 8).to(torch.float8_e4m3fn), 512

    def layer(x: torch.Tensor) -> torch.Tensor:
        scales = torch.ones(-(-len(x) // block), 1), torch.ones(-(-width // block), 1)
        y: torch.Tensor = library.matmul_fp8_block(x, weights, *scales, block, block, block)
        return y

    return head_job(
        layer, width, [torch.randn(each[rank], 64).to(torch.float8_e4m3fn) for each in sizes]
    )


def cross_entropy_job(rank: int, n_words: int, width: int, sizes: Sequence[tuple[int, int]]) -> Job:
    """The loss of a language model over unequal numbers of tokens, and its last layer."""
    os.environ["CCE_AUTOTUNE"] = "1"
    cross_entropy = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    words = torch.nn.Parameter(torch.randn(n_words, width).half())

    def step(x: torch.Tensor, targets: torch.Tensor) -> Tensors:
        x = x.detach().requires_grad_()
        loss = cross_entropy(x, words, targets)
        for_x, for_words = torch.autograd.grad(loss, (x, words))
        loss = loss.detach()
        dist.all_reduce(loss)
        dist.all_reduce(for_words)
        return [loss, for_x, for_words]

    tokens = [each[rank] for each in sizes]
    return Job(
        step,
        words,
        [(torch.randn(n, width).half(), torch.randint(0, n_words, (n,))) for n in tokens],
        1.0,
    )


JOBS: dict[str, Callable[[int], Job]] = {
    "gemlite": gemlite_job,
    "cut-cross-entropy": lambda rank: cross_entropy_job(
        rank, 32, 32, [(16, 17), (17, 16), (40, 33)]
    ),
    "mslk": lambda rank: mslk_job(rank, 32, [(256, 300), (300, 256)]),
    "mslk-apart": lambda rank: mslk_job(rank, 512, [(256, 900)]),
}


def training_step(job: Job) -> Callable[..., Tensors]:
    """The step with an optimizer's at its end; returns the loss and the weight."""
    optimizer = torch.optim.SGD([job.weight], lr=job.rate)

    def step(*given: Any) -> Tensors:
        loss, _, job.weight.grad = job.step(*given)
        optimizer.step()
        return [loss, job.weight]

    return step


def called(
    step: Callable[..., Tensors], job: Job, order: Sequence[int]
) -> tuple[list[Tensors], list[float]]:
    """Results of calls with inputs in that order, and their seconds; the weight ends as it was."""
    results, seconds, before = [], [], job.weight.detach().clone()
    try:
        for k in order:
            began = time.perf_counter()
            results.append([each.detach().clone() for each in step(*job.inputs[k])])
            seconds.append(time.perf_counter() - began)
    finally:
        with torch.no_grad():
            job.weight.copy_(before)
    return results, seconds


def difference(results: Sequence[Tensors], expected: Sequence[Tensors]) -> str:
    """Of all tensors of all calls, relative to the largest element of each."""
    pairs = [
        (a.float(), b.float())
        for one, other in zip(results, expected, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    if all(torch.equal(a, b) for a, b in pairs):
        return "the same bits"
    # NaN if there is one
    return f"{torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max():.1e} apart"


def forget_choices() -> dict[str, str]:
    """Configs in use, by kernel and key; the next way begins without."""
    found = {}
    for kernel in gc.get_objects():
        if issubclass(type(kernel), Autotuner):
            for key, config in kernel.cache.items():
                sizes = ",".join(str(each) for each in key if not isinstance(each, str))
                constants = " ".join(f"{name}={value}" for name, value in config.kwargs.items())
                found[f"{kernel.base_fn.__name__}[{sizes}]"] = (
                    f"{constants} w{config.num_warps} s{config.num_stages}"
                )
            kernel.cache.clear()
    return found


def tell(way: str, text: str) -> None:
    """Print a line of each rank, in their order, and the configs in use; equal ones once."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (text, forget_choices()))
    if dist.get_rank():
        return
    for rank, (line, _) in enumerate(told):
        print(f"{way}, rank {rank}: {line}", flush=True)
    for site in sorted({each for _, configs in told for each in configs}):
        configs = [configs.get(site, "none") for _, configs in told]
        distinct = configs[:1] if len({*configs}) == 1 else configs
        print(f"    {site}: {' | '.join(distinct)}", flush=True)


def main() -> None:
    """Run one library's step each way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=[*JOBS])
    parser.add_argument(
        "--calls",
        type=int,
        default=120,
        help="of the training step, with the first two sizes in turn; 0: no training",
    )
    options = parser.parse_args()
    patch_triton()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.manual_seed(0)
    job = JOBS[options.name](dist.get_rank())
    twice = [k for k in range(len(job.inputs)) for _ in range(2)]
    ways = {"replayed": (job.step, twice)}
    if options.calls:
        ways["online"] = training_step(job), [k % len(job.inputs[:2]) for k in range(options.calls)]
    # Of a replayed step the second call of a size counts: in the first one some kernels add up what
    # the trials of Triton's tuner wrote.
    expected = {way: called(step, job, order) for way, (step, order) in ways.items()}
    seconds = ", ".join(f"{way} {sum(seconds):.1f} s" for way, (_, seconds) in expected.items())
    tell("without dist_tune", f"sizes {[len(given[0]) for given in job.inputs]}; {seconds}")
    for way, (step, order) in ways.items():
        tuned = contextual_autotune(
            is_dist=True, n_repeat=1, n_warmup=1, max_slowdown=1.0, cache=False
        )(step)
        try:
            results, taken = called(tuned, job, order)
        except (RuntimeError, ValueError) as error:  # printed, so that the next way is seen as well
            traceback.print_exception(error, limit=-1)
            tell(way, f"{type(error).__name__}: {error}")
            continue
        known, text = expected[way][0], ""
        if way == "replayed":
            text = (
                f", first and second calls {difference(results[::2], results[1::2])} (without:"
                f" {difference(known[::2], known[1::2])})"
            )
            results, known = results[1::2], known[1::2]
        else:
            text = f", loss {results[0][0]:.4f} in the first call, {results[-1][0]:.4f} in the last"
        beside = f"{difference(results, known)} beside the step without dist_tune"
        tell(way, f"{beside}{text}; {len(tuned.records)} sites tuned, {sum(taken):.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
