"""Shards and optimizer state in the memory of the CPU or in files: the option `offload` of OSS and FSDP.

At stage 3 the parameters' shards are offloaded, at stages 1 and 2 the tensors that the optimizer steps in their place
(zero/shards/masters.py). Only all-gathers and steps read them. Files are mapped into memory: the operating system reads
and writes pages as they are touched, and used pages are released.

(S. Rajbhandari et al., ZeRO-Infinity, 2021, section 5; J. Ren et al., ZeRO-Offload, 2021.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary

from zero._torch.tensors import has_values
from zero.comm.streams import pinned
from zero.offload.disk import Disk
from zero.offload.on_host import OnHost
from zero.shards.offload import DEVICE, Offload


@dataclass(frozen=True)
class CPUOffload(OnHost):
    """Shards, their gradients and the optimizer's state lie in the memory of the CPU, where the optimizer steps them.

    torch steps a parameter on its device, with a gradient and state on the same device. Without a GPU this changes
    nothing. torch.optim.Adam(fused=True) is fast on the CPU.

    pin_memory: keep shards in pinned memory, which a GPU reads asynchronously.
    ratio: the share of the parameters whose shards and optimizer state are offloaded, by whole buckets (stages 1 and 2)
        or units (stage 3). Those that forward needs first stay on the device, which steps them, as many as fit into the
        remaining share.
    """

    pin_memory: bool = True
    ratio: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(
                f"CPUOffload(ratio={self.ratio}): pass a share above 0 and up to 1, or offload=None for 0."
            )

    @property
    def alike(self) -> str:  # type: ignore[override]
        return f"offload CPUOffload, ratio {self.ratio}"

    def of_groups(self, numels: Sequence[int]) -> list[Offload]:
        offloads: list[Offload] = []
        left = (1 - self.ratio) * sum(numels)
        for numel in numels:
            stays = numel <= left
            left -= numel * stays
            offloads.append(DEVICE if stays else self)
        return offloads

    def place(self, shard: Tensor) -> Tensor:
        if shard.device.type == "cpu":
            return shard.clone()
        pins = self.pin_memory and has_values(shard)
        there = pinned(shard.shape, shard.dtype) if pins else torch.empty_like(shard, device="cpu")
        return there.copy_(shard)

    def has(self, shard: Tensor) -> bool:
        return shard.device.type == "cpu"

    def returned(self, shard: Tensor) -> None:
        if not self.has(shard):
            _digests[shard] = digest(shard)

    def holds(self, shard: Tensor) -> bool:
        before = None if self.has(shard) else _digests.get(shard)
        return before is not None and (not has_values(shard) or bool(digest(shard) == before))


# Of shards on the device, when they were written last.
_digests = WeakIdKeyDictionary()

# Bytes of which a digest is made at a time: it needs twice as many, which stay in a GPU's cache.
_CHUNK = 2**24

# As signed numbers, as torch has them.
_ODD = 0x9E3779B97F4A7C15 - 2**64
_ROUNDS = [(30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)]


def digest(tensor: Tensor) -> Tensor:
    """64 bits, on the tensor's device, that differ if any element of a flat tensor has other bits (but for one
    case in 2**64).

    The sum of the tensor's words of 64 bits, each mixed with its position as in splitmix64 (G. Steele et al., Fast
    Splittable Pseudorandom Number Generators, 2014, section 4). It reads and writes 26 times the tensor's bytes.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, chunk in enumerate(tensor.view(torch.uint8).split(_CHUNK)):
        mixed, begin = pad(chunk, (0, -len(chunk) % 8)).view(torch.int64), number * _CHUNK // 8
        mixed.add_(torch.arange(begin, begin + len(mixed), device=tensor.device), alpha=_ODD)
        for shift, factor in _ROUNDS:
            mixed.bitwise_xor_(mixed >> shift).mul_(factor)
        total += mixed.bitwise_xor_(mixed >> 31).sum()
    return total


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


def offload_of(given: Any) -> Offload:
    """Converts the option: an Offload, PyTorch's CPUOffload and policies, None. Raises ValueError for others."""
    if given is None or isinstance(given, Offload):
        return given or DEVICE
    if isinstance(given, DiskOffload):
        return Disk(Path(given.path).expanduser(), given)
    from torch.distributed import fsdp  # takes 0.7 s, and has been imported where it is needed

    if isinstance(given, fsdp.CPUOffload):
        return CPUOffload() if given.offload_params else DEVICE
    if isinstance(given, fsdp.CPUOffloadPolicy):
        return CPUOffload(pin_memory=given.pin_memory)
    if type(given) is fsdp.OffloadPolicy:  # PyTorch's word for none
        return DEVICE
    raise ValueError(
        f"offload={given!r}: pass zero.CPUOffload(), zero.DiskOffload(path), torch.distributed.fsdp.CPUOffload or "
        "CPUOffloadPolicy, or None, which offloads nothing."
    )


NAMES = ("offload", "cpu_offload")
"""The options that say where shards are stored; the second is PyTorch's name."""


def take_offload(options: dict[str, Any]) -> Offload:
    """Takes these options out of arguments, and returns where shards lie. Raises ValueError for a value."""
    asked = {name: options.pop(name) for name in NAMES if name in options}
    given = [name for name, value in asked.items() if value not in (None, False)]
    if len(given) > 1:
        raise ValueError(f"{given[0]} and {given[1]} both say where shards are stored. Pass one of them.")
    # PyTorch takes False for none.
    found = [offload_of(None if value is False and name == NAMES[1] else value) for name, value in asked.items()]
    return next((offload for offload in found if offload.active), DEVICE)
