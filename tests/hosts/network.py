"""Hosts on one machine, made of Linux namespaces, and the network between them.

A host has networks, processes, a hostname, shared memory and a boot id of its own: whoever asks
where it runs, UCX for one, finds different hosts. Temporary files are in the host's shared memory,
and not in a ``/tmp`` of its own, since that would hide a checkout there. All are joined by one
switch, with a bridge for each network::

    host 0                      switch                      host 1
    eth0 10.77.0.1 ---veth--- bridge net0 ---veth--- eth0 10.77.0.2
    eth1 10.77.1.1 ---veth--- bridge net1 ---veth--- eth1 10.77.1.2

No namespace has a name, and each host ends when its first process does, which reads a pipe from
here: whatever becomes of this process, the kernel takes everything away.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

_TOOLS = ("ip", "tc", "unshare", "nsenter")
_UNSHARE = ["unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child"]
_FIRST_PROCESS = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
echo $2 >/dev/shm/boot_id
mount --bind /dev/shm/boot_id /proc/sys/kernel/random/boot_id
hostname $1
ip link set lo up
echo ready
exec cat
"""
_QDISC = ("tc", "qdisc")
_SHAPE = ("burst", "64kb", "latency", "50ms")  # of a link with a rate


def obstacle() -> str | None:
    """Return why no hosts can be made here; None if they can."""
    if sys.platform != "linux" or os.geteuid():
        return "network namespaces take root on Linux"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install iproute2 util-linux"
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun, which delayed links take"
    process = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True, check=False)
    return f"no namespaces can be made: {process.stderr.strip()}" if process.returncode else None


class Host:
    """Namespaces, alive as long as their first process is."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self._started: list[subprocess.Popen[bytes]] = []
        self._unshare = subprocess.Popen(
            [*_UNSHARE, "sh", "-c", _FIRST_PROCESS, "sh", name, str(uuid.uuid4())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        assert self._unshare.stdout is not None
        if self._unshare.stdout.readline() != "ready\n":
            raise RuntimeError(f"host {name} cannot be made")
        (first,) = psutil.Process(self._unshare.pid).children()
        self.pid = first.pid

    def address(self, network: int = 0) -> str:
        return f"10.77.{network}.{self.number + 1}"

    def command(self, *args: str) -> list[str]:
        """Return a command as it is run on this host."""
        return ["nsenter", "--target", str(self.pid), "--all", *args]

    def run(self, *args: str) -> str:
        """Run a command, and return what it prints."""
        process = subprocess.run(self.command(*args), capture_output=True, text=True, check=False)
        assert not process.returncode, f"{' '.join(args)} on {self.name}: {process.stderr}"
        return process.stdout

    def start(self, *args: str, log: Path, **environment: str) -> None:
        """Start a process that runs until it is stopped, or the host ends."""
        with open(log, "ab") as file:
            started = subprocess.Popen(
                self.command(*args),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**os.environ, "TMPDIR": "/dev/shm", **environment},
            )
        self._started.append(started)

    @property
    def pids(self) -> list[int]:
        return [started.pid for started in self._started]

    def stop(self) -> None:
        """Kill the processes that were started, and their child processes."""
        for started in self._started:
            with suppress(psutil.NoSuchProcess):
                for process in psutil.Process(started.pid).children(recursive=True):
                    process.kill()
            started.wait()
        self._started.clear()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Move this thread, and threads that it starts, to this host's networks."""
        old_network = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        network = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)
        try:
            _enter(network)
            yield
        finally:
            _enter(old_network)
            os.close(old_network)
            os.close(network)

    def sent_bytes(self, network: int = 0) -> int:
        return int(self.run("cat", f"/sys/class/net/eth{network}/statistics/tx_bytes"))

    def close(self) -> None:
        """End all its processes, and with them its namespaces."""
        assert self._unshare.stdin is not None
        assert self._unshare.stdout is not None
        self._unshare.stdin.close()
        self._unshare.wait()
        self.stop()
        self._unshare.stdout.close()


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "setns")


