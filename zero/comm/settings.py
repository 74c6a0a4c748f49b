"""How ranks reach one another, as the environment says on every rank before the first model is built.

ZERO_HOST_MEMORY

    (unset)   ranks of one host read one another's memory if the system permits it
    0         they do not; tensors on the CPU are sent over Gloo, as between hosts
    ptracer   as unset, and where Yama restricts tracing (ptrace_scope 1), each rank permits its launcher and the
              launcher's descendants to read its memory as long as it lives (prctl(2), PR_SET_PTRACER)

ZERO_SECOND_COMMUNICATOR

    (unset)   reductions on GPUs have an NCCL communicator of their own, so that they need not wait for all-gathers
    0         they have not, on any rank: NCCL may deadlock where kernels of two communicators need more of a GPU than
              it has

`configure` says the same in a program.
"""

from __future__ import annotations

import os
from typing import Any

_HOST_MEMORY = {"": "auto", "1": "auto", "0": "off", "ptracer": "ptracer"}
_SECOND_COMMUNICATOR = {"": True, "1": True, "0": False}

_configured: dict[str, Any] = {"host_memory": None, "second_communicator": None}


def configure(**given: Any) -> None:
    """Sets how ranks reach one another; None uses the environment again. Call it on every rank, before the first model
    or optimizer is built on a process group.

    host_memory: in place of ZERO_HOST_MEMORY how ranks of one host send: "auto" (unset), "off" (0) or "ptracer".
    second_communicator: True (the default) or False, as ZERO_SECOND_COMMUNICATOR=0. Whether reductions on GPUs have an
        NCCL communicator of their own, so that they need not wait for all-gathers. NCCL may deadlock where kernels of
        two communicators need more of a GPU than it has. It is enough that one rank says False.

    Raises ValueError for unknown values, TypeError for unknown settings.
    """
    for name, value in given.items():
        if name not in _configured:
            raise TypeError(f"zero.comm.configure() has no setting {name!r}. There are: {', '.join(_configured)}.")
        if name == "host_memory" and value not in (None, *_HOST_MEMORY.values()):
            raise ValueError(
                f"host_memory={value!r}: choose 'auto', 'off', 'ptracer', or None for the environment's setting."
            )
        if name == "second_communicator" and value not in (None, True, False):
            raise ValueError(
                f"second_communicator={value!r}: choose True, False, or None for the environment's setting."
            )
        _configured[name] = value


def host_memory() -> str:
    """Returns "auto", "off" or "ptracer". Raises ValueError if the environment has an unknown value."""
    return str(_setting("host_memory", _HOST_MEMORY, "0, ptracer"))


def second_communicator() -> bool:
    """Returns the setting. Raises ValueError if the environment has an unknown value."""
    return bool(_setting("second_communicator", _SECOND_COMMUNICATOR, "0, 1"))


def check() -> None:
    """Raises ValueError for settings of the environment that mean nothing, before any rank waits for another."""
    host_memory()
    second_communicator()


def _setting(name: str, meanings: dict[str, Any], choices: str) -> Any:
    if _configured[name] is not None:
        return _configured[name]
    variable = f"ZERO_{name.upper()}"
    value = os.environ.get(variable, "")
    if value not in meanings:
        raise ValueError(f"{variable}={value!r} in the environment: choose {choices}, or leave it out.")
    return meanings[value]
