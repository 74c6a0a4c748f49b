"""Ranks of one Linux host read one another's memory instead of sending over Gloo.

transport   the transport
rendezvous  whether ranks share a host and may read one another
peers       notes between them
attach      cross memory attach (process_vm_readv)
settings    ZERO_HOST_MEMORY, zero.comm.configure(host_memory=)
"""

from __future__ import annotations

from zero.comm import link
from zero.comm.link import StoreExchange
from zero.comm.order import Order
from zero.comm.transport import Transport
from zero.features.host_memory.rendezvous import rendezvous
from zero.features.host_memory.settings import configure, host_memory
from zero.features.host_memory.transport import HostMemory


class _Factory:
    """See TransportFactory."""

    def check(self) -> None:
        host_memory()

    def offer(self, order: Order, exchange: StoreExchange) -> Transport | None:
        peers = rendezvous(exchange, host_memory())
        return None if peers is None else HostMemory(order, peers, exchange.rank, exchange.world)


link.factories.append(_Factory())
link.settings["host_memory"] = configure
