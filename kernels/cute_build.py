"""Compiled kernels of kernels/cute_gemm.py: built ahead in processes, kept by kernel key in memory
and as libraries on disk.

The compiler of CuTe DSL holds its state in one object of a process, so several kernels are compiled
in as many processes; threads would mix their options. A library (TVM FFI, linked by the C compiler)
is a file beside Triton's (`TRITON_CACHE_DIR`): the next process loads it. No GPU is needed to build
one. Nothing of CuTe DSL is imported before a kernel is asked for.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton

PACKAGES = {"nvidia-cutlass-dsl": "cutlass", "apache-tvm-ffi": "tvm_ffi"}
"""What has to be installed, and what is imported of it."""
HOPPER = (9, 0)
DTYPES = {torch.float16: "Float16", torch.bfloat16: "BFloat16"}
"""torch's types, and what CuTe DSL calls them."""
OPTIONS = "--gpu-arch sm_90a --enable-tvm-ffi"

KernelKey = tuple[torch.dtype, tuple[tuple[str, Any], ...]]
"""Type and config. No size is compiled in: layouts are dynamic."""


class CuteBuildError(RuntimeError):
    """A kernel that does not compile; a tuner drops its config."""


def kernel_key(dtype: torch.dtype, config: triton.Config) -> KernelKey:
    """All that decides a kernel's code."""
    return dtype, (*config.kwargs.items(), ("num_stages", config.num_stages))


def reason_to_skip() -> str:
    """Why the kernel cannot run here; empty if it can."""
    missing = [name for name, module in PACKAGES.items() if find_spec(module) is None]
    capability, reason = (
        torch.cuda.get_device_capability() if torch.cuda.is_available() else None,
        "",
    )
    if missing:
        reason = (
            f"not installed: {', '.join(missing)}. Install the extra: pip install"
            " 'dist-tune[cute]'."
        )
    elif capability is None:
        reason = "no GPU was found: wgmma and TMA need a Hopper GPU (compute capability 9.0)."
    elif capability != HOPPER:
        reason = (
            f"the GPU has compute capability {capability[0]}.{capability[1]}: wgmma of sm_90a needs"
            " 9.0 (H100, H200)."
        )
    return reason and f"kernels/cute_gemm.py cannot run here: {reason}"


def library_path(key: KernelKey) -> Path:
    """Where a kernel's library is kept; another one for other code or versions."""
    code = Path(__file__).with_name("cute_kernel.py").read_bytes()
    described = repr((key, [version(name) for name in PACKAGES], OPTIONS)).encode()
    return (
        Path(triton.knobs.cache.dir)
        / "cute_gemm"
        / f"{hashlib.sha256(described + code).hexdigest()[:32]}.so"
    )


def build(job: tuple[str, dict[str, Any], str]) -> str:
    """Compile a kernel into a library: (type, config, path).

    In a process of its own; returns the compiler's message if it fails.
    """
    dtype, config, path = job
    # For another architecture than that of the process no launcher is made, which would open the
    # GPU.
    os.environ["CUTE_DSL_ARCH"] = "sm_100a"
    from cutlass.cute.runtime import find_runtime_libraries

    from kernels.cute_kernel import compiled

    made = f"{path}.{os.getpid()}"
    try:
        compiled(dtype, config, OPTIONS).export_to_c(
            f"{made}.o", function_name="gemm", export_only_tvm_ffi_symbols=True
        )
        command = [
            os.environ.get("CC", "cc"),
            "-shared",
            "-o",
            made,
            f"{made}.o",
            *find_runtime_libraries(),
        ]
        subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(made, path)
    except subprocess.CalledProcessError as error:
        return f"{command[0]}: {error.stderr}"
    except Exception as error:  # noqa: BLE001  the compiler's own classes, which do not pass from process to process
        return f"{type(error).__name__}: {error}"
    finally:
        Path(f"{made}.o").unlink(missing_ok=True)
    return ""


class Kernels:
    """Loaded kernels by kernel key, and the messages of those that do not compile."""

    def __init__(self, builder: Callable[[tuple[str, dict[str, Any], str]], str] = build) -> None:
        self.builder = builder
        self.loaded: dict[KernelKey, Callable[..., Any]] = {}
        self.libraries: list[Any] = []
        """Those of the loaded kernels: unloaded when no longer referred to."""
        self.failures: dict[KernelKey, str] = {}
        self._first: dict[Hashable, KernelKey] = {}
        """Problem -> the kernel that was asked for first."""

    def build(self, keys: Iterable[KernelKey]) -> int:
        """Compile what is neither on disk nor has failed, in a process for each core; returns the
        number compiled.
        """
        paths = {
            key: library_path(key)
            for key in keys
            if key not in self.loaded and key not in self.failures
        }
        jobs = {
            key: (DTYPES[key[0]], dict(key[1]), str(path))
            for key, path in paths.items()
            if not path.exists()
        }
        if not jobs:
            return 0
        next(iter(paths.values())).parent.mkdir(parents=True, exist_ok=True)
        n_workers = min(len(jobs), len(os.sched_getaffinity(0)))
        with ProcessPoolExecutor(n_workers, mp_context=get_context("spawn")) as pool:
            messages = list(pool.map(self.builder, jobs.values()))
        self.failures |= {
            key: message for key, message in zip(jobs, messages, strict=True) if message
        }
        return len(jobs)

    def get(
        self,
        key: KernelKey,
        problem: Hashable = None,
        space: Callable[[], Iterable[KernelKey]] = tuple,
    ) -> Callable[..., Any]:
        """The kernel of a key: `kernel(a, b, c, max_clusters)` on torch's current stream.

        Compiled now if it was not before.

        A caller whose choice is known asks for one kernel of a problem; one that asks for a second
        searches, and waits once for `space`.

        Raises:
            CuteBuildError: it does not compile.
        """
        if key not in self.loaded:
            is_known = self._first.setdefault(problem, key) == key
            self.build([key] if is_known else {key, *space()})
            if key in self.failures:
                raise CuteBuildError(
                    f"{DTYPES[key[0]]} {dict(key[1])} does not compile: {self.failures[key]}"
                )
            from cutlass.cute.runtime import load_module

            library = load_module(str(library_path(key)))
            self.libraries.append(library)
            self.loaded[key] = library.gemm
        return self.loaded[key]


kernels = Kernels()
"""Those of this process."""
