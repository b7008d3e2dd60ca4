"""Candidates that come to the same kernel: compiled once, raced once, and named in the record. Real sm_90 code."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.nvidia.compiler import CUDABackend

from dist_tune import autotune
from dist_tune.testing import FakeH200, values
from tests.ranks.kernels import add_kernel, autotuned, launch, tuned
from tests.ranks.worlds import on_fake

pytestmark = pytest.mark.processes

STAGES = (1, 2, 3, 4)


@triton.jit
def unused_block_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, PART: tl.constexpr):
    """Its code reads BLOCK alone; PART is for the grid."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1.0, mask=at < n)


@triton.jit
def rank_loop_kernel(x_ptr, y_ptr, n_steps, BLOCK: tl.constexpr):
    """With ``n_steps`` 1, a constant, there is no loop, and nothing is pipelined."""
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    sum = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(n_steps):
        x = tl.load(x_ptr + k * BLOCK * BLOCK + at)
        sum += tl.dot(x, x)
    tl.store(y_ptr + at, sum)


def counted() -> dict[str, int]:
    """From here on, the runs of Triton's stages in this process."""
    runs = dict.fromkeys(("make_llir", "make_ptx", "make_cubin"), 0)
    lock = threading.Lock()

    def counting(name: str, own: Any) -> Any:
        def stage(*args: Any) -> Any:
            with lock:
                runs[name] += 1
            return own(*args)

        return stage

    for name in runs:
        setattr(CUDABackend, name, counting(name, getattr(CUDABackend, name)))
    return runs


def launched() -> list[int]:
    """From here on, the stages of each kernel that is launched."""
    stages: list[int] = []

    def launch_ms(src: Any, metadata: Any) -> float:
        stages.append(metadata.num_stages)
        return 50.0 if src.constants[(src.fn.arg_names.index("BLOCK"),)] == 16 else 1.0

    FakeH200.launch_ms = staticmethod(launch_ms)
    return stages


def staged(*blocks: int, **options: Any) -> list[triton.Config]:
    return [triton.Config({"BLOCK": block}, num_stages=stages, **options) for block in blocks for stages in STAGES]


def _stages(rank: int, options: dict[str, Any]) -> Any:
    runs, stages = counted(), launched()
    kernel = autotuned(configs=staged(16, 32))
    step = tuned(kernel, **options)
    step(torch.zeros(64))
    (record,) = step.records
    timings = [ms[0] for ms in kernel.configs_timings.values()]
    return runs, stages, record.winner, [each.equal_to for each in record.candidates], record.candidates, timings


@pytest.mark.parametrize("options", [{}, {"search": "exhaustive"}, {"n_repeat": 3, "n_warmup": 1}], ids=str)
def test_stages_without_effect_are_one_candidate(options: dict[str, Any]):
    """Eight configs, two kernels: each goes through LLVM and ptxas once; the lowest index races, and its times are all four's."""
    ((runs, stages, winner, equal_to, candidates, timings),) = values(on_fake(1, _stages, options))
    assert runs == {"make_llir": 2, "make_ptx": 2, "make_cubin": 2}
    assert equal_to == [None, 0, 0, 0, None, 4, 4, 4]
    assert set(stages) == {1}
    assert winner == 4
    assert [each.latency_ms == candidates[each.equal_to].latency_ms for each in candidates if each.equal_to is not None] == [True] * 6
    assert timings[4:] == [timings[4]] * 4
    assert all(each.n_regs == 64 for each in candidates)


def _on_disk(rank: int) -> Any:
    """Kernels in memory after a tuning, and those that Triton alone finds on disk, and makes anew in another folder."""
    kernel = autotuned(configs=staged(16, 32))
    tuned(kernel)(torch.zeros(64))
    cache = add_kernel.device_caches[0][0]

    def contents() -> Any:
        return {key: ({**each.asm}, each.metadata, each.packed_metadata) for key, each in cache.items()}

    ours, hits = contents(), []
    triton.knobs.compilation.listener = lambda *, cache_hit, **facts: hits.append(cache_hit)
    for _ in range(2):
        cache.clear()
        for config in staged(16, 32):
            launch(autotuned(configs=[config]), torch.zeros(64))
        assert contents() == ours
        os.environ["TRITON_CACHE_DIR"] += "-anew"
    return hits, sorted(each.metadata.num_stages for each in cache.values())