class Network:
    """Some hosts, joined by networks. A context manager."""

    def __init__(self, n_hosts: int, n_networks: int = 2) -> None:
        self._networks = n_networks
        self._ending = ExitStack()
        with ExitStack() as undo:
            self._switch = undo.enter_context(closing(Host("switch", n_hosts)))
            self.hosts = [undo.enter_context(closing(Host(f"host{n}", n))) for n in range(n_hosts)]
            self._join()
            self._ending = undo.pop_all()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._ending.close()

    def _join(self) -> None:
        for network in range(self._networks):
            self._switch.run("ip", "link", "add", f"net{network}", "type", "bridge")
            self._switch.run("ip", "link", "set", f"net{network}", "up")
            for host in self.hosts:
                port, device = _port(host, network), f"eth{network}"
                self._plug(host, port, device)
                self._switch.run("ip", "link", "set", port, "master", f"net{network}", "up")
                host.run("ip", "addr", "add", f"{host.address(network)}/24", "dev", device)
                host.run("ip", "link", "set", device, "up")
        for host in self.hosts:  # Dask resolves it to find out its address
            host.run("ip", "route", "add", "default", "dev", "eth0")

    def _plug(self, host: Host, port: str, device: str) -> None:
        # The host's number is that of its process where `ip` runs: here, but for the network.
        cable = ["ip", "link", "add", port, "type", "veth", "peer", "name", device]
        at_switch = ["nsenter", "--target", str(self._switch.pid), "--net"]
        subprocess.run([*at_switch, *cable, "netns", str(host.pid)], check=True)

    # --- faults of links ---

    def cut(self, host: Host) -> AbstractContextManager[None]:
        """Cut a host's links."""
        return self._set([host], ["down"], ["up"])

    def parted(self, hosts: Sequence[Host]) -> AbstractContextManager[None]:
        """Block traffic between these hosts, but not with others."""
        isolated = ["type", "bridge_slave", "isolated"]
        return self._set(hosts, [*isolated, "on"], [*isolated, "off"])

    @contextmanager
    def _set(self, hosts: Sequence[Host], state: list[str], end: list[str]) -> Iterator[None]:
        """Have the links of hosts in some state, and in another one at the end."""
        with ExitStack() as undo:
            for port in [_port(host, n) for host in hosts for n in range(self._networks)]:
                undo.callback(self._switch.run, "ip", "link", "set", "dev", port, *end)
                self._switch.run("ip", "link", "set", "dev", port, *state)
            yield

    @contextmanager
    def limited(self, hosts: Sequence[Host], mbit: float) -> Iterator[None]:
        """Limit each link of these hosts in both directions, in 1e6 bits a second."""
        ends = [
            end
            for host in hosts
            for network in range(self._networks)
            for end in ((host, f"eth{network}"), (self._switch, _port(host, network)))
        ]
        for host, device in ends:
            host.run(
                *_QDISC, "replace", "dev", device, "root", "tbf", "rate", f"{mbit}mbit", *_SHAPE
            )
        try:
            yield
        finally:
            for host, device in ends:
                host.run(*_QDISC, "del", "dev", device, "root")

    @contextmanager
    def delayed(self, host: Host, delay_s: float, network: int = 0) -> Iterator[None]:
        """Delay everything that a host sends or receives.

        Not every kernel has netem. A process takes each packet from one bridge to another instead.
        """
        port, bridge = _port(host, network), f"net{network}"
        relay = subprocess.Popen(
            [
                *["nsenter", "--target", str(self._switch.pid), "--net"],
                *[sys.executable, str(Path(__file__).with_name("relay.py"))],
                *["near", "far", str(delay_s)],
            ],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        with relay, ExitStack() as undo:
            undo.callback(relay.kill)
            assert relay.stdout is not None
            assert relay.stdout.readline() == b"ready\n"
            self._switch.run("ip", "link", "add", "slow", "type", "bridge")
            undo.callback(self._switch.run, "ip", "link", "del", "slow")
            undo.callback(self._switch.run, "ip", "link", "set", port, "master", bridge)
            for device, master in ("near", "slow"), ("far", bridge), (port, "slow"):
                self._switch.run("ip", "link", "set", device, "master", master, "up")
            self._switch.run("ip", "link", "set", "slow", "up")
            yield


def _port(host: Host, network: int) -> str:
    """Return the name of the switch's end of a host's link."""
    return f"port{host.number}n{network}"
