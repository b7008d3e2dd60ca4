"""kernels/step_times.py and kernels/moe_times.py: the names that torch uses, and tables that keep numbers whole."""

from __future__ import annotations

import io

import pytest

from tests.programs import run_python
from tests.row_parallel_ranks import ROOT

pytestmark = pytest.mark.once


def test_torchs_operators_have_the_names_and_arguments_that_contenders_use():
    """No GPU is needed to see an operator's schema."""
    import torch
    import torch.distributed._symmetric_memory  # defines the operators

    def arguments(operator: str) -> list[str]:
        return [f"{each.type} {each.name}" for each in getattr(torch.ops.symm_mem, operator).default._schema.arguments]

    assert arguments("fused_matmul_reduce_scatter") == ["Tensor A", "Tensor B", "str reduce_op", "int scatter_dim", "str group_name"]
    assert arguments("fused_all_gather_matmul")[:4] == ["Tensor A", "List[Tensor] Bs", "int gather_dim", "str group_name"]
    assert arguments("one_shot_all_reduce") == ["Tensor input", "str reduce_op", "str group_name"]
    assert arguments("two_shot_all_reduce_") == ["Tensor input", "str reduce_op", "str group_name"]
    grouped = [each.name for each in torch.ops.aten._grouped_mm.default._schema.arguments]
    assert grouped[:3] == ["self", "mat2", "offs"]


@pytest.mark.parametrize("names", [("fused",), ("torch one-shot", "torch two-shot")])
def test_a_table_in_a_log_keeps_its_numbers_whole(names: tuple[str, ...]):
    """All contenders of a perf case at the largest shape, as wide as a log is: nothing is cut off."""
    from rich.console import Console

    from kernels.harness import WIDTH
    from kernels.step_times import StepTimes, bound_table

    others = ("step", "staged", "contextual", "tuned alone", "default", "mm", "exchange", "mm, exchange", *names)
    console = Console(width=WIDTH, file=io.StringIO())
    console.print(bound_table([StepTimes((8192, 8192, 28672), 8, "aligned, host ahead", dict.fromkeys(others, 12.3456))], 1))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert text.count("12.3456") == 4
    assert "8192, 8192, 28672" in text


def test_a_table_of_a_mixture_of_experts_keeps_its_numbers_whole():
    """All contenders at the sizes with the most digits."""
    from rich.console import Console

    from kernels import moe_times
    from kernels.harness import WIDTH
    from kernels.step_times import COPIES, GATHER, GATHER_MM, MM, STEP, StepTimes

    names = (STEP, COPIES, MM, GATHER, GATHER_MM, moe_times.FIRST, moe_times.ALONE)
    shape = (2048, 14336, 4096, 32, 2)
    console = Console(width=WIDTH, file=io.StringIO())
    times = [StepTimes(shape, 2, "aligned, host ahead", dict.fromkeys(names, 12.3456))]
    console.print(moe_times.table_of(times, moe_times.Bound(1e12, 1e9, 1e8)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert text.count("12.3456") == len(names)


@pytest.mark.processes
def test_torchs_sums_compete_where_torch_has_them():
    """One-shot and two-shot sum bfloat16, and no fp16: there they are left out rather than fail."""
    script = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "import torch.distributed._symmetric_memory as memory\n"
        "memory.empty, memory.rendezvous = (lambda *size, dtype, device: torch.empty(*size, dtype=dtype)), (lambda *_: None)\n"
        "from kernels.step_times import all_reduce_contenders\n"
        "for dtype in (torch.bfloat16, torch.float16):\n"
        "    print(list(all_reduce_contenders(torch.ones(2, 2, dtype=dtype), torch.ones(2, 2, dtype=dtype))))\n"
    )
    done = run_python("-c", script, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    bf16, fp16 = done.stdout.splitlines()
    assert bf16 == "['mm', 'exchange', 'mm, exchange', 'torch one-shot', 'torch two-shot']"
    assert fp16 == "['mm', 'exchange', 'mm, exchange']"
