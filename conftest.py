"""What every test starts from: no settings left over from the shell, and no silent skip of a
distributed test.
"""

import multiprocessing.process
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# No deadline, because a busy machine takes longer than 200 ms for an example that takes one. `make
# test-faults` runs the thorough profile.
settings.register_profile("quick", deadline=None, max_examples=20)
settings.register_profile("thorough", deadline=None, max_examples=300)
settings.load_profile("quick")

# Tests start ranks as processes and choose the environment of each; @triton.jit reads
# TRITON_INTERPRET when a kernel is defined.
LEAKS = (
    "TRITON_INTERPRET",
    "DIST_TUNE_",
    "SLURM_",
    "NNODES",
    "NODE_RANK",
    "MASTER_",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "PET_",
)


_AT_ONCE = ThreadPoolExecutor(4)
_under_way: dict[pytest.Item, Future[object]] = {}
"""Test of ranks -> its run in a thread of that pool."""
_running: list[pytest.Item] = []
_unmarked: dict[str, str] = {}
"""Test -> the error that it was given for a process; code under test may have taken the error for
one of its own.
"""


def _demand_mark(event: str, args: tuple[Any, ...]) -> None:
    """A rank or program that a test starts without the mark `processes` or `gpu` fails it: `make
    test-fast` is for all others.
    """
    is_start = event == "dist_tune.test_process" or (
        event == "subprocess.Popen" and sys.executable in (args[0], *args[1][:1])
    )
    # It may have outlived the test that started it.
    if threading.current_thread() is not threading.main_thread():
        return
    if (
        is_start
        and _running
        and not any(_running[-1].get_closest_marker(mark) for mark in ("processes", "gpu"))
    ):
        name = _running[-1].nodeid
        _unmarked[name] = f"{name} starts a process: mark it with pytest.mark.processes"
        raise AssertionError(_unmarked[name])


def pytest_configure() -> None:
    sys.addaudithook(_demand_mark)
    start = multiprocessing.process.BaseProcess.start

    def audited(self: multiprocessing.process.BaseProcess) -> None:
        sys.audit("dist_tune.test_process")
        start(self)

    multiprocessing.process.BaseProcess.start = audited  # type: ignore[method-assign]
    # Ignored in what a script starts in the background, and in its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in [name for name in os.environ if name.startswith(LEAKS)]:
        del os.environ[name]
    os.environ["DIST_TUNE_LOG_LEVEL"] = (
        "DEBUG"  # tests read steps of a tuning out of logs that users are not shown
    )
    # A store asks for the name of each of its clients. Every tenth of them or so waits 5 s where
    # the name server answers no such question.
    os.environ["RES_OPTIONS"] = "attempts:0"
    # numpy reads it in the server that ranks are forked from. With more threads than cores, those
    # of several ranks spin for each other.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    from dist_tune.testing import ranks  # it imports triton, which reads the environment

    # Before dist_tune.testing.preload, the last one, which leaves what is imported out of garbage
    # collections.
    ranks.PRELOADED = ("tests.interpreter", "tests.pauses", *ranks.PRELOADED)
    # What a test finds must not depend on what was tuned on this machine, nor be found by its user.
    os.environ["DIST_TUNE_CACHE_DIR"] = tempfile.mkdtemp(prefix="dist_tune-tests-")


def pytest_unconfigure() -> None:
    _AT_ONCE.shutdown(wait=False, cancel_futures=True)
    shutil.rmtree(os.environ["DIST_TUNE_CACHE_DIR"], ignore_errors=True)


def pytest_collection_finish(session: pytest.Session) -> None:
    if {"test_online", "test_operators", "test_replays"} & {
        each.path.stem for each in session.items
    }:
        from dist_tune.testing import ranks

        # Optimizers import it, and it takes seconds: for each rank of the files that have most of
        # them; for the others it is loaded where it is needed.
        ranks.PRELOADED = ("torch._dynamo", *ranks.PRELOADED)
    # Tests that import kernels/ have set it, where there is no GPU.
    os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture(autouse=True)
def _environment_stays() -> Generator[None]:
    yield
    # Triton's knobs write what is set, and put back, into the environment, where the processes of
    # later tests would find it.
    os.environ.pop("TRITON_INTERPRET", None)
    # Warnings that the log of a later test would have.
    if (files := sys.modules.get("dist_tune.files")) is not None:
        files.texts_to_log()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """True for files whose every test has a mark that ``-m`` leaves out: importing them and
    rewriting their asserts takes seconds.
    """
    if collection_path.suffix != ".py":
        return None
    left_out = re.findall(r"\bnot (\w+)", config.option.markexpr)
    marks = re.findall(
        r"mark\.(\w+)",
        "".join(re.findall(r"^pytestmark = .*", collection_path.read_text(), re.MULTILINE)),
    )
    return (
        True
        if {*left_out} & {*marks, *(["processes"] if "ranks" in collection_path.parts else [])}
        else None
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "ranks" in item.path.parts:
            item.add_marker("processes")


def pytest_report_header() -> str:
    return ", ".join(f"{package} {version(package)}" for package in ("torch", "triton", "numpy"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _running[:] = [item]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Ranks wait for one another more than they compute: tests of ranks that take no fixture, and
    shared worlds, run in threads.
    """
    for each in [] if session.config.option.collectonly else session.items:
        test: Any = getattr(each, "function", None)
        if hasattr(test, "start"):
            test.start(each, _AT_ONCE)
        elif isinstance(each, pytest.Function) and _runs_in_thread(each):
            _under_way[each] = _AT_ONCE.submit(each.obj, **_cases(each))
        else:
            continue
        # It may wait for its turn; what it runs has limits of its own.
        each.add_marker(pytest.mark.timeout(0))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem not in _under_way:
        return None
    _under_way[pyfuncitem].result()
    return True


def _runs_in_thread(test: pytest.Function) -> bool:
    return bool({"ranks", "faults"} & {*test.path.parts}) and {*test._fixtureinfo.argnames} == {
        *_cases(test)
    }


def _cases(test: pytest.Function) -> dict[str, object]:
    return test.callspec.params if hasattr(test, "callspec") else {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if (
        report.skipped
        and not hasattr(report, "wasxfail")
        and ("ranks" in item.path.parts or "CI" in os.environ)
    ):
        report.outcome = "failed"
        report.longrepr = (
            f"a test of ranks that skips has failed, and so has any other in CI: {report.longrepr}"
        )
    if (error := _unmarked.pop(item.nodeid, None)) is not None and report.passed:
        report.outcome, report.longrepr = "failed", error
    return report
