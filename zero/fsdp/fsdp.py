"""Stage 3: parameters, too, live only with their owner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zero._torch import children_of
from zero.comm import Comm
from zero.fsdp.backward import Backward
from zero.fsdp.build import Builder, Options
from zero.fsdp.choice import Choice
from zero.fsdp.compiled import BETWEEN_UNITS, compiling_problem
from zero.fsdp.forward import Forward
from zero.fsdp.guard import Guard, guarded
from zero.fsdp.in_backward import StepsInBackward
from zero.fsdp.index import Index
from zero.fsdp.precision import MixedPrecision, as_precision
from zero.fsdp.prefetch import BackwardPrefetch, Prefetch
from zero.fsdp.schedule import Schedule
from zero.fsdp.state_dict_guard import NO_COPIES, StateDictGuard
from zero.fsdp.strategy import ShardingStrategy, place
from zero.fsdp.summon import Summons
from zero.fsdp.torch_options import from_torch, refuse_number_of_ranks, refuse_unknown
from zero.fsdp.tracing import Gradients
from zero.fsdp.unit import Unit
from zero.fsdp.unwrap import give_back, refuse_forward
from zero.fsdp.weights import Weights
from zero.fsdp.wrap import Policy
from zero.oss import norm
from zero.oss.announce import announce
from zero.oss.ddp import ddp_within
from zero.oss.in_backward import refuse
from zero.oss.joining import NO_JOIN
from zero.oss.offload import CPUOffload, DiskOffload
from zero.oss.partition import Partition, partition_problem
from zero.sdp.buffers import BufferSync
from zero.sdp.unwrapped import refuse_steps

_GIVEN = "the models given to FSDP"


class FSDP(Weights):
    """Fully sharded data parallelism: parameters, gradients and optimizer state in shards, one a rank (ZeRO stage 3;
    Rajbhandari et al., 2020, section 5.3).

        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    The module is divided into units. A unit's parameters are gathered before its forward and its backward, and released
    after. Parameters stay the objects they were, under their names, so an optimizer may be built before or after; at
    rest their data and gradient are this rank's shard, with as many dimensions as the full ones.

    module: stays usable as it is; its attributes can be read through this one. An FSDP inside it hands its module
        back into its place, and its units over to this one, with the options that they have.
    process_group: by default all ranks; without torch.distributed, this process alone. For hybrid strategies a pair:
        the ranks to shard within, and those to replicate across.
    device_mesh: the groups as a DeviceMesh: of one dimension, or of two for hybrid strategies, replicas first.
    auto_wrap_policy: which modules become units: a policy of torch.distributed.fsdp.wrap. By default the blocks that
        the model repeats in an nn.ModuleList.
    as_one_unit: modules, or classes of modules, that are gathered as a whole, such as a mixture of experts of which
        each rank runs others.
    ignored_modules, ignored_parameters: left as they are; nobody averages their gradients. Quantised ones, and others
        that wrap tensors, are not sent at the start either.
    partition: "even" cuts inside parameters, for optimizers that treat each element by itself; "whole" keeps each
        parameter with one rank; "auto" is even, and refuses steps of optimizers that were found to need whole ones.
    sharding_strategy: one of ShardingStrategy, PyTorch's enum, or its name.
    optimizer_sharding: "all", with a hybrid strategy: what is stepped, its gradients and the optimizer's state are cut
        over all ranks of the job, parameters over those to shard within. Once a step, node shards are gathered across.
    reshard_after_forward: False is SHARD_GRAD_OP: parameters stay from forward to backward, which sends less.
    mixed_precision: which dtypes are computed with and sent; shards keep the parameters' own. PyTorch's MixedPrecision
        means here what it means there; one with keep_low_precision_grads is refused.
    prefetch: what is gathered ahead, and how many units are in flight at once; see Prefetch, MEMORY_FIRST, SPEED_FIRST.
        A BackwardPrefetch, zero's or PyTorch's, stands for a Prefetch with it.
    offload: where shards lie at rest: CPUOffload, DiskOffload. PyTorch's CPUOffload() offloads nothing, and
        CPUOffload(offload_params=True) is zero's.
    param_init_fn: gives values to a module that was built on the meta device, instead of its `reset_parameters`. Units
        get memory one at a time, values on rank 0 only, and are never full anywhere else than there.
    sync_module_states: start from the parameters and buffers of rank 0. Other ranks may build on the meta device.
    broadcast_buffers: before a forward, buffers are those of rank 0, as with DistributedDataParallel.
    of_torch: options of PyTorch's FSDP1 that have another name here: backward_prefetch, cpu_offload, device_id,
        forward_prefetch, ignored_states, limit_all_gathers, use_orig_params. See zero.fsdp.torch_options.

    A penalty that is added to the loss, such as the sum of squares, is computed after forward from what `parameters()`
    or `named_parameters()` of this gives then: it sees this rank's shards, and adds its gradient to theirs. It must be
    a sum over elements: of norms and products of matrices a shard would be another number than of the full one.

    torch.compile may be called with units, with the module, or with this. Graphs break where units begin and end, so
    only units can be compiled with fullgraph=True. A module that is compiled as a whole runs its first forward in
    training and its first in evaluation uncompiled, to find what modules read of other units. Where units are compiled
    by themselves this is not looked for, and no module may read parameters of another unit. On GPUs CUDA graphs are
    refused: mode="reduce-overhead", "max-autotune" and triton.cudagraphs of torch.compile, and torch.cuda.graph.

    Collective: the constructor, forward, backward, `state_dict`, `load_state_dict`, `summon_full_params`.
    Raises ValueError, on every rank, for what cannot be sharded or differs between ranks, and where modules cannot be
    initialised or shards find no room: the model is plain then, and can be wrapped again. RuntimeError,
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
        optimizer_sharding: Literal["group", "all"] = "group",
        reshard_after_forward: bool | None = True,
        mixed_precision: MixedPrecision | None = None,
        prefetch: Prefetch | BackwardPrefetch | None = None,
        offload: CPUOffload | DiskOffload | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        sync_module_states: bool = True,
        broadcast_buffers: bool = True,
        **of_torch: Any,
    ) -> None:
        super().__init__()
        self.module = module
        refuse_unknown(of_torch)
        strategy, self._placement, problem = place(sharding_strategy, process_group, device_mesh, optimizer_sharding)
        self._comm = self._placement.comm
        with self._placement.raised_everywhere(_GIVEN):
            refuse_number_of_ranks(reshard_after_forward)
            asked = from_torch(of_torch, prefetch, offload, ignored_modules, ignored_parameters)
            precision = as_precision(mixed_precision)
            stays = strategy.keeps_parameters or reshard_after_forward is False
            options = Options(partition, precision, stays, sync_module_states, asked.offload, asked.prefetch)
        asked.move(module)
        inside = _inside(module)
        choice = Choice(module, inside, _parameters_in(inside), asked.ignored)
        problem = problem or choice.divide(auto_wrap_policy, as_one_unit, small=options.prefetch.limit == 1)
        problem = problem or self._problem(choice, inside, options)
        signature = f"{strategy}, optimizer_sharding {optimizer_sharding}, {options.signature()}"
        self._placement.compare(_GIVEN, [signature, *choice.signature()], problem)
        builder = Builder(choice, self._placement, options, param_init_fn)
        self._units = builder.build()  # the last that can fail
        self._take_over(builder, inside)
        ignored = asked.ignored_modules
        self._index = Index(self._units)
        self._guard = Guard(module, self._index, self._comm, ignored=ignored, partition=partition, disk=builder.disk)
        self.broadcast_buffers = broadcast_buffers
        self._drive(options.prefetch, BufferSync(module, self._placement.all_groups()) if broadcast_buffers else None)
        title = f"FSDP({type(module).__name__}, {strategy}, {len(self._units)} units)"
        left_out = f"{len(choice.ignored)} parameters, ignored as the caller asked" if choice.ignored else ""
        announce(title, self._comm, self.shard_groups, left_out, sharded="parameters and gradients")

    def _problem(self, choice: Choice, inside: dict[str, FSDP], options: Options) -> str | None:
        """What keeps the module from being wrapped so, in words for the user; None if nothing."""
        return (
            partition_problem(options.partition)
            or self._misfit(inside)
            or ddp_within(self.module, choice.ignored)
            or choice.unusable(synced=options.synced, sharded=guarded())
            or choice.unquantisable(options.precision)
            or self._comm.device_problem(choice.devices())
            or self._compiling_problem(choice, inside, options)
        )

    def _compiling_problem(self, choice: Choice, inside: dict[str, FSDP], options: Options) -> str | None:
        frees = self._comm.world > 1 or options.offload is not None or options.precision.param_dtype is not None
        units = [module for name, module in choice.units.items() if name]
        units += [unit.module for one in inside.values() for unit in one._units[1:]]
        return compiling_problem(self.module, units, choice.devices() if frees else [])

    def _take_over(self, builder: Builder, inside: dict[str, FSDP]) -> None:
        """What was built, and what the FSDPs inside have."""
        self._cast_buffers, self._hooks = builder.cast_buffers, builder.hooks
        for name, one in inside.items():
            self._units += one._hand_over(self.module, name)
            self._cast_buffers += one._cast_buffers
            self._hooks += one._hooks

    def _drive(self, prefetch: Prefetch, buffers: BufferSync | None) -> None:
        """From now on the units are gathered, released and reduced as the module runs."""
        self._summons = Summons(self._units, self._guard, self._placement, self._cast_buffers)
        self._state_dict_guard = StateDictGuard(self._index)
        self._before_forward = torch.compiler.disable(self._guard.before_forward, reason=BETWEEN_UNITS)
        prefetch = prefetch.where(overlaps=any(unit.overlaps for unit in self._units))
        self._backward = Backward(self._units, self._placement.all_groups(), prefetch, after=self._guard.after_backward)
        self._schedule = Schedule(self._index, self._placement.all_groups(), prefetch, self._backward)
        gradients = Gradients([*self._index])
        self._forward = Forward(self.module, self._units, self._schedule, self._backward, gradients, buffers)

    def _misfit(self, inside: dict[str, FSDP]) -> str | None:
        if "" in inside:
            return "the module is an FSDP already. Wrap it once, and choose units by auto_wrap_policy."
        for name, one in inside.items():
            if one._placement.groups != self._placement.groups:
                return (
                    f"{name!r} is an FSDP over another process group than the FSDP around it. Wrap both over the same "
                    "groups, or leave its parameters out by ignored_modules and average their gradients yourself."
                )
        return None

    def _hand_over(self, root: nn.Module, name: str) -> list[Unit]:
        """To the FSDP around this one: the units, and in the root the place at which this one stands."""
        self._dismiss()
        for parent in root.modules():
            for child, module in children_of(parent).items():
                if module is self:
                    children_of(parent)[child] = self.module
        for unit in self._units:
            unit.move_below(name)
        return self._units

    def _dismiss(self) -> None:
        self._schedule.remove()
        for one in (self._guard, self._summons, self._state_dict_guard):
            one.dismiss()

    def unwrap(self) -> nn.Module:
        """Collective. The module, plain again, with full parameters and without gradients; see zero.unwrap."""
        self._guard.refuse_moved()
        give_back(self._units, self._cast_buffers, self._hooks)
        self._dismiss()
        refuse_steps(self._guard.optimizers)
        self._before_forward = refuse_forward
        return self.module

    # --------------------------------------------------------------------------------------------- running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward. Collective.

        Raises RuntimeError where parameters were moved, cast or given other data since they were wrapped.
        """
        self._before_forward()
        return self._forward.run(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here keep full gradients on every rank, to be added to by later ones; nothing is reduced.

        The first backward outside sends them along. Forward and backward both belong in here. `param.grad` shows this
        rank's own share meanwhile; clearing it clears what is kept.
        """
        if self._backward.steps is not None:
            refuse("no_sync()", "Step after backward to accumulate.")
        before, self._backward.reduces = self._backward.reduces, False
        try:
            yield
        finally:
            self._backward.reduces = before

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """For torch's Join, which calls it on every rank before anything is sent. Raises RuntimeError."""
        raise RuntimeError(NO_JOIN.format("FSDP"))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Collective. Scales all gradients so that their norm, as one vector over all ranks, is at most max_norm.

        Returns the norm before, 0-dim, the same on every rank. norm_type: 1, 2, any p > 0, or inf. To be called instead
        of torch.nn.utils.clip_grad_norm_, which sees this rank's shards only.
        """
        if self._backward.steps is not None:
            refuse("clipping by the norm of all gradients", "Step after backward, or clip values in hooks.")
        params = [*self._index]
        shards = [param.grad for param in params if param.grad is not None]
        dtypes = {param.dtype for param in params}
        total = norm.total_norm(shards, self._comm, float(norm_type), params[0].device, dtypes)
        with self._guard.scaling_alike():
            norm.clip(shards, total, float(max_norm))
        return total

    def step_in_backward(self, optimizer: Optimizer) -> None:
        """See zero.step_in_backward. Raises ValueError as it does."""
        if self._backward.steps is not None:
            raise ValueError("zero.step_in_backward was called before for this model.")
        self._backward.steps = StepsInBackward(optimizer, self._guard, self._guard.params)

    @property
    def require_backward_grad_sync(self) -> bool:
        """False within no_sync, as of DistributedDataParallel."""
        return self._backward.reduces

    @property
    def comms(self) -> list[Comm]:
        """The groups of ranks that what is stepped is sharded within, and replicated across if it is."""
        return [self._comm, *([self._placement.replicas] if self._placement.replicas else [])]

    @property
    def buffer_dtypes(self) -> dict[Tensor, torch.dtype]:
        """Of the buffers that MixedPrecision.buffer_dtype has cast, the dtypes that they are saved in."""
        return {one.tensor: one.dtype for one in self._cast_buffers}

    @property
    def unit_bytes(self) -> int:
        """Bytes of the largest unit's parameters: what is unsharded at a time."""
        return max(sum(group.full.nbytes for group in unit.groups) for unit in self._units)

    # ------------------------------------------------------------------------------------------ the module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; `parameters()` comes from here, too. At rest they are this rank's shards."""
        self._schedule.expect_reads()
        yield from super().named_parameters(*args, **kwargs)

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
    return {param for one in inside.values() for group in one.shard_groups for param in group.params}
