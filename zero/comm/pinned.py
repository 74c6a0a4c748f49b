"""Pinned memory of exact size. torch's own allocator takes the next power of two."""

from __future__ import annotations

import mmap
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# Bytes from which a copy gets memory of exact size. Pinning takes the system longer than torch's allocator needs.
_EXACT = 2**20

# Memory for copies, by what it is kept for.
_kept = WeakIdKeyDictionary()


def pinned_for(owner: object, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As `pinned`, from 1 MiB on in memory that is used again, and is kept as long as `owner`. Less is torch's own."""
    if prod(shape) * dtype.itemsize < _EXACT:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    memory: PinnedMemory = _kept.setdefault(owner, PinnedMemory())
    return memory.empty(shape, dtype)


def pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a tensor in pinned memory of the CPU, with memory for as many bytes as it has, in whole pages."""
    return PinnedMemory().empty(shape, dtype)


class PinnedMemory:
    """Tensors in pinned memory, which is used again once a tensor has been freed, and given back with this object.

    On other devices than CUDA's, and other systems than Linux, memory is torch's own.
    """

    def __init__(self) -> None:
        # By the number of bytes.
        self._free: dict[int, list[memoryview]] = defaultdict(list)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor without values. Raises RuntimeError if the system does not pin so much memory."""
        nbytes = prod(shape) * dtype.itemsize
        if not nbytes or not torch.cuda.is_available() or sys.platform != "linux":
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=torch.accelerator.is_available())
        free = self._free[nbytes]
        pages = free.pop() if free else _pin(nbytes)
        view = memoryview(pages)  # another, which the tensor holds
        finalize(view, free.append, pages)
        return torch.frombuffer(view, dtype=dtype).view(*shape)


def _pin(nbytes: int) -> memoryview:
    """Returns memory that is pinned as long as this very view of it exists."""
    pages, runtime = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), torch.cuda.cudart()
    # A process that is forked has none of them, as of CUDA's own, so that the device and this process never have
    # different copies of a page.
    pages.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # where the system has no huge pages, which are quicker to touch and to pin
        pages.madvise(mmap.MADV_HUGEPAGE)
    address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    error = runtime.cudaHostRegister(address, nbytes, 0)
    if int(error):
        raise RuntimeError(
            f"{nbytes} bytes of memory of the CPU could not be pinned: {error}. The limit of locked memory (ulimit -l) "
            "may be too low. Raise it, or pass CPUOffload(pin_memory=False)."
        )
    view = memoryview(pages)
    finalize(view, _unpin, runtime, address, pages)
    return view


def _unpin(runtime: Any, address: int, pages: mmap.mmap) -> None:
    """Before the pages are unmapped: they go with this call's arguments."""
    runtime.cudaHostUnregister(address)
