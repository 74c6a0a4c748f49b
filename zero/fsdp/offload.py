"""Parts that live elsewhere than the parameters that are computed with: in the memory of the CPU, or in files.

Parts, and with them what an optimizer keeps of them, are read at a gathering and at a step, and rest in between. In
files both are mapped into memory: the operating system reads and writes pages as they are touched, and each is told to
go when it has been used. (S. Rajbhandari et al., ZeRO-Infinity, 2021, section 5; J. Ren et al., ZeRO-Offload, 2021.)
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.oss.flat import Home
from zero.oss.kinds import ELEMENTWISE


@dataclass(frozen=True)
class CPUOffload:
    """Parts, their gradients and the optimizer's state lie in the memory of the CPU, where the optimizer steps them.

    The three go together: torch steps a parameter where it is, with a gradient and state of the same device. Without a
    GPU there is nothing to move, and this changes nothing. torch.optim.Adam(fused=True) is fast on the CPU.

    pin_memory: keep parts where a GPU can read them without waiting for the CPU.
    """

    pin_memory: bool = True

    def home(self) -> Home:
        return _CPU(self.pin_memory)


@dataclass(frozen=True)
class DiskOffload:
    """Parts and the optimizer's state lie in files, mapped into memory; gradients and whole units stay in memory.

    Each parameter is stepped by itself, so that no more than one's state need be resident at a time; optimizers that
    torch does not step element by element step all at once. A step given a closure does so too.

    path: a directory on this rank's machine, made if it is missing. The files have no name in it and are gone when the
        process ends. Checkpoints are what outlasts it.

    glibc keeps much of the memory that tensors freed, unless the process is started with
    MALLOC_MMAP_THRESHOLD_=262144 in its environment.

    Raises ValueError, on every rank, where a rank's files cannot be made or the disk has no room for the parts;
    OSError, from the first step, where it has none for the state.
    """

    path: str | Path

    def home(self) -> Disk:
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


@dataclass
class _CPU:
    """The memory of the CPU."""

    pin_memory: bool

    def place(self, part: Tensor) -> Tensor:
        if part.device.type == "cpu":
            return part.clone()
        there = torch.empty(part.shape, dtype=part.dtype, pin_memory=self.pin_memory)
        return there.copy_(part)

    def used(self, part: Tensor) -> None:
        pass


class Disk:
    """Files in one directory, and the tensors that are mapped to them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mapped: dict[int, mmap.mmap] = {}
        """By the address that they are mapped to, so that views of a tensor are known too."""
        self._state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._put_by: dict[nn.Parameter, Tensor] = {}

    def place(self, part: Tensor) -> Tensor:
        """A copy in a file. Raises OSError where there is no room."""
        if not part.numel():
            return part
        self._path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._path) as file:
            os.posix_fallocate(file.fileno(), 0, part.nbytes)  # a full disk is an error here, not a signal later
            pages = mmap.mmap(file.fileno(), part.nbytes)
        there = torch.frombuffer(pages, dtype=part.dtype).as_strided(part.shape, part.stride())
        there.copy_(part)
        self._mapped[_address(there)] = pages
        self.used(there)
        return there

    def used(self, part: Tensor) -> None:
        """Lets go of the memory; what was written is on its way to the file."""
        pages = self._mapped.get(_address(part))
        if pages is not None:
            pages.madvise(mmap.MADV_DONTNEED)

    # ------------------------------------------------------------------------------------------- stepping

    def before_step(self, optimizer: Optimizer, params: Sequence[nn.Parameter], *, closure: bool) -> None:
        """Steps the parameters one by one, and leaves to the step itself what else the optimizer has."""
        if closure or type(optimizer) not in ELEMENTWISE:
            return
        unhooked = vars(type(optimizer).step)["__wrapped__"]  # hooks and schedulers are to see one step
        step: Callable[[], object] = partial(unhooked, optimizer)
        everything = [param for group in optimizer.param_groups for param in group["params"]]
        gradients = {param: param.grad for param in everything if param.grad is not None}
        try:
            for param in gradients:
                param.grad = None
            for param in params:
                if param in gradients:
                    param.grad = gradients[param]
                    step()
                    param.grad = None
                    self._rest(optimizer, param)
        except BaseException:
            for param, gradient in gradients.items():
                param.grad = gradient
            raise
        stepped = set(params)
        for param, gradient in gradients.items():
            if param in stepped:
                self._put_by[param] = gradient
            else:
                param.grad = gradient

    def after_step(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        """Gives gradients back, and puts into files what state a step has made in memory."""
        for param in params:
            if param in self._put_by:
                param.grad = self._put_by.pop(param)
            self._rest(optimizer, param)

    def _rest(self, optimizer: Optimizer, param: nn.Parameter) -> None:
        """To files with what there is of a parameter, and out of memory."""
        state = optimizer.state.get(param, {})
        kept = self._state.setdefault(param, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() and kept.get(key) is not value:
                if key in kept:
                    self._mapped.pop(_address(kept[key]), None)
                state[key] = kept[key] = self.place(value)
            if key in kept:
                self.used(kept[key])
        self.used(param.data)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
