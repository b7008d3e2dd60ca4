"""Compilation in other processes: the same kernels, the same errors, and nothing lost when a process dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.nvidia.compiler import CUDABackend

from dist_tune import contextual_autotune
from dist_tune.compiler import processes, worker
from dist_tune.compiler.compilation import Toolchain
from dist_tune.compiler.processes import Worker, folder_in_use, temporary_folder
from dist_tune.testing import Outcome, on_ranks, values
from tests.steps import gemm_kernel

pytestmark = pytest.mark.processes

CONFIGS = [(16, 16), (16, 32), (32, 32), (32, 64)]


@triton.jit
def bad_asm_kernel(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    loaded = tl.load(x + at)
    if BLOCK == 32:
        loaded = tl.inline_asm_elementwise("no.such.thing $0, $1;", "=r,r", [loaded], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(x + at, loaded)


def is_gone(pid: int, within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def alone(function: Any, *args: Any, deadline_s: int = 30) -> Outcome:
    """One rank with the fake driver."""
    (outcome,) = on_ranks(1, function, *args, mode="fake", is_dist=False, env={"DIST_TUNE_DEADLINE_S": f"{deadline_s}"})
    return outcome


def note_requests() -> list[Any]:
    """The options of the kernels that other processes are asked for, from now on."""
    asked: list[Any] = []
    ask = Worker.ask

    def noting(self: Worker, request: Any, on_wait: Any) -> Any:
        asked.append(request[2])
        return ask(self, request, on_wait)

    Worker.ask = noting  # type: ignore[method-assign]
    return asked


def tune(kernel: Any, configs: list[triton.Config], *args: Any) -> Any:
    """Tune one launch; the record."""
    autotuned = triton.autotune(configs, key=[])(kernel)

    @contextual_autotune(is_dist=False, cache=False)
    def step() -> None:
        autotuned[(1,)](*args)

    step()
    return step.records[0]


def tune_product(configs: list[triton.Config] | None = None) -> list[str | None]:
    data = torch.zeros(64, 64, dtype=torch.bfloat16)
    configs = configs or [triton.Config({"BM": m, "BN": n}) for m, n in CONFIGS]
    record = tune(gemm_kernel, configs, data, data, data.float(), 64)
    return [each.failure for each in record.candidates]


def made() -> dict[str, bytes]:
    """The files in Triton's disk cache whose content is the kernel's alone."""
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    return {str(path.relative_to(cache)): path.read_bytes() for path in cache.rglob("*") if path.suffix in (".cubin", ".ptx", ".json")}


def product(rank: int, place: str) -> tuple[int, dict[str, bytes], list[int | None]]:
    """Kernels asked of other processes, what came of all, and which of four configs without a pipelined loop came to another's kernel."""
    asked = note_requests()
    configs = [triton.Config({"BM": m, "BN": n}, num_warps=4, num_stages=stages) for m, n in CONFIGS for stages in (1, 2)]
    if place == "triton":
        triton.knobs.runtime.add_stages_inspection_hook = lambda *args: ("", "")
    if place == "here":
        sys.executable = "/no/such/python"
    assert tune_product(configs) == [None] * 8
    n_asked, Worker.can_start = len(asked), True
    unpipelined = [triton.Config({"BLOCK": 64}, num_stages=stages) for stages in (1, 2, 3, 4)]
    record = tune(bad_asm_kernel, unpipelined, torch.zeros(64, dtype=torch.int32))
    files = {name: content for name, content in made().items() if "__grp__" not in name}
    return n_asked, files, [each.equal_to for each in record.candidates]


@pytest.fixture(scope="module")
def places() -> dict[str, Outcome]:
    """The same tunings by other processes, by this one where none starts, and by Triton alone."""
    return {place: alone(product, place) for place in ("elsewhere", "here", "triton")}


def test_kernels_are_the_same_to_the_bit(places: dict[str, Outcome]) -> None:
    """PTX, cubin and metadata under the same keys in Triton's disk cache."""
    found = {place: outcome.value for place, outcome in places.items()}
    assert [found[place][0] for place in ("elsewhere", "here")] == [8, 0]
    files = {place: {name: content for name, content in each[1].items() if "gemm" in name} for place, each in found.items()}
    assert len(files["here"]) == 3 * 8
    assert files["elsewhere"] == files["here"]
    assert {Path(name).suffix for name in files["triton"] if ".json" not in name} == {".ptx", ".cubin"}
    here, vanilla = (sorted(content for name, content in files[place].items() if ".cubin" in name) for place in ("here", "triton"))
    assert here == vanilla


