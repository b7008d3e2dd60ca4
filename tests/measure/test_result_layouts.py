"""Results of every layout are checked, whether their memory can be poisoned or not, and arguments stay what they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from dist_tune.measure.checks import Checker
from dist_tune.measure.memory import tensors_in
from tests.checked_runs import A, B, Function, judge, multiply

pytestmark = pytest.mark.once

RESULTS: dict[str, Function] = {
    "empty": lambda x: x[:0],
    "scalar": lambda x: x.sum(),
    "transposed": lambda x: (x + 1).t(),
    "strided": lambda x: (x + 1)[::2, 1:],
    "expanded": lambda x: x.sum(0)[:, None].expand(4, 5),
    "views of each other": lambda x: (y := x + 1, y[1:], y.view(-1)),
    "unfolded": lambda x: (x + 1).view(-1).unfold(0, 3, 1),
    "conjugate": lambda x: torch.complex(x, x).conj(),
    "negative view": lambda x: torch.complex(x, x).conj().imag,
    "sparse": lambda x: x.to_sparse(),
    "sparse rows": lambda x: x.to_sparse_csr(),
    "parameter": lambda x: torch.nn.Parameter(x + 1),
    "view of an argument": lambda x: x[1:],
    "expanded argument": lambda x: x[:1].expand(3, 4),
    "conjugate of an argument": lambda x: torch.view_as_complex(x.view(4, 2, 2)).conj(),
    "bits of an argument": lambda x: x.view(torch.int32),
    "detached": lambda x: x.detach(),
    "nested": lambda x: {"a": [x + 1, (None, 3)], "b": x},
}


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_results_of_any_layout_are_checked_and_arguments_stay(name: str):
    """Whether they can be poisoned or not."""
    function = RESULTS[name]
    x = torch.randn(4, 4)
    before = x.clone()
    for check in (function, lambda result, x: not x.isnan().any()):
        checker = Checker(check, function)
        for _ in range(4):
            assert judge(checker, function, x) == ""
        assert torch.equal(x, before)


@dataclass
class Output:
    value: torch.Tensor
    whole: Any = None
    unset: torch.Tensor = field(init=False)


def test_a_missing_write_to_a_field_of_a_dataclass_is_found():
    """It is a part of the result like an item of a tuple; one that holds itself, or lacks a field, is no obstacle."""
    out = torch.zeros(8, 4)

    def right(a: torch.Tensor, b: torch.Tensor) -> Output:
        return Output(torch.mm(a, b, out=out))

    def is_right(result: Output, a: torch.Tensor, b: torch.Tensor) -> bool:
        result.whole = result
        return torch.allclose(result.value, a @ b, atol=1e-4)

    for check in (lambda a, b: Output(a @ b), is_right):
        checker = Checker(check, right)
        assert judge(checker, right, A, B) == ""
        assert judge(checker, lambda a, b: Output(out), A, B) != ""
        assert judge(checker, right, A, B) == ""


def test_a_container_is_searched_once():
    """A list in itself, a tree whose nodes know their parent, and twenty pairs in one another, which have a million ends."""
    value = torch.ones(1)
    itself: list[Any] = [value]
    itself.append(itself)
    root = Output(value)
    root.whole = [Output(value, root) for _ in range(40)]
    pair: Any = value
    for _ in range(20):
        pair = (pair, pair)
    assert list(tensors_in(itself, has_fields=True)) == [(0,)]
    assert len(tensors_in(root, has_fields=True)) == 41
    assert list(tensors_in((pair, value), has_fields=True))[-1] == (1,)
    assert len(tensors_in(pair, has_fields=True)) == 2
    assert list(tensors_in([[value], {"a": value}], has_fields=True)) == [(0, 0), (1, "a")]


def test_inference_tensors_and_leaves_can_be_outputs():
    """Autograd has no say in what is poisoned: versions do not count up."""
    with torch.inference_mode():
        made_there = torch.zeros(8, 4)
    for out in (made_there, torch.zeros(8, 4, requires_grad=True), torch.nn.Parameter(torch.zeros(8, 4))):

        def function(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode():
                out.copy_(a @ b)
            return out

        checker = Checker(multiply, function)
        assert judge(checker, function, A, B, out) == ""
        version = 0 if out.is_inference() else out._version
        assert judge(checker, lambda a, b, out: out, A, B, out) != ""
        assert out.is_inference() or out._version == version
        assert judge(checker, function, A, B, out) == ""