def test_what_is_taken_over_is_what_triton_alone_makes():
    """Each key has all its files on disk, to the byte, and the metadata of its own config."""
    ((hits, stages),) = values(on_fake(1, _on_disk))
    assert hits == [True] * 8 + [False] * 8
    assert stages == sorted(STAGES * 2)


def _distinct(rank: int, kind: str) -> Any:
    launched()
    x, y, n = torch.zeros(64), torch.zeros(64), 64
    if kind == "grid":
        configs = [triton.Config({"BLOCK": 16, "PART": part}) for part in (1, 2)]
        kernel = autotuned(unused_block_kernel, configs=configs)
        step = tuned(kernel, lambda: kernel[lambda meta: (4 * meta["PART"],)](x, y, n))
    else:
        others: dict[str, list[dict[str, Any]]] = {
            "maxnreg": [{"maxnreg": 64}, {"maxnreg": 128}, {}],
            "warps": [{"num_warps": 1}, {"num_warps": 2}],
            "pre_hook": [{"pre_hook": lambda args: args["y_ptr"].zero_()}, {"pre_hook": lambda args: None}, {}],
        }
        kernel = autotuned(configs=[triton.Config({"BLOCK": 16}, **each) for each in others[kind]])
        step = tuned(kernel, lambda: launch(kernel, x, y))
    step()
    return [each.equal_to for each in step.records[0].candidates], [each.n_replays for each in step.records[0].candidates]


@pytest.mark.parametrize("kind", ["grid", "maxnreg", "warps", "pre_hook"])
def test_what_decides_a_launch_tells_candidates_apart(kind: str):
    """A constant that the grid alone reads, a limit of registers, hooks: all are raced, though some have the same code."""
    ((equal_to, n_replays),) = values(on_fake(1, _distinct, kind))
    assert set(equal_to) == {None}
    assert all(n_replays)


def _specialised(rank: int, n_steps: list[int]) -> Any:
    kernel = autotuned(rank_loop_kernel, configs=staged(32), key=("BLOCK",))
    x, y = torch.zeros(4 * 32 * 32, dtype=torch.float16), torch.zeros(32 * 32)
    step = tuned(kernel, lambda: kernel[(1,)](x, y, n_steps[rank]))
    step()
    return [each.equal_to for each in step.records[0].candidates], [each.n_replays > 0 for each in step.records[0].candidates]


@pytest.mark.once
def test_candidates_are_equal_if_they_are_on_all_ranks():
    """One step on rank 0 makes one kernel of the four stages; on rank 1 they differ, so all race on both. One on both: nothing to race."""
    assert values(on_fake(2, _specialised, [1, 4])) == [([None] * 4, [True] * 4)] * 2
    assert values(on_fake(2, _specialised, [1, 1])) == [([None, 0, 0, 0], [False] * 4)] * 2


@pytest.mark.once
def test_two_ranks_assemble_few_of_equal_kernels():
    """The four stages of a block stay together, so that one rank makes them all, but for those that the other one takes at the end."""
    got = values(on_fake(2, _stages, {}))
    assert sum(runs["make_cubin"] for runs, *_ in got) <= 4
    assert [equal_to for _, _, _, equal_to, _, _ in got] == [[None, 0, 0, 0, None, 4, 4, 4]] * 2


def _failing(rank: int) -> Any:
    tried: list[int] = []

    def launch_ms(src: Any, metadata: Any) -> float:
        if src.constants[(src.fn.arg_names.index("BLOCK"),)] == 32:
            tried.append(metadata.num_stages)
            raise RuntimeError("does not launch")
        return 0.1

    FakeH200.launch_ms = staticmethod(launch_ms)
    kernel = autotuned(configs=staged(16, 32))
    step = tuned(kernel)
    step(torch.zeros(64))
    (record,) = step.records
    return tried, record.winner, [each.failure for each in record.candidates]


