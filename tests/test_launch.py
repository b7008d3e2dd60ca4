"""launch/launch.sh: what it makes of the machine, the environment and its options."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from dist_tune.cli.main import main
from tests.worlds import further

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]

# Stands in for the python of .venv: tells the number of GPUs, and instead of starting torchrun
# shows how it was called, but for real jobs.
STUB = f"""#!{sys.executable}
import json, os, sys
if sys.argv[1] == "-c" and "device_count" in sys.argv[2]:
    print(os.environ["N_GPUS"])
elif "IS_REAL" in os.environ:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
else:
    print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""
SHARES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
PACKAGED = (
    "__init__.py",
    "__main__.py",
    "launch.sh",
    "cli/__init__.py",
    "cli/main.py",
    "cli/render.py",
)
"""Of a wheel, in which no checkout is around the script."""
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
    return subprocess.run(
        command, cwd=checkout, env=base | environment, capture_output=True, text=True, timeout=100
    )


def start(checkout: Path, *arguments: str, **environment: str) -> Started:
    done = call(checkout, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return Started(*json.loads(done.stdout))


def test_without_gpus_two_ranks_interpret(checkout: Path):
    """Two CPU ranks with one thread each, the checkout importable, multicast off; what the user has
    set stays.
    """
    started = start(checkout, "job.py")
    assert started.options == ["--nnodes=1", "--nproc-per-node=2", "--standalone"]
    names = {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
    assert started.environment.items() >= {**names, "PYTHONPATH": str(checkout)}.items()
    mine = dict.fromkeys(names, "3") | {"TRITON_INTERPRET": ""}
    assert (
        start(checkout, "job.py", PYTHONPATH="/mine", **mine).environment.items()
        >= {
            **mine,
            "PYTHONPATH": f"{checkout}:/mine",
        }.items()
    )


ONE = "--nnodes=1 --nproc-per-node=2 --standalone"
TWO = "--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d"


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        ("", "N_GPUS=4", "--nnodes=1 --nproc-per-node=4 --standalone"),
        # Each spelling of an option overrides, and other options of torchrun pass through.
        *(
            (
                f"{option} --monitor_interval 2",
                "N_GPUS=8",
                "--nnodes=1 --nproc-per-node=3 --standalone --monitor_interval 2",
            )
            for option in (
                "--nproc_per_node=3",
                "--nproc_per_node 3",
                "--nproc-per-node=3",
                "--nproc-per-node 3",
            )
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
        # Slurm needs no options: the first host of the job hosts the rendezvous, at a port that
        # follows from the job.
        (
            "",
            f"N_GPUS=8 {SLURM}",
            (
                "--nnodes=3 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=node07:22345"
                " --rdzv-id=4012345 --rdzv-conf=is_host=0"
            ),
        ),
        ("--nnodes=1", SLURM, ONE),
        # A rendezvous of one's own is left alone.
        (
            "--nnodes=2 --rdzv-endpoint gamma:99",
            "MASTER_ADDR=alpha",
            f"{TWO} --node-rank=0 --rdzv-endpoint gamma:99",
        ),
    ],
)
def test_options_and_environment_become_options_of_torchrun(
    checkout: Path, words: str, environment: str, expected: str
):
    started = start(
        checkout,
        *words.split(),
        "job.py",
        **dict(each.split("=", 1) for each in environment.split()),
    )
    assert (started.options, started.script) == (expected.split(), ["job.py"])
    assert ("TRITON_INTERPRET" in started.environment) == ("N_GPUS" not in environment)


def test_script_arguments_are_the_script_s(checkout: Path):
    """Spaces, empty words, a double dash and names of torchrun's options reach the script as they
    are; also behind a module's name.
    """
    words = ["--nnodes", "7", "two words", "", "--", "--standalone", "*"]
    started = start(checkout, "job.py", *words)
    assert (started.options, started.script) == (ONE.split(), ["job.py", *words])
    assert start(checkout, "-m", "package.job", "--nnodes=7").arguments[-3:] == [
        "-m",
        "package.job",
        "--nnodes=7",
    ]


WRONG = """
                                        no script
--nnodes=2 job.py                       need MASTER_ADDR
--nnodes                                needs a value
--nproc-per-node=2 jop.py               launch.sh: jop.py: no such file
--step a:b jop.py                       launch.sh: jop.py: no such file
--step                                  --step needs a value
--step a.b job.py                       --step wants package.module:function or package.module:Class.method, got a.b
--step=a:b --no-python program          --step needs a program in Python, not --no-python
--is-dist job.py                        --is-dist is for --step
"""  # noqa: E501


@pytest.mark.parametrize("row", WRONG.strip("\n").splitlines())
def test_a_call_that_cannot_work_says_why(checkout: Path, row: str):
    """In one line, and without a traceback of torchrun for each rank."""
    done = call(checkout, *row[:40].split())
    assert (done.returncode, row[40:] in done.stderr, done.stderr.count("\n")) == (
        2,
        True,
        1,
    ), done.stderr


INSTALL = ["-m", "--", "dist_tune.install", "--step=a.b:C.d", "--step=e:f", "--is-dist"]


def test_steps_stand_before_the_program(checkout: Path):
    """All ranks run it by dist_tune.install, supervised or not; words of the program that look like
    torchrun's stay the program's.
    """
    steps = ["--step", "a.b:C.d", "--is-dist", "--step=e:f"]
    assert start(checkout, *steps, "--nnodes=1", "job.py", "--m", "--", "x").arguments[-10:] == [
        *INSTALL,
        "job.py",
        "--m",
        "--",
        "x",
    ]
    assert start(checkout, *steps, "-m", "job", "--step=x").arguments[-9:] == [
        *INSTALL,
        "-m",
        "job",
        "--step=x",
    ]
    supervised = start(checkout, *steps, "--supervise", "job.py", "x").arguments
    assert supervised[-8:] == ["-u", *INSTALL[:1], *INSTALL[2:], "job.py", "x"]


# The store's variable as the user has it and as ranks find it.
STORES = """
- 1   --max-restarts=1
0 0   --max_restarts 1
- 1   --nnodes=1:2 --master-addr=alpha
0 1   --supervise
- -
1 1   --max-restarts=0
- -   --supervise --max-restarts=0
"""


@pytest.mark.parametrize("row", STORES.strip().splitlines())
def test_ranks_share_the_agent_s_store_unless_they_may_start_again(checkout: Path, row: str):
    """After a death, or when a machine joins; the user's variable stays, but under supervision."""
    mine, found, *words = row.split()
    started = start(checkout, *words, "job.py", **({} if mine == "-" else {SHARES: mine}))
    assert started.environment.get(SHARES, "-") == found
    assert (started.arguments[:2] == ["-m", "torch.distributed.run"]) == (
        not words or words[-1] == "--max-restarts=0"
    )


# A job of two ranks, of which the second dies in the first attempt: rank 0 hosts their port, which
# the agent must have left free.
JOB = """
import json, os, signal, socket, time
from pathlib import Path

rank, port, died = os.environ["RANK"], int(os.environ["MASTER_PORT"]), Path("died")
is_first = not died.exists()
host = socket.create_server(("", port)) if rank == "0" else None
with Path(f"rank-{rank}").open("a") as attempts:
    print(json.dumps([port, os.environ["TORCHELASTIC_RESTART_COUNT"]]), file=attempts)
if host:
    host.accept()
while not host:
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], port)).close()
        break
    except OSError:
        time.sleep(0.05)
if is_first and rank == "1":
    died.touch()
    os.kill(os.getpid(), signal.SIGKILL)
elif is_first:
    signal.pause()
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


def is_given_to_connections(port: int) -> bool:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return low <= port <= high


@pytest.mark.parametrize(
    ("option", "n_machines"), [("--supervise", 1), further("--max-restarts=1", 2)]
)
def test_each_attempt_has_a_free_port_that_connections_are_not_given(
    checkout: Path, option: str, n_machines: int
):
    """The port asked for first is another program's, which costs no attempt.

    Rank 1 dies in the first one.
    """
    (checkout / "job.py").write_text(JOB)
    # The rendezvous of several machines is here, at a port that is bound from the start, and so on
    # none of them.
    rendezvous = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    env = {
        "PATH": os.environ["PATH"],
        "N_GPUS": "0",
        "IS_REAL": "1",
        "PYTHONPATH": f"{checkout}:{os.environ.get('PYTHONPATH', '')}",
    }
    env |= {
        "NNODES": str(n_machines),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(rendezvous.port),
        "NODE_RANK": "1",
    }
    command = [
        str(checkout / "launch/launch.sh"),
        f"--nproc-per-node={2 // n_machines}",
        option,
        "job.py",
    ]
    with socket.create_server(("", 0)) as taken:
        (checkout / "sitecustomize.py").write_text(FIRST_PORT.format(port=taken.getsockname()[1]))
        machines = [
            subprocess.Popen(command, cwd=checkout, env=env, stderr=subprocess.PIPE, text=True)
            for _ in range(n_machines)
        ]
        for machine in machines:
            errors = machine.communicate(timeout=110)[1]
            assert machine.returncode == 0, errors[-5000:]
    first, second = (
        [json.loads(line) for line in (checkout / f"rank-{rank}").read_text().splitlines()]
        for rank in (0, 1)
    )
    assert first[0] == second[0] == [first[0][0], "0"]
    ports = [port for port, _ in first]
    assert (ports, len({*ports}), any(map(is_given_to_connections, ports))) == (
        [port for port, _ in second],
        2,
        False,
    )


def test_a_supervised_job_is_restarted_with_a_back_off(checkout: Path):
    """Three times, or as often as the user says; each rank waits before it starts again.

    Also modules and other programs.
    """
    words = start(checkout, "--supervise", "--nnodes=1", "job.py", "--supervise", "-x").arguments
    shown = words[2 : words.index("bash")]
    assert shown == [
        "--nnodes=1",
        "--nproc-per-node=2",
        "--standalone",
        "--max-restarts=3",
        "--no-python",
        "--",
    ]
    assert words[words.index("job.py") - 1 :] == ["-u", "job.py", "--supervise", "-x"]
    command = [
        "bash",
        "-c",
        words[words.index("bash") + 2].replace("sleep", "echo"),
        "launch.sh",
        "true",
    ]
    for n, expected in ((0, ""), (1, "1\n"), (3, "4\n"), (9, "30\n")):
        env = {**os.environ, "TORCHELASTIC_RESTART_COUNT": str(n)}
        assert (
            subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
            == expected
        )
    often = start(checkout, "--max-restarts=7", "--supervise", "-m", "job.py").arguments
    assert [each for each in often if each.startswith("--max-restarts")] == ["--max-restarts=7"]
    assert often[-3:] == ["-u", "-m", "job.py"]
    assert start(checkout, "--supervise", "--no-python", "program", "job.py").arguments[-3:] == [
        "launch.sh",
        "program",
        "job.py",
    ]


def test_help_before_the_script_is_its_own_and_behind_it_the_script_s(checkout: Path):
    """All of the comment at its head, without the marks."""
    done = call(checkout, "--nnodes=2", "--help", "job.py")
    assert (done.returncode, done.stderr, "#" in done.stdout) == (0, "", False)
    assert "dist-tune launch [--supervise] [torchrun options] script.py" in done.stdout
    assert start(checkout, "job.py", "--help").script == ["job.py", "--help"]


def test_it_starts_from_an_installed_package(tmp_path: Path):
    """As ``python -m dist_tune launch``: with this Python, without a PYTHONPATH of its own, and
    naming itself in its messages.
    """
    files = {f"dist_tune/{name}": (ROOT / "dist_tune" / name).read_text() for name in PACKAGED}
    shown = (
        "import json, os, sys\nprint(json.dumps([[sys.executable, *sys.argv[1:]],"
        " dict(os.environ)]))\n"
    )
    fake = {
        "__init__": "class accelerator:\n    device_count = staticmethod(lambda: 3)\n",
        "distributed/__init__": "",
        "distributed/run": shown,
    }
    for name, text in {
        **files,
        **{f"torch/{name}.py": text for name, text in fake.items()},
        "job.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path), "python": "/no/python"}
    found = []
    for words in (["job.py", "--", "--help"], []):
        command = [sys.executable, "-m", "dist_tune", "launch", *words]
        found.append(
            subprocess.run(
                command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
            )
        )
    assert found[0].returncode == 0, found[0].stderr
    words, seen = json.loads(found[0].stdout)
    assert words == [
        sys.executable,
        "--nnodes=1",
        "--nproc-per-node=3",
        "--standalone",
        "--",
        "job.py",
        "--",
        "--help",
    ]
    assert seen["PYTHONPATH"] == str(tmp_path)
    assert (found[1].returncode, found[1].stderr.partition(":")[0]) == (2, "dist-tune launch")


def test_the_command_hands_all_words_over(monkeypatch: pytest.MonkeyPatch):
    """Also a double dash, ``-m`` and ``--help``, which a parser would keep."""
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execvp", lambda _file, words: started.append(words))
    words = ["--supervise", "-m", "job", "--", "--help", "--json", ""]
    main(["launch", *words])
    assert started[0][-len(words) :] == words
    assert [started[0][0], *started[0][3:6]] == [
        "bash",
        "dist-tune launch",
        sys.executable,
        str(ROOT / "dist_tune/launch.sh"),
    ]
