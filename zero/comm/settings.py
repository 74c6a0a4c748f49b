"""What users may say of the way in which ranks send.

ZERO_HOST_MEMORY in the environment, on every rank, before the first model is built:

    (unset)   ranks of one host read one another's memory where the system permits it
    0         never; what is on the CPU goes by Gloo, as between hosts
    ptracer   as unset, and where Yama restricts tracing (ptrace_scope 1), each rank permits its launcher and the
              launcher's descendants to read its memory, as long as it lives (prctl(2), PR_SET_PTRACER)

ZERO_CHECK=each in the environment compares every operation between ranks before it is launched, also between hosts,
where otherwise only new schedules are compared so (order.py).
"""

from __future__ import annotations

import os
from typing import Literal

HostMemory = Literal["auto", "off", "ptracer"]

_BY_ENVIRONMENT: dict[str, HostMemory] = {"": "auto", "1": "auto", "0": "off", "ptracer": "ptracer"}

_configured: HostMemory | None = None


def configure(*, host_memory: HostMemory | None) -> None:
    """Says what ZERO_HOST_MEMORY says: "auto", "off" (0) or "ptracer". None goes by the environment again.

    To be called on every rank, before the first model or optimizer is built on a process group. Raises ValueError for
    anything else.
    """
    global _configured
    if host_memory not in (None, *_BY_ENVIRONMENT.values()):
        raise ValueError(
            f"host_memory={host_memory!r}: choose 'auto', 'off', 'ptracer', or None for the environment's."
        )
    _configured = host_memory


def host_memory() -> HostMemory:
    """Raises ValueError where the environment says something that is not known."""
    if _configured is not None:
        return _configured
    given = os.environ.get("ZERO_HOST_MEMORY", "")
    if given not in _BY_ENVIRONMENT:
        raise ValueError(f"ZERO_HOST_MEMORY={given!r} in the environment: choose 0, ptracer, or leave it out.")
    return _BY_ENVIRONMENT[given]


def compares_each() -> bool:
    """Raises ValueError where the environment says something that is not known."""
    given = os.environ.get("ZERO_CHECK", "")
    if given not in ("", "each"):
        raise ValueError(f"ZERO_CHECK={given!r} in the environment: choose each, or leave it out.")
    return given == "each"
