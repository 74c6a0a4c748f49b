"""Stage 3: parameters, too, live only with their owner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zero.fsdp import whole
from zero.fsdp.build import Builder, Options
from zero.fsdp.choice import Choice
from zero.fsdp.compiled import BETWEEN_UNITS
from zero.fsdp.forward import Forward
from zero.fsdp.guard import Guard, guarded, strayed
from zero.fsdp.offload import CPUOffload, DiskOffload
from zero.fsdp.optim_state import SteppingParts
from zero.fsdp.precision import MixedPrecision
from zero.fsdp.prefetch import Prefetch
from zero.fsdp.schedule import Schedule
from zero.fsdp.sentry import NO_COPIES, Sentry
from zero.fsdp.strategy import ShardingStrategy, place
from zero.fsdp.tracing import Gradients
from zero.fsdp.unit import Unit
from zero.fsdp.wrap import Policy
from zero.oss import norm, state
from zero.oss.comm import Comm
from zero.oss.flat import FlatGroup
from zero.oss.partition import Partition, partition_problem
from zero.sdp.buffers import BufferSync


class FSDP(nn.Module):
    """Fully sharded data parallelism: parameters, gradients and optimizer state in parts, one a rank (ZeRO stage 3;
    Rajbhandari et al., 2020, section 5.3).

        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    The module is divided into units. A unit's parameters are gathered before its forward and its backward, and released
    after. Parameters stay the objects they were, under their names, so an optimizer may be built before or after; at
    rest their data and gradient are this rank's part, with as many dimensions as the whole.

    module: stays usable as it is; its attributes can be read through this one. An FSDP inside it hands its module
        back into its place, and its units over to this one, with the options that they have.
    process_group: by default all ranks; without torch.distributed, this process alone. For hybrid strategies a pair:
        the ranks to shard within, and those to replicate across.
    device_mesh: the groups as a DeviceMesh: of one dimension, or of two for hybrid strategies, replicas first.
    auto_wrap_policy: which modules become units: a policy of torch.distributed.fsdp.wrap. By default the blocks that
        the model repeats in an nn.ModuleList.
    as_one_unit: modules, or classes of modules, that are gathered as a whole, such as a mixture of experts of which
        each rank runs others.
    ignored_modules, ignored_parameters: left as they are; nobody averages their gradients.
    partition: "even" cuts inside parameters, for optimizers that treat each element by itself; "whole" keeps each
        parameter with one rank; "auto" is even, and refuses steps of optimizers that torch does not know to be so.
    sharding_strategy: one of ShardingStrategy, PyTorch's enum, or its name.
    reshard_after_forward: False is SHARD_GRAD_OP: parameters stay from forward to backward, which sends less.
    mixed_precision: which dtypes are computed with and sent; parts keep the parameters' own.
    prefetch: what is gathered ahead, and how many units are in flight at once; see Prefetch, MEMORY_FIRST, SPEED_FIRST.
    offload: where parts lie at rest: CPUOffload, DiskOffload.
    param_init_fn: gives values to a module that was built on the meta device, instead of its `reset_parameters`. Units
        get memory one at a time, values on rank 0 only, and are never whole anywhere else than there.
    sync_module_states: start from the parameters and buffers of rank 0. Other ranks may build on the meta device.
    broadcast_buffers: before a forward, buffers are those of rank 0, as with DistributedDataParallel.

    torch.compile may be called with units, with the module, or with this. Graphs break where units begin and end, so
    only units can be compiled with fullgraph=True. A module that is compiled as a whole runs its first forward in
    training and its first in evaluation uncompiled, to find what modules read of other units. Where units are compiled
    by themselves this is not looked for, and no module may read parameters of another unit.

    Collective: the constructor, forward, backward, `state_dict`, `load_state_dict`, `summon_full_params`.
    Raises ValueError, on every rank, for what cannot be sharded or differs between ranks, and where modules cannot be
    initialised or parts find no room: the model, its parameters and FSDPs inside it are as before then. RuntimeError,
    on every rank, where ranks run different units.
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
        partition: Partition = "auto",
        sharding_strategy: ShardingStrategy | str = "FULL_SHARD",
        reshard_after_forward: bool = True,
        mixed_precision: MixedPrecision | None = None,
        prefetch: Prefetch | None = None,
        offload: CPUOffload | DiskOffload | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        sync_module_states: bool = True,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        ignored_modules = [*ignored_modules]
        strategy, self._placement, problem = place(sharding_strategy, process_group, device_mesh)
        self._comm, self._prefetch = self._placement.comm, prefetch or Prefetch()
        options = Options(
            partition,
            mixed_precision or MixedPrecision(),
            stays=strategy.keeps_parameters or not reshard_after_forward,
            synced=sync_module_states,
            offload=offload,
        )
        inside = _inside(module)
        choice = Choice(module, inside, _parameters_in(inside), _ignored(ignored_modules, ignored_parameters))
        problem = (
            problem
            or choice.divide(auto_wrap_policy, as_one_unit, small=self._prefetch.limit == 1)
            or partition_problem(partition)
            or self._misfit(inside)
            or choice.unusable(synced=sync_module_states, sharded=guarded())
        )
        told = [f"{strategy}, {options.told()}, {self._prefetch}", *choice.told()]
        self._placement.compare("the models given to FSDP", told, problem)

        builder = Builder(choice, self._placement, options, param_init_fn)
        self._units = builder.build()  # the last that can fail
        for name, one in inside.items():
            self._units += one._hand_over(module, name)
        self._guard = Guard(
            module,
            self._units,
            self._comm,
            ignored=ignored_modules,
            partition=partition,
            disk=builder.disk,
        )
        self._sentry = Sentry(self._units)
        self._before_forward = torch.compiler.disable(self._guard.before_forward, reason=BETWEEN_UNITS)
        self._schedule = Schedule(self._units, self._comm, self._prefetch, after_backward=self._guard.after_backward)
        gradients = Gradients([param for group in self.flat_groups for param in group.params])
        buffers = BufferSync(module, self.comms) if broadcast_buffers else None
        self._forward = Forward(module, self._schedule, gradients, buffers)

    def _misfit(self, inside: dict[str, FSDP]) -> str | None:
        if "" in inside:
            return "the module is an FSDP already. Wrap it once, and choose units by auto_wrap_policy."
        for name, one in inside.items():
            if [comm.group for comm in one.comms] != [comm.group for comm in self.comms]:
                return (
                    f"{name!r} is an FSDP over another process group than the FSDP around it. Wrap both over the same "
                    "groups, or leave its parameters out by ignored_modules and average their gradients yourself."
                )
        return None

    def _hand_over(self, root: nn.Module, name: str) -> list[Unit]:
        """To the FSDP around this one: the units, and in the root the place at which this one stands."""
        self._schedule.remove()
        self._guard.dismiss()
        self._sentry.dismiss()
        for parent in root.modules():
            for child, module in parent._modules.items():
                if module is self:
                    parent._modules[child] = self.module
        for unit in self._units:
            unit.move_below(name)
        return self._units

    # --------------------------------------------------------------------------------------------- running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward. Collective.

        Raises RuntimeError where parameters were moved, cast or given other data since they were wrapped.
        """
        self._before_forward()
        return self._forward.run(*args, **kwargs)

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
        dtypes = {param.dtype for param in params}
        total = norm.total_norm(parts, self._comm, float(norm_type), params[0].device, dtypes)
        with self._guard.scaling_alike():
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
    def summon_full_params(
        self, writeback: bool = True, rank0_only: bool = False, with_grads: bool = False
    ) -> Iterator[None]:
        """Collective. In here all parameters are whole, in their own dtype, on every rank.

        Forwards in here must be under no_grad; they gather nothing, which suits `generate()`.

        writeback: changes made in here stay, those of each part's owner; otherwise they are lost.
        rank0_only: only the first rank of the group sees them whole, with writeback=False.
        with_grads: averaged gradients are whole in `param.grad`, too.

        Raises ValueError for rank0_only with writeback, and, on every rank, where parameters were given other data in
        here that is to stay; RuntimeError where they were given some before, and within forward and backward.
        """
        self._guard.refuse_strays()
        with whole.summoned(self._units, writeback=writeback, rank0_only=rank0_only, with_grads=with_grads):
            yield
            if writeback:
                self._placement.compare("the whole parameters of FSDP", [], strayed(self.flat_groups))

    def apply(self, fn: Callable[[nn.Module], None]) -> FSDP:
        """Collective. Calls fn with every module, as nn.Module.apply, on whole parameters; rank 0's results count."""
        with self.summon_full_params():
            super().apply(fn)
            self._placement.broadcast([*self.module.parameters(), *self.module.buffers()])
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Collective. Whole parameters and buffers under the module's own names, on every rank, as copies.

        Raises RuntimeError where parameters were moved, cast or given other data.
        """
        self._guard.refuse_strays()
        return whole.state_dict(self.module, self._units, *args, **kwargs)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Collective. Called by the `load_state_dict` of a plain module around this one."""
        given = {name.removeprefix(prefix): state_dict.pop(name) for name in [*state_dict] if name.startswith(prefix)}
        try:
            assign = local_metadata.get("assign_to_params_buffers", False)
            missing, unexpected = self.load_state_dict(given, strict=False, assign=assign)
            missing_keys += [prefix + name for name in missing]
            unexpected_keys += [prefix + name for name in unexpected]
        except (RuntimeError, ValueError) as error:
            error_msgs.append(str(error))
        # The modules inside are asked next: they are given what they have.
        own = self.module.state_dict(keep_vars=True)
        state_dict.update({f"{prefix}module.{name}": value for name, value in own.items()})

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Collective. Takes whole weights under the module's own names; every rank must be given the same.

        Raises ValueError for assign=True, which would leave the optimizer with other tensors.
        """
        if assign:
            raise ValueError("assign=True replaces the parameters that are sharded. Load with assign=False.")
        with self.summon_full_params():
            return self.module.load_state_dict(state_dict, strict)

    def optim_state_dict(self, optimizer: Optimizer, to: int | None = 0) -> dict[str, Any] | None:
        """Collective. The state of an optimizer of these parameters, whole, in the plain optimizer's own format.

        to: the rank of the group that gets it, or None for all; other ranks get None. It loads into the optimizer of
        the plain model, and by `load_optim_state_dict` at any number of ranks. Each rank's part alone is what
        `optimizer.state_dict()` gives. Raises ValueError, on every rank, for state that cannot be put together.
        """
        return state.consolidate(self._stepping(optimizer), to)

    def load_optim_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Takes a whole state, the same on every rank: the plain optimizer's, or what `optim_state_dict` gave.

        Raises ValueError, and changes nothing, where it does not fit.
        """
        state.load(self._stepping(optimizer), state_dict)

    def _stepping(self, optimizer: Optimizer) -> SteppingParts:
        self.reshard()
        return SteppingParts(optimizer, self.flat_groups, self._comm)

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's parts, and all buffers, as copies, without communication: for saving each rank's by itself.

        Raises RuntimeError, on this rank, where its parameters were moved, cast or given other data.
        """
        problem = self._guard.stray()
        if problem is not None:
            raise RuntimeError(problem)
        return whole.local_state_dict(self.module, self._units)

    def load_local_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Collective. Takes what `local_state_dict` gave on this rank, of the same model on as many ranks.

        Raises ValueError on every rank, and changes nothing, where one was given something else.
        """
        problem = self._guard.stray() or whole.local_problem(self.module, self._units, state_dict)
        self._comm.compare("the parts given to FSDP", [], problem)
        whole.load_local_state_dict(self.module, self._units, state_dict)

    # ------------------------------------------------------------------------------------------ the module

    def __getstate__(self) -> NoReturn:
        raise TypeError(NO_COPIES)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _inside(module: nn.Module) -> dict[str, FSDP]:
    """The FSDPs in the module, by name. What lies in one of them it has taken over itself."""
    return {name: one for name, one in module.named_modules() if isinstance(one, FSDP)}


def _parameters_in(inside: dict[str, FSDP]) -> set[nn.Parameter]:
    """What is sharded already."""
    return {param for one in inside.values() for group in one.flat_groups for param in group.params}


def _ignored(modules: Iterable[nn.Module], params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [*dict.fromkeys([*(param for module in modules for param in module.parameters()), *params])]
