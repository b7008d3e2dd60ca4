"""kernels/routing.py: the experts of tokens, and their sorting into tiles, beside a plain loop."""

import os
from pathlib import Path

import pytest
import torch

from tests.programs import run_python

ROOT = Path(__file__).parents[1]


@pytest.mark.once
@pytest.mark.processes
def test_rows_are_sorted_and_padded_as_by_a_plain_loop_for_any_imbalance():
    """Random routings, experts without rows, all rows to one expert, empty parts, experts that do not exist; all orders of tiles."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = run_python(ROOT / "tests/routing_program.py", cwd=ROOT, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


def routing_module():
    """The module with kernels that are not run here, whatever interprets them."""
    import kernels.routing

    return kernels.routing


@pytest.mark.once
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_the_most_probable_experts_are_chosen_with_weights_that_sum_up_to_one(top_k: int):
    logits = torch.randn(50, 5, generator=torch.Generator().manual_seed(3))
    routing = routing_module().route(logits.half(), top_k)
    for token in range(50):
        shares = logits[token].half().float().exp()
        chosen = sorted(range(5), key=lambda e: -shares[e])[:top_k]
        assert routing.experts[token].tolist() == chosen
        assert torch.allclose(routing.weights[token], shares[chosen] / shares[chosen].sum(), rtol=1e-5)
    assert routing.experts.dtype == torch.int32


@pytest.mark.once
def test_skewed_logits_choose_experts_by_zipfs_law():
    """First choices at exponent 1 come close to 1 : 1/2 : 1/3 : 1/4, and at 0 to equal shares."""
    torch.manual_seed(0)
    for skew, parts in ((1.0, [1, 1 / 2, 1 / 3, 1 / 4]), (0.0, [1.0] * 4)):
        first = routing_module().skewed_logits(20_000, 4, skew, torch.device("cpu")).argmax(dim=1)
        shares = torch.bincount(first, minlength=4) / 20_000
        assert torch.allclose(shares, torch.tensor(parts) / sum(parts), atol=0.02)


@pytest.mark.once
def test_a_routing_that_kernels_would_misread_is_refused():
    """Transposed experts, other shapes and 64-bit numbers, each with what was given."""
    routing, experts, weights = routing_module().Routing, torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2)
    routing(experts, weights)
    with pytest.raises(ValueError, match=r"contiguous; got \[4, 2\] of strides \[1, 4\]"):
        routing(torch.zeros(2, 4, dtype=torch.int32).T, weights)
    with pytest.raises(ValueError, match=r"contiguous; got \[4, 2\] of strides \[2, 1\] and \[4, 1\]"):
        routing(experts, weights[:, :1].clone())
    with pytest.raises(ValueError, match=r"need int32 experts and float32 weights; got torch.int64"):
        routing(experts.long(), weights)
