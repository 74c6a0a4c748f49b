"""Counts the bytes of the tensors that are alive while something runs.

A storage is the memory behind a tensor. It is counted once, however many tensors view it, with the bytes that it has at
that moment. A storage that `resize_` has shrunk to nothing counts as nothing, and a storage inside another's memory
(torch.from_dlpack) is not counted again. Tensors on the meta device and fake ones count as much as real ones would.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor

from zero._torch.recording import DEVICE_OF, DispatchMode
from zero._torch.tensors import WithoutMemory, is_wrapping_class, wrapped_in

_Known = ref[torch.UntypedStorage]


class Meter(DispatchMode):
    """Adds up all live storages but those `apart` after every operator, while its arguments and results live."""

    def __init__(self, apart: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._apart = WeakSet(tensor.untyped_storage() for tensor in apart)
        self._bytes: dict[_Known, int] = {}  # of each live storage when it was last measured
        self._resized: set[_Known] = set()  # found to change their size; they are measured after every operator
        self._shared: set[_Known] = set()  # do not own their memory: they may be inside others
        self._operators_since_all_were_measured = self._live = self._peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF:
            return args[0].device
        if any(issubclass(kind, WithoutMemory) or is_wrapping_class(kind) for kind in types):
            return NotImplemented  # such as DTensor: the operators on what it wraps are seen instead
        kwargs = kwargs or {}
        result = self.run(func, args, kwargs)
        for value in (*args, *kwargs.values(), *(result if isinstance(result, (tuple, list)) else (result,))):
            for one in value if isinstance(value, (tuple, list)) else (value,):
                if not isinstance(one, Tensor):
                    continue
                storage = one.untyped_storage()
                known = ref(storage, self._forget)
                if known in self._bytes:
                    if self._bytes[known] != storage.nbytes():
                        self._resized.add(known)
                elif storage not in self._apart:
                    if self.counts(one) and not self._is_inside_another(storage, known):
                        self._bytes[known] = 0
                        self._measure(known)
                    else:
                        self._apart.add(storage)
        self._operators_since_all_were_measured += 1
        if self._operators_since_all_were_measured < max(len(self._bytes) // 4, 8):
            for known in [*self._resized]:
                self._measure(known)
        else:  # resizing a storage calls no operator
            self.live()
        self._peak = max(self._peak, self._live)
        return result

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs the operator. Its tensors are counted afterwards."""
        return func(*args, **kwargs)

    def counts(self, tensor: Tensor) -> bool:
        """Whether to count the memory behind a tensor that is seen for the first time."""
        return True

    def _is_inside_another(self, storage: torch.UntypedStorage, known: _Known) -> bool:
        """Those that are inside this one are no longer counted."""
        if storage.device.type == "meta":
            return False
        for key in [*(self._bytes if not storage.resizable() else self._shared)]:
            if (other := key()) is None or other.device.type == "meta":
                continue
            if _lies_within(storage, other):
                return True
            if _lies_within(other, storage):
                self._forget(key)
                self._apart.add(other)
        if not storage.resizable():
            self._shared.add(known)
        return False

    def _measure(self, known: _Known) -> bool:
        """Returns whether the storage's size has changed."""
        storage, before = known(), self._bytes.get(known, 0)
        if storage is None or storage.nbytes() == before:
            return False
        self._bytes[known] = storage.nbytes()
        self._live += self._bytes[known] - before
        return True

    def _forget(self, known: _Known) -> None:
        self._live -= self._bytes.pop(known, 0)
        self._resized.discard(known)
        self._shared.discard(known)

    def live(self) -> int:
        self._operators_since_all_were_measured = 0
        self._resized.update([known for known in [*self._bytes] if self._measure(known)])
        return self._live

    def peak(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self.live()


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind the tensors, each byte of memory counted once."""
    outermost: list[torch.UntypedStorage] = []
    without_address = 0
    for storage in {each.untyped_storage() for tensor in tensors for each in wrapped_in(tensor)}:
        if storage.device.type == "meta":
            without_address += storage.nbytes()
        elif not any(_lies_within(storage, other) for other in outermost):
            outermost = [other for other in outermost if not _lies_within(other, storage)] + [storage]
    return without_address + sum(storage.nbytes() for storage in outermost)


def _lies_within(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    """Whether a storage is inside another's memory. Both must have addresses."""
    start, first = other.data_ptr(), storage.data_ptr()
    return 0 < storage.nbytes() <= start + other.nbytes() - first and start <= first