@pytest.mark.parametrize("place", ["elsewhere", "here"])
def test_equal_kernels_are_assembled_once(places: dict[str, Outcome], place: str) -> None:
    """Stages after TTGIR are taken over, also from another process's kernel; each has its own metadata."""
    _, files, equal_to = values([places[place]])[0]
    assert equal_to == [None, 0, 0, 0]
    assert "kernels: compiled=1 equal=3 on_disk=0 failed=0" in places[place].log
    stages = sorted(content.partition(b'"num_stages": ')[2][:1] for name, content in files.items() if name.endswith("bad_asm_kernel.json"))
    assert stages == [b"1", b"2", b"3", b"4"]


def failing(rank: int) -> tuple[list[str | None], int]:
    """Failures by the assembler, and runs of the front end for six other kernels."""
    refused = tune(bad_asm_kernel, [triton.Config({"BLOCK": block}) for block in (32, 64)], torch.zeros(64, dtype=torch.int32))
    return [each.failure for each in refused.candidates], front_ends()


def front_ends() -> int:
    runs, is_lost = list[str](), iter((True, True))
    own, parse = triton.compiler.compiler.ASTSource.make_ir, triton.JITFunction.parse

    def losing_count(kernel: Any) -> Any:
        """As Python 3.11 does where a collection lets another thread parse meanwhile."""
        if next(is_lost, False):
            raise SystemError("AST constructor recursion depth mismatch")
        return parse(kernel)

    def make_ir(source: Any, *args: Any) -> Any:
        runs.append(source.name)
        return own(source, *args)

    triton.compiler.compiler.ASTSource.make_ir, triton.JITFunction.parse = make_ir, losing_count
    configs = [triton.Config({"BM": 16, "BN": n}, num_warps=warps) for n in (16, 32) for warps in (1, 2, 4)]
    assert tune_product(configs) == [None] * 6
    return len(runs)


@pytest.mark.once
def test_errors_are_those_of_this_process_and_ttir_is_made_once_for_configs_that_differ_in_warps() -> None:
    """The PTX that Triton prints is in the log. Of six candidates of two sizes, the first run's waits for no other thread."""
    outcome = alone(failing)
    (refused, none), n_runs = values([outcome])[0]
    assert none is None
    assert "PTXASError: " in refused
    assert "no.such.thing" in outcome.log
    assert n_runs <= 3


def crash(rank: int, how: signal.Signals) -> tuple[list[str | None], list[int]]:
    """Kill, abort or stop the process of one config while it compiles."""
    ask, pids = Worker.ask, list[int]()

    def dying(self: Worker, request: Any, on_wait: Any) -> Any:
        if request[2].num_warps == 8:
            pids.append(self._process.pid)
            if not self._is_greeted:  # one that dies before has not started
                self._greet()
            os.kill(self._process.pid, how)
        return ask(self, request, on_wait)

    Worker.ask = dying  # type: ignore[method-assign]
    configs = [triton.Config({"BM": m, "BN": n}, num_warps=8 if (m, n) == CONFIGS[-1] else 4) for m, n in CONFIGS]
    return tune_product(configs), pids


@pytest.mark.once
@pytest.mark.parametrize(("how", "kind"), [(signal.SIGABRT, "CompilerCrashError"), (signal.SIGKILL, "MemoryError")])
def test_a_compiler_that_crashes_costs_one_candidate(how: signal.Signals, kind: str) -> None:
    """With the signal, and its last words in the log. One that is killed has most likely taken too much memory: no config is blamed."""
    outcome = alone(crash, how)
    *others, failure = values([outcome])[0][0]
    assert others == [None] * 3
    assert f"{kind}: the compiler's process ended with exit code -{how.value}" in failure
    assert ("Fatal Python error: Aborted" in outcome.log) == (how is signal.SIGABRT)


@pytest.mark.once
def test_a_compilation_that_never_ends_is_given_up_and_its_process_ended() -> None:
    """After the deadline the config is dropped, and no process stays behind."""
    (*others, failure), (pid,) = values([alone(crash, signal.SIGSTOP, deadline_s=5)])[0]
    assert "TimeoutError" in failure
    assert others == [None] * 3
    assert is_gone(pid)


