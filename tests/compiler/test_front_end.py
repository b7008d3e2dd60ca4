"""The lock of Triton's front end, and TTIR that is made once."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from triton.compiler.compiler import ASTSource

from dist_tune.compiler.passes.front_end import FrontEndLock, _Observed, one_front_end
from dist_tune.compiler.subprocesses.leftovers import in_use
from dist_tune.testing import on_ranks, values
from tests.ranks.kernels import add_kernel, autotuned, configs, launch, tuned

pytestmark = pytest.mark.processes


class Options:
    """A backend's options."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def test_only_options_that_were_read_tell_ttir_apart():
    """Made with eight warps, used with four, because the front end did not read them; not used where debug differs, or is missing."""
    lock = FrontEndLock()
    observed = _Observed(Options(debug=False, num_warps=8))
    assert observed.debug is False
    lock.store(("source",), observed._read, "module of a thread that has lost the lock")
    assert lock.find(("source",), Options(debug=False)) is None
    lock.acquire()
    with in_use():
        lock.store(("source",), observed._read, "module {}")
        found = lock.find(("source",), Options(debug=False, num_warps=4))
        assert found is not None
        assert found.read_text() == "module {}"
        assert lock.find(("source",), Options(debug=True, num_warps=8)) is None
        assert lock.find(("source",), Options(num_warps=8)) is None
        assert lock.find(("another",), Options(debug=False, num_warps=8)) is None
        lock.close()
    assert not found.exists()
    assert lock.find(("source",), Options(debug=False)) is None


def test_an_option_that_is_missing_is_missed():
    """hasattr() and getattr() with a default work as on the options themselves."""
    observed = _Observed(Options(debug=False))
    assert not hasattr(observed, "fpsan")
    with pytest.raises(AttributeError):
        observed.fpsan  # noqa: B018


def test_one_thread_at_a_time_holds_the_lock():
    """The second thread gets it when the first releases it; to release twice, or another thread's, changes nothing."""
    lock = FrontEndLock()
    lock.acquire()
    came = threading.Event()

    def second() -> None:
        lock.acquire()
        came.set()
        lock.release()

    thread = threading.Thread(target=second, daemon=True)
    thread.start()
    assert not came.wait(0.05)
    lock.release(12345)
    assert not came.wait(0.05)
    lock.release()
    assert came.wait(5)
    thread.join(5)
    lock.release()
    lock.acquire()
    lock.release()


def test_the_lock_can_be_taken_from_a_stuck_thread():
    """From a thread that does not come back."""
    lock = FrontEndLock()
    idents: list[int] = []

    def stuck() -> None:
        lock.acquire()
        idents.append(threading.get_ident())

    thread = threading.Thread(target=stuck)
    thread.start()
    thread.join()
    lock.release(idents[0])
    lock.acquire()
    lock.release()


def test_triton_and_python_are_left_as_found():
    """Also where two tunings overlap, and where the user has put a wrapper around ours meanwhile."""
    own, interval_s = ASTSource.make_ir, sys.getswitchinterval()
    with one_front_end():
        with one_front_end():
            assert ASTSource.make_ir is not own
            assert sys.getswitchinterval() < interval_s
        assert ASTSource.make_ir is not own
    assert ASTSource.make_ir is own
    assert sys.getswitchinterval() == pytest.approx(interval_s)
    with one_front_end():
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
    assert n_made <= 3  # the candidate that the first run waits for does not wait for the lock
