"""kernels/cute_gemm.py without a GPU: space, keys, buckets, builds and the skip; and its code, where the compiler is installed."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from kernels import cases, cute_build
from kernels.cute_build import CuteBuildError, Kernels, kernel_key, library_path, reason_to_skip
from kernels.cute_gemm import SHARED_BYTES, all_configs, cute_gemm, reason_to_drop, search_space, shared_bytes

FP16, BF16 = torch.float16, torch.bfloat16
LARGE = (4096, 4096, 4096)


def test_the_space_has_every_axis_and_begins_with_a_config_that_fits():
    """Tiles, clusters, schedules, stages and stores differ within it, and no config comes twice."""
    space = search_space(*LARGE)
    assert all_configs()[0] is space[0]
    assert not reason_to_drop(space[0], LARGE)
    assert all(len({config.kwargs[name] for config in space}) > 1 for name in space[0].kwargs)
    assert len({config.num_stages for config in space}) == 4
    assert len({kernel_key(BF16, config) for config in all_configs()}) == len(all_configs()) > len(space) > 100


def test_what_a_hopper_block_has_no_room_for_is_dropped_with_the_figures():
    """Shared memory, registers, the rows of a wgmma, buffers in turn, stages left over: each rule drops some, and all kept ones keep it."""
    reasons = {re.sub(r"\d+", "N", reason_to_drop(config, LARGE)) for config in all_configs()}
    assert reasons == {
        "",
        "gives a warpgroup N rows, a wgmma has N",
        "needs N sums a thread, more than N",
        "needs N bytes of shared memory, there are N",
        "has N stages where N fit",
        "stores N pieces, which N buffers do not take in turn",
    }
    assert max(shared_bytes(config) for config in search_space(*LARGE)) <= SHARED_BYTES == 227 * 1024
    # 1 KiB of barriers, 4 stages of a 128 x 64 and a 256 x 64 tile, 4 buffers of 64 x 64, 2 bytes each.
    assert shared_bytes(all_configs()[0]) == 1024 + 4 * 384 * 64 * 2 + 4 * 64 * 64 * 2


def test_small_sizes_drop_tiles_and_clusters_that_would_be_padding():
    """One row keeps the smallest tile, and no cluster along M; each drop is named."""
    space = search_space(1, 4096, 4096)
    assert {(config.kwargs["TILE_M"], config.kwargs["CLUSTER_M"]) for config in space} == {(64, 1)}
    reasons = {reason_to_drop(config, (1, 4096, 4096)) for config in all_configs()}
    assert {"TILE_M=128 is mostly padding for M=1", "CLUSTER_M=2 has one tile for two blocks at M=1"} <= reasons


@pytest.mark.parametrize(("one", "other"), [((33, 100, 4096), (64, 128, 2049)), ((4096, 4096, 4096), (2049, 3000, 2100))])
def test_sizes_of_a_bucket_have_the_same_space(one: tuple[int, int, int], other: tuple[int, int, int]):
    """Otherwise the winner may be a config that the next size would have dropped."""
    assert search_space(*one) == search_space(*other) != search_space(1, 1, 1)


def of_this_machine(monkeypatch: pytest.MonkeyPatch, missing: list[str], capability: tuple[int, int] | None) -> None:
    """Packages that are not installed, and the compute capability of the GPU, None where there is none."""
    monkeypatch.setattr(cute_build, "find_spec", lambda module: None if module in missing else object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


@pytest.mark.parametrize(
    ("missing", "capability", "said"),
    [
        (["cutlass"], (9, 0), "not installed: nvidia-cutlass-dsl. Install the extra: pip install 'dist-tune[cute]'."),
        ([], None, "no GPU was found: wgmma and TMA need a Hopper GPU (compute capability 9.0)."),
        ([], (10, 0), "the GPU has compute capability 10.0: wgmma of sm_90a needs 9.0 (H100, H200)."),
        ([], (9, 0), ""),
    ],
)
def test_the_reason_of_a_skip_says_what_is_missing(
    missing: list[str], capability: tuple[int, int] | None, said: str, monkeypatch: pytest.MonkeyPatch
):
    """Packages first: they can be installed."""
    of_this_machine(monkeypatch, missing, capability)
    assert reason_to_skip() == (said and f"kernels/cute_gemm.py cannot run here: {said}")


@pytest.mark.parametrize("case", ["check", "tune", "perf"])
def test_without_the_package_a_program_ends_as_a_skip(case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """One line and exit code 77 for every case; an option that is wrong is a mistake all the same."""
    of_this_machine(monkeypatch, ["tvm_ffi"], None)
    assert cases.main("cute_gemm", ["--case", case]) == 77
    said = capsys.readouterr().out
    assert said.startswith("skipped: kernels/cute_gemm.py cannot run here: not installed: apache-tvm-ffi.")
    assert said.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        cases.main("cute_gemm", ["--case", case, "--dtype", "fp32"])


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Builds in threads, with versions of packages that may be missing, into a folder of the test."""
    monkeypatch.setattr(cute_build, "ProcessPoolExecutor", lambda n, mp_context: ThreadPoolExecutor(n))
    monkeypatch.setattr(cute_build, "version", lambda name: f"{name} 1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def built(broken: Any, jobs: list[str]) -> Callable[[tuple[str, dict[str, Any], str]], str]:
    """A builder that writes empty libraries, and fails for one config."""

    def build(job: tuple[str, dict[str, Any], str]) -> str:
        jobs.append(job[2])
        if job[1] == broken:
            return "DSLRuntimeError: no layout"
        Path(job[2]).touch()
        return ""

    return build


@pytest.mark.usefixtures("threads")
def test_kernels_are_built_once_for_each_key_and_found_on_disk():
    """Three keys are three builds; then none, in this process as in the next. A failure is kept and told with the config."""
    keys, jobs = [kernel_key(BF16, config) for config in all_configs()[:3]], list[str]()
    kernels = Kernels(built(dict(keys[1][1]), jobs))
    assert [kernels.build(keys), kernels.build(keys)] == [3, 0]
    assert len(set(jobs)) == 3
    with pytest.raises(CuteBuildError, match=r"BFloat16 \{'TILE_M': .* does not compile: DSLRuntimeError: no layout"):
        kernels.get(keys[1])
    assert Kernels(built(None, jobs)).build(keys) == 1  # the one that failed
    assert len(jobs) == 4


@pytest.mark.usefixtures("threads")
def test_a_search_compiles_its_space_at_once_and_a_known_choice_one_kernel(monkeypatch: pytest.MonkeyPatch):
    """One kernel is asked for: one is built. A second one of the same problem: all the rest, in one go; of another problem, one more."""
    keys, jobs = [kernel_key(BF16, config) for config in all_configs()[:6]], list[str]()
    kernels, n_built = Kernels(built(None, jobs)), list[int]()
    monkeypatch.setitem(sys.modules, "cutlass.cute.runtime", SimpleNamespace(load_module=lambda path: SimpleNamespace(gemm=path)))
    for problem, index in (("one", 1), ("one", 1), ("other", 5), ("one", 0), ("one", 4)):
        kernels.get(keys[index], problem, lambda: keys[:5])
        n_built.append(len(jobs))
    assert n_built == [1, 1, 2, 6, 6]


@pytest.mark.usefixtures("threads")
def test_a_library_is_found_by_type_config_and_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Another type, config or version of the compiler is another file beside Triton's."""
    first, second = (kernel_key(BF16, config) for config in all_configs()[:2])
    paths = [library_path(key) for key in (first, first, second, kernel_key(FP16, all_configs()[0]))]
    monkeypatch.setattr(cute_build, "version", lambda name: f"{name} 2")
    assert len({*paths, library_path(first)}) == 4
    assert {path.parent for path in paths} == {tmp_path / "cute_gemm"}


def test_tuning_drops_wrong_and_broken_configs_and_shares_results_in_a_bucket(monkeypatch: pytest.MonkeyPatch):
    """Kernels are stood in for by torch, one wrong and one that does not compile; a second shape of the bucket tunes nothing."""
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
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    for m, n, k in ((33, 17, 70), (64, 32, 128)):
        a, b = torch.randn(m, k, dtype=BF16), torch.randn(n, k, dtype=BF16)
        assert torch.allclose(cute_gemm(a, b), a @ b.T, atol=0.2)
    assert len(cute_gemm.records) == 1
    candidates = cute_gemm.records[0].candidates
    failures = [each.failure for each in candidates if each.failure]
    assert len(candidates) == len(space)
    assert len(failures) == 2
    assert "does not compile" in str(failures)


def check_code(config: triton.Config, dtype: torch.dtype, folder: Path) -> None:
    """Compile for sm_90a, which needs no GPU, and look at PTX, machine code and the launch."""
    pytest.importorskip("cutlass.cute", reason="needs the extra cute")
    pytest.importorskip("tvm_ffi", reason="needs the extra cute")
    from kernels.cute_kernel import compiled

    block, (_, items), folder = config.kwargs, kernel_key(dtype, config), Path(tempfile.mkdtemp(dir=folder))
    code = compiled(cute_build.DTYPES[dtype], dict(items), f"{cute_build.OPTIONS} --keep-ptx --keep-cubin --dump-dir {folder}")
    ptx = next(folder.glob("*.ptx")).read_text(errors="replace")
    rows, n_boxes = block["TILE_M"] // (1 if block["PING_PONG"] else 2), block["TILE_K"] // 64  # a box of TMA has 128 bytes a row
    element = "f16" if dtype is FP16 else "bf16"
    counts = {
        f"wgmma.mma_async.sync.aligned.m64n{block['TILE_N']}k16.f32.{element}.{element}": rows // 64 * block["TILE_K"] // 16,
        "cp.async.bulk.tensor.2d.shared::cluster.global": 2 * n_boxes,
        ".multicast::cluster": n_boxes * (block["CLUSTER_M"] * block["CLUSTER_N"] - 1),
        "cp.async.bulk.tensor.2d.global.shared::cta": rows // 64 * block["TILE_N"] // block["STORE_N"],
        "setmaxnreg": 2,
    }
    assert {text: ptx.count(text) for text in counts} == counts, str(config)
    assert f"constant({shared_bytes(config)} : i64)" in str(code.ir_module), str(config)
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([cuobjdump, "-res-usage", next(folder.glob("*.cubin"))], capture_output=True, text=True, check=True).stdout
    assert "REG:168 STACK:0 " in usage, f"{config}: {usage}"  # 65,536 registers for 384 threads, nothing spilled
    assert " LOCAL:0 " in usage, f"{config}: {usage}"


@pytest.mark.processes
@pytest.mark.parametrize(("index", "dtype"), [(0, BF16), (-1, FP16)])
def test_compiled_code_has_wgmma_tma_and_the_shared_memory_that_was_foreseen(index: int, dtype: torch.dtype, tmp_path: Path):
    """The first config, and one of another schedule: instructions by number, registers without spills."""
    check_code(search_space(*LARGE)[index], dtype, tmp_path)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1800)
def test_every_config_compiles_without_spills(tmp_path: Path):
    """The whole space of a large product, in half a second to two for each."""
    for config in search_space(*LARGE):
        check_code(config, BF16, tmp_path)
