"""Ranks of one Linux host read one another's memory instead of sending over Gloo.

transport   the transport
rendezvous  whether ranks share a host and may read one another
peers       notes between them
attach      cross memory attach (process_vm_readv)

ZERO_HOST_MEMORY in the environment, on every rank, before the first model is built:

    (unset)   ranks of one host read one another's memory if the system permits it
    0         they do not; tensors on the CPU are sent over Gloo, as between hosts
    ptracer   as unset, and where Yama restricts tracing (ptrace_scope 1), each rank permits its launcher and the
              launcher's descendants to read its memory as long as it lives (prctl(2), PR_SET_PTRACER)
"""

from __future__ import annotations

import os

from zero.comm import link
from zero.comm.link import StoreExchange
from zero.comm.order import Order
from zero.comm.transport import Transport
from zero.features.host_memory.rendezvous import rendezvous
from zero.features.host_memory.transport import HostMemory

_BY_ENVIRONMENT: dict[str, str] = {"": "auto", "1": "auto", "0": "off", "ptracer": "ptracer"}

_configured: str | None = None


def configure(host_memory: str | None) -> None:
    """Sets in place of ZERO_HOST_MEMORY how ranks of one host send: "auto" (unset), "off" (0) or "ptracer"; None uses
    the environment again. Raises ValueError for other values."""
    global _configured
    if host_memory not in (None, *_BY_ENVIRONMENT.values()):
        raise ValueError(
            f"host_memory={host_memory!r}: choose 'auto', 'off', 'ptracer', or None for the environment's setting."
        )
    _configured = host_memory


def host_memory() -> str:
    """Returns the setting of `configure` or of ZERO_HOST_MEMORY. Raises ValueError if that has an unknown value."""
    if _configured is not None:
        return _configured
    value = os.environ.get("ZERO_HOST_MEMORY", "")
    if value not in _BY_ENVIRONMENT:
        raise ValueError(f"ZERO_HOST_MEMORY={value!r} in the environment: choose 0, ptracer, or leave it out.")
    return _BY_ENVIRONMENT[value]


class _Factory:
    """See TransportFactory."""

    def check(self) -> None:
        host_memory()

    def offer(self, order: Order, exchange: StoreExchange) -> Transport | None:
        peers = rendezvous(exchange, host_memory())
        return None if peers is None else HostMemory(order, peers, exchange.rank, exchange.world)


link.factories.append(_Factory())
link.settings["host_memory"] = configure