@pytest.mark.once
def test_where_the_first_fails_its_equals_fail_alike():
    """It is launched once, and its equals never."""
    ((tried, winner, failures),) = values(on_fake(1, _failing))
    assert tried == [1]
    assert winner == 0
    assert failures[:4] == [None] * 4
    assert failures[4] == "rank 0: RuntimeError: does not launch"
    assert failures[5:] == [f"the same kernel as candidate 4: {failures[4]}"] * 3


def _again(rank: int) -> Any:
    launched()
    answers = []
    for configs in (staged(16, 32), list(reversed(staged(16, 32))), staged(16, 32, 64), staged(16, 32)):
        kernel = autotuned(configs=configs)
        step = tuned(kernel)
        step(torch.zeros(64))
        (record,) = step.records
        answers.append((record.is_recalled, record.best.fields["BLOCK"], record.best.equal_to, len(record.candidates)))
    return answers


@pytest.mark.once
def test_records_of_other_candidate_lists_are_used():
    """Reversed, the winner of before is equal to one in front of it; more candidates; and the first list again, from the cache."""
    ((first, reversed_, longer, recalled),) = values(on_fake(1, _again))
    assert first == (False, 32, None, 8)
    assert reversed_ == (False, 32, None, 8)
    assert (longer[0], longer[2:]) == (False, (None, 12))
    assert recalled == (True, 32, None, 8)


def _log(rank: int) -> None:
    launched()
    tuned(autotuned(configs=staged(16, 32)))(torch.zeros(64))


@pytest.mark.once
def test_the_log_names_equal_candidates():
    """In the compile phase with their number, and in the table."""
    (outcome,) = on_fake(1, _log)
    values([outcome])
    assert "6 of 8 candidates are the same kernel as another" in outcome.log
    assert outcome.log.count("the same kernel as candidate 4") == 3


def _late(rank: int) -> Any:
    asked: list[int] = []
    FakeH200.launch_ms = staticmethod(lambda src, metadata: asked.append(metadata.num_stages) or 1.0)  # type: ignore[func-returns-value]
    kernel = autotuned(rank_loop_kernel, configs=staged(32), key=("BLOCK",))
    x, y = torch.zeros(4 * 32 * 32, dtype=torch.float16), torch.zeros(32 * 32)
    n_runs = 0

    def step() -> None:
        nonlocal n_runs
        n_runs += 1
        if rank == 0 or n_runs > 1:
            kernel[(1,)](x, y, 1 if rank else 4)

    tune = tuned(kernel, step, n_repeat=2)
    tune()
    return set(asked), [each.equal_to for each in tune.records[0].candidates]


@pytest.mark.once
def test_a_rank_that_comes_late_runs_what_races_for_others():
    """Rank 1 meets the kernel after the first run, and finds one kernel where rank 0 has four: it launches what rank 0 is timed with."""
    got = values(on_fake(2, _late))
    assert [equal_to for _, equal_to in got] == [[None] * 4] * 2
    assert [asked for asked, _ in got] == [set(STAGES)] * 2


def _function(rank: int) -> Any:
    runs, seen = counted(), list[int]()

    def add(x: torch.Tensor, num_stages: int) -> torch.Tensor:
        seen.append(num_stages)
        y = torch.empty_like(x)
        add_kernel[(4,)](x, y, x.numel(), BLOCK=16, num_stages=num_stages)
        return y

    step = autotune([{"num_stages": stages} for stages in STAGES], lambda x: x.numel(), n_warmup=0, n_repeat=1)(add)
    step(torch.zeros(64))
    return runs["make_cubin"], [each.equal_to for each in step.records[0].candidates], set(seen)


@pytest.mark.once
def test_configs_of_a_function_stay_apart():
    """The kernel is compiled in the recorded run, and once for the others; but a function may do anything with its config: all are run."""
    ((n_compiled, equal_to, seen),) = values(on_fake(1, _function))
    assert (n_compiled, equal_to, seen) == (2, [None] * 4, set(STAGES))
