"""Shards and their optimizer state in files that are mapped into memory.

The operating system reads and writes pages as they are touched; used pages are released.
(S. Rajbhandari et al., ZeRO-Infinity, 2021, section 5.)
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.measure.kinds import ELEMENTWISE
from zero.measure.param_groups import params_of
from zero.shards.home import Home, only, unhooked


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

    # ------------------------------------------------------------------------------------------- stepping

    def step(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        with only(optimizer, params):
            self.before_step(optimizer, params, closure=False)
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
