"""Turns in Triton's front end, and TTIR that is made once."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from triton.compiler.compiler import ASTSource

from dist_tune.compiler.front_end import FrontEndLock, _Watched, in_turn
from dist_tune.testing import on_ranks, values
from tests.ranks.kernels import add_kernel, autotuned, configs, launch, tuned

pytestmark = pytest.mark.processes


class Options:
    """A backend's options."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def test_only_options_that_were_looked_at_tell_ttir_apart():
    """Made with eight warps, used with four, since nobody asked for warps; not used where debug differs, or is missing."""
    turns = FrontEndLock()
    watched = _Watched(Options(debug=False, num_warps=8))
    assert watched.debug is False
    turns.keep(("source",), watched._seen, "module of a thread whose turn was over")
    assert turns.find(("source",), Options(debug=False)) is None
    turns.take()
    turns.keep(("source",), watched._seen, "module {}")
    found = turns.find(("source",), Options(debug=False, num_warps=4))
    assert found is not None
    assert found.read_text() == "module {}"
    assert turns.find(("source",), Options(debug=True, num_warps=8)) is None
    assert turns.find(("source",), Options(num_warps=8)) is None
    assert turns.find(("another",), Options(debug=False, num_warps=8)) is None
    turns.close()
    assert not found.exists()
    assert turns.find(("source",), Options(debug=False)) is None


def test_an_option_that_is_missing_is_missed():
    """hasattr() and getattr() with a default work as on the options themselves."""
    watched = _Watched(Options(debug=False))
    assert not hasattr(watched, "fpsan")
    with pytest.raises(AttributeError):
        watched.fpsan  # noqa: B018


def test_turns_are_taken_one_at_a_time():
    """The second comes when the first has passed its turn on; passing on twice, or another's, changes nothing."""
    turns = FrontEndLock()
    turns.take()
    came = threading.Event()

    def second() -> None:
        turns.take()
        came.set()
        turns.pass_on()

    thread = threading.Thread(target=second, daemon=True)
    thread.start()
    assert not came.wait(0.05)
    turns.pass_on(12345)
    assert not came.wait(0.05)
    turns.pass_on()
    assert came.wait(5)
    thread.join(5)
    turns.pass_on()
    turns.take()
    turns.pass_on()


def test_a_turn_can_be_taken_away():
    """From a thread that does not come back."""
    turns = FrontEndLock()
    idents: list[int] = []

    def stuck() -> None:
        turns.take()
        idents.append(threading.get_ident())

    thread = threading.Thread(target=stuck)
    thread.start()
    thread.join()
    turns.pass_on(idents[0])
    turns.take()
    turns.pass_on()


def test_triton_and_python_are_left_as_found():
    """Also where two tunings overlap, and where somebody has put a wrapper around ours meanwhile."""
    own, interval_s = ASTSource.make_ir, sys.getswitchinterval()
    with in_turn():
        with in_turn():
            assert ASTSource.make_ir is not own
            assert sys.getswitchinterval() < interval_s
        assert ASTSource.make_ir is not own
    assert ASTSource.make_ir is own
    assert sys.getswitchinterval() == pytest.approx(interval_s)
    with in_turn():
        ASTSource.make_ir = wrapper = lambda *args: None
    assert ASTSource.make_ir is wrapper
    ASTSource.make_ir = own


def _compiled(rank: int) -> Any:
    import triton

    made = []
    own = ASTSource.make_ir

    def make_ir(source: Any, *args: Any) -> Any:
        made.append(source)
        return own(source, *args)

    ASTSource.make_ir = make_ir
    kernel = autotuned(configs=[c for warps in (1, 2, 4) for c in configs(16, 32, num_warps=warps)])
    import torch

    tuned(kernel)(torch.zeros(64))
    n_made = len(made)
    cache = add_kernel.device_caches[0][0]
    ours = {key: (each.asm["ptx"], each.asm["cubin"]) for key, each in cache.items()}
    cache.clear()
    triton.knobs.cache.dir += "-anew"
    for config in kernel.configs:
        kernel.configs = [config]
        launch(kernel, torch.zeros(64))
    return n_made, len(made) - n_made, ours == {key: (each.asm["ptx"], each.asm["cubin"]) for key, each in cache.items()}, len(ours)


def test_ttir_is_made_once_for_configs_that_differ_in_warps():
    """Six candidates of two block sizes; what becomes of them is what Triton alone makes, to the byte."""
    ((n_made, n_alone, is_equal, n_kernels),) = values(on_ranks(1, _compiled, mode="fake"))
    assert (n_alone, n_kernels) == (6, 6)
    assert is_equal
    assert n_made <= 3  # the candidate that the first run waits for does not wait for its turn
