"""Network namespaces for ranks of one machine, as if each were a host whose link to a switch has a limited bandwidth.

Needs Linux, iproute2 and the permission to make namespaces (root). Ranks apart read nothing from one another's memory.
"""

import ctypes
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

INTERFACE = "veth-bench"
ADDRESS = "10.213.8.{}"
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000


@contextmanager
def joined(count: int, link: str) -> Iterator[list[str]]:
    """The names of so many namespaces. link: the rate and perhaps the delay of what each sends, as tc(8) writes them:
    "1gbit" or "100mbit,5ms"."""
    rate, _, delay = link.partition(",")
    shaping = f"netem rate {rate} delay {delay}" if delay else f"tbf rate {rate} burst 256kb latency 400ms"
    switch = f"bench-{os.getpid()}"
    names = [f"{switch}-{number}" for number in range(count)]
    made: list[str] = []
    try:
        for name in (switch, *names):
            _run(f"ip netns add {name}")
            made.append(name)
            _run(f"ip -n {name} link set lo up")
        _run(f"ip -n {switch} link add switch type bridge")
        _run(f"ip -n {switch} link set switch up")
        for number, name in enumerate(names):
            port = f"port{number}"
            _run(f"ip link add {INTERFACE} netns {name} type veth peer name {port} netns {switch}")
            _run(f"ip -n {switch} link set {port} master switch up")
            _run(f"ip -n {name} address add {ADDRESS.format(number + 1)}/24 dev {INTERFACE}")
            _run(f"ip -n {name} link set {INTERFACE} up")
            _run(f"ip netns exec {name} tc qdisc add dev {INTERFACE} root {shaping}")
        yield names
    finally:
        for name in made:
            _run(f"ip netns delete {name}")


def enter(namespace: str) -> None:
    """Before other threads start. The host is then called by its address, where Gloo and zero look for themselves."""
    os.environ["ZERO_HOST_MEMORY"] = "0"
    libc = ctypes.CDLL(None, use_errno=True)  # Python has os.setns from 3.12 on
    with open(f"/var/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), f"this user may not enter the network namespace {namespace}")
    number = int(namespace.rpartition("-")[2])
    socket.sethostname(ADDRESS.format(number + 1))


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"no link between network namespaces: `{command}` said {done.stderr.strip()!r}")
