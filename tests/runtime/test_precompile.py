"""Launches of a function's other configs, predicted from one that was recorded: real sm_90 compile keys, on the fake H200."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dist_tune.compiler.candidate import Candidate
from dist_tune.runtime.recording import LaunchConfig, RecordedKernel, precompiles
from dist_tune.testing import on_ranks, values
from tests.foresight_programs import act_kernel, copy_kernel, record, tiles, twice, x_and_y

pytestmark = pytest.mark.processes


@triton.jit
def thrice(x):
    return 3 * x


@triton.jit
def descriptor_kernel(x_desc, y_desc, BLOCK: tl.constexpr):
    y_desc.store([0, 0], x_desc.load([0, 0]))


def key(config: LaunchConfig) -> str:
    """Of the kernel that Triton would compile."""
    return Candidate(RecordedKernel(), config).compilation.key


def predicted_and_true(function: Any, space: Any, *args: Any) -> list[tuple[list[str], list[str]]]:
    """For each predicted launch: the keys that are predicted for all candidates, and those of the launches that follow."""
    site, recorder = record(function, space, 0, *args)
    found = precompiles(site.label, site.configs, recorder.launches)
    true = [record(function, space, i, *args)[1].launches for i in range(len(site.configs))]
    positions = [recorder.launches.index(each.configs[0].launch) for each in found]
    return [
        (
            [key(config) for config in each.configs],
            [key(LaunchConfig(launches[position], {})) for launches in true],
        )
        for each, position in zip(found, positions, strict=True)
    ]


FOLLOWED: dict[str, tuple[Any, Any]] = {
    "all that a config has": (
        lambda x, y, config: copy_kernel[(1,)](x, y, 256, **config.all_kwargs()),
        [*tiles(16, 32, num_warps=2), *tiles(16, num_stages=5)],
    ),
    "constants and one option": (
        lambda x, y, config: copy_kernel[(1,)](x, y, 255, num_warps=config.num_warps, **config.kwargs),
        [*tiles(16, 32, num_warps=2), *tiles(16)],
    ),
    "by position": (lambda x, y, block: copy_kernel[lambda meta: (1,)](x, y, 256, block, 4), [{"block": b} for b in (16, 64)]),
    "in other letters": (
        lambda x, y, rows, Block: copy_kernel[(1,)](x, y, 1, BLOCK=Block, ROWS=rows),
        [{"Block": 16, "rows": r} for r in (2, 8)],
    ),
    "beside what is not handed on": (
        lambda x, y, block, mode: copy_kernel[(1,)](x, y, 256, BLOCK=block),
        [{"block": b, "mode": mode} for b in (16, 32) for mode in ("a", "b")],
    ),
    "functions": (lambda x, y, act: act_kernel[(1,)](x, ACT=act, block=16), [{"act": twice}, {"act": thrice}]),
    "to an unaligned tensor": (lambda x, y, config: copy_kernel[(1,)](x[1:], y, 16, **config.kwargs), tiles(16, 32)),
    "to several launches": (
        lambda x, y, config: [copy_kernel[(1,)](a, b, 16, **config.kwargs) for a, b in ((x, y), (y, x))] + [act_kernel[(1,)](x, twice, 32)],
        tiles(16, 32),
    ),
}  # fmt: skip


def _followed() -> Any:
    return {name: predicted_and_true(function, space, *x_and_y()) for name, (function, space) in FOLLOWED.items()}


def _described(hook: bool) -> Any:
    def set_block(nargs: dict[str, Any]) -> None:
        for name in ("x_desc", "y_desc"):
            nargs[name].block_shape = [nargs["BLOCK"], 16]

    mine: list[Any] = []

    def function(x: torch.Tensor, config: triton.Config) -> None:
        descriptors = [TensorDescriptor.from_tensor(x, [config.kwargs["BLOCK"], 16]) for _ in range(2)]
        mine.append(descriptors)
        descriptor_kernel[(1,)](*descriptors, **config.kwargs)

    compared = predicted_and_true(function, tiles(16, 32, pre_hook=set_block if hook else None), torch.zeros(64, 64))
    return compared, [each.block_shape for each in mine[0]]


def _not_followed() -> Any:
    x, y = x_and_y()
    derived = record(lambda x, y, block: copy_kernel[(1,)](x, y, 256, BLOCK=2 * block), [{"block": 16}, {"block": 32}], 0, x, y)
    nothing = record(lambda x, y, block: None, [{"block": 16}], 0, x, y)
    other = precompiles("g[]", tiles(16), derived[1].launches)
    of_kernel = precompiles("k[]", [triton.Config({})], derived[1].launches)
    return [*[precompiles(site.label, site.configs, recorder.launches) for site, recorder in (derived, nothing)], other, of_kernel]


def _scenarios(rank: int) -> dict[str, Any]:
    described = {"_described": {hook: _described(hook) for hook in (True, False)}}
    return described | {each.__name__: each() for each in (_followed, _not_followed)}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """One process with the fake driver for all."""
    (value,) = values(on_ranks(1, _scenarios, mode="fake", is_dist=False))
    return dict(value)


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_prediction_is_what_will_be_compiled(answers: dict[str, Any], name: str):
    """To the key of Triton's disk cache, for every candidate and every launch that a config reaches."""
    launches = answers["_followed"][name]
    assert len(launches) == (2 if name == "to several launches" else 1)
    for predicted, true in launches:
        assert predicted == true
        assert all(predicted)
        assert len(set(predicted)) > 1


def test_descriptors_are_predicted_where_a_hook_sets_their_blocks(answers: dict[str, Any]):
    """Those of the function stay as they are. Without a hook the blocks of other configs are unknown."""
    ((predicted, true),), blocks = answers["_described"][True]
    assert predicted == true
    assert len(set(predicted)) == 2
    assert blocks == [[16, 16], [16, 16]]
    assert answers["_described"][False][0] == []


def test_what_does_not_follow_is_not_predicted(answers: dict[str, Any]):
    """A value made of a config's, a function that launches nothing, other sites, kernels with configs of their own."""
    assert answers["_not_followed"] == [[]] * 4
