"""Stage 3: parameters, too, live only with their owner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zero.fsdp.guard import Guard
from zero.fsdp.materialise import Materialiser
from zero.fsdp.precision import MixedPrecision
from zero.fsdp.schedule import Schedule
from zero.fsdp.strategy import ShardingStrategy, as_strategy, place
from zero.fsdp.unit import Unit
from zero.fsdp.wrap import Policy, params_by_unit, unit_modules
from zero.oss import norm
from zero.oss.comm import Comm
from zero.oss.flat import FlatGroup, unusable
from zero.oss.partition import Partition, lay_out, partition_problem
from zero.sdp.buffers import BufferSync
from zero.sdp.sharded_ddp import describe


class FSDP(nn.Module):
    """Fully sharded data parallelism: parameters, gradients and optimizer state in parts, one a rank (ZeRO stage 3;
    Rajbhandari et al., 2020, section 5.3).

        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    The module is divided into units. A unit's parameters are gathered before its forward and its backward, and released
    after. Parameters stay the objects they were, under their names, so an optimizer may be built before or after; at
    rest their data and gradient are this rank's part, with as many dimensions as the whole.

    module: stays usable as it is; its attributes can be read through this one.
    process_group: by default all ranks; without torch.distributed, this process alone. For hybrid strategies a pair:
        the ranks to shard within, and those to replicate across.
    device_mesh: the groups as a DeviceMesh: of one dimension, or of two for hybrid strategies, replicas first.
    auto_wrap_policy: which modules become units: a policy of torch.distributed.fsdp.wrap. By default the blocks that
        the model repeats in an nn.ModuleList.
    as_one_unit: modules, or classes of modules, that are gathered as a whole, such as a mixture of experts of which
        each rank runs others.
    ignored_modules, ignored_parameters: left as they are; nobody averages their gradients.
    partition: "even" (also "auto") cuts inside parameters, for optimizers that treat each element by itself; "whole"
        keeps each parameter with one rank.
    sharding_strategy: one of ShardingStrategy, PyTorch's enum, or its name.
    reshard_after_forward: False is SHARD_GRAD_OP: parameters stay from forward to backward, which sends less.
    mixed_precision: which dtypes are computed with and sent; parts keep the parameters' own.
    param_init_fn: gives values to a module that was built on the meta device, instead of its `reset_parameters`. Units
        get memory one at a time, values on rank 0 only, and are never whole anywhere else than there.
    sync_module_states: start from the parameters and buffers of rank 0. Other ranks may build on the meta device.
    broadcast_buffers: before a forward, buffers are those of rank 0, as with DistributedDataParallel.

    Collective: the constructor, forward, backward, `state_dict`, `load_state_dict`, `summon_full_params`.
    Raises ValueError, on every rank, for what cannot be sharded or differs between ranks; RuntimeError, on every rank,
    where ranks run different units.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: Any = None,
        device_mesh: DeviceMesh | None = None,
        auto_wrap_policy: Policy = None,
        as_one_unit: Sequence[nn.Module | type[nn.Module]] = (),
        ignored_modules: Iterable[nn.Module] = (),
        ignored_parameters: Iterable[nn.Parameter] = (),
        partition: Partition = "even",
        sharding_strategy: ShardingStrategy | str = "FULL_SHARD",
        reshard_after_forward: bool = True,
        mixed_precision: MixedPrecision | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        sync_module_states: bool = True,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        strategy = as_strategy(sharding_strategy)
        self._placement = place(strategy, process_group, device_mesh)
        self._comm = self._placement.comm
        precision = mixed_precision or MixedPrecision()
        ignored = {param for one in ignored_modules for param in one.parameters()} | set(ignored_parameters)
        modules, problem = _units_of(module, auto_wrap_policy, as_one_unit)
        problem = problem or partition_problem(partition) or _unusable(module, ignored, synced=sync_module_states)
        keeps = strategy.keeps_parameters or not reshard_after_forward
        told = [
            f"{strategy}, reshard_after_forward {not keeps}, partition {partition}, {precision}",
            f"units {', '.join(modules)}",
            *describe(module),
        ]
        for comm in self._placement.all_groups():
            comm.compare("the models given to FSDP", told, problem)

        first = all(comm.rank == 0 for comm in self._placement.all_groups())
        materialiser = Materialiser(module, param_init_fn, initialises=first)
        precision.prepare(module)
        loads = [0] * self._comm.world
        self._units: list[Unit] = []
        for name, owned in params_by_unit(module, modules, ignored).items():
            owned = materialiser.materialise(owned)
            if sync_module_states:
                self._broadcast([param for _, param in owned])
            groups = _lay_out_unit(
                module,
                owned,
                self._comm,
                partition=partition,
                precision=precision,
                loads=loads,
                part_in_whole=keeps,
                label=f"unit {name!r}" if name else "the root unit",
            )
            sent_as, replicas = precision.reduce_dtype, self._placement.replicas
            self._units.append(Unit(name, modules[name], groups, sent_as=sent_as, replicas=replicas))
        if sync_module_states:
            self._broadcast([*ignored, *module.buffers()])
        self._schedule = Schedule(self._units, self._comm, reshard_after_forward=not keeps, precision=precision)
        self._buffers_in_step = BufferSync(module, self._placement.all_groups()) if broadcast_buffers else None
        self._guard = Guard(self._units)

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        for comm in self._placement.all_groups():
            comm.broadcast(tensors)

    # --------------------------------------------------------------------------------------------- running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward. Collective."""
        if self._buffers_in_step is not None:
            self._buffers_in_step.before_forward()
        output = self.module(*args, **kwargs)
        if self._buffers_in_step is not None:
            self._buffers_in_step.after_forward(reduced=self._schedule.active)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here keep whole gradients on every rank, to be added to by later ones; nothing is reduced.

        The first backward outside sends them along. Forward and backward both belong in here. `param.grad` shows this
        rank's own share meanwhile; clearing it clears what is kept.
        """
        before, self._schedule.active = self._schedule.active, False
        try:
            yield
        finally:
            self._schedule.active = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Collective. Scales all gradients so that their norm, as one vector over all ranks, is at most max_norm.

        Returns the norm before, 0-dim, the same on every rank. norm_type: 1, 2, any p > 0, or inf. To be called instead
        of torch.nn.utils.clip_grad_norm_, which sees this rank's parts only.
        """
        params = [param for unit in self._units for group in unit.groups for param in group.params]
        parts = [param.grad for param in params if param.grad is not None]
        total = norm.total_norm(parts, self._comm, float(norm_type), params[0].device)
        norm.clip(parts, total, float(max_norm))
        return total

    @property
    def comms(self) -> list[Comm]:
        """The groups of ranks that it is sharded within, and replicated across if it is."""
        return self._placement.all_groups()

    @property
    def flat_groups(self) -> list[FlatGroup]:
        """The flat groups that the parameters lie in."""
        return [group for unit in self._units for group in unit.groups]

    def reshard(self) -> None:
        """Releases what a forward without backward may have left whole. Not within a step."""
        for unit in self._units:
            unit.reshard()

    @property
    def unit_bytes(self) -> int:
        """Bytes of the largest unit's parameters: what is whole at a time."""
        return max(sum(group.full.nbytes for group in unit.groups) for unit in self._units)

    # ---------------------------------------------------------------------------------------- whole weights

    @contextmanager
    def summon_full_params(self, writeback: bool = True) -> Iterator[None]:
        """Collective. In here all parameters are whole, on every rank.

        writeback: changes made in here stay, those of each part's owner; otherwise they are lost.
        """
        groups = [group for unit in self._units for group in unit.groups]
        for unit in self._units:
            unit.reshard()  # what a forward without backward may have left whole
        for group in groups:
            group.summon()
        keep = False
        try:
            yield
            keep = writeback
        finally:
            for group in groups:
                group.dismiss(keep=keep)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Collective. Whole parameters and buffers under the module's own names, on every rank, as copies."""
        found = self.module.state_dict(*args, **{**kwargs, "keep_vars": True})
        whole: dict[nn.Parameter, Tensor] = {}
        for unit in self._units:
            unit.reshard()
            for group in unit.groups:
                group.summon()
                whole |= {param: param.detach().clone() for param in group.params}
                group.dismiss(keep=False)
        for key, value in found.items():
            if isinstance(value, nn.Parameter):
                found[key] = whole.get(value, value)
            elif isinstance(value, Tensor):
                found[key] = value.detach().clone()
        return found

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Collective. Takes whole weights under the module's own names; every rank must be given the same.

        Raises ValueError for assign=True, which would leave the optimizer with other tensors.
        """
        if assign:
            raise ValueError("assign=True replaces the parameters that are sharded. Load with assign=False.")
        with self.summon_full_params():
            return self.module.load_state_dict(state_dict, strict)

    # ------------------------------------------------------------------------------------------ the module

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "an FSDP cannot be copied or pickled: its parameters are spread over the ranks. Save full_state_dict(), or "
            "copy the module before wrapping it."
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _units_of(
    module: nn.Module, policy: Policy, as_one_unit: Sequence[nn.Module | type[nn.Module]]
) -> tuple[dict[str, nn.Module], str | None]:
    """The units, or what is wrong with the way they were chosen, to be raised on every rank."""
    try:
        return unit_modules(module, policy, as_one_unit), None
    except ValueError as error:
        return {}, str(error)


def _lay_out_unit(
    root: nn.Module,
    owned: list[tuple[str, nn.Parameter]],
    comm: Comm,
    *,
    partition: Partition,
    precision: MixedPrecision,
    loads: list[int],
    part_in_whole: bool,
    label: str,
) -> list[FlatGroup]:
    """A unit's parameters in flat groups of their own parts, those apart that are computed with in another dtype."""
    return [
        group
        for dtype, named in precision.apart(root, owned).items()
        for group in lay_out(
            [param for _, param in named],
            [name for name, _ in named],
            comm,
            cut="whole" if partition == "whole" else "even",
            loads=loads,
            own_part=True,
            compute_dtype=dtype,
            part_in_whole=part_in_whole,
            label=label,
        )
    ]


def _unusable(module: nn.Module, ignored: set[nn.Parameter], *, synced: bool) -> str | None:
    if any(isinstance(inner, FSDP) for inner in module.modules()):
        return "the module contains an FSDP already. Wrap once, from the outside, and choose units by auto_wrap_policy."
    found = False
    for name, param in module.named_parameters():
        if param in ignored:
            continue
        found = True
        if param.is_meta and synced:
            continue
        problem = unusable(param, repr(name))
        if problem:
            return problem
    return None if found else "FSDP was given a module without parameters: there is nothing to shard."
