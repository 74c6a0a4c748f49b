"""Understands what FSDP was given, compares it between ranks, and builds the model: before anything is changed, a wrong
argument raises on every rank."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from zero._torch.modules import children_of
from zero.comm.together import Together, alike
from zero.fsdp.build import Builder
from zero.fsdp.choice import UnitChoice
from zero.fsdp.compile import RECORDING, refuse_compiled
from zero.fsdp.model import Model, sharded_params
from zero.fsdp.options import (
    GivenOptions,
    Options,
    ShardingStrategy,
    as_prefetch,
    place,
    refuse_number_of_ranks,
    refuse_unknown,
)
from zero.fsdp.torch_options import NAMES, from_torch
from zero.fsdp.units import Policy, largest_unit, smallest_leaves
from zero.offload import NAMES as OFFLOAD
from zero.offload import take_offload
from zero.shards.announce import announce
from zero.shards.partition import Partition, refuse_partition, whole_among
from zero.shards.placement import Placement
from zero.tensor_parallel import parts
from zero.tensor_parallel.shown import put_into
from zero.wrap.ddp import refuse_ddp_within
from zero.wrap.precision import as_precision
from zero.wrap.wrapper import refuse_scripted

if TYPE_CHECKING:
    from zero.wrap.precision import GivenPrecision

_GIVEN = "the models given to FSDP"


@dataclass(frozen=True)
class Arguments:
    """Those of FSDP, which says what they mean."""

    process_group: Any
    device_mesh: DeviceMesh | None
    auto_wrap_policy: Policy
    as_one_unit: Sequence[nn.Module | type[nn.Module]]
    ignored_modules: Iterable[nn.Module]
    ignored_parameters: Iterable[nn.Parameter]
    partition: Partition
    sharding_strategy: enum.Enum | str
    reshard_after_forward: bool | None
    precision: GivenPrecision
    prefetch: int | None
    param_init_fn: Callable[[nn.Module], None] | None
    sync_module_states: bool
    more: dict[str, Any]


@dataclass(frozen=True)
class Inside:
    """An FSDP inside the module. end: takes its hooks on state away."""

    wrapper: nn.Module
    module: nn.Module
    model: Model
    hooks: Sequence[RemovableHandle]
    end: Callable[[], None]


def construct(module: nn.Module, given: Arguments, nested: dict[str, Inside]) -> tuple[Model, list[RemovableHandle]]:
    """Collective. Returns the model that an FSDP runs, and the hooks of mixed precision on modules.

    nested: FSDPs inside the module by name, which this one dissolves. None contains another.
    """
    asked = GivenOptions(given.prefetch, [*given.ignored_modules], [*given.ignored_parameters])
    strategy, placement = place(_GIVEN, given.sharding_strategy, given.process_group, given.device_mesh)
    with alike(placement.all_groups(), _GIVEN) as lines:
        options = _understand(given, asked, strategy)
        for change in asked.before:
            change(module)
        sharded = {param for fsdp in nested.values() for param in fsdp.model.index}
        choice = UnitChoice(module, {name: fsdp.wrapper for name, fsdp in nested.items()}, sharded, asked.ignored)
        beside = any(comm.link.overlaps(device) for comm in placement.all_groups() for device in choice.devices())
        leaves = smallest_leaves(options.prefetch, beside=beside)
        refuse_scripted(module, inside=True)
        choice.divide(given.auto_wrap_policy, given.as_one_unit, leaves)
        _refuse_unusable(choice, nested, options, placement)
        whole = whole_among(options.partition, choice.own())
        lines += [f"{strategy}, {options.signature()}, whole {[*whole.values()]}", *choice.signature()]
    put_into(module, choice.ignored)
    builder = Builder(choice, placement, options, given.param_init_fn, {*map(parts.of, whole)})
    with Together(placement.all_groups(), "the construction of FSDP"):
        units, hooks = builder.build(), builder.hooks  # nothing after this fails
    for name, fsdp in nested.items():
        _dissolve(fsdp, module, name)
        units, hooks = [*units, *fsdp.model.units], [*hooks, *fsdp.hooks]
    model = Model(module, units, placement, options, asked.ignored_modules)
    _announce(model, strategy, len(choice.ignored))
    return model, hooks


def _dissolve(fsdp: Inside, root: nn.Module, name: str) -> None:
    """Puts the module of an FSDP inside `root` back into its place."""
    fsdp.end()
    inner: nn.Module = fsdp.module
    for parent in root.modules():
        children = children_of(parent)
        children.update({name: inner for name, module in children.items() if module is fsdp.wrapper})
    for unit in fsdp.model.units:
        unit.move_below(name)


def _understand(given: Arguments, asked: GivenOptions, strategy: ShardingStrategy) -> Options:
    """Raises ValueError or TypeError for what FSDP does not take."""
    refuse_number_of_ranks(given.reshard_after_forward)
    more = {**given.more}
    own = [*(one.name for one in fields(Arguments)), "broadcast_buffers"]
    refuse_unknown(more, known=(*OFFLOAD, *NAMES), own=own)
    offload = take_offload(more)
    from_torch(more, asked)
    stays = strategy.keeps_parameters or given.reshard_after_forward is False
    precision, prefetch = as_precision(given.precision), as_prefetch(asked.prefetch)
    return Options(given.partition, precision, stays, given.sync_module_states, offload, prefetch)


def _announce(model: Model, strategy: ShardingStrategy, ignored: int) -> None:
    number, (largest, share) = len(model.units), largest_unit(model.units)
    units = f"{number} unit{'s' if number > 1 else ''}, the largest {largest.title} with {share} of all"
    title = f"FSDP({type(model.module).__name__}, {strategy.name}) of {units},"
    left_out = f"{ignored} parameters, ignored as the caller asked" if ignored else ""
    announce(title, model.comm, model.index.groups, left_out, stage=3)


def _refuse_unusable(choice: UnitChoice, nested: dict[str, Inside], options: Options, placement: Placement) -> None:
    """Raises ValueError if the module cannot be wrapped with these options."""
    frees = placement.comm.world > 1 or options.offload.active or options.precision.param_dtype is not None
    records = frees and any(device.type in RECORDING for device in choice.devices())
    units = [module for name, module in choice.units.items() if name]
    units += [unit.module for fsdp in nested.values() for unit in fsdp.model.units[1:]]
    refuse_partition(options.partition)
    if "" in nested:
        raise ValueError(
            "the module is an FSDP already. Wrap it once, and choose units by auto_wrap_policy; zero.unwrap(model) "
            "makes it plain."
        )
    for name, fsdp in nested.items():
        if fsdp.model.placement.groups != placement.groups:
            raise ValueError(
                f"{name!r} is an FSDP over another process group than the FSDP around it. Wrap both over the same "
                "groups, or leave its parameters out by ignored_modules and average their gradients yourself."
            )
    refuse_compiled(choice.module, units, records=records)
    refuse_ddp_within(choice.module, choice.ignored)
    parts.refuse_unfit(choice.own(), placement.all_groups())
    choice.refuse_unusable(synced=options.synced, sharded=sharded_params())
    placement.comm.refuse_devices(choice.devices())
