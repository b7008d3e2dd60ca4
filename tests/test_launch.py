"""launch/launch.sh: what it makes of the machine, the environment and its options."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from dist_tune.cli.main import main

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]

# Stands in for the python of .venv: tells the number of GPUs, and instead of starting torchrun shows how it was called.
STUB = f"""#!{sys.executable}
import json, os, sys
if sys.argv[1] == "-c" and "device_count" in sys.argv[2]:
    print(os.environ["N_GPUS"])
else:
    print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames node[07-09]" ] && printf 'node07\\nnode08\\nnode09\\n'
"""
SLURM = "SLURM_NNODES=3 SLURM_NODEID=1 SLURM_JOB_NODELIST=node[07-09] SLURM_JOB_ID=4012345"


class Started(NamedTuple):
    arguments: list[str]
    environment: dict[str, str]

    @property
    def options(self) -> list[str]:
        """What stands before the script, less the two words that name torchrun."""
        assert self.arguments[:2] == ["-m", "torch.distributed.run"]
        options = self.arguments[2 : self.arguments.index("job.py")]
        assert options[-1] == "--"
        return options[:-1]

    @property
    def script(self) -> list[str]:
        return self.arguments[self.arguments.index("job.py") :]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the real launch.sh and a stubbed .venv."""
    for name, text in {
        "launch/launch.sh": (ROOT / "launch/launch.sh").read_text(),
        ".venv/bin/python": STUB,
        "bin/scontrol": SCONTROL,
        "job.py": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def call(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    base = {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", "N_GPUS": "0"}
    command = [str(checkout / "launch/launch.sh"), *arguments]
    return subprocess.run(command, cwd=checkout, env=base | environment, capture_output=True, text=True, timeout=30)


def start(checkout: Path, *arguments: str, **environment: str) -> Started:
    done = call(checkout, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return Started(*json.loads(done.stdout))


def test_without_gpus_two_ranks_interpret(checkout: Path):
    """Two CPU ranks with one thread each, the checkout importable, multicast off."""
    started = start(checkout, "job.py")
    assert started.options == ["--nnodes=1", "--nproc-per-node=2", "--standalone"]
    expected = {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(checkout),
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
    assert {name: started.environment.get(name) for name in expected} == expected


ONE = "--nnodes=1 --nproc-per-node=2 --standalone"
TWO = "--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d"


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        ("", "N_GPUS=4", "--nnodes=1 --nproc-per-node=4 --standalone"),
        # Each spelling of an option overrides, and other options of torchrun pass through.
        *(
            (f"{option} --monitor_interval 2", "N_GPUS=8", "--nnodes=1 --nproc-per-node=3 --standalone --monitor_interval 2")
            for option in ("--nproc_per_node=3", "--nproc_per_node 3", "--nproc-per-node=3", "--nproc-per-node 3")
        ),
        (
            "",
            "NNODES=2 NODE_RANK=0 MASTER_ADDR=alpha MASTER_PORT=1234",
            f"{TWO} --rdzv-endpoint=alpha:1234 --rdzv-id=dist_tune --rdzv-conf=is_host=1",
        ),
        # Options beat the environment; a rank above 0 does not host the rendezvous.
        (
            "--nnodes 2 --node_rank=1 --master_addr beta --master_port=4321",
            "NNODES=5 NODE_RANK=0 MASTER_ADDR=alpha MASTER_PORT=1234",
            f"{TWO} --rdzv-endpoint=beta:4321 --rdzv-id=dist_tune --rdzv-conf=is_host=0",
        ),
        # Slurm needs no options: the first host of the job hosts the rendezvous, at a port that follows from the job.
        (
            "",
            f"N_GPUS=8 {SLURM}",
            "--nnodes=3 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=node07:22345 --rdzv-id=4012345 --rdzv-conf=is_host=0",
        ),
        ("--nnodes=1", SLURM, ONE),
        # A rendezvous of one's own is left alone.
        ("--nnodes=2 --rdzv-endpoint gamma:99", "MASTER_ADDR=alpha", f"{TWO} --node-rank=0 --rdzv-endpoint gamma:99"),
    ],
)
def test_options_and_environment_become_options_of_torchrun(checkout: Path, words: str, environment: str, expected: str):
    started = start(checkout, *words.split(), "job.py", **dict(each.split("=", 1) for each in environment.split()))
    assert (started.options, started.script) == (expected.split(), ["job.py"])
    assert ("TRITON_INTERPRET" in started.environment) == ("N_GPUS" not in environment)


def test_the_user_environment_wins(checkout: Path):
    mine = {"TRITON_INTERPRET": "", "OMP_NUM_THREADS": "3", "NCCL_NVLS_ENABLE": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "0"}
    started = start(checkout, "job.py", PYTHONPATH="/mine", **mine)
    assert {name: started.environment[name] for name in mine} == mine
    assert started.environment["PYTHONPATH"] == f"{checkout}:/mine"


def test_script_arguments_are_the_script_s(checkout: Path):
    """Spaces, empty words, a double dash and names of torchrun's options reach the script as they are; also behind a module's name."""
    words = ["--nnodes", "7", "two words", "", "--", "--standalone", "*"]
    started = start(checkout, "job.py", *words)
    assert (started.options, started.script) == (ONE.split(), ["job.py", *words])
    assert start(checkout, "-m", "package.job", "--nnodes=7").arguments[-3:] == ["-m", "package.job", "--nnodes=7"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no script"),
        (["--nnodes=2", "job.py"], "need MASTER_ADDR"),
        (["--nnodes"], "needs a value"),
        (["--nproc-per-node=2", "jop.py"], "launch.sh: jop.py: no such file\n"),  # and no traceback of torchrun for each rank
        (["--step", "a:b", "jop.py"], "launch.sh: jop.py: no such file\n"),
        (["--step"], "--step needs a value"),
        (["--step", "a.b", "job.py"], "--step wants package.module:function or package.module:Class.method, got a.b\n"),
        (["--step=a:b", "--no-python", "program"], "--step needs a program in Python, not --no-python\n"),
        (["--is-dist", "job.py"], "--is-dist is for --step\n"),
    ],
)
def test_a_call_that_cannot_work_says_why(checkout: Path, arguments: list[str], message: str):
    done = call(checkout, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


INSTALL = ["-m", "--", "dist_tune.install", "--step=a.b:C.d", "--step=e:f", "--is-dist"]


def test_steps_stand_before_the_program(checkout: Path):
    """All ranks run it by dist_tune.install, supervised or not; words of the program that look like torchrun's stay the program's."""
    steps = ["--step", "a.b:C.d", "--is-dist", "--step=e:f"]
    assert start(checkout, *steps, "--nnodes=1", "job.py", "--m", "--", "x").arguments[-10:] == [*INSTALL, "job.py", "--m", "--", "x"]
    assert start(checkout, *steps, "-m", "job", "--step=x").arguments[-9:] == [*INSTALL, "-m", "job", "--step=x"]
    supervised = start(checkout, *steps, "--supervise", "job.py", "x").arguments
    assert supervised[-8:] == ["-u", *INSTALL[:1], *INSTALL[2:], "job.py", "x"]


@pytest.mark.parametrize("words", ["--max-restarts=1", "--max_restarts 1", "--nnodes=1:2 --master-addr=alpha"])
def test_ranks_that_may_start_again_do_not_share_the_agent_s_store(checkout: Path, words: str):
    """After a death, or when a machine joins; unless the user says so."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    assert start(checkout, *words.split(), "job.py").environment[name] == "1"
    assert start(checkout, *words.split(), "job.py", **{name: "0"}).environment[name] == "0"


@pytest.mark.parametrize("words", ["", "--max-restarts=0", "--supervise --max-restarts=0"])
def test_ranks_that_start_once_share_the_agent_s_store(checkout: Path, words: str):
    """The variable is left to the user."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    started = start(checkout, *words.split(), "job.py")
    assert name not in started.environment
    assert started.arguments[:2] == ["-m", "torch.distributed.run"]
    assert start(checkout, *words.split(), "job.py", **{name: "1"}).environment[name] == "1"


JOB = """
import json, os, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist

died = Path("died")
loses_a_rank = "restart" in sys.argv and not died.exists()
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
names = ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
seen = {name: os.environ.get(name) for name in names}
with Path(f"rank-{dist.get_rank()}").open("a") as attempts:
    print(json.dumps(seen | {"total": total.item()}), file=attempts)
if loses_a_rank:
    dist.barrier()
    if dist.get_rank() == 1:
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
dist.destroy_process_group()
"""
# In each Python of the job: the agent asks for this port first.
FIRST_PORT = """
import random
shuffle = random.shuffle
def last(ports):
    shuffle(ports)
    ports.append({port})
random.shuffle = last
"""


def run(folder: Path, *words: str, n_machines: int = 1) -> list[tuple[dict[str, Any], ...]]:
    """Run the job on two ranks; what each rank saw in each attempt."""
    (folder / "job.py").write_text(JOB)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH")}
    environment |= {"PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": "", "NNODES": str(n_machines)}
    # The rendezvous of several machines is here, at a port that is bound from the start, and so on none of them.
    rendezvous = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(rendezvous.port), "NODE_RANK": "1"}
    command = [str(ROOT / "launch/launch.sh"), f"--nproc-per-node={2 // n_machines}", *words]
    machines = [subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(n_machines)]
    try:
        for machine in machines:
            errors = machine.communicate(timeout=100)[1]
            assert machine.returncode == 0, errors[-5000:]
    finally:
        for machine in machines:
            machine.terminate()
            machine.communicate()
    first, second = ((folder / f"rank-{rank}").read_text().splitlines() for rank in (0, 1))
    return [(json.loads(each), json.loads(other)) for each, other in zip(first, second, strict=True)]


def is_given_to_connections(port: int) -> bool:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return low <= port <= high


def test_two_ranks_meet_in_the_agent_s_store(tmp_path: Path):
    (ranks,) = run(tmp_path, "job.py")
    for seen in ranks:
        assert (seen["total"], seen["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]) == (2, None)


@pytest.mark.parametrize(("option", "n_machines"), [("--supervise", 1), ("--max-restarts=1", 2)])
def test_each_attempt_has_a_free_port_that_connections_are_not_given(tmp_path: Path, option: str, n_machines: int):
    """The port asked for first is another program's, which costs no attempt. Rank 1 dies in the first one."""
    with socket.create_server(("", 0)) as taken:
        (tmp_path / "sitecustomize.py").write_text(FIRST_PORT.format(port=taken.getsockname()[1]))
        attempts = run(tmp_path, option, "job.py", "restart", n_machines=n_machines)
    assert [seen["total"] for ranks in attempts for seen in ranks] == [2] * 4
    assert [seen["TORCHELASTIC_RESTART_COUNT"] for seen in attempts[0]] == ["0", "0"]
    ports = [{int(seen["MASTER_PORT"]) for seen in ranks} for ranks in attempts]
    assert [len(of_attempt) for of_attempt in ports] == [1, 1]
    assert ports[0] != ports[1]
    assert not any(map(is_given_to_connections, set.union(*ports)))


def test_a_supervised_job_is_restarted_with_a_back_off(checkout: Path):
    """Three times, by c10d, without the agent's store; each rank waits before it starts again."""
    started = start(checkout, "--supervise", "--nnodes=1", "job.py", "--supervise", "-x", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0")
    words = started.arguments
    assert words[2 : words.index("bash")] == [
        "--nnodes=1", "--nproc-per-node=2", "--standalone", "--max-restarts=3", "--no-python", "--",
    ]  # fmt: skip
    assert words[words.index("job.py") - 1 :] == ["-u", "job.py", "--supervise", "-x"]
    assert started.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    for n, expected_s in ((0, 0), (1, 1), (2, 2), (3, 4), (9, 30)):
        script = words[words.index("bash") + 2].replace("sleep", "echo")
        shown = subprocess.run(
            ["bash", "-c", script, "launch.sh", "true"],
            env={**os.environ, "TORCHELASTIC_RESTART_COUNT": str(n)}, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert int(shown or 0) == expected_s


def test_a_supervised_job_takes_the_number_of_restarts_and_modules_and_programs(checkout: Path):
    started = start(checkout, "--max-restarts=7", "--supervise", "-m", "job.py")
    options = [each for each in started.arguments if each.startswith("--max-restarts")]
    assert options == ["--max-restarts=7"]
    assert started.arguments[-3:] == ["-u", "-m", "job.py"]
    assert start(checkout, "--supervise", "--no-python", "program", "job.py").arguments[-3:] == ["launch.sh", "program", "job.py"]


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_before_the_script_is_its_own_and_behind_it_the_script_s(checkout: Path, word: str):
    """No GPU is counted for it and no rank started; all of the comment at its head, without the marks."""
    done = call(checkout, "--nnodes=2", word, "job.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert "dist-tune launch [--supervise] [torchrun options] script.py" in done.stdout
    assert "MASTER_ADDR" in done.stdout
    assert "#" not in done.stdout
    assert start(checkout, "job.py", word).script == ["job.py", word]


def installed(tmp_path: Path) -> Path:
    """The package as a wheel lays it out: the command, with the script above it and no checkout around it."""
    for name in ("__init__.py", "__main__.py", "launch.sh", "cli/__init__.py", "cli/main.py", "cli/render.py"):
        path = tmp_path / "site" / "dist_tune" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((ROOT / "dist_tune" / name).read_text())
    return tmp_path / "site"


def test_it_starts_from_an_installed_package(tmp_path: Path):
    """As ``python -m dist_tune launch``: with this Python, without a PYTHONPATH of its own, and naming itself in its messages."""
    (tmp_path / "job.py").touch()
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("class accelerator:\n    device_count = staticmethod(lambda: 3)\n")
    (tmp_path / "torch" / "distributed").mkdir()
    (tmp_path / "torch" / "distributed" / "__init__.py").write_text("")
    shown = "import json, os, sys\nprint(json.dumps([[sys.executable, *sys.argv[1:]], dict(os.environ)]))\n"
    (tmp_path / "torch" / "distributed" / "run.py").write_text(shown)
    path = f"{installed(tmp_path)}:{tmp_path}"
    command = [sys.executable, "-m", "dist_tune", "launch"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "python": "/no/python"}
    done = subprocess.run([*command, "job.py", "--", "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    words, seen = json.loads(done.stdout)
    assert words == [sys.executable, "--nnodes=1", "--nproc-per-node=3", "--standalone", "--", "job.py", "--", "--help"]
    assert seen["PYTHONPATH"] == path
    lost = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30)
    assert (lost.returncode, lost.stdout) == (2, "")
    assert lost.stderr == "dist-tune launch: no script: dist-tune launch [--supervise] [torchrun options] script.py [script arguments]\n"


def test_the_command_hands_all_words_over(monkeypatch: pytest.MonkeyPatch):
    """Also a double dash, ``-m`` and ``--help``, which a parser would keep."""
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execvp", lambda _file, words: started.append(words))
    words = ["--supervise", "-m", "job", "--", "--help", "--json", ""]
    main(["launch", *words])
    assert started[0][-len(words) :] == words
    assert [started[0][0], *started[0][3:6]] == ["bash", "dist-tune launch", sys.executable, str(ROOT / "dist_tune/launch.sh")]
