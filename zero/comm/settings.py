"""How ranks reach one another, as the environment says on every rank before the first model is built.

ZERO_HOST_MEMORY

    (unset)   ranks of one host read one another's memory if the system permits it
    0         they do not; tensors on the CPU are sent over Gloo, as between hosts. It is enough that one rank says so
    ptracer   as unset, and where Yama restricts tracing (ptrace_scope 1), each rank permits its launcher and the
              launcher's descendants to read its memory as long as it lives (prctl(2), PR_SET_PTRACER)

ZERO_SECOND_COMMUNICATOR

    (unset)   reductions on GPUs go by the NCCL communicator of the group, as all-gathers do. It is enough that one rank
              says so. Another one gains nothing that the simulator finds, and takes as much memory as the first
    1         on every rank: they have one of their own, so that they need not wait for all-gathers. Two may deadlock
              where their kernels need more of a GPU than it has, unless NCCL orders what one thread launches in both
              (NCCL's user guide, "Using multiple NCCL communicators concurrently"). So importing zero sets
              NCCL_LAUNCH_ORDER_IMPLICIT=1 then, which NCCL reads when it first connects, from version 2.26 on; with a
              driver of CUDA before 12.3 it would run all communicators one after another

ZERO_CHECK

    (unset)   ranks compare an operation when it follows the operations before it for the first time
    each      they compare every operation before its launch, and each forward is searched for writes through `.data`.
              It is enough that one rank says so
"""

from __future__ import annotations

import os
from typing import TypeVar

import torch.distributed as dist

_CONNECTED_BEFORE = dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend()
if os.environ.get("ZERO_SECOND_COMMUNICATOR") == "1":
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")

_HOST_MEMORY = {"": "auto", "1": "auto", "0": "off", "ptracer": "ptracer"}
_SECOND_COMMUNICATOR = {"": False, "0": False, "1": True}
_ORDERS_LAUNCHES, _DRIVER = (2, 26), 12030
"""The first version of NCCL that does, and of the driver by which communicators still run beside one another."""
_CHECK = {"": False, "each": True}

T = TypeVar("T")


def host_memory() -> str:
    """Returns "auto", "off" or "ptracer". Raises ValueError if the environment has an unknown value."""
    return _setting("ZERO_HOST_MEMORY", _HOST_MEMORY, "0, ptracer")


def second_communicator(nccl: tuple[int, ...] | None = None, driver: int = _DRIVER) -> bool:
    """Returns the setting. nccl: the version of NCCL; None where it is not known yet. driver: the version of CUDA that
    the driver is of, such as 12030.

    Raises ValueError if the environment has an unknown value, or asks for what cannot be had."""
    given = _setting("ZERO_SECOND_COMMUNICATOR", _SECOND_COMMUNICATOR, "0, 1")
    problem = None
    if given and _CONNECTED_BEFORE:
        problem = "zero was imported after NCCL had connected. Import it before init_process_group()"
    elif given and os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") != "1":
        problem = "NCCL_LAUNCH_ORDER_IMPLICIT is not 1, without which two communicators may deadlock. Leave it out"
    elif given and nccl is not None and nccl < _ORDERS_LAUNCHES:
        problem = f"NCCL {'.'.join(map(str, nccl))} orders no launches. Take 2.26 or later"
    elif given and driver < _DRIVER:
        problem = f"the driver is of CUDA {driver // 1000}.{driver % 1000 // 10}, and of 12.3 or later it must be"
    if problem is not None:
        raise ValueError(f"ZERO_SECOND_COMMUNICATOR=1 in the environment: {problem}, or leave the variable out.")
    return given


def check_each() -> bool:
    """Returns the setting. Raises ValueError if the environment has an unknown value."""
    return _setting("ZERO_CHECK", _CHECK, "each")


def check() -> None:
    """Raises ValueError for settings that mean nothing, before any rank waits for another."""
    host_memory()
    second_communicator()
    check_each()


def _setting(variable: str, meanings: dict[str, T], choices: str) -> T:
    value = os.environ.get(variable, "")
    if value not in meanings:
        raise ValueError(f"{variable}={value!r} in the environment: choose {choices}, or leave it out.")
    return meanings[value]
