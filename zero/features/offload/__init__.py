"""Shards and optimizer state in the memory of the CPU or in files: the option `offload` of OSS and FSDP.

At stage 3 the parameters' shards are offloaded, at stages 1 and 2 the tensors that the optimizer steps in their place
(zero/shards/masters.py). Only all-gathers and steps read them. Files are mapped into memory: the operating system reads
and writes pages as they are touched, and used pages are released.

(S. Rajbhandari et al., ZeRO-Infinity, 2021, section 5; J. Ren et al., ZeRO-Offload, 2021.)
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from zero._torch import has_values
from zero.features.offload.memory import digest, pinned
from zero.measure.kinds import ELEMENTWISE
from zero.measure.param_groups import params_of
from zero.shards.home import DEVICE, Home, homes, part_of, unhooked


@dataclass(frozen=True)
class CPUOffload(Home):
    """Shards, their gradients and the optimizer's state lie in the memory of the CPU, where the optimizer steps them.

    torch steps a parameter on its device, with a gradient and state on the same device. Without a GPU this changes
    nothing. torch.optim.Adam(fused=True) is fast on the CPU.

    pin_memory: keep shards in pinned memory, which a GPU reads asynchronously.
    """

    pin_memory: bool = True

    apart, alike = True, "offload CPUOffload"

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


_digests = WeakIdKeyDictionary()
"""Of shards on the device, when they were written last."""


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


def home_of(given: Any) -> Home:
    """Converts the option: zero's classes, a home, PyTorch's CPUOffload and policies, None. Raises ValueError for other
    values."""
    if given is None or isinstance(given, Home):
        return given or DEVICE
    if isinstance(given, DiskOffload):
        return Disk(Path(given.path), given)
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


class Disk(Home):
    """Files in one directory, and the tensors that are mapped to them. offload: named in the error for a full disk."""

    apart, alike = True, "offload DiskOffload"

    def __init__(self, path: Path, offload: object = None) -> None:
        self._path, self._offload = path, offload
        self._full: str | None = None
        self._mapped: dict[int, mmap.mmap] = {}
        """By address of the mapping, so that views of a tensor are found, too."""
        self._state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._set_aside: dict[nn.Parameter, Tensor] = {}

    def place(self, shard: Tensor) -> Tensor:
        try:
            return self.map(shard)
        except OSError as error:  # other ranks wait until this one says so: `problem`
            self._full = str(error)
            return shard.clone()

    def problem(self, what: str) -> str | None:
        if self._full is None:
            return None
        return f"there is no room for {what} in {self._offload}: {self._full}. Free some, or choose another directory."

    def map(self, shard: Tensor) -> Tensor:
        """Copies a tensor into a file. Raises OSError where the disk is full."""
        if not shard.numel():
            return shard.cpu()
        self._path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._path) as file:
            os.posix_fallocate(file.fileno(), 0, shard.nbytes)  # a full disk is an error here, not a signal later
            pages = mmap.mmap(file.fileno(), shard.nbytes)
        there = torch.frombuffer(pages, dtype=shard.dtype).as_strided(shard.shape, shard.stride())
        there.copy_(shard)
        self._mapped[_address(there)] = pages
        self.used(there)
        return there

    def has(self, shard: Tensor) -> bool:
        return _address(shard) in self._mapped

    def used(self, shard: Tensor) -> None:
        """Releases the memory; the operating system writes changed pages to the file."""
        pages = self._mapped.get(_address(shard))
        if pages is not None:
            pages.madvise(mmap.MADV_DONTNEED)

    def step(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        self.before_step(part_of(optimizer, params), params, closure=False)
        self.stepped(optimizer, params)

    def before_step(self, optimizer: Optimizer, params: Sequence[nn.Parameter], *, closure: bool) -> None:
        """Steps these parameters one by one. The optimizer's own step then steps all others."""
        if closure or type(optimizer) not in ELEMENTWISE:
            return
        step = unhooked(optimizer)  # hooks and schedulers are to see one step
        gradients = {param: param.grad for param in params_of(optimizer) if param.grad is not None}
        try:
            for param in gradients:
                param.grad = None
            own = [param for param in params if param in gradients]
            for param in own:
                param.grad = gradients[param]
                step()
                param.grad = None
                self._rest(optimizer, param)
            self._set_aside.update({param: gradients.pop(param) for param in own})
        finally:
            for param, gradient in gradients.items():
                param.grad = gradient

    def stepped(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        """Puts the gradients back, and moves state that the step created in memory into files."""
        for param in params:
            if param in self._set_aside:
                param.grad = self._set_aside.pop(param)
            self._rest(optimizer, param)

    def _rest(self, optimizer: Optimizer, param: nn.Parameter) -> None:
        """Moves the state of a parameter into files, and releases the memory of both."""
        state = optimizer.state.get(param, {})
        kept = self._state.setdefault(param, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() and kept.get(key) is not value:
                if key in kept:
                    self._mapped.pop(_address(kept[key]), None)
                state[key] = kept[key] = self.map(value)
            if key in kept:
                self.used(kept[key])
        self.used(param.data)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


homes["offload"] = home_of
homes["cpu_offload"] = lambda given: home_of(given or None)  # PyTorch's name; it takes False for none
