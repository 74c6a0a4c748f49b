"""The state that all Comms of one process group share: the log of operations, and a transport for each type of device.

Operations never use the user's own Gloo group: another thread may use it at the same time (torch's asynchronous
checkpoints do), and two threads on one Gloo group end the process. Ranks of one host need no Gloo group; ranks on
several hosts get a private one.
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
from zero.comm.order import Order
from zero.comm.process_group import Gloo, Overlapping
from zero.comm.rendezvous import rendezvous
from zero.comm.settings import host_memory
from zero.comm.transport import Transport
from zero.comm.watchdog import Watchdog

_CPU = torch.device("cpu")

_TIMEOUT = timedelta(minutes=30)
"""The timeout of transfers on the CPU if the group has no backend for the CPU: torch's own default."""


class Link:
    """The order and the transports of one process group, or (None) of this process alone. The link does not keep the
    group alive, and ends with it."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        self.order = Order(self.rank, self.world)
        self._group: Any = None if group is None else proxy(group)
        self._store = None if group is None else store_of(group)
        host_memory()  # raises here for an unknown setting, where no other rank waits for this one yet
        self._transports: dict[str, Transport] = {}

    def transport(self, device: torch.device = _CPU) -> Transport:
        """Returns the transport for a type of device. Collective the first time for each type."""
        if device.type not in self._transports:
            self._transports[device.type] = self._choose(device)
        return self._transports[device.type]

    def without_backend(self, devices: Iterable[torch.device]) -> str | None:
        """Returns the first of these types of device for which the group has no backend, if there is one."""
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
            arguments = self.order, self._group, self.rank, self.world
            if device.type == "cpu":  # this backend can compare operations, too
                watchdog = self._watchdog(backend)
                return Overlapping(*arguments, watchdog, checks=Gloo(*arguments, watchdog), name=backend)
            return self._device_transport(device, backend, self.transport())
        timeout = _TIMEOUT if backend is None else timeout_of(self._group, device)
        with self.order.transfer(None, None):
            return self._cpu_transport(timeout)

    def _device_transport(self, device: torch.device, backend: str, checks: Transport) -> Transport:
        """Collective. Returns a transport for an accelerator, with a communicator of its own for reductions."""
        assert self._store is not None
        nonce = checks.exchange(os.urandom(16))[0].hex()  # the store may have keys of an earlier group of the same name
        store = dist.PrefixStore(f"zero/{nonce}", self._store)
        group, reduces_by = self._group, another_like(self._group, device, store)

        def abort_both() -> None:
            for communicator in (group, reduces_by):
                with suppress(ReferenceError):  # the user has dropped the group
                    if communicator is not None:
                        abort(communicator, device)

        arguments = self.order, group, self.rank, self.world
        return Overlapping(*arguments, None, checks=checks, name=backend, reduces_by=reduces_by, abort=abort_both)

    def _watchdog(self, backend: str) -> Watchdog | None:
        """Collective. Returns a watchdog; None for torch's fake backend, whose store keeps no values."""
        if self._store is None or backend == "fake":
            return None
        store = dist.PrefixStore("zero", self._store)
        _, nonce = rendezvous(store, self.rank, self.world, _TIMEOUT, how="off")
        return Watchdog(self.order, dist.PrefixStore(nonce, store), self.rank, self.world)

    def _cpu_transport(self, timeout: timedelta) -> Transport:
        """Collective. Returns HostMemory if ranks can read one another's memory, else Gloo on a group of its own."""
        assert self._store is not None
        store = dist.PrefixStore("zero", self._store)
        peers, nonce = rendezvous(store, self.rank, self.world, timeout, how=host_memory())
        if peers is not None:
            return HostMemory(self.order, peers, self.rank, self.world)
        # Not torch.distributed.new_group(): it is collective over all ranks of the job, or (use_local_synchronization)
        # waits for ever if ranks are in different numbers of groups (torch 2.13).
        own = dist.PrefixStore(nonce, store)
        gloo = dist.ProcessGroupGloo(own, self.rank, self.world, timeout)
        return Gloo(self.order, gloo, self.rank, self.world, Watchdog(self.order, own, self.rank, self.world))


_links: WeakKeyDictionary[dist.ProcessGroup, Link] = WeakKeyDictionary()


def link_of(group: dist.ProcessGroup) -> Link:
    """Returns the link of a process group."""
    if group not in _links:
        _links[group] = Link(group)
    return _links[group]


def orders_groups() -> bool:
    """Whether torch makes groups whose ranks are not sorted: torch 2.11 does not."""
    return "sort_ranks" in inspect.signature(dist.new_group).parameters


def group_in_order(ranks: list[int]) -> dist.ProcessGroup:
    """Collective over all ranks of the job. Returns a group, with the job's backend, of these ranks in this order.

    Raises ValueError if this version of torch always sorts the ranks of a group.
    """
    if not orders_groups():
        raise ValueError(
            f"torch {torch.__version__} sorts the ranks of every group, but this needs another order. Take a newer one."
        )
    group: dist.ProcessGroup = dist.new_group(ranks, sort_ranks=False)
    return group
