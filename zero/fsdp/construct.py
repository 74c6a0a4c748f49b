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
from zero.comm.together import Together
from zero.fsdp.build import Builder
from zero.fsdp.choice import UnitChoice
from zero.fsdp.compile import RECORDING, compiling_problem
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
from zero.shards.partition import Partition, whole_among
from zero.shards.placement import Placement
from zero.tensor_parallel import parts
from zero.tensor_parallel.shown import put_into
from zero.wrap.ddp import ddp_within
from zero.wrap.precision import as_precision
from zero.wrap.wrapper import scripted

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
    strategy, placement, problem = place(given.sharding_strategy, given.process_group, given.device_mesh)
    with placement.raised_everywhere(_GIVEN):
        options = _understand(given, asked, strategy)
        for change in asked.before:
            change(module)
        sharded = {param for fsdp in nested.values() for param in fsdp.model.index}
        choice = UnitChoice(module, {name: fsdp.wrapper for name, fsdp in nested.items()}, sharded, asked.ignored)
        beside = any(comm.link.overlaps(device) for comm in placement.all_groups() for device in choice.devices())
        leaves = smallest_leaves(options.prefetch, beside=beside)
        problem = (
            problem or scripted(module, inside=True) or choice.divide(given.auto_wrap_policy, given.as_one_unit, leaves)
        )
        problem = problem or _problem(choice, nested, options, placement)
        whole = {} if problem else whole_among(options.partition, choice.own())
        lines = [f"{strategy}, {options.signature()}, whole {[*whole.values()]}", *choice.signature()]
    placement.compare(_GIVEN, lines, problem)
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
    offload, wrong = take_offload(more)
    if wrong is not None:
        raise ValueError(wrong)
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


def _problem(choice: UnitChoice, nested: dict[str, Inside], options: Options, placement: Placement) -> str | None:
    """Returns an error message if the module cannot be wrapped with these options, else None."""
    frees = placement.comm.world > 1 or options.offload.active or options.precision.param_dtype is not None
    records = frees and any(device.type in RECORDING for device in choice.devices())
    units = [module for name, module in choice.units.items() if name]
    units += [unit.module for fsdp in nested.values() for unit in fsdp.model.units[1:]]
    return (
        options.problem()
        or _nesting_problem(nested, placement)
        or compiling_problem(choice.module, units, records=records)
        or ddp_within(choice.module, choice.ignored)
        or parts.problem(choice.own(), placement.all_groups())
        or choice.unusable(synced=options.synced, sharded=sharded_params())
        or placement.comm.device_problem(choice.devices())
    )


def _nesting_problem(nested: dict[str, Inside], placement: Placement) -> str | None:
    if "" in nested:
        return (
            "the module is an FSDP already. Wrap it once, and choose units by auto_wrap_policy; zero.unwrap(model) "
            "makes it plain."
        )
    for name, fsdp in nested.items():
        if fsdp.model.placement.groups != placement.groups:
            return (
                f"{name!r} is an FSDP over another process group than the FSDP around it. Wrap both over the same "
                "groups, or leave its parameters out by ignored_modules and average their gradients yourself."
            )
    return None
