"""Arguments of an autotuned function: every config, and the run whose value is returned, starts
from what the caller gave.

Writes through numpy stand for those of Triton's kernels: torch does not count them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_tune import NoValidConfigError, autotune, contextual_autotune
from tests.steps import BLOCKS, QUICK, failures, quiet

NESTED = ([torch.ones(2), torch.ones(3)],)


@pytest.fixture(autouse=True)
def _folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quiet(monkeypatch, tmp_path)


def write(x: torch.Tensor, value: float, *, is_counted: bool = False) -> None:
    """All elements, as torch or as a kernel does it."""
    (x if is_counted else x.numpy()).__setitem__(..., value)


def is_one_more(result: torch.Tensor, x: torch.Tensor) -> bool:
    return bool((result == x + 1).all())


def harming(
    blocks: set[int], raising: set[int], *, is_counted: bool = False, seen: list[Any] | None = None
) -> Any:
    """A function of which some configs write to its argument, and some raise after that."""

    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        if seen is not None:
            seen.append(x.tolist())
        result = x + 1
        if block in blocks:
            write(x, 5.0, is_counted=is_counted)
        if block in raising:
            raise RuntimeError("no more")
        return result

    return step


@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("check", [lambda x: x + 1, is_one_more])
@pytest.mark.parametrize("bad", [1, 2])
@pytest.mark.parametrize("raises", [False, True])
def test_a_config_that_harms_its_input_is_dropped_and_undone(
    check: Any, is_counted: bool, bad: int, raises: bool
):
    """Whichever config it is, with each kind of check, whether torch counts the write, also
    halfway; others find the caller's values.
    """
    seen: list[Any] = []
    work = harming({bad}, {bad} if raises else set(), is_counted=is_counted, seen=seen)
    step: Any = autotune(BLOCKS, None, check=check, **QUICK)(work)
    x = torch.ones(4)
    assert (step(x).tolist(), x.tolist()) == ([2.0] * 4, [1.0] * 4)
    assert all(each == [1.0] * 4 for each in seen)
    assert [failure is not None for failure in failures(step)] == [
        block["block"] == bad for block in BLOCKS
    ]
    reason = failures(step)[bad - 1] or ""
    assert (
        "no more" if raises else "it changes its argument x"
    ) in reason or "is_one_more returned False" in reason


def test_an_error_leaves_the_callers_values():
    """For the caller's own way out, when no config runs."""
    x = torch.ones(4)
    with pytest.raises(NoValidConfigError):
        autotune(BLOCKS, None, check=lambda x: x + 1, **QUICK)(harming({1, 2, 4}, {1, 2, 4}))(x)
    assert x.tolist() == [1.0] * 4


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_first_config_that_harms_its_argument_and_raises_is_the_callers_error(is_counted: bool):
    """Without a check: no other one can stand in for it, because it would find another argument."""
    with pytest.raises(RuntimeError, match="no more") as raised:
        autotune(BLOCKS, None, **QUICK)(harming({1}, {1}, is_counted=is_counted))(torch.ones(4))
    assert "has changed x before" in raised.value.__notes__[0]


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_function_that_changes_its_argument_does_so_once(is_counted: bool):
    """With a check each run of the tuning finds the caller's values, and the last one leaves what
    one call leaves.
    """
    seen = []

    @autotune(BLOCKS, None, check=lambda c, x: c + x, n_warmup=2, n_repeat=3, cache=False)
    def step(c: torch.Tensor, x: torch.Tensor, block: int) -> torch.Tensor:
        seen.append(c.tolist())
        write(c, float(c[0] + x[0]), is_counted=is_counted)
        return c

    c, x = torch.ones(4), torch.full((4,), 2.0)
    assert step(c, x) is c
    assert (c.tolist(), failures(step)) == ([3.0] * 4, [None] * 3)
    assert len(seen) > 6
    assert all(each == [1.0] * 4 for each in seen)
    step(c, x)
    assert c.tolist() == [5.0] * 4


def is_told(result: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> bool:
    return torch.allclose(out, x + 1)


def test_an_output_is_no_input():
    """A buffer that is written, returned or not, and whose old content one config leaves as it is,
    because it is the result.
    """

    def step(x: torch.Tensor, out: torch.Tensor, block: int) -> torch.Tensor:
        out.copy_((x + 1) * (1 + 1e-7 * (block - 1)))
        return x + 1

    x, out = torch.ones(4), torch.zeros(4)
    for _ in range(2):
        tuned: Any = autotune(BLOCKS, None, check=is_told, **QUICK)(step)
        tuned(x, out)
        assert out.tolist() == pytest.approx([2.0] * 4)
        assert failures(tuned) == [None] * 3


class Counter:
    def __init__(self) -> None:
        self.c, self.total = 0, torch.zeros(1)

    def step(self, x: torch.Tensor, block: int) -> torch.Tensor:
        self.c += 1
        self.total += 1
        return x + 1


def changing(x: torch.Tensor, block: int) -> torch.Tensor:
    if block == 2:
        x.add_(1)
    return torch.ones(4)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Counter().step, ["each replay does so again", "self.c", "self.total"]),
        (changing, ["some config has changed x, which"]),
    ],
)
def test_what_runs_of_the_tuning_change_is_told(
    step: Any, words: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: Any
):
    """Of a method's object, which each call of the tuning counts, and of an argument that the first
    config leaves as it is.
    """
    monkeypatch.setenv("DIST_TUNE_VERBOSITY", "normal")
    autotune(BLOCKS, None, **QUICK)(step)(torch.ones(4))
    (line,) = [each for each in capfd.readouterr().err.splitlines() if words[0] in each]
    assert [word for word in words if word not in line] == []


def test_reset_is_the_users_own_way():
    """With it arguments are not copied: each run but the first finds what it leaves."""
    c, seen = torch.ones(4), []

    @autotune(BLOCKS, None, reset=lambda: c.fill_(7.0), **QUICK)
    def step(c: torch.Tensor, block: int) -> torch.Tensor:
        seen.append(c[0].item())
        return c.add_(1)

    assert step(c).tolist() == [8.0] * 4
    assert seen == [1.0, *[7.0] * (len(seen) - 1)]


def test_inside_a_closure_a_config_that_harms_its_input_is_undone():
    """Tensors that the closure keeps from call to call stay as they are."""
    weight, inner = (
        torch.ones(4),
        autotune(BLOCKS, None, check=lambda x: x + 1, **QUICK)(harming({1, 2}, {2})),
    )
    closure = contextual_autotune(n_warmup=0, n_repeat=1, cache=False)(lambda: inner(weight) * 2)
    assert (closure().tolist(), weight.tolist()) == ([4.0] * 4, [1.0] * 4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(6)[1:4],
        lambda: torch.ones(2, 3).t(),
        lambda: torch.ones(3, dtype=torch.complex64),
        lambda: torch.full((3,), torch.nan, dtype=torch.float16),
        lambda: torch.nested.nested_tensor(*NESTED, layout=torch.jagged),
        lambda: torch.nested.nested_tensor(*NESTED),
    ],
)
def test_tensors_of_all_kinds_are_put_back(make: Callable[[], torch.Tensor]):
    """Views, other types, NaN, wrappers of tensors, tensors without strides."""

    def parts(tensor: torch.Tensor) -> list[Any]:
        return [each.clone() for each in (tensor.unbind() if tensor.is_nested else [tensor])]

    step: Any = autotune(BLOCKS, None, **QUICK)(lambda c, block: c.mul_(2))
    c = make()
    before = parts(c)
    step(c)
    torch.testing.assert_close(parts(c), [2 * each for each in before], equal_nan=True)
