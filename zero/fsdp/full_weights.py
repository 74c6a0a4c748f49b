"""Full weights: copies that are gathered unit by unit, and a way to load them without gathering any.

    gathered   one shard group after another, so that a rank holds one full group at most beside the weights it
               receives; a rank that receives none sends its shards and holds nothing
    loading    a context in which full values that are written into sharded parameters reach the shards
    naming     a context in which only names and shapes are read

In both contexts a state_dict() has tensors without values in place of shards.

Buffers that mixed precision has cast are saved in their original dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zero._torch.compiling import name_without_compile
from zero._torch.modules import children_of, loads_by_itself, parameters_of, saved_of, saves_by_itself
from zero._torch.tensors import as_plain_tensors, wraps_others
from zero.comm import AGREEMENT, Comm
from zero.comm.together import Together, alike
from zero.fsdp.model import Model, models, models_of
from zero.fsdp.unit import Unit, refuse_busy
from zero.shards.answers import writable
from zero.shards.layout import runs
from zero.shards.owned_shards import gather_masters, rounded_groups
from zero.shards.placement import Placement
from zero.shards.shard_group import ShardGroup, refuse_moved
from zero.shards.sharded_parameter import Sharded
from zero.state.gathered import AT_ONCE, refuse_no_rank
from zero.tensor_parallel import parts, table
from zero.tensor_parallel.shown import Slot, slots_of
from zero.wrap.wrapper import Wrapper

# ------------------------------------------------------------------------------------------------------ full parameters
#
# Full parameters in place: all units at once, where the module's own code, or the user's, must see them.


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
                refuse_moved(group for group in groups)
        else:
            yield
        keep = writeback  # not after an exception: what is half written would reach the owners
    finally:
        for unit in units:
            unit.end_summon(keep=keep)
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
        self._exist, self._views = exist.tolist(), list[Tensor]()
        self._full = group.gather_full(shard, to)

    def show(self) -> None:
        if self._full is not None:
            self._views = self._group.shapes.views_of_full(self._full)
            for param, view, exists in zip(self._group.params, self._views, self._exist, strict=True):
                param.grad = view if exists else None

    def end(self, *, keep: bool) -> None:
        group, shards = self._group, self._shards
        if keep and self._full is not None:
            with torch.no_grad():
                for param, view in zip(group.params, self._views, strict=True):
                    if param.grad is not None and param.grad is not view:  # it was assigned
                        view.copy_(param.grad)
            # A copy: a view, as the gradient of a shard, would keep the memory of all full gradients.
            own = self._full[group.layout.segment(group.comm.rank)].to(group.shard.device, copy=True)
            views = zip(group.params, group.shapes.views_of_shard(own), strict=True)
            before = [
                torch.empty_like(view) if one is None else one
                for one, view in zip(self._shards, group.shard_views, strict=True)
            ]
            shards = [
                None if param.grad is None else view if index in group.shapes.spans else before[index]
                for index, (param, view) in enumerate(views)
            ]
        for index, gradient in enumerate(shards):
            group.set_gradient(index, gradient)


# --------------------------------------------------------------------------------------------------------- full weights


UnitsOfModels = Sequence[tuple[Model, list[Unit]]]
"""Models, and those of their units that are asked for."""


@dataclass(frozen=True)
class Recipient:
    """to: the rank that receives full weights, None for all. device: None for the device that computes. dtype: to which
    floating-point tensors are rounded; None for their own. dtypes: those of tensors that are stored in other ones."""

    to: int | None = None
    device: torch.device | str | None = "cpu"
    dtype: torch.dtype | None = None
    dtypes: Mapping[Any, torch.dtype] = field(default_factory=dict)

    def receives(self, placement: Placement) -> bool:
        """Returns whether this rank receives the weights."""
        return self.to is None or (placement.has(self.to) and placement.comm.rank == placement.owner(self.to))

    def of(self, placement: Placement) -> int | None:
        """Returns the rank of the shard group that receives them there."""
        return None if self.to is None else placement.owner(self.to)

    @property
    def on_cpu(self) -> bool:
        return self.device is not None and torch.device(self.device).type == "cpu"

    def moved(self, value: Tensor) -> Tensor:
        """Returns a tensor that nobody else keeps, on the recipient's device; a copy if it is elsewhere."""
        here = self.device is None or torch.device(self.device) == value.device
        return self.rounded(value.detach()) if here else self.copy(value)

    def copy(self, value: Tensor, of: Tensor | None = None) -> Tensor:
        """Returns a copy on the recipient's device, with storage of its own. of: the tensor whose value it is."""
        if wraps_others(value):
            return value.detach().clone().to(self.device)
        dtype = (self.dtype if value.is_floating_point() else None) or self.dtypes.get(of, value.dtype)
        return value.detach().to(self.device or value.device, dtype, copy=True)

    def rounded(self, value: Tensor) -> Tensor:
        plain = value.is_floating_point() and not wraps_others(value)
        return value.to(self.dtype) if plain and self.dtype is not None else value


