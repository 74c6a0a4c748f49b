"""What all users of one process group share: the order of operations, and one transport for each type of device.

Operations never use the user's own Gloo group: another thread may use it at the same time (torch's asynchronous
checkpoints do), and two threads on one Gloo group end the process. Ranks of one host need none; others get a private
one.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, proxy

import torch
import torch.distributed as dist

from zero._torch import abort, another_like, backend_of, store_of, timeout_of
from zero.comm.host_memory import HostMemory
from zero.comm.local import Local
from zero.comm.meeting import meet
from zero.comm.order import Order
from zero.comm.process_group import Gloo, Overlapping
from zero.comm.settings import host_memory
from zero.comm.transport import Transport
from zero.comm.watch import Watch

_CPU = torch.device("cpu")

_TIMEOUT = timedelta(minutes=30)
"""Of what is on the CPU, where the group has no backend for it; torch's own default."""


class Link:
    """group: None for this process alone. It is not kept alive: those who use it have it, and links end with it."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        self.order = Order(self.rank, self.world)
        self._group: Any = None if group is None else proxy(group)
        self._store = None if group is None else store_of(group)
        host_memory()  # where the environment says something unknown, nobody waits for this rank yet
        self._transports: dict[str, Transport] = {}

    def transport(self, device: torch.device = _CPU) -> Transport:
        """Collective the first time for a type of device."""
        if device.type not in self._transports:
            self._transports[device.type] = self._choose(device)
        return self._transports[device.type]

    def without_backend(self, devices: Iterable[torch.device]) -> str | None:
        """The first of these types of device for which the group has no backend."""
        if self._group is None or self.world == 1:
            return None
        group = self._group
        return next((device.type for device in devices if backend_of(group, device) is None), None)

    def _choose(self, device: torch.device) -> Transport:
        if self._group is None or self.world == 1:
            return Local()
        backend = backend_of(self._group, device)
        if device.type != "cpu" or backend not in (None, "gloo"):
            assert backend is not None, f"the group has no backend for {device}"
            where = self.order, self._group, self.rank, self.world
            if device.type == "cpu":  # what sends from the CPU can compare there, too
                watch = self._watch(backend)
                return Overlapping(*where, watch, checks=Gloo(*where, watch), name=backend)
            return self._of_device(device, backend, self.transport())
        timeout = _TIMEOUT if backend is None else timeout_of(self._group, device)
        with self.order.transfer(None, None):
            return self._among_cpus(timeout)

    def _of_device(self, device: torch.device, backend: str, checks: Transport) -> Transport:
        """Collective."""
        assert self._store is not None
        nonce = checks.exchange(os.urandom(16))[0].hex()  # the store may know an earlier group of the same name
        store = dist.PrefixStore(f"zero/{nonce}", self._store)
        group, reduces_by = self._group, another_like(self._group, device, store)

        def end() -> None:
            for one in (group, reduces_by):
                with suppress(ReferenceError):  # the user has dropped the group
                    if one is not None:
                        abort(one, device)

        where = self.order, group, self.rank, self.world
        return Overlapping(*where, None, checks=checks, name=backend, reduces_by=reduces_by, abort=end)

    def _watch(self, backend: str) -> Watch | None:
        """Collective. torch's fake backend sends nothing, and its store keeps nothing."""
        if self._store is None or backend == "fake":
            return None
        store = dist.PrefixStore("zero", self._store)
        _, nonce = meet(store, self.rank, self.world, _TIMEOUT, how="off")
        return Watch(self.order, dist.PrefixStore(nonce, store), self.rank, self.world)

    def _among_cpus(self, timeout: timedelta) -> Transport:
        assert self._store is not None
        store = dist.PrefixStore("zero", self._store)
        peers, nonce = meet(store, self.rank, self.world, timeout, how=host_memory())
        if peers is not None:
            return HostMemory(self.order, peers, self.rank, self.world)
        # Not torch.distributed.new_group(): it is collective over all ranks of the job, or (use_local_synchronization)
        # waits for ever where ranks are in different numbers of groups (torch 2.13).
        own = dist.PrefixStore(nonce, store)
        gloo = dist.ProcessGroupGloo(own, self.rank, self.world, timeout)
        return Gloo(self.order, gloo, self.rank, self.world, Watch(self.order, own, self.rank, self.world))


_links: WeakKeyDictionary[dist.ProcessGroup, Link] = WeakKeyDictionary()


def link_of(group: dist.ProcessGroup) -> Link:
    if group not in _links:
        _links[group] = Link(group)
    return _links[group]


def orders_groups() -> bool:
    """Whether torch makes groups whose ranks are not sorted: torch 2.11 does not."""
    return "sort_ranks" in inspect.signature(dist.new_group).parameters


def group_in_order(ranks: list[int]) -> dist.ProcessGroup:
    """Collective over all ranks of the job. A group of these, of the backend of all, whose order is that of the list.

    Raises ValueError where torch can only sort them.
    """
    if not orders_groups():
        raise ValueError(
            f"torch {torch.__version__} makes no group whose ranks have another order. Take a newer torch."
        )
    group: dist.ProcessGroup = dist.new_group(ranks, sort_ranks=False)
    return group
