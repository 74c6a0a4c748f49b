"""Full parameters in place: all units at once, where the module's own code, or the user's, must see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from zero._torch.tensors import as_plain_tensors
from zero.comm.together import alike
from zero.fsdp.build import refuse_busy
from zero.fsdp.model import Model, models
from zero.fsdp.unit import Unit
from zero.shards.bound import refuse_moved
from zero.shards.shard_group import ShardGroup
from zero.tensor_parallel import table
from zero.tensor_parallel.shown import Slot, slots_of


@contextmanager
def summon(module: nn.Module, *, wrapped: nn.Module, recurse: bool, **options: bool) -> Iterator[None]:
    """Collective. See FSDP.summon_full_params, which has the same options.

    module: held here so that it exists until the end. wrapped: the module inside it if it is an FSDP, else itself.

    DTensors are shown, with gradients as DTensors, too; but not parameters that are on another device than the mesh
    (offload_to_cpu), and those that only other ranks have full.
    """
    with ExitStack() as stack:
        full: set[nn.Parameter] = set()
        for model in models():
            units = model.units_of(wrapped, recurse=recurse)
            if units:
                stack.enter_context(summoned(model, units, **options))
                full.update(param for unit in units if unit.readable for param in unit.params)
        tied: dict[nn.Parameter, Any] = {}
        for slot in [slot for holder in wrapped.modules() for slot in slots_of(holder)]:
            dtensor: Any = table.dtensor_of(slot.param)
            if slot.param in full and slot.param.device.type == dtensor.device_mesh.device_type:
                slot.show(tied.get(slot.param))
                tied[slot.param] = slot.dtensor
                if options.get("with_grads") and slot.param.grad is not None:
                    slot.dtensor.grad = table.like(dtensor, slot.param.grad)
                stack.callback(_hide, slot, with_grads=options.get("with_grads", False))
        yield


def _hide(slot: Slot, *, with_grads: bool) -> None:
    """Takes over what was set on a DTensor. Values and gradients were written on the parameter's memory."""
    slot.param.requires_grad_(slot.dtensor.requires_grad)
    if with_grads and slot.dtensor.grad is None:
        slot.param.grad = None
    slot.hide()


@contextmanager
def summoned(
    model: Model,
    units: Sequence[Unit],
    *,
    writeback: bool = False,
    rank0_only: bool = False,
    with_grads: bool = False,
    offload_to_cpu: bool = False,
    to: int | None = None,
) -> Iterator[None]:
    """Collective. See FSDP.summon_full_params. to: the rank of the shard group that alone gets full parameters."""
    model.refuse_moved()
    if offload_to_cpu and with_grads:
        raise ValueError(
            "offload_to_cpu=True with with_grads=True: torch keeps a gradient on the device of its parameter. Pass one "
            "of them."
        )
    if rank0_only and writeback:
        raise ValueError(
            "rank0_only=True with writeback=True: what rank 0 writes would not reach the owners of the shards. Pass "
            "writeback=False, or unshard the parameters on all ranks."
        )
    refuse_busy(units, "summon_full_params()")
    if with_grads:
        model.refuse_unreduced()
    groups, to = [group for unit in units for group in unit.groups], 0 if rank0_only else to
    gradients: list[_Gradients] = []
    keep = False
    try:
        for unit in units:
            unit.reshard()  # a forward without backward may have left it unsharded
        if with_grads:
            gradients = [_Gradients(group, to) for group in groups]
        for unit in units:
            unit.summon(to, on_cpu=offload_to_cpu)
        for of_group in gradients:
            of_group.show()
        if writeback:
            with alike(model.comms, "the full parameters of FSDP"):
                yield
                refuse_moved(group.bound for group in groups)
        else:
            yield
        keep = writeback  # not after an exception: what is half written would reach the owners
    finally:
        for unit in units:
            unit.dismiss(keep=keep)
        for of_group in gradients:
            of_group.end(keep=keep)


class _Gradients:
    """Collective. Gathers the gradients of a shard group, and puts them into `param.grad` until `end`."""

    def __init__(self, group: ShardGroup, to: int | None) -> None:
        self._group = group
        self._shards = [param.grad for param in group.params]
        dtypes = {grad.dtype for grad in self._shards if grad is not None}
        shard = torch.zeros_like(group.shard, dtype=dtypes.pop() if dtypes else None)
        with as_plain_tensors():
            for view, grad in zip(group.shapes.views_of_shard(shard), self._shards, strict=True):
                if grad is not None:
                    view.copy_(grad)
        exist = torch.tensor([float(grad is not None) for grad in self._shards], device=shard.device)
        group.comm.all_reduce(exist, maximum=True)
        self._exist = exist.tolist()
        self._full = group.gather_full(shard, to)

    def show(self) -> None:
        if self._full is not None:
            views = self._group.shapes.views_of_full(self._full)
            for param, view, exists in zip(self._group.params, views, self._exist, strict=True):
                param.grad = view if exists else None

    def end(self, *, keep: bool) -> None:
        group, shards = self._group, self._shards
        if keep and self._full is not None:
            # A copy: a view, as the gradient of a shard, would keep the memory of all full gradients.
            own = self._full[group.layout.segment(group.comm.rank)].to(group.shard.device, copy=True)
            views = zip(group.params, group.shapes.views_of_shard(own), strict=True)
            shards = [
                None if param.grad is None else view if index in group.shapes.spans else self._shards[index]
                for index, (param, view) in enumerate(views)
            ]
        for index, gradient in enumerate(shards):
            group.bound.set_gradient(index, gradient)