def gathered(module: nn.Module, comm: Comm, recipient: Recipient) -> Iterator[dict[Tensor, Tensor]]:
    """Collective where parameters of the module are sharded. Yields copies of full parameters and buffers, by what the
    module holds: those of one shard group after another, and of all others; nothing on ranks that receive none.

    comm: the ranks among which `to` is one, if nothing is sharded. Raises RuntimeError within forward and backward.
    """
    sharded = models_of(module)
    receives = _receives(sharded, comm, recipient)
    for model, units in sharded:
        model.refuse_moved()
        refuse_busy([unit for unit in units if not unit.summoned], "full_state_dict()")
        if receives:
            _refuse_unreadable(units)
    held: set[Tensor] = set()
    for model, units in sharded:
        for unit in units:
            held |= unit.params
            yield from _of_unit(unit, model.placement, recipient)
    for group in _wider(module, recipient):
        held.update(group.params)
        full = gather_masters(group, recipient.to)
        yield {param: recipient.moved(parts.whole(param, full.pop(param))) for param in [*full]}
    in_parts = parts.ranks(parameters_of(module)) is not None
    others = [*dict.fromkeys(one for one in (*parameters_of(module), *module.buffers()) if one not in held)]
    for run in runs([one.nbytes for one in others], AT_ONCE):
        members = [others[index] for index in run] if receives else []
        yield {one: recipient.copy(parts.whole(one, one) if in_parts else one, one) for one in members}


def _wider(module: nn.Module, recipient: Recipient) -> list[ShardGroup]:
    """The groups whose masters are gathered. Rounded to the dtype in which parameters are stored, masters are these."""
    return [group for group in rounded_groups(parameters_of(module)) if group.full.dtype is not recipient.dtype]


def _of_unit(unit: Unit, placement: Placement, recipient: Recipient) -> Iterator[dict[Tensor, Tensor]]:
    """Collective. Yields copies of the unit's full parameters on the recipient, nothing on other ranks."""
    if unit.summoned:
        params = [param for group in unit.groups for param in group.params] if recipient.receives(placement) else []
        yield {param: recipient.copy(parts.whole(param, param)) for param in params}
        return
    if recipient.to is not None and not placement.has(recipient.to):
        yield from ({} for _ in unit.groups)
        return
    unit.reshard()  # a forward without backward may have left it unsharded
    for group in unit.groups:  # one by one, so that one alone is full
        yield _of_group(group, placement, recipient)  # in no variable, which would keep it beside the next one


def _of_group(group: ShardGroup, placement: Placement, recipient: Recipient) -> dict[Tensor, Tensor]:
    """Collective."""
    group.summon(recipient.of(placement))
    try:
        params = group.params if recipient.receives(placement) else []
        # These outlive `end_summon`: it drops the group's own reference to the buffer, and frees no memory.
        return {param: recipient.moved(parts.whole(param, param)) for param in params}
    finally:
        group.end_summon(keep=False)


