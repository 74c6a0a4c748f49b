"""Shards that lie elsewhere than the parameters that are computed with: in the memory of the CPU, or in files.

At stage 3 these are the parameters' own shards, at stages 1 and 2 what the optimizer steps in their place (masters.py).
They, and with them what an optimizer keeps of them, are read at a gathering and at a step, and rest in between. In
files both are mapped into memory: the operating system reads and writes pages as they are touched, and each is let go
when it has been used. (S. Rajbhandari et al., ZeRO-Infinity, 2021, section 5; J. Ren et al., ZeRO-Offload, 2021.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.oss.disk import Disk
from zero.oss.slices import step_alone


class ShardStore(Protocol):
    """Where shards lie that are not kept beside the full parameters."""

    def place(self, shard: Tensor) -> Tensor:
        """A copy of the shard, there. Raises OSError where there is no room."""

    def has(self, shard: Tensor) -> bool:
        """Whether a shard lies there already."""

    def used(self, shard: Tensor) -> None:
        """Called when a shard that was placed has been read or written, and will not be for a while."""

    def step(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        """Steps these parameters, which lie there, and no others. The optimizer treats each element by itself."""

    def stepped(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        """Called when an optimizer has stepped these parameters otherwise."""


class Room:
    """A store that goes on where there is no room, for all ranks to learn of it. `full`: what kept a shard from it."""

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
        """In words for the user, where there was no room for `what`."""
        if self.full is None:
            return None
        return f"there is no room for {what} in {offload}: {self.full}. Free some, or choose another directory."


@dataclass(frozen=True)
class CPUOffload:
    """Shards, their gradients and the optimizer's state lie in the memory of the CPU, where the optimizer steps them.

    The three go together: torch steps a parameter where it is, with a gradient and state of the same device. Without a
    GPU there is nothing to move, and this changes nothing. torch.optim.Adam(fused=True) is fast on the CPU.

    pin_memory: keep shards where a GPU can read them without waiting for the CPU.
    """

    pin_memory: bool = True

    def store(self) -> ShardStore:
        return _CPU(self.pin_memory)


@dataclass(frozen=True)
class DiskOffload:
    """Shards and the optimizer's state lie in files, mapped into memory; gradients stay in the memory of the CPU.

    Each parameter is stepped by itself, so that no more than one's state need be resident at a time; optimizers that
    torch does not step element by element step all at once. A step given a closure does so too.

    path: a directory on this rank's machine, made if it is missing. The files have no name in it and are gone when the
        process ends. Checkpoints are what outlasts it.

    glibc keeps much of the memory that tensors freed, unless the process is started with
    MALLOC_MMAP_THRESHOLD_=262144 in its environment.

    Raises ValueError, on every rank, where a rank's files cannot be made or the disk has no room for the shards;
    OSError, from the first step, where it has none for the state.
    """

    path: str | Path

    def store(self) -> Disk:
        return Disk(Path(self.path))


def as_offload(given: Any) -> CPUOffload | DiskOffload | None:
    """Takes PyTorch's CPUOffload and offload policies too. Raises ValueError for what is none."""
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
    """As `as_offload`, but what is wrong is returned, in words for the user."""
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
        there = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=self.pin_memory)
        return there.copy_(shard)

    def has(self, shard: Tensor) -> bool:
        return shard.device.type == "cpu"

    def used(self, shard: Tensor) -> None: ...

    def step(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        step_alone(optimizer, params)

    def stepped(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None: ...
