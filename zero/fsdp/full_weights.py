"""Full weights: copies that are gathered unit by unit, and full parameters in place (summon_full_params).

    full_weights   one unit after another, so that a rank holds one full unit at most beside the weights it receives; a
                   rank that receives none sends its shards and holds nothing
    summoned       all units at once, where the module's own code, or the user's, must see full parameters

Buffers that mixed precision has cast are saved in their original dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero._torch import OwnHook, as_plain_tensors, state_dict_hooks_of, wraps_others
from zero.comm import Comm
from zero.comm.together import told_by_comparing
from zero.fsdp.build import refuse_busy
from zero.fsdp.model import Model, models, models_of
from zero.fsdp.unit import Unit
from zero.shards.moved import moved_problem
from zero.shards.placement import Placement
from zero.shards.shard_group import ShardGroup
from zero.state.optimizer_state import refuse_no_rank
from zero.tensor_parallel import parts, table
from zero.tensor_parallel.shown import Slot, slots_of
from zero.wrap.wrapper import Wrapper

Sharded = Sequence[tuple[Model, list[Unit]]]
"""Models, and those of their units that are asked for."""


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
) -> Iterator[None]:
    """Collective. See FSDP.summon_full_params."""
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
    groups, to = [group for unit in units for group in unit.groups], 0 if rank0_only else None
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
            compare = partial(model.placement.compare, "the full parameters of FSDP", [])
            with told_by_comparing(compare):
                yield
            compare(moved_problem(groups))
        else:
            yield
        keep = writeback
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
            for view, grad in zip(group.views_of_shard(shard), self._shards, strict=True):
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
            own = self._full[group.layout.segment(group.comm.rank)].to(group.shard.device, copy=True)
            views = zip(group.params, group.views_of_shard(own), strict=True)
            shards = [
                view if param.grad is not None and index in group.spans else None
                for index, (param, view) in enumerate(views)
            ]
        for index, gradient in enumerate(shards):
            group.set_gradient(index, gradient)


@dataclass(frozen=True)
class Recipient:
    """to: the rank that receives full weights, None for all. device: None for the device that computes."""

    to: int | None = None
    device: torch.device | str | None = None

    def receives(self, placement: Placement) -> bool:
        """Returns whether this rank receives the weights."""
        return self.to is None or (placement.has(self.to) and placement.comm.rank == placement.owner(self.to))

    def gather(self, unit: Unit, placement: Placement) -> dict[Tensor, Tensor]:
        """Collective. Returns copies of the unit's full parameters on the recipient, nothing on other ranks."""
        if unit.summoned:
            params = [param for group in unit.groups for param in group.params] if self.receives(placement) else []
            return {param: self.copy(parts.whole(param, param)) for param in params}
        if self.to is not None and not placement.has(self.to):
            return {}
        unit.reshard()  # a forward without backward may have left it unsharded
        copies: dict[Tensor, Tensor] = {}
        for group in unit.groups:  # one by one, so that one alone is full
            group.summon(None if self.to is None else placement.owner(self.to))
            try:
                if self.receives(placement):
                    copies.update({param: self.moved(parts.whole(param, param)) for param in group.params})
            finally:
                group.dismiss(keep=False)
        return copies

    def moved(self, value: Tensor) -> Tensor:
        """Returns a tensor that nobody else keeps, on the recipient's device; a copy if it is elsewhere."""
        here = self.device is None or torch.device(self.device) == value.device
        return value.detach() if here else self.copy(value)

    def copy(self, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a copy on the recipient's device, with storage of its own."""
        if wraps_others(value):
            return value.detach().clone().to(self.device)
        return value.detach().to(self.device or value.device, dtype or value.dtype, copy=True)


def full_weights(module: nn.Module, comm: Comm, recipient: Recipient) -> dict[str, Any]:
    """Collective where parameters of the module are sharded. See zero.full_state_dict.

    comm: the ranks among which `to` is one, if nothing is sharded.
    """
    sharded = models_of(module)
    with ExitStack() as together:
        for model, _ in sharded:
            together.enter_context(model.together)
        return _full_weights(module, sharded, comm, recipient)


def _full_weights(module: nn.Module, sharded: Sharded, comm: Comm, recipient: Recipient) -> dict[str, Any]:
    placements = [model.placement for model, _ in sharded] or [Placement(comm)]
    for placement in placements:
        refuse_no_rank(recipient.to, placement.ranks)
    receives = all(map(recipient.receives, placements))
    if not sharded and not receives:
        return {}
    for model, units in sharded:
        model.refuse_moved()
        refuse_busy([unit for unit in units if not unit.summoned], "full_state_dict()")
    copy: Callable[[Tensor], Tensor]
    named = _named(module) if sharded else None
    if named is not None:
        full, copies, copy = named, _gathered(sharded, recipient, receives=receives), recipient.copy
    else:
        full, copies, copy = state_dict(module, sharded), {}, recipient.moved
    if not receives:
        return {}
    in_parts = parts.ranks(module.parameters()) is not None
    for name, value in full.items():
        if isinstance(value, Tensor):
            if value not in copies:  # tied weights stay one tensor
                copies[value] = copy(parts.whole(value, value) if in_parts else value)
            full[name] = copies[value]
    return full


def state_dict(module: nn.Module, sharded: Sharded, *args: Any, **kwargs: Any) -> Any:
    """Collective, if any units are given. Returns the module's own state_dict() with copies of full parameters.

    sharded: the units that hold the module's parameters. Hooks of the module see full parameters, too. Inside
    summon_full_params the values are those that this rank sees there.
    """
    _refuse_unreadable(sharded)
    destination = kwargs.get("destination", args[0] if args else None)
    before = dict(destination or {})
    with ExitStack() as stack:
        temporary = set()
        for model, units in sharded:
            hidden = [unit for unit in units if not unit.summoned]
            stack.enter_context(summoned(model, hidden))
            temporary |= {param.untyped_storage() for unit in hidden for param in unit.params}
        weights = module.state_dict(*args, **{**kwargs, "keep_vars": False})
        copies: dict[Any, Tensor] = {}
        for key, value in weights.items():
            if not isinstance(value, Tensor) or before.get(key) is value:
                continue
            if wraps_others(value):
                weights[key] = value.detach().clone()
            elif value.untyped_storage() not in temporary:
                memory = (value.data_ptr(), value.shape, value.stride(), value.dtype)  # equal for tied parameters
                weights[key] = copies.setdefault(memory, value.detach().clone())
    return weights


def _gathered(sharded: Sharded, recipient: Recipient, *, receives: bool) -> dict[Tensor, Tensor]:
    """Collective. Returns full copies of parameters and cast buffers on the recipient; nothing on other ranks."""
    if receives:
        _refuse_unreadable(sharded)
    copies: dict[Tensor, Tensor] = {}
    for model, units in sharded:
        for unit in units:
            copies |= recipient.gather(unit, model.placement)
        if receives:
            copies |= {cast.tensor: recipient.copy(cast.tensor, cast.dtype) for cast in model.cast_buffers}
    return copies


def _refuse_unreadable(sharded: Sharded) -> None:
    """Raises RuntimeError if only another rank has the full parameters."""
    if any(unit.summoned and not unit.readable for _, units in sharded for unit in units):
        raise RuntimeError(
            "state_dict() on a rank that has only shards: inside summon_full_params(rank0_only=True) only rank 0 of "
            "the group has full parameters. Call it there on rank 0 alone, or outside on every rank."
        )


def _named(module: nn.Module) -> dict[str, Any] | None:
    """Returns parameters and buffers by the names of state_dict(). Returns None if state_dict() has other tensors, has
    hooks of the user's, which must see full parameters, or is a wrapper's, which has full parameters."""
    for child in module.modules():
        if isinstance(child, Wrapper) or not all(isinstance(h, OwnHook) for h in state_dict_hooks_of(child)):
            return None
    try:
        named: dict[str, Any] = module.state_dict(keep_vars=True)
    except Exception:  # the module's own state_dict() cannot handle shards
        return None
    own = {*module.parameters(), *module.buffers()}
    return None if any(isinstance(value, Tensor) and value not in own for value in named.values()) else named