def full_weights(module: nn.Module, comm: Comm, recipient: Recipient) -> dict[str, Any]:
    """Collective where parameters of the module are sharded. See zero.full_state_dict.

    comm: the ranks among which `to` is one, if nothing is sharded.
    """
    sharded = models_of(module)
    comms = (group.comm for group in rounded_groups(parameters_of(module)))
    rounded = [Together([one], AGREEMENT) for one in dict.fromkeys(comms)]
    sends = [model.together for model, units in sharded if not all(unit.summoned for unit in units)] + rounded
    with ExitStack() as together:
        for section in [*(model.together for model, _ in sharded), *rounded]:
            together.enter_context(section)
        receives = _receives(sharded, comm, recipient)
        if receives:
            torch.empty(0, device=recipient.device)  # raises if there is none
        for section in sends:
            section.agree()  # before anybody sends
        full: dict[str, Any] = {}
        if any(map(saves_by_itself, module.modules())):
            full = _by_the_module(module, sharded, recipient, receives=receives)
        else:
            copies = {one: copy for batch in gathered(module, comm, recipient) for one, copy in batch.items()}
            if receives:
                full = module.state_dict(keep_vars=True)  # filled in place, with the versions that torch attaches
                full.update({name: copies[one] for name, one in full.items()})
        for section in sends:
            section.agree()  # on every rank, whoever receives: what one alone has raised is raised on all
        return full


def _receives(sharded: UnitsOfModels, comm: Comm, recipient: Recipient) -> bool:
    """Raises ValueError if `to` is no rank."""
    placements = [model.placement for model, _ in sharded] or [Placement(comm)]
    for placement in placements:
        refuse_no_rank(recipient.to, placement.ranks)
    return all(map(recipient.receives, placements))


def _by_the_module(
    module: nn.Module, sharded: UnitsOfModels, recipient: Recipient, *, receives: bool
) -> dict[str, Any]:
    """Collective. What the module's own state_dict() returns where its parameters are full, on the recipient. It is
    called where modules save in ways of their own or have hooks of the user's, which must see full parameters."""
    for model, _ in sharded:
        model.refuse_moved()
    dtypes = {param: dtype for param, dtype in recipient.dtypes.items() if isinstance(param, nn.Parameter)}
    rounded: dict[Any, Tensor] = {param: param.data.to(dtype) for param, dtype in dtypes.items() if receives}
    for group in _wider(module, recipient):
        rounded.update(gather_masters(group, recipient.to))
    kept = {param: param.data for param in rounded}
    try:
        for param, value in rounded.items():
            param.data = value
        found: dict[str, Any] = state_dict(module, sharded, recipient, receives=receives)
    finally:
        for param, value in kept.items():
            param.data = value
    in_parts = receives and parts.ranks(parameters_of(module)) is not None
    for name, value in found.items():
        if isinstance(value, Tensor):
            found[name] = recipient.rounded(parts.whole(value, value) if in_parts else value)
    return found


def state_dict(
    module: nn.Module, sharded: UnitsOfModels, recipient: Recipient, *args: Any, receives: bool = True, **kwargs: Any
) -> Any:
    """Collective, if any units are given. Returns the module's own state_dict() with copies of full parameters.

    sharded: the units that hold the module's parameters. Hooks of the module see full parameters, too. Inside
    summon_full_params the values are those that this rank sees there. receives: other ranks send, and return nothing.
    """
    for _, units in sharded if receives else ():
        _refuse_unreadable(units)
    destination = kwargs.get("destination", args[0] if args else None)
    before = dict(destination or {})
    with ExitStack() as stack:
        temporary = set()
        for model, units in sharded:
            hidden = [unit for unit in units if not unit.summoned]
            to = recipient.of(model.placement)
            stack.enter_context(summoned(model, hidden, to=to, offload_to_cpu=recipient.on_cpu))
            temporary |= {param.untyped_storage() for unit in hidden for param in unit.params}
        if not receives:
            return {}
        # With keep_vars=True these would be the parameters, which are shards again once the context ends.
        weights = module.state_dict(*args, **{**kwargs, "keep_vars": False})
        copies: dict[Any, Tensor] = {}
        for key, value in weights.items():
            if isinstance(value, Tensor):
                writable(value)  # of an FSDP inside
            # What the caller's destination had before stays the caller's own tensor.
            if not isinstance(value, Tensor) or before.get(key) is value:
                continue
            if wraps_others(value):
                weights[key] = recipient.copy(value)
            # Full parameters were gathered for this call, and nobody else keeps them: a copy would take them twice.
            elif value.untyped_storage() not in temporary:
                memory = (value.data_ptr(), value.shape, value.stride(), value.dtype)  # equal for tied parameters
                if memory not in copies:
                    copies[memory] = recipient.copy(value)
                weights[key] = copies[memory]
    return weights


