"""What a collective sends, and how long it takes, among GPUs of several hosts, by its kind; on the wires alone: without
the time of a launch, of hops and of handshakes. Also for benchmarks/wires.py: nothing is imported.

S bytes are of all ranks together: of what an all-gather brings, of what any other collective is given. W ranks are H
hosts of L GPUs; a host has N NICs, which it uses alike.

                a rank sends within its host    a host sends, over its N NICs
    gather      S (W - 1) / W                   S (W - 1) / W       a ring enters and leaves each host once
    reduce      as gather                       as gather           a reduce-scatter
    all-reduce  twice that                      twice that
    broadcast   S                               S                   a chain through all ranks, in pieces
    all-to-all  S (L - 1) / W                   L S (H - 1) / H     each rank by itself to each of the others

Both go at once, and the slower one counts. (A. Patarasuk, X. Yuan, Bandwidth optimal all-reduce algorithms, 2009.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

RINGS = {"gather": 1, "reduce": 1, "all-reduce": 2}
"""How often each byte goes around."""


@dataclass(frozen=True)
class Network:
    """hosts: of gpus_a_host ranks each, in the order of ranks. nics_a_host: a fraction of them, where other groups of
    the hosts' ranks send at the same time. Bandwidths: bytes a second that a NIC, and a GPU within its host, sends."""

    hosts: int
    gpus_a_host: int
    nics_a_host: float
    nic_bandwidth: float
    link_bandwidth: float

    @property
    def ranks(self) -> int:
        return self.hosts * self.gpus_a_host

    def nic_bytes(self, kind: str, nbytes: float) -> float:
        if self.hosts == 1:
            return 0.0
        if kind == "all-to-all":
            sent = self.gpus_a_host * nbytes * (self.hosts - 1) / self.hosts
        else:
            sent = self._in_turn(kind, nbytes)
        return sent / self.nics_a_host

    def link_bytes(self, kind: str, nbytes: float) -> float:
        """Bytes that a rank sends to others of its host."""
        if self.gpus_a_host == 1:
            return 0.0
        return nbytes * (self.gpus_a_host - 1) / self.ranks if kind == "all-to-all" else self._in_turn(kind, nbytes)

    def _in_turn(self, kind: str, nbytes: float) -> float:
        return nbytes if kind == "broadcast" else RINGS[kind] * nbytes * (self.ranks - 1) / self.ranks

    def seconds(self, kind: str, nbytes: float) -> float:
        between, within = self.nic_bytes(kind, nbytes), self.link_bytes(kind, nbytes)
        return max(between / self.nic_bandwidth, within / self.link_bandwidth)

    def within_host(self) -> Network:
        return replace(self, hosts=1)

    def across_hosts(self) -> Network:
        """Of one rank a host, beside which the other ranks of the hosts do the same."""
        return replace(self, gpus_a_host=1, nics_a_host=self.nics_a_host / self.gpus_a_host)


class Wire:
    """What several communicators of a rank have in common: what is launched first goes first, and what is launched
    later goes in the time that is left."""

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []

    def send(self, ready: float, seconds: float) -> float:
        """Returns when what takes so many seconds by itself, and may begin when it is ready, has been sent."""
        end = ready
        for begun, ended in self._busy:
            if ended > end:
                free = max(begun - end, 0.0)
                if seconds <= free:
                    break
                seconds, end = seconds - free, ended
        end += seconds
        self._busy = sorted([*self._busy, (ready, end)])
        return end
