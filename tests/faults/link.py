"""Two hosts on one machine: network namespaces with a wire between them that can delay packets, and
lose them.

Linux, as root. The wire is made of two TUN devices and a thread, because not every kernel has the
netem queue.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x1, 0x1000, 0x40000000
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _IFF_UP = 0x8914, 0x8916, 0x891C, 0x1
HOSTS = ("a", "b")


def address(host: str) -> str:
    """Of a host, on the wire."""
    return f"10.77.0.{1 + HOSTS.index(host)}"


def lacks() -> str:
    """The reason why no hosts can be made here; empty if they can."""
    if missing := [each for each in ("nsenter", "unshare") if shutil.which(each) is None]:
        return f"no {' and no '.join(missing)} of util-linux"
    try:
        with Link():
            return ""
    except OSError as error:
        return f"no network namespaces, or no TUN devices: {error}"


class Link:
    """The hosts and their wire, while the context lasts."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        """Of each packet, one way."""
        self.is_cut = False
        """True: packets get lost, and nothing is told of it."""
        self._spaces: list[int] = []
        """Of each host, a file that keeps its namespace."""
        self._devices: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> Link:
        for host in HOSTS:
            self._make(host)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        for file in (*self._devices, *self._spaces):
            os.close(file)

    def start(
        self, host: str, command: Sequence[str], env: dict[str, str], *, ahead_s: int = 0
    ) -> subprocess.Popen[bytes]:
        """A program on a host, which sees no processes of the other one.

        Its clocks other than the wall's are ahead by so many seconds.
        """
        clocks = ["--time", f"--monotonic={ahead_s}", f"--boottime={ahead_s}"] if ahead_s else []
        apart = ["unshare", "--uts", "--pid", "--mount-proc", *clocks, "--fork"]
        named = ["sh", "-c", 'hostname "$0"; exec "$@"', f"host-{host}", *command]
        entered = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self._spaces[HOSTS.index(host)]}"]
        return subprocess.Popen([*entered, *apart, *named], env=env, start_new_session=True)

    def _make(self, host: str) -> None:
        """A host's namespace with its end of the wire.

        Raises:
            OSError: it cannot be made here.
        """
        with ThreadPoolExecutor(1) as opener:  # a namespace is entered by one thread
            opener.submit(self._enter_new, host).result()

    def _enter_new(self, host: str) -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        self._spaces.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
        self._devices.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
        fcntl.ioctl(
            self._devices[-1], _TUNSETIFF, struct.pack("16sH14x", b"wire", _IFF_TUN | _IFF_NO_PI)
        )
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            for what, text in ((_SIOCSIFADDR, address(host)), (_SIOCSIFNETMASK, "255.255.255.0")):
                fcntl.ioctl(
                    asked,
                    what,
                    struct.pack("16sHH4s8x", b"wire", socket.AF_INET, 0, socket.inet_aton(text)),
                )
            for name in (b"wire", b"lo"):
                fcntl.ioctl(asked, _SIOCSIFFLAGS, struct.pack("16sH14x", name, _IFF_UP))

    def _carry(self) -> None:
        first, second = self._devices
        under_way: deque[tuple[float, int, bytes]] = deque()
        while not self._ended.is_set():
            wait_s = min(0.05, max(0.0, under_way[0][0] - time.monotonic())) if under_way else 0.05
            for device in select.select(self._devices, [], [], wait_s)[0]:
                packet = os.read(device, 65536)
                if not self.is_cut:
                    under_way.append(
                        (
                            time.monotonic() + self.delay_s,
                            second if device == first else first,
                            packet,
                        )
                    )
            while under_way and under_way[0][0] <= time.monotonic():
                _, device, packet = under_way.popleft()
                if not self.is_cut:
                    os.write(device, packet)
