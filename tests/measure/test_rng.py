"""Random generators stand where they stood."""

import random

import numpy as np
import pytest
import torch

from dist_tune.measure.inputs import RngState

pytestmark = pytest.mark.once


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_restore_repeats_what_followed():
    """Python, numpy and torch draw again what they drew after the state was taken."""
    draw()
    state = RngState()
    first = [draw() for _ in range(3)]
    state.restore()
    assert [draw() for _ in range(3)] == first


def test_a_state_may_be_restored_many_times():
    """Drawing and restoring does not change what was kept, and a later state is another one."""
    early = RngState()
    first = draw()
    late = RngState()
    second = draw()
    for state, expected in ((early, first), (late, second), (early, first)):
        state.restore()
        assert draw() == expected
    assert len({*first, *second}) == 6


def test_the_second_half_of_a_normal_pair_is_kept():
    """Gaussian draws come in pairs; the one in waiting is part of the state."""
    random.gauss(0.0, 1.0)
    np.random.normal()
    state = RngState()
    first = random.gauss(0.0, 1.0), np.random.normal()
    state.restore()
    assert (random.gauss(0.0, 1.0), np.random.normal()) == first


def test_no_gpu_is_touched():
    """Without an initialised CUDA there is no state of one, and taking it initialises nothing."""
    if not torch.cuda.is_initialized():
        assert RngState().torch_cuda is None
        assert not torch.cuda.is_initialized()
