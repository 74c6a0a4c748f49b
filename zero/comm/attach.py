"""Reading the memory of another process of this host: Linux's cross memory attach, process_vm_readv(2).

It copies once, straight from where the other has its tensor to where this process wants it, with no buffer on either
side. MPI libraries and UCX send between the processes of one host in the same way.

The system permits it between processes of one user that may trace one another. Where Yama restricts tracing to one's
own descendants (/proc/sys/kernel/yama/ptrace_scope is 1, as on Ubuntu), ranks are siblings and may not, until
`permit_siblings` says otherwise.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_AT_ONCE = 1 << 30
"""Bytes asked for in one call; the system ends a call at 2 GiB."""

_PR_SET_PTRACER = 0x59616D61


class _Range(ctypes.Structure):
    """struct iovec"""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_process_vm_readv = getattr(_libc, "process_vm_readv", None)
if _process_vm_readv is not None:
    _process_vm_readv.restype = ctypes.c_ssize_t
    _process_vm_readv.argtypes = [
        ctypes.c_int,
        ctypes.POINTER(_Range),
        ctypes.c_ulong,
        ctypes.POINTER(_Range),
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]


def read(pid: int, address: int, into: int, nbytes: int) -> None:
    """Copies `nbytes` from an address in process `pid` to the address `into` in this one.

    Raises OSError where not all of it can be had: no such process any more, no such memory, not permitted.
    """
    if _process_vm_readv is None:
        raise OSError("this system has no process_vm_readv")
    done = 0
    while done < nbytes:
        length = min(nbytes - done, _AT_ONCE)
        here, there = _Range(into + done, length), _Range(address + done, length)
        copied = _process_vm_readv(pid, here, 1, there, 1, 0)
        if copied <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"process {pid} cannot be read: {os.strerror(number)}")
        done += copied


def permit_siblings() -> None:
    """Lets the processes that the parent of this one started read this one's memory, where Yama would forbid it.

    That is the parent itself and its descendants, of this user: with a launcher, the ranks. It holds as long as this
    process lives. Nothing is permitted where the parent is the first process of the system, whose descendants are all.
    """
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if _libc is not None and scope.exists() and scope.read_text().strip() == "1" and os.getppid() > 1:
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def host() -> str:
    """What two processes have in common if each knows the other by its process id: kernel and namespaces.

    Raises OSError where there is no telling.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net")])
