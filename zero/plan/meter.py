"""Counts the bytes of the tensors that are alive while something runs.

A storage is the memory behind a tensor. It is counted once, however many tensors view it, with the bytes that it has at
that moment: one that was shrunk to nothing by `resize_` counts as nothing, and one that lies within the memory of
another (torch.from_dlpack) is not counted beside it. Tensors on the meta device and fake ones count as much as real
ones would.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from zero._torch import DispatchMode, leaves, wrap_others


class Meter(DispatchMode):
    """Adds up all live storages after every operator, while both its arguments and its results are alive.

    The operators of a backward pass and of collectives are seen as well. What an operator allocates and frees within
    its kernel is not.

    apart: tensors that are not counted.
    """

    def __init__(self, apart: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._apart = WeakSet(tensor.untyped_storage() for tensor in apart)
        self._storages: WeakSet[torch.UntypedStorage] = WeakSet()
        self._peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if wrap_others(types):
            return NotImplemented  # such as DTensor: the operators on what it wraps are seen instead
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for value in leaves((args, kwargs, result)):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage not in self._storages and storage not in self._apart:
                    self._add(storage)
        self._peak = max(self._peak, self.live())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        for other in [*self._storages]:
            if _lies_within(storage, other):
                self._apart.add(storage)
                return
            if _lies_within(other, storage):
                self._storages.discard(other)
                self._apart.add(other)
        self._storages.add(storage)

    def live(self) -> int:
        return sum(storage.nbytes() for storage in self._storages)

    def peak(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self.live()


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind the tensors, each byte of memory counted once."""
    outermost: list[torch.UntypedStorage] = []
    for storage in {tensor.untyped_storage() for tensor in tensors}:
        if not any(_lies_within(storage, other) for other in outermost):
            outermost = [other for other in outermost if not _lies_within(other, storage)] + [storage]
    return sum(storage.nbytes() for storage in outermost)


def _lies_within(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    if "meta" in (storage.device.type, other.device.type) or not storage.nbytes():
        return False
    start = other.data_ptr()
    return start <= storage.data_ptr() and storage.data_ptr() + storage.nbytes() <= start + other.nbytes()