def idle(rank: int) -> tuple[list[str | None], int]:
    """Each process has ended for want of work before its first kernel is asked for; failures, and kernels that were asked for."""
    ask, n_asked = Worker.ask, count(1)
    short = Path(tempfile.mkdtemp()) / "worker.py"
    short.write_text(re.sub(r"\bIDLE_S = .*", "IDLE_S = 0.2", Path(worker.__file__).read_text()))
    worker.__file__ = str(short)

    def late(self: Worker, request: Any, on_wait: Any) -> Any:
        if next(n_asked) <= len(CONFIGS):
            self._process.wait()
        return ask(self, request, on_wait)

    Worker.ask = late  # type: ignore[method-assign]
    return tune_product(), next(n_asked) - 1


@pytest.mark.once
def test_a_process_that_has_ended_for_want_of_work_costs_no_candidate() -> None:
    """It may end between the look at it and the request: the front end runs meanwhile. Another one takes the kernel."""
    failures, n_asked = values([alone(idle)])[0]
    assert failures == [None] * len(CONFIGS)
    assert n_asked == 2 * len(CONFIGS)


def in_this_process(rank: int) -> dict[str, tuple[int, int, int]]:
    """Reason -> kernels asked of other processes, runs of what is the user's, kernels made."""
    asked, calls, own, found = note_requests(), list[object](), CUDABackend.make_llir, {}

    def make_llir(self: Any, *args: Any) -> Any:
        calls.append(args)
        return own(self, *args)

    cache = os.environ["TRITON_CACHE_DIR"]
    for reason in ("knobs", "patch", "listener", "/bin/false", "/no/such/python"):
        gemm_kernel.device_caches.clear()
        os.environ["TRITON_CACHE_DIR"] = f"{cache}/{reason.replace('/', '-')}"
        with triton.knobs.compilation.scope():
            if reason == "knobs":
                triton.knobs.propagate_env = False
            elif reason == "patch":
                CUDABackend.make_llir = make_llir
            elif reason == "listener":
                triton.knobs.compilation.listener = lambda **facts: calls.append(facts)
            else:
                sys.executable, Worker.can_start = reason, True
            assert tune_product() == [None] * len(CONFIGS)
        found[reason] = len(asked), len(calls), len([name for name in made() if name.endswith(".cubin")])
        assert Worker.can_start == (not reason.startswith("/"))
        triton.knobs.propagate_env, CUDABackend.make_llir = True, own
        asked.clear()
        calls.clear()
    return found


@pytest.mark.once
def test_a_compiler_that_is_not_triton_s_alone_stays_in_this_process() -> None:
    """Another process would not have the setting, the patch, or the hook. Nor is one tried again where none starts; no config is blamed."""
    found = values([alone(in_this_process)])[0]
    n = len(CONFIGS)
    assert [found[reason] for reason in ("knobs", "patch", "listener")] == [(0, 0, n), (0, n, n), (0, n, n)]
    assert [(n_calls, n_made) for _, n_calls, n_made in [found["/bin/false"], found["/no/such/python"]]] == [(0, n), (0, n)]


MAIN = """
import os
os.sched_getaffinity = lambda pid: set(range(8))
print("main of", __name__, flush=True)
from dist_tune.testing import install_fake_driver
install_fake_driver()
from tests.compiler.test_processes import tune_product, note_requests
asked = note_requests()
assert tune_product() == [None] * 4
print("asked", len(asked))
"""


