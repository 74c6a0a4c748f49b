"""Offload: shards and optimizer state in the memory of the CPU or in files.

At stage 3 the parameters' shards are offloaded, at stages 1 and 2 the tensors that the optimizer steps in their place
(masters.py). Only all-gathers and steps read them.

(S. Rajbhandari et al., ZeRO-Infinity, 2021, section 5; J. Ren et al., ZeRO-Offload, 2021.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.features.offload.disk import Disk
from zero.shards.slices import step_alone


class ShardStore(Protocol):
    """Memory for offloaded shards."""

    def place(self, shard: Tensor) -> Tensor:
        """Copies the shard into the store. Raises OSError where that is full."""

    def has(self, shard: Tensor) -> bool:
        """Whether a tensor is in the store already."""

    def used(self, shard: Tensor) -> None:
        """Called after a stored tensor was read or written, when it will not be used for a while."""

    def step(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        """Steps only these parameters, which are in the store. The optimizer treats each element by itself."""

    def stepped(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        """Called after an optimizer has stepped these parameters without `step`."""


class Room:
    """Wraps a store and keeps the error when it is full, so that the ranks can compare. `full`: that error."""

    def __init__(self, store: ShardStore) -> None:
        self.store = store
        self.full: str | None = None
        self.has, self.used, self.step, self.stepped = store.has, store.used, store.step, store.stepped

    def place(self, shard: Tensor) -> Tensor:
        try:
            return self.store.place(shard)
        except OSError as error:
            self.full = str(error)
            return shard.clone()

    def problem(self, what: str, offload: object) -> str | None:
        """The error message if the store was full; None if not. what: the shards in the message."""
        if self.full is None:
            return None
        return f"there is no room for {what} in {offload}: {self.full}. Free some, or choose another directory."


@dataclass(frozen=True)
class CPUOffload:
    """Shards, their gradients and the optimizer's state lie in the memory of the CPU, where the optimizer steps them.

    torch steps a parameter on its device, with a gradient and state on the same device. Without a GPU this changes
    nothing. torch.optim.Adam(fused=True) is fast on the CPU.

    pin_memory: keep shards in pinned memory, which a GPU reads asynchronously.
    """

    pin_memory: bool = True

    def store(self) -> ShardStore:
        return _CPU(self.pin_memory)


@dataclass(frozen=True)
class DiskOffload:
    """Shards and the optimizer's state lie in files, mapped into memory; gradients stay in the memory of the CPU.

    The optimizer steps one parameter after another, so that the state of one parameter is resident at a time. An
    optimizer that does not treat each element by itself, and a step with a closure, step all parameters at once.

    path: a directory on this rank's machine, created if it is missing. The files are unnamed and vanish when the
        process ends; save checkpoints to keep the state.

    glibc keeps much of the memory of freed tensors, unless MALLOC_MMAP_THRESHOLD_=262144 is in the environment when the
    process starts.

    Raises ValueError on every rank if a rank cannot create its files or its disk is full; OSError in the first step if
    the disk has no room for the state.
    """

    path: str | Path

    def store(self) -> Disk:
        return Disk(Path(self.path))


def as_offload(given: Any) -> CPUOffload | DiskOffload | None:
    """Converts the option: zero's classes, PyTorch's CPUOffload and policies, None. Raises ValueError otherwise."""
    if given is None or isinstance(given, CPUOffload | DiskOffload):
        return given
    from torch.distributed import fsdp  # takes 0.7 s, and has been imported where it is needed

    if isinstance(given, fsdp.CPUOffload):
        return CPUOffload() if given.offload_params else None
    if isinstance(given, fsdp.CPUOffloadPolicy):
        return CPUOffload(pin_memory=given.pin_memory)
    if type(given) is fsdp.OffloadPolicy:  # PyTorch's word for none
        return None
    raise ValueError(
        f"offload={given!r}: pass zero.CPUOffload(), zero.DiskOffload(path), torch.distributed.fsdp.CPUOffload or "
        "CPUOffloadPolicy, or None, which offloads nothing."
    )


def offload_of(given: Any) -> tuple[CPUOffload | DiskOffload | None, str | None]:
    """See `as_offload`; returns the error message instead of raising it."""
    try:
        return as_offload(given), None
    except ValueError as error:
        return None, str(error)


@dataclass
class _CPU:
    """The memory of the CPU."""

    pin_memory: bool

    def place(self, shard: Tensor) -> Tensor:
        if shard.device.type == "cpu":
            return shard.clone()
        there = torch.empty(shard.shape, dtype=shard.dtype, device="cpu", pin_memory=self.pin_memory)
        return there.copy_(shard)

    def has(self, shard: Tensor) -> bool:
        return shard.device.type == "cpu"

    def used(self, shard: Tensor) -> None: ...

    def step(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        step_alone(optimizer, params)

    def stepped(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None: ...
