"""The state that all Comms of one process group share: the log of operations, and a transport for each type of device.

Operations never use the user's own Gloo group: another thread may use it at the same time (torch's asynchronous
checkpoints do), and two threads on one Gloo group end the process. Ranks get a private one, unless a transport is
offered that needs none.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakKeyDictionary, proxy, ref

import torch
import torch.distributed as dist

from zero._torch import abort, another_like, backend_of, host_of, shortest_timeout_of, store_of, timeout_of
from zero.comm.order import Order
from zero.comm.process_group import Gloo, Overlapping
from zero.comm.transport import Local, Transport

_TIMEOUT = timedelta(minutes=30)
"""The timeout of transfers on the CPU if the group has no backend for the CPU: torch's own default."""


class TransportFactory(Protocol):
    """Offers a transport for tensors on the CPU in place of Gloo.

    A folder that brings one appends it to `factories`.
    """

    def check(self) -> None:
        """Raises ValueError for settings of the user's that mean nothing, before any rank waits for another."""

    def offer(self, order: Order, exchange: StoreExchange) -> Transport | None:
        """Collective. Returns the transport, or None on every rank. exchange: of a few bytes between the ranks."""


factories: list[TransportFactory] = []
"""Asked one after another for each new group; the first transport that is offered is taken."""

watchers: list[Callable[[Link, StoreExchange, timedelta], object]] = []
"""Collective. Called once for each group whose hosts or devices may wait in vain, with the timeout of its transfers. A
watcher calls `Order.mark_broken` when a rank is missing. It may not keep the link alive."""

settings: dict[str, Callable[[Any], None]] = {}
"""The settings that `configure` takes, by name."""


def configure(**given: Any) -> None:
    """Sets how ranks reach one another, such as host_memory="off"; None uses the environment again. Call it on every
    rank, before the first model or optimizer is built on a process group.

    second_communicator: True (the default) or False, as ZERO_SECOND_COMMUNICATOR=0. Whether reductions on GPUs have an
        NCCL communicator of their own, so that they need not wait for all-gathers. NCCL may deadlock where kernels of
        two communicators need more of a GPU than it has. It is enough that one rank says False.

    Raises ValueError for unknown values, TypeError for unknown settings.
    """
    for name, value in given.items():
        if name not in settings:
            raise TypeError(
                f"zero.comm.configure() has no setting {name!r}. There are: {', '.join(settings) or 'none'}."
            )
        settings[name](value)


_second: bool | None = None


def _set_second_communicator(value: bool | None) -> None:
    global _second
    if value not in (None, True, False):
        raise ValueError(f"second_communicator={value!r}: choose True, False, or None for the environment's setting.")
    _second = value


def _second_communicator() -> bool:
    """Returns the setting. Raises ValueError if the environment has an unknown value."""
    value = os.environ.get("ZERO_SECOND_COMMUNICATOR", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"ZERO_SECOND_COMMUNICATOR={value!r} in the environment: choose 0, 1, or leave it out.")
    return value != "0" if _second is None else _second


settings["second_communicator"] = _set_second_communicator


