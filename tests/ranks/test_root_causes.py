"""Ranks that come out of step: the error names the rank and the config that were the cause, not the rank that waited."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dist_tune import autotune, contextual_autotune
from tests.cases import further
from tests.ranks.kernels import autotuned, launch
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once

BLOCKS = (16, 32, 64, 128)


def _skips(rank: int, face: str, which: int) -> None:
    """On rank 1 one config leaves out a collective: the first of two, or the last."""
    kernel = autotuned(blocks=BLOCKS)

    def reduced(y: torch.Tensor, block: int) -> torch.Tensor:
        for number in range(2):
            if not (rank == 1 and block == 64 and number == which):
                dist.all_reduce(y)
        return y

    if face == "contextual":

        @contextual_autotune(is_dist=True, n_repeat=2, n_warmup=0)
        def step(x: torch.Tensor) -> torch.Tensor:
            return reduced(launch(kernel, x), kernel.best_config.kwargs["BLOCK"])

        step(torch.ones(64))
    else:
        tuned = autotune([{"block": block} for block in BLOCKS], None, n_warmup=1, n_repeat=2, cache=False)(
            lambda x, block: reduced(x.clone(), block)
        )
        tuned(torch.ones(64))


@pytest.mark.parametrize("which", [further(0), 1])
@pytest.mark.parametrize("face", ["contextual", "function"])
def test_a_config_that_skips_a_collective_is_named_with_its_rank(face: str, which: int):
    """On both ranks, within twice the deadline."""
    for each in on_ranks(2, _skips, face, which):
        assert each.error == "PeerFailedError", f"{each.error}: {each.message}\n{each.notes}"
        assert each.message.startswith("rank 1 issued 1 collectives where 2 are usual, in "), each.message
        assert ("BLOCK=64" if face == "contextual" else "block=64") in each.message.partition("; so")[0], each.message
        assert each.seconds < 7


def _fails_between(rank: int, block: int) -> None:
    @autotune([{"block": block} for block in BLOCKS], None, n_warmup=1, n_repeat=2, cache=False)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        dist.all_reduce(x)
        if rank == 1 and block == failing:
            raise RuntimeError("out of luck")
        dist.all_reduce(x)
        return x

    failing = block
    step(torch.ones(64))


@pytest.mark.parametrize("block", [16, further(128)])
def test_a_config_that_fails_between_its_collectives_is_the_cause_on_all_ranks(block: int):
    """Its error, its rank and the config, on both; in the first run, which is the call's, its error alone."""
    outcomes = on_ranks(2, _fails_between, block)
    if block == 16:
        assert [each.error for each in outcomes] == ["PeerFailedError", "RuntimeError"]
        assert all("out of luck" in each.message for each in outcomes)
        return
    for each in outcomes:
        assert each.error == "PeerFailedError", f"{each.error}: {each.message}\n{each.notes}"
        cause = each.message.partition("; so")[0]
        assert cause.startswith("rank 1 left candidate"), each.message
        assert f'"block={block}" with RuntimeError: out of luck' in cause
