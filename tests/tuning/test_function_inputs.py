"""Arguments of an autotuned function with a check: every config, and the run whose value is returned, starts from what the caller gave.

Without a check, a function that changes them is not tuned.

Writes through numpy stand for those of Triton's kernels: torch does not count them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_tune import NoValidConfigError, autotune, contextual_autotune
from dist_tune.testing import on_ranks, values
from tests.function_options import BLOCKS, QUICK, quiet
from tests.ranks.kernels import autotuned, launch

pytestmark = pytest.mark.once
NESTED = ([torch.ones(2), torch.ones(3)],)


@pytest.fixture(autouse=True)
def _folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quiet(monkeypatch, tmp_path)


def failures(function: Any) -> list[str | None]:
    return [each.failure for each in function.records[-1].candidates]


def write(x: torch.Tensor, value: float, *, is_counted: bool) -> None:
    """All elements, as torch or as a kernel does it."""
    if is_counted:
        x.fill_(value)
    else:
        x.numpy()[:] = value


def is_one_more(result: torch.Tensor, x: torch.Tensor) -> bool:
    return bool((result == x + 1).all())


@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("check", [lambda x: x + 1, is_one_more])
@pytest.mark.parametrize("first", [1, 2])
def test_a_config_that_harms_its_input_is_dropped_and_undone(check: Any, is_counted: bool, first: int):
    """Whichever config it is, with each kind of check, and whether torch counts the write: the result is that of the caller's values."""

    @autotune(BLOCKS, None, check=check, **QUICK)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        result = x + 1
        if block == first:
            write(x, 5.0, is_counted=is_counted)
        return result

    x = torch.ones(4)
    assert step(x).tolist() == [2.0] * 4
    assert x.tolist() == [1.0] * 4
    assert [failure is not None for failure in failures(step)] == [block["block"] == first for block in BLOCKS]
    reason = failures(step)[first - 1] or ""
    assert "it changes its argument x" in reason or "is_one_more returned False" in reason


def test_a_config_that_raises_halfway_is_undone():
    """Also for the config that stands in for it in the same run."""
    seen = []

    @autotune(BLOCKS, None, check=lambda x: x + 1, **QUICK)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        seen.append(x.tolist())
        if block == 1:
            write(x, 5.0, is_counted=False)
            raise RuntimeError("no more")
        return x + 1

    x = torch.ones(4)
    assert step(x).tolist() == [2.0] * 4
    assert x.tolist() == [1.0] * 4
    assert all(each == [1.0] * 4 for each in seen)


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_function_that_changes_its_argument_does_so_once(is_counted: bool):
    """Each run of the tuning finds the caller's values, and the last one leaves what one call leaves."""
    seen = []

    @autotune(BLOCKS, None, check=lambda c, x: c + x, n_warmup=2, n_repeat=3, cache=False)
    def step(c: torch.Tensor, x: torch.Tensor, block: int) -> torch.Tensor:
        seen.append(c.tolist())
        write(c, float(c[0] + x[0]), is_counted=is_counted)
        return c

    c, x = torch.ones(4), torch.full((4,), 2.0)
    assert step(c, x) is c
    assert c.tolist() == [3.0] * 4
    assert len(seen) > 6
    assert all(each == [1.0] * 4 for each in seen)
    assert failures(step) == [None] * 3
    step(c, x)
    assert c.tolist() == [5.0] * 4


class Counts(torch.nn.Module):
    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("total", torch.zeros(2))

    @autotune(BLOCKS, None, **QUICK)
    def step(self, state: dict[str, Any], block: int) -> torch.Tensor:
        self.total.add_(1)
        state["moments"][0].mul_(2)
        with torch.no_grad():
            self.scale.add_(1)
        return self.scale * self.total


def test_arguments_in_containers_and_of_modules_count():
    """Lists and dicts of tensors, parameters and buffers; views of one memory; elements that share memory; wrappers of tensors."""
    module: Any = Counts()
    state: Any = {"moments": [torch.ones(2)], "view": torch.ones(6)[1:4], "expanded": torch.ones(1).expand(4)}
    assert module.step(state).tolist() == [2.0, 2.0]
    assert module.total.tolist() == [1.0, 1.0]
    assert state["moments"][0].tolist() == [2.0, 2.0]


