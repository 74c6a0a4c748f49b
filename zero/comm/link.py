"""The state that all Comms of one process group share: the log of operations, and a transport for each type of device.

Operations never use the user's own Gloo group: another thread may use it at the same time (torch's asynchronous
checkpoints do), and two threads on one Gloo group end the process. Ranks get a private one, or read one another's
memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, proxy, ref

import torch
import torch.distributed as dist

from zero._torch.process_groups import (
    abort,
    another_like,
    backend_of,
    driver_version,
    gloo_groups,
    shortest_timeout_of,
    store_of,
    timeout_of,
)
from zero.comm import settings
from zero.comm.host_memory import HostMemory, host_name, rendezvous
from zero.comm.oplog import Log
from zero.comm.store import StoreRendezvous
from zero.comm.transport import Gloo, Local, Overlapping, Transport
from zero.comm.watchdog import Watchdog

# The timeout of transfers on the CPU if the group has no backend for the CPU: torch's own default.
_TIMEOUT = timedelta(minutes=30)


class Link:
    """The log and the transports of one process group, or (None) of this process alone. The link does not keep the
    group alive, and ends with it. `one_host`: whether all ranks are on one, as far as they have told one another."""

    one_host = True

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        self._group: Any = None if group is None else proxy(group)
        self._store = None if group is None else store_of(group)
        self.log = Log(self.rank, self.world, () if group is None else dist.get_process_group_ranks(group))
        self._watched = False
        if self.world == 1:
            settings.check()
            self.log.each = settings.check_each()
        # Not `self`: the link is to end with its last user, and not only when garbage is collected.
        own: Any = ref(self)
        # By type of device. By that of the CPU ranks compare what they do.
        self.transports: Mapping[str, Transport] = Transports(lambda kind: own()._choose(kind))

    def without_backend(self, devices: Iterable[torch.device]) -> str | None:
        """Returns the first of these types of device for which the group has no backend, if there is one."""
        if self._group is None or self.world == 1:
            return None
        group = self._group
        return next((device.type for device in devices if backend_of(group, device) is None), None)

    def overlaps(self, device: torch.device) -> bool:
        """Whether transfers of what is on the device overlap with computing. Chooses no transport, which is
        collective."""
        if self._group is None or self.world == 1:
            return False
        return device.type != "cpu" or backend_of(self._group, device) not in (None, "gloo")

    def _choose(self, kind: str) -> Transport:
        if self._group is None or self.world == 1:
            return Local()
        device = torch.device(kind)
        backend = backend_of(self._group, device)
        if kind != "cpu":
            assert backend is not None, f"the group has no backend for {device}"
            return self._device_transport(device, backend, self.transports["cpu"])
        if backend in (None, "gloo"):
            timeout = _TIMEOUT if backend is None else timeout_of(self._group, device)
            self.log.failure.refuse_if_broken()
            try:
                return self._cpu_transport(timeout, lazy=backend is None)
            except ValueError:  # every rank has raised it, and may ask again
                raise
            except BaseException as error:
                self.log.failure.of_transfer(None, None, error)
                raise
        assert self._store is not None
        if backend != "fake":  # whose store keeps no values
            with StoreRendezvous(self._store, self.rank, self.log.ranks, _TIMEOUT) as exchange:
                self._agree_on_settings(exchange)
                self._watch(exchange)
        group, where = self._group, (self.rank, self.world)
        checks = Gloo(self.log, iter([group]), *where)  # this backend can compare operations, too
        how: Any = {"checks": checks, "name": str(backend), "one_host": self.one_host}
        return Overlapping(self.log, group, *where, blocks=True, **how)

    def _cpu_transport(self, timeout: timedelta, *, lazy: bool) -> Transport:
        """Collective. Returns host memory where all ranks may read one another's, else Gloo on a group of its own.

        lazy: ranks connect when they first send to one another, as where they only compare what goes by another
            backend."""
        assert self._store is not None
        with StoreRendezvous(self._store, self.rank, self.log.ranks, timeout) as exchange:
            self._agree_on_settings(exchange)
            peers, store = rendezvous(exchange, settings.host_memory()), self._watch(exchange)
            if peers is not None:
                return HostMemory(self.log, peers, self.rank, self.world)
            # Not torch.distributed.new_group(): it is collective over all ranks of the job, or
            # (use_local_synchronization) waits for ever if ranks are in different numbers of groups (torch 2.13).
            how: Any = {"timeout": timeout, "address": exchange.address(), "lazy": lazy}

            def level(ranks: list[int]) -> Any:
                own, where = dist.PrefixStore(f"of {ranks}", store), (ranks.index(self.rank), len(ranks))
                return next(gloo_groups(dist.ProcessGroupGloo, own, *where, **how))

            where = self.rank, self.world
            return Gloo(self.log, gloo_groups(dist.ProcessGroupGloo, store, *where, **how), *where, level)

    def _agree_on_settings(self, exchange: StoreRendezvous) -> None:
        """Collective. Raises ValueError on every rank for settings that mean nothing on any. One rank alone would
        compare where the others send: it decides for all."""
        each, problem, host = False, "", ""
        try:
            settings.check()
            each = settings.check_each()
        except ValueError as error:
            problem = str(error)
        with suppress(OSError):  # a system without /proc
            host = host_name()
        told = exchange.all_gather(json.dumps([each, problem, host, os.getpid()]).encode())
        ranks = [json.loads(text) for text in told]
        for rank, (_, problem, *_) in enumerate(ranks):
            if problem:
                with suppress(RuntimeError):  # the store's host may end once it has raised
                    exchange.all_gather(b"")
                raise ValueError(f"{problem} (on rank {self.log.ranks[rank]})")
        self.log.each = any(each for each, *_ in ranks)
        self.log.failure.raised.store = exchange.store
        self.one_host = len({there for *_, there, _ in ranks}) == 1 and ranks[0][2] != ""
        self.log.failure.others = [pid for *_, there, pid in ranks if host and there == host and pid != os.getpid()]

    def _device_transport(self, device: torch.device, backend: str, checks: Transport) -> Transport:
        """Collective. Returns a transport for an accelerator, with a communicator of its own for reductions."""
        assert self._store is not None
        # None without NCCL, or with another library such as RCCL.
        nccl = tuple(torch.cuda.nccl.version()) if torch.version.cuda and dist.is_nccl_available() else None
        store, second = self._store, False
        if backend != "fake":
            problem = ""
            try:
                second = nccl is not None and settings.second_communicator(nccl, driver_version())
            except ValueError as error:
                problem = str(error)
            # Keys of its own: another rank may not have ended the exchange before this one.
            with StoreRendezvous(dist.PrefixStore(str(device), store), self.rank, self.log.ranks, _TIMEOUT) as exchange:
                store = self._watch(exchange)
                told = [json.loads(text) for text in exchange.all_gather(json.dumps([second, problem]).encode())]
            for rank, (_, problem) in enumerate(told):
                if problem:
                    raise ValueError(f"{problem} (on rank {self.log.ranks[rank]})")
            second = all(second for second, _ in told)  # all ranks make a communicator, or those that do wait for ever
        group = self._group
        return Overlapping(
            *(self.log, group, self.rank, self.world),
            blocks=False,
            checks=checks,
            name=backend,
            one_host=self.one_host,
            second=(lambda: another_like(group, device, store, [*self.log.ranks])) if second else None,
            abort=lambda groups: abort(groups, device),
        )

    def _watch(self, exchange: StoreRendezvous) -> dist.Store:
        """Collective. Starts the watchdog, unless another type of device had it started. Returns a store of this link's
        own: that of the group may have keys of an earlier group of the same name."""
        if not self._watched:
            Watchdog(self, self.log, exchange, shortest_timeout_of(self._group))
        self._watched = True
        return dist.PrefixStore("groups", exchange.store)


class Transports(dict[str, Transport]):
    """Transports by type of device. Each is chosen when it is first asked for, which is collective."""

    def __init__(self, choose: Callable[[str], Transport]) -> None:
        self._choose = choose

    def __missing__(self, kind: str) -> Transport:
        self[kind] = self._choose(kind)
        return self[kind]


_links: WeakKeyDictionary[dist.ProcessGroup, Link] = WeakKeyDictionary()


def link_of(group: dist.ProcessGroup) -> Link:
    """Returns the link of a process group."""
    if group not in _links:
        _links[group] = Link(group)
    return _links[group]
