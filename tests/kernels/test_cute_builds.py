"""Kernels of kernels/cute_gemm.py without a GPU: built once for each key, kept on disk, and chosen
among.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels import cute_build
from kernels.cute_build import CuteBuildError, Kernels, kernel_key, library_path
from kernels.cute_gemm import all_configs, cute_gemm, search_space

FP16, BF16 = torch.float16, torch.bfloat16
KEYS = [kernel_key(BF16, config) for config in all_configs()[:6]]


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Builds in threads, with versions of packages that may be missing, into a folder of the
    test.
    """
    monkeypatch.setattr(
        cute_build, "ProcessPoolExecutor", lambda n, mp_context: ThreadPoolExecutor(n)
    )
    monkeypatch.setattr(cute_build, "version", lambda name: f"{name} 1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


class Builder:
    """Writes empty libraries, and fails for one config."""

    def __init__(self, broken: Any = None) -> None:
        self.broken, self.paths = broken, list[str]()

    def __call__(self, job: tuple[str, dict[str, Any], str]) -> str:
        self.paths.append(job[2])
        if job[1] == self.broken:
            return "DSLRuntimeError: no layout"
        Path(job[2]).touch()
        return ""


def test_kernels_are_built_once_for_each_key_and_found_on_disk():
    """Three keys are three builds; then none, in this process as in the next.

    A failure is kept and told with the config.
    """
    kernels = Kernels(builder := Builder(dict(KEYS[1][1])))
    assert [kernels.build(KEYS[:3]), kernels.build(KEYS[:3]), len({*builder.paths})] == [3, 0, 3]
    with pytest.raises(
        CuteBuildError,
        match=r"BFloat16 \{'TILE_M': .* does not compile: DSLRuntimeError: no layout",
    ):
        kernels.get(KEYS[1])
    assert Kernels(Builder()).build(KEYS[:3]) == 1  # the one that failed


def test_a_search_compiles_its_space_at_once_and_a_known_choice_one_kernel(
    monkeypatch: pytest.MonkeyPatch,
):
    """One kernel is asked for: one is built.

    A second one of the same problem: all the rest, in one go; of another problem, one more.
    """
    kernels, n_built = Kernels(builder := Builder()), []
    monkeypatch.setitem(
        sys.modules,
        "cutlass.cute.runtime",
        SimpleNamespace(load_module=lambda path: SimpleNamespace(gemm=path)),
    )
    for problem, index in (("one", 1), ("one", 1), ("other", 5), ("one", 0), ("one", 4)):
        kernels.get(KEYS[index], problem, lambda: KEYS[:5])
        n_built.append(len(builder.paths))
    assert n_built == [1, 1, 2, 6, 6]


def test_a_library_is_found_by_type_config_and_versions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Another type, config or version of the compiler is another file beside Triton's; no two
    configs are one.
    """
    paths = [
        library_path(key) for key in (KEYS[0], KEYS[0], KEYS[1], kernel_key(FP16, all_configs()[0]))
    ]
    monkeypatch.setattr(cute_build, "version", lambda name: f"{name} 2")
    assert len({*paths, library_path(KEYS[0])}) == 4
    assert {path.parent for path in paths} == {tmp_path / "cute_gemm"}
    assert len({kernel_key(BF16, config) for config in all_configs()}) == len(all_configs())


def test_tuning_drops_wrong_and_broken_configs_and_shares_results_in_a_bucket(
    monkeypatch: pytest.MonkeyPatch,
):
    """Kernels are stood in for by torch, one wrong and one that does not compile; a second shape of
    the bucket tunes nothing.
    """
    space = search_space(33, 17, 70)
    wrong, broken, *_ = [kernel_key(BF16, config) for config in space]

    def get(key: cute_build.KernelKey, *_: Any) -> Callable[..., None]:
        if key == broken:
            raise CuteBuildError("does not compile")

        def kernel(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, max_clusters: int) -> None:
            assert {x.stride(0) % 8 for x in (a, b, c)} == {0}
            assert max_clusters in (66, 132)
            c.copy_(a @ b.T + (key == wrong))

        return kernel

    monkeypatch.setattr("kernels.cute_gemm.kernels.get", get)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(multi_processor_count=132),
    )
    for m, n, k in ((33, 17, 70), (64, 32, 128)):
        a, b = torch.randn(m, k, dtype=BF16), torch.randn(n, k, dtype=BF16)
        assert torch.allclose(cute_gemm(a, b), a @ b.T, atol=0.2)
    (record,) = cute_gemm.records
    failures = [each.failure for each in record.candidates if each.failure]
    assert (len(record.candidates), len(failures)) == (len(space), 2)
    assert "does not compile" in str(failures)
