"""The doctor: findings about kernels, ranks and GPUs."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from dist_tune.cli.doctor import machine, probes
from tests.doctor_machines import TOPOLOGY, found, gpu, nvidia_smi, with_gpus

# Triton 3.6 under a numpy that warns of what 2.4 forbids.
pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")]


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIST_TUNE_CACHE_DIR", str(tmp_path / "cache" / "of" / "records"))
    monkeypatch.setenv("DIST_TUNE_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


# -- kernels and ranks -----------------------------------------------------------------------------------------------


def test_the_interpreter_is_really_tried(monkeypatch: pytest.MonkeyPatch):
    """A kernel with a loop runs in it: one that came to another result, or a numpy that it cannot work with, is seen."""
    assert found("Triton's interpreter").state == "ok"
    monkeypatch.setitem(sys.modules, "numpy", None)
    finding = found("Triton's interpreter")
    assert finding.state == "fail"
    assert "numpy" in finding.advice


def test_the_kernel_compiles_for_a_gpu():
    """Triton compiles more of a function than Python runs, its annotations for one; only a GPU would tell otherwise."""
    source = ASTSource(JITFunction(probes._sum_steps), {"total": "*i32", "n": "i32"}, {})
    assert "ptx" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm


def test_a_wrong_result_is_no_success():
    class Idle:
        def __getitem__(self, _grid: tuple[int, ...]) -> Any:
            return lambda *_args: None

    with pytest.raises(ArithmeticError, match="counts to 3"):
        probes._ran(Idle(), "cpu")


def test_the_interpreter_hides_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """TRITON_INTERPRET=1 left over in a shell is why nothing is fast."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert probes.triton_on_gpu([gpu()])[0] == "off"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert probes.interpreter()[0] == "warn"


def test_a_gpu_in_use_is_found():
    """By its memory or by its kernels; the memory that the driver itself takes does not count."""
    assert probes.idle([gpu(used_mib=600, busy_percent=0)])[0] == "ok"
    assert probes.idle([gpu()])[0] == "off"
    for used, busy in ((70_000, 0), (600, 98)):
        state, fact, _ = probes.idle([gpu(used_mib=600, busy_percent=0), gpu(3, used_mib=used, busy_percent=busy)])
        assert (state, "GPU 3" in fact, "GPU 0" in fact) == ("warn", True, False)


def test_pairs_without_peer_access_are_named():
    assert probes.peers([["", "NV18"], ["peer", ""]])[0] == "ok"
    state, fact, _ = probes.peers([["", "none"], ["peer", ""]])
    assert (state, "0->1" in fact, "1->0" in fact) == ("warn", True, False)


def test_a_host_without_a_name_is_found(monkeypatch: pytest.MonkeyPatch):
    """The gloo backend looks its own host up, and fails without saying what it looked for."""
    assert probes.distributed([])[0] == "ok"
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
    state, fact, advice = probes.distributed([])
    assert (state, "no-such-host.invalid" in fact, "GLOO_SOCKET_IFNAME" in advice) == ("warn", True, True)


def test_launches_that_block_are_found(monkeypatch: pytest.MonkeyPatch):
    """A debugging variable left over in a shell changes every time."""
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert probes.events([gpu()])[0] == "warn"


# -- the machine -----------------------------------------------------------------------------------------------------


def test_nvidia_smi_is_believed_where_it_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Its numbers go to the GPU with the same identity, in any order of CUDA_VISIBLE_DEVICES; "[N/A]" is not a number."""
    rows = "0, GPU-aaa, 580.95, 71000, 98\n3, GPU-bbb, 580.95, [N/A], [N/A]\nsome warning"
    nvidia_smi(monkeypatch, tmp_path, f'if [ "$1" = topo ]; then cat <<END\n{TOPOLOGY}END\nelse cat <<END\n{rows}\nEND\nfi')
    with_gpus(monkeypatch, "bbb", "aaa", "unknown")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) != (2, 0))
    smi = machine.smi_gpus()
    gpus = machine.gpus(smi)
    assert [(each.smi_index, each.used_mib, each.busy_percent) for each in gpus] == [(3, None, None), (0, 71000, 98), (None, None, None)]
    assert machine.links(gpus) == [["", "PIX", "peer"], ["PIX", "", "peer"], ["none", "peer", ""]]
    assert machine.versions(smi)["driver"] == "580.95"


@pytest.mark.parametrize("script", ["exit 9", "exec sleep 30", "printf '\\377\\n'"])
def test_a_broken_nvidia_smi_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str):
    """It fails, hangs, or prints what is no text."""
    monkeypatch.setattr(machine, "_SMI_TIMEOUT_S", 0.2)
    nvidia_smi(monkeypatch, tmp_path, script)
    start = time.monotonic()
    assert machine.smi_gpus() == []
    assert time.monotonic() - start < 25


def test_the_topology_is_read():
    """Rows and columns by nvidia-smi's indices, with the heading underlined or not, and without network cards."""
    kinds = machine.parse_topology(TOPOLOGY)
    assert (kinds[0, 1], kinds[3, 0], kinds[1, 3]) == ("NV18", "PIX", "SYS")
    assert len(kinds) == 9
    assert machine.parse_topology(TOPOLOGY.replace("\x1b[4m", "").replace("\t\x1b[0m", "")) == kinds
    assert machine.parse_topology("") == machine.parse_topology("No devices were found") == {}
