"""The wheel and the sdist: what is in them, what an index shows of them, and the package as it is
installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from dist_tune import __version__
from hatch_build import without_paths

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
PROGRAM = """
from typing import assert_type

import torch

import dist_tune
from dist_tune import TunedClosure, TunedFunction, autotune, contextual_autotune


@contextual_autotune(is_dist=True)
def step(x: torch.Tensor, n: int = 1) -> float:
    return float(x[n])


@autotune([{"block": 1}], None)
def scaled(x: torch.Tensor, factor: float = 1.0, *, block: int = 0) -> torch.Tensor:
    return x * factor


@autotune(configs=[{"n_chunks": 1}], key=["x"])
def chunked(x: torch.Tensor, n_chunks: int) -> int:
    return n_chunks


class Layer:
    @contextual_autotune()
    def step(self, x: torch.Tensor) -> int:
        return len(x)

    @autotune([{"block": 1}], None)
    def scaled(self, x: torch.Tensor, block: int = 0) -> torch.Tensor:
        return x

    @autotune([{"block": 1}], None)
    def chunked(self, x: torch.Tensor, block: int) -> str:
        return ""


x = torch.ones(4)
assert_type(step(x, n=2), float)
assert_type(scaled(x, factor=2.0), torch.Tensor)
assert_type(scaled(x, autotune=False), torch.Tensor)
assert_type(scaled(x, autotune_pg=None, autotune_verbose=True), torch.Tensor)
assert_type(scaled(x, block=3, autotune_allow_arg_overwrite=True), torch.Tensor)
assert_type(chunked(x), int)
assert_type(Layer().step(x), int)
assert_type(Layer().scaled(x), torch.Tensor)
assert_type(Layer().scaled(x, autotune_verbose=True), torch.Tensor)
assert_type(Layer().chunked(x), str)
assert_type(Layer.chunked(Layer(), x), str)
Layer.step(Layer(), x)
scaled.records[0].winner, scaled.configs[0], step.records, Layer().step.records, step.__wrapped__(x), scaled.__name__

step("x")  # wrong
step()  # wrong
step(x, m=2)  # wrong
step(x, 1, 2)  # wrong
word: str = step(x)  # wrong
number: int = scaled(x)  # wrong
Layer().step(3)  # wrong
Layer().step()  # wrong
scaled.recrods  # wrong
step.recrods  # wrong
autotune(configs=3, key=["x"])  # wrong
contextual_autotune(reset=5)  # wrong
assert_type(dist_tune.__version__, str)
dist_tune.contextual_autotun  # wrong
"""  # noqa: E501
TORCH = """
class Tensor:
    def __mul__(self, factor: float) -> Tensor: ...
    def __getitem__(self, i: int) -> Tensor: ...
    def __float__(self) -> float: ...
    def __len__(self) -> int: ...
def ones(*size: int) -> Tensor: ...
"""
SKIPPED = "[mypy]\n" + "".join(
    f"[mypy-{name}.*]\nfollow_imports = skip\nignore_missing_imports = True\n"
    for name in ("torch", "triton", "numpy", "pydantic")
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of this tree."""
    folder = tmp_path_factory.mktemp("built")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=100,
    )
    return folder


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an environment in which the wheel is installed, beside the packages of this
    one.
    """
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=100
    )
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "beside.pth").write_text(
        "\n".join(
            {
                sysconfig.get_path("purelib"),
                *(path for path in sys.path if path.endswith("-packages")),
            }
        )
    )
    with zipfile.ZipFile(built / f"dist_tune-{__version__}-py3-none-any.whl") as archive:
        archive.extractall(site)
    return folder / "bin" / "python"


def run(command: list[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")
    }
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_wheel_holds_the_package_and_nothing_else(built: Path):
    """Every module, the page's template, py.typed, the launcher and the licence are in the wheel;
    kernels and tests are not.
    """
    with zipfile.ZipFile(built / f"dist_tune-{__version__}-py3-none-any.whl") as archive:
        names = archive.namelist()
    about = f"dist_tune-{__version__}.dist-info/"
    modules = [*(ROOT / "dist_tune").rglob("*.py"), ROOT / "dist_tune/report/page.html"]
    expected = [
        *(str(path.relative_to(ROOT)) for path in modules),
        "dist_tune/py.typed",
        "dist_tune/launch.sh",
    ]
    assert sorted(name for name in names if not name.startswith(about)) == sorted(expected)
    assert f"{about}licenses/LICENSE" in names


def test_the_sdist_holds_what_a_checkout_holds(built: Path):
    """Docs, tests and all that these read: every file that git keeps but settings of its own and of
    CI.
    """
    with tarfile.open(built / f"dist_tune-{__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    done = subprocess.run(
        ["git", "ls-files", "--cached"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    kept = (
        set(done.stdout.splitlines())
        if done.returncode == 0
        else {"tests/test_wheel.py", "LICENSE"}
    )  # the tests of an sdist itself
    assert {
        name for name in kept if (ROOT / name).exists() and not name.startswith(".")
    } - names == set()
    assert any(name.startswith("docs/") for name in names)


def test_the_changelog_has_this_version():
    """With a date, below what is not released yet."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d", headings[1])


def test_an_index_shows_no_dead_link(built: Path):
    """Its page is the README, whose links to files lead nowhere outside the repository."""
    with zipfile.ZipFile(built / f"dist_tune-{__version__}-py3-none-any.whl") as archive:
        about = message_from_bytes(archive.read(f"dist_tune-{__version__}.dist-info/METADATA"))
    assert (about["Version"], about["License-Expression"], about["Author"]) == (
        __version__,
        "Apache-2.0",
        "dist_tune contributors",
    )
    assert about["Keywords"]
    page = about.get_payload()
    assert isinstance(page, str)
    assert page.strip().startswith("#")
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    assert "scale_kernel[lambda config: " in page  # code is no link
    assert [
        target
        for target in re.findall(r"\]\(([^)]*)\)", prose)
        if not target.startswith(("https:", "http:", "#"))
    ] == []


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (
            "see [the docs](docs/a.md#b) and [x](https://x.org/a.md)",
            "see the docs and [x](https://x.org/a.md)",
        ),
        ("[here](#measured) ![plot](docs/images/a.png)!", "[here](#measured) !"),
        ("![badge](https://x.org/a.svg)", "![badge](https://x.org/a.svg)"),
        (
            '<img alt="a" src="docs/a.png"> <img src="https://x.org/a.png">',
            ' <img src="https://x.org/a.png">',
        ),
        ("a[0](1)", "a0"),
    ],
)
def test_relative_links_become_their_text(text: str, left: str):
    assert without_paths(text) == left


def test_a_program_that_uses_the_wheel_is_type_checked(python: Path, tmp_path: Path):
    """Line by line, by mypy --strict, which reads an installed package's types only where py.typed
    says so, beside a short torch.

    Closures with their arguments, tuned functions by what they return, and methods of both.
    """
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.pyi").write_text(TORCH)
    (tmp_path / "mypy.ini").write_text(SKIPPED)
    options = [
        "--strict",
        "--no-error-summary",
        "--config-file",
        "mypy.ini",
        "--python-executable",
        str(python),
    ]
    done = run([sys.executable, "-m", "mypy", *options, "program.py"], tmp_path)
    lines = PROGRAM.splitlines()
    found = {
        lines[int(number) - 1]
        for number in re.findall(r"^program\.py:(\d+): error", done.stdout, re.MULTILINE)
    }
    assert found == {line for line in lines if line.endswith("# wrong")}, done.stdout + done.stderr
