"""Builds the units of an FSDP, and makes the module plain again; what cannot be wrapped is refused before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero._torch.modules import buffers_of, parameters_of
from zero.comm.together import alike
from zero.fsdp.choice import UnitChoice
from zero.fsdp.compile import RECORDING, refuse_compiled
from zero.fsdp.model import Model, sharded_params
from zero.fsdp.options import Options
from zero.fsdp.unit import Unit, refuse_busy
from zero.shards.cut import hold, part_from
from zero.shards.partition import Shares, lay_out, refuse_partition
from zero.shards.placement import Placement
from zero.shards.shard_group import GroupOptions, ShardGroup
from zero.tensor_parallel import parts
from zero.tensor_parallel.shown import take_out_of
from zero.wrap.ddp import refuse_ddp_within

# -------------------------------------------------------------------------------------------- models on the meta device
#
# Gives memory and values to models that were built on the meta device, one unit at a time.


class Materialiser:
    """Turns meta parameters into real ones in place, so that optimizers still hold them.

    One rank initialises the values; the other ranks receive them.

    param_init_fn: called with a module whose own parameters have memory but no values; by default its
        `reset_parameters` is called. Each module is initialised once, when the first of its parameters gets memory. Of
        the modules that share a parameter, the first in the model is initialised last.
    initialises: whether this rank initialises values. `can_fail`: whether it has modules to initialise.
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
        self.can_fail = initialises and bool(self._uninitialised)

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
                    if own.is_meta:
                        real = nn.Parameter(torch.empty_like(own, device=self._device), requires_grad=own.requires_grad)
                        # swap_tensors also swaps the attributes that the user has set on the parameter.
                        vars(real).update(vars(own))
                        torch.utils.swap_tensors(own, real)
                        self._materialised.append((own, real))
            for module in reversed(holders):
                self._initialise(module, self._uninitialised[module])

    def undo(self) -> None:
        """Puts all tensors that were given memory back on the meta device."""
        for param, meta in self._materialised:
            torch.utils.swap_tensors(param, meta)
        for module, buffers in self._materialised_buffers:
            buffers_of(module).update(buffers)

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


def build(
    choice: UnitChoice,
    placement: Placement,
    options: Options,
    param_init_fn: Callable[[nn.Module], None] | None,
    whole: Collection[nn.Parameter],
) -> tuple[list[Unit], list[RemovableHandle]]:
    """Collective. Returns the units, the root first, and the hooks of mixed precision on modules.

    Units are built one after another, so that at most one is unsharded. If this can fail, because modules must be
    initialised or shards may find no room, ranks compare after each whether it has failed on any.

    param_init_fn: initialises modules that were built on the meta device. whole: the parameters that are not cut.

    Raises ValueError on every rank if, on any, a module could not be initialised or there was no room for a shard. The
    model is plain then, and can be wrapped again: parameters that had values have those of the first rank (without
    sync_module_states those of each shard's owner), and the others are on the meta device.
    """
    values = Materialiser(choice.module, param_init_fn, initialises=placement.first)
    division = Shares(placement.comm.world).divide([param for _, param in choice.own()], whole)
    units: list[Unit] = []
    # torch.set_default_device() may name another, such as meta, on which no rank can send.
    can_fail = torch.tensor(float(options.offload.active or values.can_fail), device="cpu")

    def agree(title: str = "") -> None:
        """Raises ValueError on every rank if building has failed on any."""
        if can_fail:
            with alike(placement.all_groups(), "the units of FSDP"):
                if values.problem is not None:
                    raise ValueError(values.problem)
                options.offload.refuse_full(f"the shards of {title}")

    try:
        for comm in placement.all_groups():
            comm.all_reduce(can_fail, maximum=True)
        values.materialise_buffers()
        named = choice.owned()
        offloads = options.offload.of_groups([sum(param.numel() for _, param in owned) for owned in named.values()])
        for (name, owned), offload in zip(named.items(), offloads, strict=True):
            title = f"unit {name!r}" if name else "the root unit"
            values.materialise(param for _, param in owned)
            agree(title)
            groups: list[ShardGroup] = []
            for dtype, alike_named in options.precision.by_dtype(choice.module, owned).items():
                groups += lay_out(
                    [param for _, param in alike_named],
                    [name for name, _ in alike_named],
                    placement,
                    division,
                    options=GroupOptions(
                        True, dtype, not options.reshard_after_forward, offload, from_first=options.synced
                    ),
                    label=title,
                )
            units.append(
                Unit(
                    name,
                    choice.units[name],
                    groups,
                    precision=options.precision,
                    reshard_after_forward=options.reshard_after_forward,
                )
            )
            agree(title)
        if options.synced:
            values.materialise(choice.ignored)
            agree()
        hooks = options.precision.prepare(choice.modules)
        if options.synced:
            placement.broadcast([*choice.ignored, *choice.module.buffers()])
    except ValueError:  # of all ranks
        restore_units(units)
        take_out_of(choice.module)
        values.undo()
        raise
    except BaseException:  # perhaps of this rank alone: the others cannot be asked for their shards
        for _, param in choice.own():
            hold(param).half_sharded = True  # every later FSDP of it raises
        raise
    return units, hooks


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
        for param in unit.params:
            part_from(param)


def refuse_unfit(choice: UnitChoice, nested: dict[str, Model], options: Options, placement: Placement) -> None:
    """Raises ValueError if the module cannot be wrapped with these options. nested: models of FSDPs inside, by name."""
    frees = placement.comm.world > 1 or options.offload.active or options.precision.param_dtype is not None
    records = frees and any(device.type in RECORDING for device in choice.devices())
    units = [module for name, module in choice.units.items() if name]
    units += [unit.module for model in nested.values() for unit in model.units[1:]]
    refuse_partition(options.partition)
    if "" in nested:
        raise ValueError(
            "the module is an FSDP already. Wrap it once, and choose units by auto_wrap_policy; zero.unwrap(model) "
            "makes it plain."
        )
    for name, model in nested.items():
        if model.placement.groups != placement.groups:
            raise ValueError(
                f"{name!r} is an FSDP over another process group than the FSDP around it. Wrap both over the same "
                "groups, or leave its parameters out by ignored_modules and average their gradients yourself."
            )
    refuse_compiled(choice.module, units, records=records)
    refuse_ddp_within(choice.module, choice.ignored)
    parts.refuse_unfit(choice.own(), placement.all_groups())
    choice.refuse_unusable(synced=options.synced, sharded=sharded_params())
    placement.comm.refuse_devices(choice.devices())
