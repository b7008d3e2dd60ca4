"""What dist_tune has tuned is read by the engines: FLA's own function, and vLLM's as
transcribed.
"""

import ast
import json
import os
from pathlib import Path

import pytest

from dist_tune.records import Cache
from tests.cli.test_engines import vllm_reads
from tests.cli_answers import run
from tests.programs import ROOT, run_python

pytestmark = pytest.mark.processes


def launch(folder: Path, what: str, **more: str) -> str:
    folders = {f"DIST_TUNE_{name}_DIR": str(folder / name) for name in ("CACHE", "LOG")} | {
        "TRITON_CACHE_DIR": str(folder / "triton")
    }
    env = {**os.environ, **folders, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), **more}
    done = run_python("-m", "tests.cli.engine_steps", what, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow  # the library takes seconds to import, in each process
def test_a_kernel_of_fla_finds_what_was_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With FLA_CONFIG_DIR, in a process without dist_tune in which Triton's tuner would fail."""
    pytest.importorskip("fla", reason="needs fla-core, of the extra `test`")
    launch(tmp_path, "fla")
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "CACHE"))
    (entry,) = Cache(tmp_path / "CACHE").entries()
    path = tmp_path / "configs/chunk_local_cumsum_scalar_kernel.json"
    done = run(
        "convert", "chunk_local_cumsum_scalar_kernel", "--to", "fla", "-o", tmp_path / "configs"
    )
    key = [1, 4, 64, False, False, "torch.float32", "torch.float32"]
    assert done.stdout.splitlines() == [
        f"{path}: 1 config, for {json.dumps(key)}",
        f"fla finds it by FLA_CACHE_MODE=strict FLA_CONFIG_DIR={tmp_path}/configs",
    ]
    found = launch(
        tmp_path, "load", FLA_CONFIG_DIR=str(tmp_path / "configs"), FLA_CACHE_MODE="strict"
    )
    assert ast.literal_eval(found.splitlines()[-1]) == {
        tuple(key): {"num_ctas": 1, **entry.record.best.fields}
    }


def test_a_step_s_fused_moe_kernel_becomes_the_file_that_vllm_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One size from each record; the device's name is the machine's, or one that is given."""
    launch(tmp_path, "moe")
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "CACHE"))
    winners = {
        entry.record.key: entry.record.best.fields for entry in Cache(tmp_path / "CACHE").entries()
    }
    told = ["--set", "E=8", "--set", "N=512", "--set", "device_name=NVIDIA H200"]
    for source in ("fused_moe_kernel", str(tmp_path / "CACHE")):
        run("convert", source, "--to", "vllm", *told, "-o", tmp_path / source.rpartition("/")[2])
        found = vllm_reads(tmp_path / source.rpartition("/")[2], "NVIDIA H200", 8, 512)
        assert found == {n: winners[f"[{n},8,torch.float32]"] for n in (16, 64)}
