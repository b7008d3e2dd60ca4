"""Two hosts on one machine: network namespaces with a wire between them that can delay packets, and lose them.

Linux, as root. The wire is made of two TUN devices and a thread, because not every kernel has the netem queue.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from pathlib import Path

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x1, 0x1000, 0x40000000
HOSTS = ("a", "b")
_links = count()


def address(host: str) -> str:
    """Of a host, on the wire."""
    return f"10.77.0.{1 + HOSTS.index(host)}"


def lacks() -> str:
    """The reason why no hosts can be made here; empty if they can."""
    name = f"dt{os.getpid()}probe"
    try:
        done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    except OSError as error:
        return f"no iproute2: {error}"
    if done.returncode:
        return f"no network namespaces: {done.stderr.strip()}"
    return "" if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "no /dev/net/tun"


class Link:
    """The hosts and their wire, while the context lasts."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        """Of each packet, one way."""
        self.is_cut = False
        """True: packets get lost, and nothing is told of it."""
        self._spaces = [f"dt{os.getpid()}-{number}{host}" for number in [next(_links)] for host in HOSTS]
        self._devices: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> Link:
        for host, space in zip(HOSTS, self._spaces, strict=True):
            _ip("netns", "add", space)
            opener = threading.Thread(target=self._open, args=(space,))  # a namespace is entered by one thread
            opener.start()
            opener.join()
            for words in ("link set lo up", f"addr add {address(host)}/24 dev wire", "link set wire up"):
                _ip("-n", space, *words.split())
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        for device in self._devices:
            os.close(device)
        for space in self._spaces:
            _ip("netns", "del", space)

    def start(self, host: str, command: Sequence[str], env: dict[str, str], *, ahead_s: int = 0) -> subprocess.Popen[bytes]:
        """A program on a host, which sees no processes of the other one. Its clocks other than the wall's are ahead by so many seconds."""
        clocks = ["--time", f"--monotonic={ahead_s}", f"--boottime={ahead_s}"] if ahead_s else []
        apart = ["unshare", "--uts", "--pid", "--mount-proc", *clocks, "--fork"]
        named = ["sh", "-c", 'hostname "$0"; exec "$@"', f"host-{host}", *command]
        return subprocess.Popen(["ip", "netns", "exec", self._spaces[HOSTS.index(host)], *apart, *named], env=env, start_new_session=True)

    def _open(self, space: str) -> None:
        with Path("/run/netns", space).open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                return
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", b"wire", _IFF_TUN | _IFF_NO_PI))
        self._devices.append(device)

    def _carry(self) -> None:
        first, second = self._devices
        under_way: deque[tuple[float, int, bytes]] = deque()
        while not self._ended.is_set():
            wait_s = min(0.05, max(0.0, under_way[0][0] - time.monotonic())) if under_way else 0.05
            for device in select.select(self._devices, [], [], wait_s)[0]:
                packet = os.read(device, 65536)
                if not self.is_cut:
                    under_way.append((time.monotonic() + self.delay_s, second if device == first else first, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, device, packet = under_way.popleft()
                if not self.is_cut:
                    os.write(device, packet)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert not done.returncode, f"ip {' '.join(words)}: {done.stderr}"
