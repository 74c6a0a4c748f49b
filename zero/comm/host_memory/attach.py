"""Reads the memory of another process of this host by Linux's cross memory attach, process_vm_readv(2).

It copies once, directly from a tensor of the other process into a tensor of this process, without a buffer in between.
MPI libraries and UCX send between the processes of one host in the same way.

The system permits it between processes of one user that may trace one another. Where Yama restricts tracing to
descendants (/proc/sys/kernel/yama/ptrace_scope is 1, as on Ubuntu), ranks may not read one another, as they are
siblings, unless each has called `permit_siblings`.

Where a system has none of it, these raise, and ranks send over Gloo.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

# "Yama" in ASCII. The standard library does not have the number.
_PR_SET_PTRACER = 0x59616D61

# struct iovec: an address, and a number of bytes.
_Range = ctypes.c_size_t * 2


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    ranges = ctypes.c_void_p, ctypes.c_ulong
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    libc.process_vm_readv.argtypes = ctypes.c_int, *ranges, *ranges, ctypes.c_ulong
    return libc


def read(pid: int, address: int, into: int, nbytes: int) -> None:
    """Copies `nbytes` from an address in process `pid` to the address `into` in this process.

    Raises OSError if not all bytes can be read: the process has ended, has no such memory, or does not permit it.
    """
    libc, done = _libc(), 0
    while done < nbytes:  # the system copies at most 2 GiB in one call
        local, remote = _Range(into + done, nbytes - done), _Range(address + done, nbytes - done)
        copied = libc.process_vm_readv(pid, local, 1, remote, 1, 0)
        if copied <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"process {pid} cannot be read: {os.strerror(number)}")
        done += copied


def permit_siblings() -> None:
    """Permits the parent of this process and its descendants to read this process's memory, where Yama forbids it.

    With a launcher, these are the ranks. The permission is for processes of this user, and lasts as long as this
    process. Does nothing if the parent is the first process of the system, because all processes descend from it.
    """
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and scope.read_text().strip() == "1" and os.getppid() > 1:
        _libc().prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def host() -> str:
    """Returns kernel and namespace, which are equal in two processes if each finds the other by its process id."""
    if os.readlink("/proc/self") != str(os.getpid()):
        raise OSError("/proc is of another namespace of process ids")
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
