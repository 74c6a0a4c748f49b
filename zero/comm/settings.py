"""How ranks reach one another, as the environment says on every rank before the first model is built.

ZERO_HOST_MEMORY

    (unset)   ranks of one host read one another's memory if the system permits it
    0         they do not; tensors on the CPU are sent over Gloo, as between hosts. It is enough that one rank says so
    ptracer   as unset, and where Yama restricts tracing (ptrace_scope 1), each rank permits its launcher and the
              launcher's descendants to read its memory as long as it lives (prctl(2), PR_SET_PTRACER)

ZERO_SECOND_COMMUNICATOR

    (unset)   reductions on GPUs have an NCCL communicator of their own, so that they need not wait for all-gathers,
              where NCCL runs the kernels of several communicators in the order of their launches on every rank
    0         they have not, on any rank. It is enough that one rank says so
    1         they have, whatever NCCL guarantees

NCCL_LAUNCH_ORDER_IMPLICIT

    (unset)   importing zero sets it to 1, before NCCL reads it: from version 2.26 on NCCL then orders what one thread
              launches in several communicators. Without that they may deadlock, where kernels of two need more of a GPU
              than it has (NCCL's user guide, "Using multiple NCCL communicators concurrently")
    0         NCCL orders nothing, and reductions have no communicator of their own

ZERO_CHECK

    (unset)   ranks compare an operation when it follows the operations before it for the first time
    each      they compare every operation before its launch, and each forward is searched for writes through `.data`.
              It is enough that one rank says so
"""

from __future__ import annotations

import os
from typing import TypeVar

os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")

_HOST_MEMORY = {"": "auto", "1": "auto", "0": "off", "ptracer": "ptracer"}
_SECOND_COMMUNICATOR = {"": None, "1": True, "0": False}
_ORDERS_LAUNCHES = (2, 26)
"""The first version of NCCL that does."""
_CHECK = {"": False, "each": True}

T = TypeVar("T")


def host_memory() -> str:
    """Returns "auto", "off" or "ptracer". Raises ValueError if the environment has an unknown value."""
    return _setting("ZERO_HOST_MEMORY", _HOST_MEMORY, "0, ptracer")


def second_communicator(nccl: tuple[int, ...] | None) -> bool:
    """Returns the setting. nccl: the version of NCCL; None of another backend, which gives no order.

    Raises ValueError if the environment has an unknown value."""
    given = _setting("ZERO_SECOND_COMMUNICATOR", _SECOND_COMMUNICATOR, "0, 1")
    orders = nccl is not None and nccl >= _ORDERS_LAUNCHES and os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") != "0"
    return orders if given is None else given


def check_each() -> bool:
    """Returns the setting. Raises ValueError if the environment has an unknown value."""
    return _setting("ZERO_CHECK", _CHECK, "each")


def check() -> None:
    """Raises ValueError for settings that mean nothing, before any rank waits for another."""
    host_memory()
    second_communicator(None)
    check_each()


def _setting(variable: str, meanings: dict[str, T], choices: str) -> T:
    value = os.environ.get(variable, "")
    if value not in meanings:
        raise ValueError(f"{variable}={value!r} in the environment: choose {choices}, or leave it out.")
    return meanings[value]