@pytest.mark.once
def test_the_user_s_program_runs_once(tmp_path: Path) -> None:
    """Processes that compile do not import it, as those of multiprocessing would; it has no ``if __name__ == "__main__"``."""
    (tmp_path / "program.py").write_text(MAIN)
    folders = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "DIST_TUNE_LOG_DIR": str(tmp_path), "DIST_TUNE_VERBOSITY": "quiet"}
    environment = {
        **os.environ,
        **folders,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["main of __main__", "asked 4"]


@pytest.mark.once
def test_a_process_is_used_again_in_the_same_environment_and_ends_with_the_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton reads its settings from there. Idle ones end at once, others when they are given back."""
    tools = Toolchain()
    first = tools.take()
    assert first is not None
    tools.give(first)
    assert tools.take() is first
    tools.give(first)
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    later, another = tools.take(), tools.take()
    assert later is not None and another is not None  # noqa: PT018
    assert later is not first
    tools.give(later)
    tools.end()
    assert [each.is_alive for each in (first, later, another)] == [False, False, True]
    tools.give(another)
    assert not another.is_alive


@pytest.mark.once
def test_processes_are_stopped_beside_a_job_s_plain_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """And go on after it; no front end begins meanwhile, but one that a launch waits for."""
    tools, began = Toolchain(), list[str]()
    each = tools.take()
    assert each is not None
    try:
        tools.hold()
        assert state(each._process.pid) == "T"
        waiting = threading.Thread(target=lambda: tools.ttir(("a",), object(), lambda read: began.append("later"), is_urgent=False))
        waiting.start()
        tools.ttir(("b",), object(), lambda read: began.append("urgent"), is_urgent=True)
        assert began == ["urgent"]
        tools.go_on()
        waiting.join(30)
        assert began == ["urgent", "later"]
        assert state(each._process.pid) != "T"
    finally:
        each.end()


def state(pid: int) -> str:
    """Of a process, as soon as a signal has reached it: "T" if it is stopped."""
    time.sleep(0.2)
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_process_ignores_ctrl_c_and_says_how_it_died() -> None:
    """An interrupt reaches the whole group of processes, and is the rank's to handle."""
    each = Worker()
    with pytest.raises(AttributeError):  # it serves
        each.ask(("no module", None, None, None, None), lambda: None)
    each._process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert each.is_alive
    each._process.kill()
    with pytest.raises(MemoryError, match=r"exit code -9"):
        each.ask(("", None, None, None, None), lambda: None)


@pytest.mark.once
def test_a_process_ends_with_its_rank() -> None:
    """Also in the middle of a kernel, with the compiler that it has started: ptxas may never end."""
    text = "import time\nfrom dist_tune.compiler.processes import Worker\neach = Worker()\neach._greet()\n"
    text += "print(each._process.pid, flush=True)\ntime.sleep(60)"
    rank = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    pid = int(rank.stdout.readline())
    child = subprocess.Popen(["/bin/sleep", "60"], process_group=pid)
    rank.kill()
    rank.wait()
    rank.stdout.close()
    assert is_gone(pid)
    assert child.wait(timeout=5) == -signal.SIGKILL


# -- what killed processes leave ---------------------------------------------------------------------------------------


def test_a_folder_is_swept_once_its_process_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a process that looks while it is made, nor before; files and folders of other names stay, and a link is not followed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "dist_tune-notes").mkdir()
    (tmp_path / "dist_tune_compiles-file").write_text("")
    (tmp_path / "dist_tune_compiles-link").symlink_to(tmp_path / "dist_tune-notes")
    others, make = set(tmp_path.iterdir()), tempfile.mkdtemp

    def watched(**options: Any) -> str:
        made: str = make(**options)
        processes._sweep()
        return made

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkdtemp", watched)
        with folder_in_use():
            folder = Path(temporary_folder() or "")
            processes._sweep()
            assert set(tmp_path.iterdir()) == {*others, folder}
    assert set(tmp_path.iterdir()) == others
    folder.mkdir()
    (folder / "left.ttir").touch()
    with folder_in_use():
        assert set(tmp_path.iterdir()) == {*others, Path(temporary_folder() or "")}


def _step(rank: int, folder: Path) -> None:
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    tune(bad_asm_kernel, [triton.Config({"BLOCK": block}) for block in (16, 64)], torch.zeros(64, dtype=torch.int32))


def _killed_in_ptxas(rank: int, folder: Path) -> None:
    slow = folder.parent / "ptxas"
    slow.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {triton.knobs.nvidia.ptxas.path} --version\nsleep 3\n')
    slow.chmod(0o755)
    os.environ["TRITON_PTXAS_PATH"] = os.environ["TRITON_PTXAS_BLACKWELL_PATH"] = str(slow)  # Triton 3.9 asks the latter from sm_90 on

    def kill() -> None:
        while not list(folder.rglob("*.ptx")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    _step(rank, folder)


@pytest.mark.once
def test_files_of_a_compiler_that_was_killed_are_swept(tmp_path: Path) -> None:
    """What Triton gives the assembler, with the rank in the middle of it."""
    (folder := tmp_path / "tmp").mkdir()
    assert alone(_killed_in_ptxas, folder).error == "Died"
    assert [*folder.rglob("*.ptx")]
    time.sleep(1.0)  # the compiler's process looks twice a second whether its rank lives
    values([alone(_step, folder)])
    assert not [*folder.iterdir()]
