"""Python programs as tests start them, without their imports' seconds: forked from the server that
ranks come from.

A program has a process, streams, environment and folder of its own; torch, Triton and dist_tune are
imported before it starts. Tests of what happens before that (launch.sh, torchrun, an entry point)
and of Python's own start or end use ``subprocess``.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from dist_tune.testing import choose_interpreter, fork_context

Done = subprocess.CompletedProcess[str]
ROOT = Path(__file__).parents[1]


def of_checkout(cwd: Path, path: str = "", **variables: str) -> dict[str, str]:
    """The environment of a program that interprets kernels, imports from `path` and the checkout,
    and keeps its caches in `cwd`.
    """
    paths = os.pathsep.join(filter(None, [path, str(ROOT), os.environ.get("PYTHONPATH", "")]))
    own = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": paths,
        "TRITON_INTERPRET": "1",
    }
    folders = {"DIST_TUNE_CACHE_DIR": str(cwd / "cache"), "TRITON_CACHE_DIR": str(cwd / "triton")}
    return {**os.environ, **own, **folders, **variables}


def run_python(
    *command: str | Path,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    n_ranks: int = 0,
    timeout_s: float = 250.0,
) -> Done:
    """``python *command`` (a script, ``-m`` and a module, or ``-c`` and code) in a forked process;
    waits for its end.

    ``env`` is the whole environment. With ``n_ranks``, as many processes get the environment that
    torchrun gives them and write to the same streams; when one fails, the others are ended and the
    return code is 1.

    Raises:
        subprocess.TimeoutExpired: not done after ``timeout_s`` seconds; it was killed.
    """
    words, env = [str(word) for word in command], dict(os.environ if env is None else env)
    context = fork_context()
    with tempfile.TemporaryDirectory() as folder:
        streams = [f"{folder}/stdout", f"{folder}/stderr"]
        store, environments = _torchrun(n_ranks, env) if n_ranks else (None, [env])
        path = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *_own_path()]
        processes = [
            context.Process(target=_main, args=(words, str(cwd or Path.cwd()), path, each, streams))
            for each in environments
        ]
        for process in processes:
            process.start()
        codes = _wait(processes, timeout_s)
        del store
        texts = [Path(stream).read_text() for stream in streams]
    if codes is None:
        raise subprocess.TimeoutExpired(words, timeout_s, *texts)
    return Done(words, codes[0] if not n_ranks else int(any(codes)), *texts)


def _torchrun(n: int, env: Mapping[str, str]) -> tuple[dist.TCPStore, list[dict[str, str]]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "GROUP_RANK": "0",
    }
    return store, [
        {"OMP_NUM_THREADS": "1", **env, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(n)
    ]


def _wait(processes: list[Any], timeout_s: float) -> list[int] | None:
    """Exit codes; None if a process did not end in time."""
    end = time.monotonic() + timeout_s
    while any(process.exitcode is None for process in processes) and time.monotonic() < end:
        if any(process.exitcode for process in processes):
            end = min(end, time.monotonic() + 2.0)  # time to fail in the same way
        time.sleep(0.005)
    has_failed = any(process.exitcode for process in processes)
    for process in processes:
        if process.exitcode is None:
            process.kill()
            process.join()
            if not has_failed:
                return None
    return [process.exitcode for process in processes]


@functools.cache
def _own_path() -> list[str]:
    """The end of ``sys.path`` in any process of this Python."""
    command = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path[1:]))"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path: list[str] = json.loads(
        subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    )
    return path


def _main(
    words: list[str], cwd: str, path: list[str], env: dict[str, str], streams: list[str]
) -> None:
    for descriptor, stream in enumerate(streams, 1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_APPEND | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    # OpenMP has read the variable in the fork server.
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    choose_interpreter(env.get("TRITON_INTERPRET") == "1")
    if "TRITON_INTERPRET" not in env:
        del os.environ["TRITON_INTERPRET"]
    kind = words[0] if words[0] in ("-m", "-c") else ""
    sys.argv = [kind, *words[2:]] if kind else words
    sys.path[:] = [
        cwd if kind == "-m" else "" if kind else str(Path(words[0]).resolve().parent),
        *path,
    ]
    try:
        if kind == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(words[1], vars(main))
        else:
            runpy.run_path(words[0], run_name="__main__")
    finally:
        with suppress(ValueError):  # a program may close its own
            sys.stdout.flush()
        atexit._run_exitfuncs()
