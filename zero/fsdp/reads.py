"""What those read who read parameters.

Outside of their own unit's forward the forward of another unit, a hook in backward and a checkpoint that computes again
read full parameters, and torch.amp.GradScaler reads all gradients: sharded parameters ask here. Within it modules of
tensor parallelism read DTensors in place of the plain parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import get_ident
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from zero._torch.autograd import in_a_backward
from zero._torch.tensors import as_plain_tensors
from zero.comm import Comm
from zero.comm.together import Together
from zero.fsdp.backward import Backward
from zero.fsdp.edges import recorded_as_shard
from zero.fsdp.unit import Index, Unit
from zero.shards.cut import Owner
from zero.shards.shard_group import ShardGroup
from zero.shards.sharded_parameter import AtRest
from zero.tensor_parallel.shown import Shown, Slot, slots_of
from zero.wrap.dtensor_checks import watch_steps

_OUTSIDE = (
    "parameters of {} are read outside of its forward. They are DTensors, which the unit's modules see only while one "
    "of them runs. Put the module that reads them and the unit into one unit, by auto_wrap_policy or as_one_unit."
)


class Reads:
    """Reads of the parameters of one model, as sharded_parameter.py asks for them.

    scaled: the groups of ranks that have elements of the gradients.
    `loading`: whether full weights are loaded now. `naming`: whether names and shapes are read (full_weights.py).
    """

    def __init__(self, index: Index, comms: Sequence[Comm], backward: Backward, scaled: Sequence[Comm]) -> None:
        self._index, self._backward = index, backward
        self.loading = self.naming = False
        self._first_read = Together(comms, "the first reading of parameters of another unit")
        self._overflow = [(comm, comm.channel("the search for gradients that are not finite")) for comm in scaled]

    @property
    def _are_full(self) -> bool:
        """Whether parameters are full for who reads them now: within forward and backward."""
        return (bool(self._index.running) and self._index.thread == get_ident()) or in_a_backward()

    @property
    def beside(self) -> bool:
        runs = bool(self._index.running) or self._backward.active
        return runs and self._index.thread != get_ident() and not in_a_backward()

    @property
    def without_values(self) -> bool:
        return self.loading or self.naming

    def like(self, param: nn.Parameter) -> Tensor | None:
        """A tensor without memory like the full parameter, if that is read as full now or without values."""
        if not (self._are_full or self.without_values):
            return None
        group, index = self._index[param]
        shapes = group.shapes
        return torch.empty_strided(shapes.full[index], shapes.strides[index], dtype=group.full.dtype, device="meta")

    def load(self, owner: Owner, index: int, shard: Tensor, value: Tensor) -> bool:
        """While full weights are loaded, writes this rank's elements of a full value, and returns True."""
        if not self.loading or isinstance(value, AtRest):  # of shards each rank copies its own
            return False
        assert isinstance(owner, ShardGroup)
        param, full_shape = owner.params[index], owner.shapes.full[index]
        if value.shape != full_shape and value.numel() != 1:
            raise RuntimeError(f"{owner.names[index]} has the shape {list(full_shape)}, not {list(value.shape)}")
        value = value.detach()  # on every rank, also if it owns nothing: it may be received here
        with as_plain_tensors():
            if index in owner.shapes.spans:
                shard.copy_(owner.own_slice(index, value.expand(full_shape)))
            else:
                increment_version(param)  # so that graphs that saved it are refused on every rank
        return True

    def unshard(self, param: nn.Parameter) -> bool:
        """Collective within a forward or backward: a parameter of another unit is read, which is unsharded with the
        innermost running one from now on. Returns False outside."""
        unit = self._index.unit_of(param)
        if not self._are_full:
            return False
        if not self._index.running:
            self._backward.unshard_to_read(unit)
            return True
        reader = self._index.running[-1]
        if not self._backward.active:
            refuse_read(unit)
        unit.unshard(for_backward=self._backward.active)
        unit.needed_by.add(reader)
        if unit not in self._index.reads[reader]:
            self._index.reads[reader].append(unit)
            self._refuse_recorded(unit, reader)
        return unit.readable

    def _refuse_recorded(self, unit: Unit, reader: Unit) -> None:
        """Collective. Raises RuntimeError on every rank for a Function of the user's that has recorded a shard."""
        with self._first_read:
            for name in filter(None, map(recorded_as_shard, unit.groups)):
                raise RuntimeError(
                    f"a torch.autograd.Function in the forward of {reader.title} of FSDP was given {name} of "
                    f"{unit.title} while it was sharded, and would get its gradient in the shape of the shard. From "
                    "the next forward on it is unsharded before. To train from the first on make both one unit, "
                    "FSDP(as_one_unit=...), or read the parameter once before the Function: param.detach()."
                )
            self._first_read.agree()

    def spread_overflow(self, found: Tensor) -> None:
        """Collective. Makes it the largest of any rank: 1 where a gradient is not finite.

        Loss scaling skips a step whose gradients are not finite (P. Micikevicius et al., Mixed Precision Training,
        2018, section 3.2). Only the owner of the overflowed elements sees them, and all ranks skip the same steps.
        """
        for comm, channel in self._overflow:
            comm.all_reduce(found, maximum=True, channel=channel)


class ShownUnits:
    """Shows the parameters of each unit of an FSDP while the unit runs."""

    def __init__(self, index: Index) -> None:
        watch_steps()
        self._index: Index = proxy(index)  # which keeps the units, and these keep this
        # Units come from the outside in, so the innermost, which is the last, overwrites the others.
        innermost = {module: unit for unit in index.units for module in unit.module.modules()}
        slots: dict[Unit, list[Slot]] = {}
        holders: dict[Unit, set[nn.Module]] = {}
        for module, unit in innermost.items():
            if own := slots_of(module):
                slots.setdefault(unit, []).extend(own)
                holders.setdefault(unit, {unit.module}).add(module)
        self._hooks: list[RemovableHandle] = []
        for unit, own in slots.items():
            unit.shown = Shown(own, self._refuse_sharded)
            self._hooks += unit.shown.watch(holders[unit])

    def _refuse_sharded(self, params: Iterable[nn.Parameter]) -> None:
        """Raises RuntimeError for a tied parameter of a unit around this one that does not run."""
        for param in params:
            if param in self._index and not (unit := self._index.unit_of(param)).readable:
                raise RuntimeError(_OUTSIDE.format(unit.title))

    def remove(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        for unit in self._index.units:
            if unit.shown is not None:
                unit.shown.hide()
                unit.shown = None


def refuse_read(unit: Unit) -> None:
    """Raises RuntimeError for a unit that another one reads, if its parameters are DTensors."""
    if unit.shown is not None:
        raise RuntimeError(_OUTSIDE.format(unit.title))