def test_an_output_is_no_input():
    """A buffer that is written, returned or not, and whose old content one config leaves as it is, because it is the result."""

    @autotune(BLOCKS, None, check=is_told, **QUICK)
    def step(x: torch.Tensor, out: torch.Tensor, block: int) -> torch.Tensor:
        out.copy_((x + 1) * (1 + 1e-7 * (block - 1)))
        return x + 1

    x, out = torch.ones(4), torch.zeros(4)
    step(x, out)
    assert out.tolist() == pytest.approx([2.0] * 4)
    assert failures(step) == [None] * 3
    again = autotune(BLOCKS, None, check=is_told, **QUICK)(step.__wrapped__)
    again(x, out)
    assert failures(again) == [None] * 3


def is_told(result: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> bool:
    return torch.allclose(out, x + 1)


@pytest.mark.parametrize("is_counted", [True, False])
def test_without_a_check_such_a_function_is_not_tuned(is_counted: bool):
    """Its arguments, and a list that it has captured, are as after one call."""
    seen = []

    @autotune(BLOCKS, None, **QUICK)
    def step(c: torch.Tensor, x: torch.Tensor, block: int) -> torch.Tensor:
        seen.append(block)
        write(c, float(c[0] + x[0]), is_counted=is_counted)
        return c

    c, x = torch.ones(4), torch.full((4,), 2.0)
    assert step(c, x) is c
    assert c.tolist() == [3.0] * 4
    assert (seen, step.records) == ([1], [])
    step(c, x)
    assert (c.tolist(), seen) == ([5.0] * 4, [1, 1])


class Counter:
    def __init__(self) -> None:
        self.c, self.total = 0, torch.zeros(1)

    @autotune(BLOCKS, None, **QUICK)
    def step(self, x: torch.Tensor, block: int) -> torch.Tensor:
        self.c += 1
        self.total += 1
        return x + 1


def test_a_counter_of_a_method_is_told(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Each call of the tuning counts it, as one line says."""
    monkeypatch.setenv("DIST_TUNE_VERBOSITY", "normal")
    Counter().step(torch.ones(4))
    (line,) = [each for each in capfd.readouterr().err.splitlines() if "each replay does so again" in each]
    assert "self.c" in line
    assert "self.total" in line


def test_what_another_config_changes_is_told(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """An argument that the first config leaves as it is."""
    monkeypatch.setenv("DIST_TUNE_VERBOSITY", "normal")

    @autotune(BLOCKS, None, **QUICK)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        result = torch.ones(4)
        if block == 2:
            x.add_(1)
        return result

    step(torch.ones(4))
    assert "some config has changed x, which the first one leaves as it is" in capfd.readouterr().err


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_first_config_that_harms_its_argument_and_raises_is_the_callers_error(is_counted: bool):
    """No other one can stand in for it, because it would find another argument."""

    @autotune(BLOCKS, None, **QUICK)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        if block == 1:
            write(x, 5.0, is_counted=is_counted)
            raise RuntimeError("no more")
        return x + 1

    with pytest.raises(RuntimeError, match="no more") as raised:
        step(torch.ones(4))
    assert "has changed x before" in raised.value.__notes__[0]


def test_reset_is_the_users_own_way():
    """With it arguments are not copied: each run but the first finds what it leaves."""
    c, seen = torch.ones(4), []

    @autotune(BLOCKS, None, reset=lambda: c.fill_(7.0), **QUICK)
    def step(c: torch.Tensor, block: int) -> torch.Tensor:
        seen.append(c[0].item())
        return c.add_(1)

    assert step(c).tolist() == [8.0] * 4
    assert seen == [1.0, *[7.0] * (len(seen) - 1)]


def test_an_error_leaves_the_callers_values():
    """For the caller's own way out, when no config runs."""

    @autotune(BLOCKS, None, check=lambda x: x + 1, **QUICK)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        write(x, 5.0, is_counted=False)
        raise RuntimeError("no more")

    x = torch.ones(4)
    with pytest.raises(NoValidConfigError):
        step(x)
    assert x.tolist() == [1.0] * 4


def _known_with_new_kernels(rank: int, folder: str) -> Any:
    os.environ["DIST_TUNE_CACHE_DIR"] = folder

    def tuned() -> tuple[list[float], list[bool]]:
        kernel = autotuned(blocks=(2, 4))

        @autotune(BLOCKS, None, n_warmup=0, n_repeat=1)
        def step(c: torch.Tensor, block: int) -> torch.Tensor:
            return launch(kernel, c)

        return step(torch.ones(4)).tolist(), [record.is_recalled for record in step.records]

    first = tuned()
    for path in Path(folder).glob("*add_kernel*/*.json"):
        path.unlink()
    return first, tuned()


@pytest.mark.processes
def test_a_known_config_runs_once_also_where_kernels_inside_are_tuned(tmp_path: Path):
    """The run that meets them is none that counts."""
    (got,) = values(on_ranks(1, _known_with_new_kernels, str(tmp_path)))
    assert got == (([2.0] * 4, [False, False]), ([2.0] * 4, [False, True]))


def test_inside_a_closure_a_config_that_harms_its_input_is_undone():
    """Tensors that the closure keeps from call to call stay as they are."""
    weight = torch.ones(4)

    @autotune(BLOCKS, None, check=lambda x: x + 1, **QUICK)
    def inner(x: torch.Tensor, block: int) -> torch.Tensor:
        result = x + 1
        if block == 1:
            write(x, 5.0, is_counted=False)
        if block == 2:
            write(x, 6.0, is_counted=False)
            raise RuntimeError("no more")
        return result

    @contextual_autotune(n_warmup=0, n_repeat=1, cache=False)
    def closure() -> Any:
        return inner(weight) * 2

    assert closure().tolist() == [4.0] * 4
    assert weight.tolist() == [1.0] * 4


def _on_one_rank(rank: int) -> Any:
    @autotune(BLOCKS, None, check=lambda x: x + 1, **QUICK)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        result = x + 1
        if rank == 1 and block < 4:
            write(x, 5.0, is_counted=block == 1)
            if block == 2:
                raise RuntimeError("no more")
        return result

    x = torch.ones(4)
    return step(x).tolist(), x.tolist(), failures(step)


@pytest.mark.processes
def test_harm_on_one_rank_drops_a_config_on_all():
    """Each rank undoes what happened there, and says so at the vote."""
    for result, x, (one, two, four) in values(on_ranks(2, _on_one_rank)):
        assert result == [2.0] * 4
        assert x == [1.0] * 4
        assert one.startswith("rank 1: it changes its argument x")
        assert two == "rank 1: RuntimeError: no more"
        assert four is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(6)[1:4], lambda: torch.ones(2, 3).t(), lambda: torch.ones(3, dtype=torch.complex64),
        lambda: torch.ones(3, dtype=torch.float16), lambda: torch.full((3,), torch.nan), lambda: torch.ones(3, dtype=torch.int64),
        lambda: torch.nested.nested_tensor(*NESTED, layout=torch.jagged), lambda: torch.nested.nested_tensor(*NESTED),
    ],
)  # fmt: skip
def test_tensors_of_all_kinds_are_put_back(make: Callable[[], torch.Tensor]):
    """Views, other types, NaN, wrappers of tensors, tensors without strides."""

    def parts(tensor: torch.Tensor) -> list[Any]:
        return [each.clone() for each in (tensor.unbind() if tensor.is_nested else [tensor])]

    @autotune(BLOCKS, None, **QUICK)
    def step(c: torch.Tensor, block: int) -> torch.Tensor:
        return c.mul_(2)

    c = make()
    before = parts(c)
    step(c)
    torch.testing.assert_close(parts(c), [2 * each for each in before], equal_nan=True)


def test_gradients_are_those_of_one_call():
    """Of a function that writes to a tensor through which a backward pass goes, and of one that makes that pass itself."""

    @autotune(BLOCKS, None, **QUICK)
    def forward(c: torch.Tensor, block: int) -> torch.Tensor:
        return c.mul_(3)

    @autotune(BLOCKS, None, **QUICK)
    def both(x: torch.Tensor, y: torch.Tensor, block: int) -> None:
        (x * y).sum().backward()

    x, y = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    forward(2 * x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6.0] * 4
    mine = x.grad
    both(x, y)
    assert x.grad is mine
    assert x.grad.tolist() == [7.0] * 4
    assert y.grad is not None
    assert y.grad.tolist() == [1.0] * 4
    view = (2 * x)[:2]
    autotune(BLOCKS, None, **QUICK)(forward.__wrapped__)(view)
    assert view.tolist() == [6.0] * 2
