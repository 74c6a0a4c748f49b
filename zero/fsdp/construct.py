"""Understands what FSDP was given, compares it between ranks, and builds the model: before anything is changed, a wrong
argument raises on every rank."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from zero._torch.modules import buffers_of, children_of, parameters_of
from zero.comm.together import Together, alike
from zero.fsdp.choice import Policy, UnitChoice, largest_unit, smallest_leaves
from zero.fsdp.compile import RECORDING, refuse_compiled
from zero.fsdp.model import Model, sharded_params
from zero.fsdp.options import (
    NAMES,
    GivenOptions,
    Options,
    ShardingStrategy,
    as_prefetch,
    from_torch,
    place,
    refuse_number_of_ranks,
    refuse_unknown,
)
from zero.fsdp.unit import Unit, refuse_busy
from zero.offload import NAMES as OFFLOAD
from zero.offload import take_offload
from zero.shards.announce import announce
from zero.shards.cut import forget
from zero.shards.offload import Offload
from zero.shards.partition import Partition, Shares, lay_out, refuse_partition, whole_among
from zero.shards.placement import Placement
from zero.shards.shard_group import GroupOptions, ShardGroup
from zero.tensor_parallel import parts
from zero.tensor_parallel.shown import put_into, take_out_of
from zero.wrap.ddp import refuse_ddp_within
from zero.wrap.precision import as_precision
from zero.wrap.wrapper import refuse_scripted

if TYPE_CHECKING:
    from zero.wrap.precision import GivenPrecision

# -------------------------------------------------------------------------------------------- models on the meta device
#
# Gives memory and values to models that were built on the meta device, one unit at a time.


class Materialiser:
    """Turns meta parameters into real ones in place, so that optimizers still hold them.

    One rank initialises the values; the other ranks receive them.

    param_init_fn: called with a module whose own parameters have memory but no values; by default its
        `reset_parameters` is called. Each module is initialised once, when the first of its parameters gets memory. Of
        the modules that share a parameter, the first in the model is initialised last.
    initialises: whether this rank initialises values.
    """

    problem: str | None = None

    def __init__(
        self, root: nn.Module, param_init_fn: Callable[[nn.Module], None] | None, *, initialises: bool
    ) -> None:
        cuda = torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._init, self._initialises = param_init_fn, initialises
        self._holders: dict[nn.Parameter, list[nn.Module]] = {}
        # Modules that are not initialised yet, and their names.
        self._uninitialised: dict[nn.Module, str] = {}
        # Parameters that were given memory, and the meta parameters that they were swapped with.
        self._materialised: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._materialised_buffers: list[tuple[nn.Module, dict[str, Tensor]]] = []
        for prefix, module in root.named_modules():
            own = [*parameters_of(module, recurse=False)]
            for param in own:
                if param.is_meta:
                    self._holders.setdefault(param, []).append(module)
            if any(tensor.is_meta for tensor in (*own, *module.buffers(recurse=False))):
                self._uninitialised[module] = prefix

    @property
    def pending(self) -> bool:
        """Whether this rank has modules to initialise."""
        return self._initialises and bool(self._uninitialised)

    def materialise_buffers(self) -> None:
        """Gives memory to all meta buffers, and values to modules that hold only buffers."""
        for module, name in [*self._uninitialised.items()]:
            meta = {key: buffer for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
            self._materialised_buffers.append((module, meta))
            for key, buffer in meta.items():
                # Not empty_like: a buffer that reset_parameters() does not write would hold whatever lay in its memory.
                buffers_of(module)[key] = torch.zeros_like(buffer, device=self._device)
            params = [*parameters_of(module, recurse=False)]
            if not params:
                self._initialise(module, name)
            elif not any(param.is_meta for param in params):
                del self._uninitialised[module]
                if self._initialises and self.problem is None:
                    self.problem = (
                        f"the buffer {f'{name}.{next(iter(meta))}'.lstrip('.')!r} is on the meta device, but the "
                        "parameters of its module have values, which initialising the module would overwrite. Give the "
                        "buffer its values first."
                    )

    def materialise(self, params: Iterable[nn.Parameter]) -> None:
        """Gives memory to the meta parameters among `params`, and values to the modules that hold them."""
        for param in params:
            holders = [module for module in self._holders.get(param, []) if module in self._uninitialised]
            for module in holders:
                for own in parameters_of(module, recurse=False):
                    self._give_memory(own)
            for module in reversed(holders):
                self._initialise(module, self._uninitialised[module])

    def undo(self) -> None:
        """Puts all tensors that were given memory back on the meta device."""
        for param, meta in self._materialised:
            torch.utils.swap_tensors(param, meta)
        for module, buffers in self._materialised_buffers:
            buffers_of(module).update(buffers)

    def _give_memory(self, param: nn.Parameter) -> None:
        if param.is_meta:
            real = nn.Parameter(torch.empty_like(param, device=self._device), requires_grad=param.requires_grad)
            # swap_tensors also swaps the attributes that the user has set on the parameter.
            vars(real).update(vars(param))
            torch.utils.swap_tensors(param, real)
            self._materialised.append((param, real))

    def _initialise(self, module: nn.Module, name: str) -> None:
        del self._uninitialised[module]
        if not self._initialises or self.problem is not None:
            return
        # From the class: a module that forwards attributes would give the method of a module inside it.
        reset = self._init or getattr(type(module), "reset_parameters", None)
        if reset is None:
            self.problem = (
                f"{repr(name) if name else 'the module itself'} is on the meta device, and {type(module).__name__} has "
                "no reset_parameters(). Give it one, wrap the model by zero.FSDP(model, param_init_fn=...), or build "
                "this module with real parameters on rank 0."
            )
            return
        without_values = torch.get_default_device().type == "meta"  # what it computes must have values
        try:
            with torch.no_grad(), self._device if without_values else nullcontext():
                reset(module)
        except Exception as error:  # the other ranks wait for this one; all raise this problem
            self.problem = f"{name!r} could not be initialised: {type(error).__name__}: {error}"


# ------------------------------------------------------------------------------------------------------------- building
#
# Builds the units of a model one by one: initialises, lays out and shards their parameters; and makes the module plain
# again.


class Builder:
    """Builds the units of one model one after another, so that at most one is unsharded.

    If this can fail, because modules must be initialised or shards may find no room, ranks compare after each unit
    whether it has failed on any. If it has, the units that were sharded before are gathered again.

    param_init_fn: initialises modules that were built on the meta device. whole: the parameters that are not cut.
    `hooks`: those of mixed precision on modules.
    """

    def __init__(
        self,
        choice: UnitChoice,
        placement: Placement,
        options: Options,
        param_init_fn: Callable[[nn.Module], None] | None,
        whole: Collection[nn.Parameter],
    ) -> None:
        self._choice, self._placement, self._options = choice, placement, options
        self._values = Materialiser(choice.module, param_init_fn, initialises=placement.first)
        self._division = Shares(placement.comm.world).divide([param for _, param in choice.own()], whole)
        self.hooks: list[RemovableHandle] = []
        self._can_fail = False

    def build(self) -> list[Unit]:
        """Collective. Returns the units, the root first.

        Raises ValueError on every rank if, on any, a module could not be initialised or there was no room for a shard.
        The model is plain then, and can be wrapped again: parameters that had values have those of the first rank
        (without sync_module_states those of each shard's owner), and the others are on the meta device.
        """
        units: list[Unit] = []
        try:
            self._can_fail = self._on_any_rank(self._options.offload.active or self._values.pending)
            self._values.materialise_buffers()
            named = self._choice.owned()
            numels = [sum(param.numel() for _, param in owned) for owned in named.values()]
            offloads = self._options.offload.of_groups(numels)
            for (name, owned), offload in zip(named.items(), offloads, strict=True):
                units.append(self._unit(name, owned, offload))
                self._agree(units[-1].title)
            if self._options.synced:
                self._values.materialise(self._choice.ignored)
                self._agree()
            self.hooks = self._options.precision.prepare(self._choice.modules)
            if self._options.synced:
                self._placement.broadcast([*self._choice.ignored, *self._choice.module.buffers()])
        except ValueError:  # of all ranks
            restore_units(units)
            take_out_of(self._choice.module)
            self._values.undo()
            raise
        except BaseException:  # perhaps of this rank alone: the others cannot be asked for their shards
            self._choice.mark_half_sharded()
            raise
        return units

    def _unit(self, name: str, owned: list[tuple[str, nn.Parameter]], offload: Offload) -> Unit:
        params = [param for _, param in owned]
        title = f"unit {name!r}" if name else "the root unit"
        self._values.materialise(params)
        self._agree(title)
        return Unit(
            name,
            self._choice.units[name],
            self._lay_out(owned, title, offload),
            precision=self._options.precision,
            stays=self._options.stays,
        )

    def _lay_out(self, owned: Sequence[tuple[str, nn.Parameter]], title: str, offload: Offload) -> list[ShardGroup]:
        """Returns the shard groups of a unit's parameters, one for each dtype of computing."""
        return [
            group
            for dtype, named in self._options.precision.by_dtype(self._choice.module, [*owned]).items()
            for group in lay_out(
                [param for _, param in named],
                [name for name, _ in named],
                self._placement,
                self._division,
                options=GroupOptions(True, dtype, self._options.stays, offload, from_first=self._options.synced),
                label=title,
            )
        ]

    def _on_any_rank(self, flag: bool) -> bool:
        """Collective. Returns whether any rank has the flag."""
        # torch.set_default_device() may name another, such as meta, on which no rank can send.
        result = torch.tensor(float(flag), device="cpu")
        for comm in self._placement.all_groups():
            comm.all_reduce(result, maximum=True)
        return bool(result)

    def _agree(self, title: str = "") -> None:
        """Collective, if building can fail. Raises ValueError on every rank if it has failed on any."""
        if not self._can_fail:
            return
        with alike(self._placement.all_groups(), "the units of FSDP"):
            if self._values.problem is not None:
                raise ValueError(self._values.problem)
            self._options.offload.refuse_full(f"the shards of {title}")


def restore_units(units: Sequence[Unit]) -> None:
    """Collective. Unshards the units' parameters for good on every rank, and drops gradients.

    Raises RuntimeError within forward, backward and summon_full_params().
    """
    refuse_busy(units, "zero.unwrap()")
    for unit in units:
        unit.reshard()
        for group in unit.groups:
            for param in group.params:
                param.grad = None
        unit.summon()
        for group in unit.groups:
            group.stay_full()
        forget(unit.params)


# --------------------------------------------------------------------------------------------------------- construction


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
