"""Ranks on one machine, and the fake driver: both of Triton's modes in ranks of one fork server,
and ranks that do not end well.
"""

from __future__ import annotations

import importlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.runtime.cache import triton_key

from dist_tune.testing import ExactTime, FakeH200, Mode, on_ranks, values
from tests.interpreter import ELEMENTWISE
from tests.steps import accumulate_kernel, add_kernel
from tests.worlds import on_each_rank

pytestmark = pytest.mark.processes


@triton.jit
def _sum_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + tl.cdiv(0, BLOCK), tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0)))


def _summed(rank: int) -> Any:
    y, n_digests, before = torch.zeros(1), triton_key.cache_info().currsize, ExactTime.seconds
    _sum_kernel[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)](
        torch.ones(64), y, 64, BLOCK=64
    )
    programs = round((ExactTime.seconds - before) * 1e3 / ExactTime.program_ms, 6)
    return y.item(), FakeH200.launches, type(_sum_kernel).__name__, n_digests, programs


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("interpret", (64.0, [], "InterpretedFunction", 1, 1.0)),
        ("fake", (0.0, ["_sum_kernel"], "JITFunction", 1, 0.0)),
    ],
)
def test_tritons_own_kernels_are_in_the_mode_of_the_ranks(mode: Mode, expected: tuple[Any, ...]):
    """tl.sum and tl.cdiv are kernels, decorated in the fork server before the mode is known.

    It has made the digest of Triton's files, because 0.3 CPU-seconds of each rank would be most of
    a small tuning. An interpreted grid takes its time also where it is made of the launch's
    arguments, which are tensors of the interpreter's there.
    """
    assert values(
        on_ranks(
            1,
            _summed,
            mode=mode,
            is_dist=False,
            clock="exact",
            env={"TRITON_DEFAULT_FP_FUSION": "1"},
        )
    ) == [expected]


def _ends(rank: int) -> int:
    if rank == 1:
        raise ValueError("mine")
    if rank == 2:
        os._exit(1)
    return rank


def _hangs(rank: int) -> None:
    threading.Event().wait()


def test_the_end_of_each_rank_is_told():
    """One returns, one raises, one ends its process, one does not end."""
    outcomes = [
        *on_ranks(3, _ends, is_dist=False),
        *on_ranks(1, _hangs, is_dist=False, timeout_s=0.5),
    ]
    assert [(each.value, each.error) for each in outcomes] == [
        (0, ""),
        (None, "ValueError"),
        (None, "Died"),
        (None, "Hung"),
    ]
    with pytest.raises(AssertionError, match=r"(?s)rank 1 raised ValueError: mine.*in _ends"):
        values(outcomes[:2])


@pytest.mark.parametrize(
    ("n", "options", "told"),
    [
        (0, {}, "at least one rank"),
        (1, {"mode": "cuda"}, "mode must be one of .*'gpu'.*, got 'cuda'"),
        (1, {"clock": "fake"}, "clock must be one of .*'exact'.*, got 'fake'"),
        (1, {"mode": "gpu", "clock": "exact"}, "keeps the time of launches on the CPU"),
    ],
)
def test_ranks_that_would_not_run_as_asked_are_refused(n: int, options: dict[str, Any], told: str):
    """No ranks would pass any test; a GPU's times would not be exact."""
    with pytest.raises(ValueError, match=told):
        on_ranks(n, _short, **options)


def _short(rank: int) -> int:
    return rank


def test_ranks_that_end_at_once_do_not_fail_those_that_still_connect():
    for _ in range(4):
        assert values(on_ranks(3, _short)) == [0, 1, 2]


def test_functions_of_any_module_that_the_caller_can_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its folder is on sys.path of the caller, and the fork server has started before."""
    (tmp_path / "steps_of_a_user.py").write_text(
        "import torch.distributed as dist\ndef size(rank, more): return dist.get_world_size() +"
        " more\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert values(on_ranks(2, importlib.import_module("steps_of_a_user").size, 5)) == [7, 7]
    assert not dist.is_initialized()


@on_each_rank(1, is_dist=False)
def test_kernels_that_numpy_computes_come_to_what_the_interpreter_comes_to(rank: int):
    """Those of ``tests/interpreter.py``, also where no block divides the size, or the grid does not
    cover it.
    """
    x, known = torch.arange(100.0), dict(ELEMENTWISE)

    def results() -> list[torch.Tensor]:
        y = [torch.ones(100) for _ in range(4)]
        for kernel, at in ((add_kernel, 0), (accumulate_kernel, 2)):
            kernel[(4,)](x, y[at], 100, BLOCK=32, num_warps=4)
            kernel[(2,)](x, y[at + 1], 100, BLOCK=32, num_warps=4)
        return y

    fast = results()
    ELEMENTWISE.clear()
    exact = results()
    ELEMENTWISE.update(known)
    assert (len(known), all(map(torch.equal, fast, exact))) == (2, True)
