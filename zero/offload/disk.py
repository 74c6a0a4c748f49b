"""Offload of shards to files."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.measure.built import state_made_by
from zero.measure.kinds import ELEMENTWISE
from zero.measure.param_groups import params_of
from zero.offload.on_host import OnHost
from zero.shards.offload import SteppedGroup, unhooked


class Disk(OnHost):
    """Files in one directory, and the tensors that are mapped to them. offload: named in the error for a full disk."""

    alike = "offload DiskOffload"

    def __init__(self, path: Path, offload: object = None) -> None:
        self._path, self._offload = path, offload
        self._full: str | None = None
        # By bytes, files for what a step is to make; and how many tensors of a parameter's shape each group gets.
        self._room: dict[int, list[mmap.mmap]] = {}
        self._made: WeakKeyDictionary[Optimizer, list[int]] = WeakKeyDictionary()
        # By address of the mapping, so that views of a tensor are found, too. The tensor keeps it.
        self._mapped: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()
        # Gradients of what was stepped by group, until the optimizer's own step has returned.
        self._taken: WeakKeyDictionary[Optimizer, dict[nn.Parameter, Tensor]] = WeakKeyDictionary()

    def place(self, shard: Tensor) -> Tensor:
        try:
            return self.map(shard)
        except OSError as error:  # other ranks wait until this one says so: `problem`
            self._full = str(error)
            return shard.clone()

    def refuse_full(self, what: str) -> None:
        if self._full is not None:
            raise ValueError(
                f"there is no room for {what} in {self._offload}: {self._full}. Free some, or choose another directory."
            )

    def make_room(self, optimizer: Optimizer, params: Iterable[nn.Parameter]) -> None:
        self._room.clear()  # where another rank had none
        held = {param for param in params if param.grad is not None and not optimizer.state.get(param)}
        if not held or type(optimizer) not in ELEMENTWISE:
            return
        # Measured once: a plain SGD has no state in any step.
        counts, groups = self._made.get(optimizer, []), optimizer.param_groups
        for group in groups[len(counts) :]:
            made = state_made_by(optimizer, group, torch.float32, of_torchs=True).values()
            counts = [*counts, sum(isinstance(one, Tensor) and one.dim() > 0 for one in made)]
        self._made[optimizer] = counts
        for group, of_shape in zip(groups, counts, strict=False):
            try:
                for param in group["params"] if of_shape else ():
                    if param in held and param.nbytes:
                        files = self._room.setdefault(param.nbytes, [])
                        files += [self._file(param.nbytes) for _ in range(of_shape)]
            except OSError as error:
                self._room.clear()
                raise ValueError(
                    f"there is no room for the state of {type(optimizer).__name__} in {self._offload}: {error}. "
                    "Nothing was stepped. Free some, or choose another directory."
                ) from error

    def map(self, shard: Tensor) -> Tensor:
        """Copies a tensor into a file. Raises OSError where the disk is full."""
        if not shard.numel():
            return shard.cpu()
        room = self._room.get(shard.nbytes)
        pages = room.pop() if room else self._file(shard.nbytes)
        there = torch.frombuffer(pages, dtype=shard.dtype).as_strided(shard.shape, shard.stride())
        there.copy_(shard)
        self._mapped[there.untyped_storage().data_ptr()] = pages
        self.used(there)
        return there

    def _file(self, nbytes: int) -> mmap.mmap:
        self._path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._path) as file:
            if hasattr(os, "posix_fallocate"):  # a full disk is an error here, not a signal later
                os.posix_fallocate(file.fileno(), 0, nbytes)
            else:
                file.truncate(nbytes)
            return mmap.mmap(file.fileno(), nbytes)

    def has(self, shard: Tensor) -> bool:
        return shard.untyped_storage().data_ptr() in self._mapped

    def used(self, shard: Tensor, advice: str = "MADV_DONTNEED") -> None:
        """Releases the memory; the operating system writes changed pages to the file. Or gives other advice."""
        pages = self._mapped.get(shard.untyped_storage().data_ptr())
        if pages is not None and hasattr(mmap, advice):  # other systems take no advice
            pages.madvise(getattr(mmap, advice))

    def at_once(self) -> int:
        return sys.maxsize  # `step_part` reads the files of one parameter while it steps the one before

    def step_part(self, part: Optimizer) -> None:
        """Steps parameters one by one, so that the state of one is resident at a time."""
        step = unhooked(part)  # hooks and schedulers are to see one step
        gradients = [(param, param.grad) for param in params_of(part) if param.grad is not None]
        try:
            for param, _ in gradients:
                param.grad = None
            for number, (param, gradient) in enumerate(gradients):
                for following, _ in gradients[number + 1 : number + 2]:
                    for tensor in (following, *part.state.get(following, {}).values()):
                        if isinstance(tensor, Tensor):
                            self.used(tensor, "MADV_WILLNEED")
                param.grad = gradient
                step()
                param.grad = None
                self._rest(part, param)
        finally:
            for param, gradient in gradients:
                param.grad = gradient

    def before_step(
        self, optimizer: Optimizer, params: Sequence[nn.Parameter], groups: Sequence[SteppedGroup], *, closure: bool
    ) -> None:
        """Steps groups one after another also at stage 3, where the optimizer is the user's."""
        if closure or type(optimizer) not in ELEMENTWISE:
            return
        held = {*params}
        for group in groups:
            own = [param for param in group.params if param in held]
            if any(param.grad is not None for param in own):
                self.step_group(group, optimizer, own)
        taken = {param: param.grad for param in params if param.grad is not None}
        for param in taken:  # the optimizer's own step is to leave these
            param.grad = None
        self._taken.setdefault(optimizer, {}).update(taken)

    def after_step(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        """Puts the gradients back, and moves state that the step created in memory into files."""
        for param, gradient in self._taken.pop(optimizer, {}).items():
            param.grad = gradient
        for param in params:
            self._rest(optimizer, param)
        self._room.clear()  # where a step was skipped

    def _rest(self, optimizer: Optimizer, param: nn.Parameter) -> None:
        """Moves the state of a parameter into files, and releases the memory of both."""
        state = optimizer.state.get(param, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                if not self.has(value):
                    state[key] = self.map(value)
                self.used(state[key])
        self.used(param.data)