class Link:
    """The order and the transports of one process group, or (None) of this process alone. The link does not keep the
    group alive, and ends with it."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        self.ranks = [0] if group is None else dist.get_process_group_ranks(group)
        """The ranks of the job that the ranks of the group are."""
        self.order = Order(self.rank, self.world)
        self._group: Any = None if group is None else proxy(group)
        self._store = None if group is None else store_of(group)
        for factory in factories:
            factory.check()
        _second_communicator()
        self._watched = False
        # Not `self`: the link is to end with its last user, and not only when garbage is collected.
        own: Any = ref(self)
        self.transports: Mapping[str, Transport] = Transports(lambda kind: own()._choose(kind))

    @property
    def on_host(self) -> Transport:
        """The transport by which the ranks compare what they do."""
        return self.transports["cpu"]

    def without_backend(self, devices: Iterable[torch.device]) -> str | None:
        """Returns the first of these types of device for which the group has no backend, if there is one."""
        if self._group is None or self.world == 1:
            return None
        group = self._group
        return next((device.type for device in devices if backend_of(group, device) is None), None)

    def _choose(self, kind: str) -> Transport:
        if self._group is None or self.world == 1:
            return Local()
        device = torch.device(kind)
        backend = backend_of(self._group, device)
        if kind != "cpu":
            assert backend is not None, f"the group has no backend for {device}"
            return self._device_transport(device, backend, self.on_host)
        if backend in (None, "gloo"):
            timeout = _TIMEOUT if backend is None else timeout_of(self._group, device)
            return self.order.attempt(None, None, partial(self._cpu_transport, timeout))
        assert self._store is not None
        if backend != "fake":  # whose store keeps no values
            with StoreExchange(self._store, self.rank, self.world, _TIMEOUT) as exchange:
                self._watch(exchange)
        where = self.order, self._group, self.rank, self.world
        # This backend can compare operations, too.
        return Overlapping(*where, blocks=True, checks=Gloo(*where), name=str(backend))

    def _cpu_transport(self, timeout: timedelta) -> Transport:
        """Collective. Returns the first transport that is offered, else Gloo on a group of its own."""
        assert self._store is not None
        with StoreExchange(self._store, self.rank, self.world, timeout) as exchange:
            for factory in factories:
                offered = factory.offer(self.order, exchange)
                if offered is not None:
                    return offered
            # Not torch.distributed.new_group(): it is collective over all ranks of the job, or
            # (use_local_synchronization) waits for ever if ranks are in different numbers of groups (torch 2.13).
            gloo = dist.ProcessGroupGloo(self._watch(exchange), self.rank, self.world, timeout)
            return Gloo(self.order, gloo, self.rank, self.world)

    def _device_transport(self, device: torch.device, backend: str, checks: Transport) -> Transport:
        """Collective. Returns a transport for an accelerator, with a communicator of its own for reductions."""
        assert self._store is not None
        store, second = self._store, _second_communicator()
        if backend != "fake":
            # Keys of its own: another rank may not have ended the exchange before this one.
            with StoreExchange(dist.PrefixStore(str(device), store), self.rank, self.world, _TIMEOUT) as exchange:
                store = self._watch(exchange)
                second = bytes([0]) not in exchange.all_gather(bytes([second]))
        group, reduces_by = self._group, another_like(self._group, device, store) if second else None

        def abort_both() -> None:
            for communicator in (group, reduces_by):
                with suppress(ReferenceError):  # the user has dropped the group
                    if communicator is not None:
                        abort(communicator, device)

        return Overlapping(
            *(self.order, group, self.rank, self.world),
            blocks=False,
            checks=checks,
            name=backend,
            reduces_by=reduces_by,
            abort=abort_both,
        )

    def _watch(self, exchange: StoreExchange) -> dist.Store:
        """Collective. Starts the watchers, unless another type of device had them started. Returns a store of this
        link's own: that of the group may have keys of an earlier group of the same name."""
        assert self._store is not None
        for watch in () if self._watched else watchers:
            watch(self, exchange, shortest_timeout_of(self._group))
        self._watched = True
        return dist.PrefixStore(exchange.nonce, dist.PrefixStore("zero", self._store))


class Transports(dict[str, Transport]):
    """Transports by type of device. Each is chosen when it is first asked for, which is collective."""

    def __init__(self, choose: Callable[[str], Transport]) -> None:
        self._choose = choose

    def __missing__(self, kind: str) -> Transport:
        self[kind] = self._choose(kind)
        return self[kind]


class StoreExchange:
    """Exchanges a few bytes between the ranks, in rounds. The last rank to end it deletes all keys, so that a later
    process group may use the same store.

    `nonce`: a new name, the same on all ranks. `host`: where the store is, as this rank reaches it.
    """

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: timedelta) -> None:
        self.rank, self.world, self.timeout = rank, world, timeout
        self.host = host_of(store)
        self._store, self._rounds = dist.PrefixStore("zero", store), 0

    def __enter__(self) -> StoreExchange:
        self.nonce = self.all_gather(secrets.token_hex(8).encode())[0].decode()
        return self

    def all_gather(self, data: bytes) -> list[bytes]:
        """Collective. Returns the data of every rank, by rank."""
        keys = [f"{self._rounds}/{rank}" for rank in range(self.world)]
        self._rounds += 1
        self._store.set(keys[self.rank], data.hex() or "-")
        self._store.wait(keys, self.timeout)
        texts = [self._store.get(key).decode() for key in keys]
        return [b"" if text == "-" else bytes.fromhex(text) for text in texts]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(Exception):  # the store has ended, or cannot delete keys
            if self._store.add("left", 1) == self.world:
                for number in range(self._rounds):
                    for rank in range(self.world):
                        self._store.delete_key(f"{number}/{rank}")
                self._store.delete_key("left")


_links: WeakKeyDictionary[dist.ProcessGroup, Link] = WeakKeyDictionary()


def link_of(group: dist.ProcessGroup) -> Link:
    """Returns the link of a process group."""
    if group not in _links:
        _links[group] = Link(group)
    return _links[group]