def _refuse_unreadable(units: Sequence[Unit]) -> None:
    """Raises RuntimeError if only another rank has the full parameters."""
    if any(unit.summoned and not unit.readable for unit in units):
        raise RuntimeError(
            "state_dict() on a rank that has only shards: inside summon_full_params(rank0_only=True) only rank 0 of "
            "the group has full parameters. Call it there on rank 0 alone, or outside on every rank."
        )


def named_tensors(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Returns parameters and buffers by the names of state_dict(), without those of wrappers and of torch.compile."""
    if isinstance(module, Wrapper | DistributedDataParallel):
        return named_tensors(module.module, prefix)
    named: dict[str, Tensor] = {prefix + name: one for name, one in saved_of(module).items()}
    for name, child in children_of(module).items():
        if child is not None:
            named |= named_tensors(child, name_without_compile(f"{prefix}{name}.") if name else prefix)
    return named


# ---------------------------------------------------------------------------------------------------- loading


@contextmanager
def naming(models: Sequence[Model]) -> Iterator[None]:
    """Within the context a state_dict() has tensors of the shapes of full weights, which raise if their values are
    read: for whoever needs its names. Parameters that are full keep their values."""
    before = [model.reads.naming for model in models]
    try:
        for model in models:
            model.reads.naming = True
        yield
    finally:
        for model, was in zip(models, before, strict=True):
            model.reads.naming = was


@contextmanager
def loading(models: Sequence[Model], *, frozen: bool = True) -> Iterator[None]:
    """Collective. Within the context sharded parameters have the shapes of full ones, and a full value that is copied
    into one reaches this rank's shard. So the module's own load_state_dict() loads full weights, and gathers nothing,
    but units of modules that the user's code loads in another way. frozen: whether frozen parameters are loaded, too.

    Raises RuntimeError within forward, backward and summon_full_params().
    """
    models = [model for model in models if not model.reads.loading]  # others are loaded around this one
    with ExitStack() as stack:
        for model in models:
            model.refuse_moved()
            refuse_busy(model.units, "load_state_dict()")
            for unit in model.units:
                unit.reshard()  # a forward without backward may have left it unsharded
                unit.synchronize()
            for group in model.index.groups:
                stack.callback(group.offload.used, group.shard)
            stack.callback(setattr, model.reads, "loading", False)
            model.reads.loading = True
            full = [unit for unit in model.units if _needs_full(unit, frozen=frozen)]
            if full:
                stack.enter_context(summoned(model, full, writeback=True))
        yield


def _needs_full(unit: Unit, *, frozen: bool) -> bool:
    """Whether more is done with its parameters, as they are loaded, than to copy into them; or whether they are of a
    class that is not exchanged (sharded_parameter.py)."""
    loaded = {param for param in unit.params if frozen or param.requires_grad}
    at_rest = (param for group in unit.groups if group.at_rest for param in group.params)
    if any(param in loaded and not isinstance(param, Sharded) for param in at_rest):
        return True
    holders = (one for one in unit.module.modules() if not loaded.isdisjoint(parameters_of(one, recurse=False)))
    return any(map(loads_by_itself, holders))
