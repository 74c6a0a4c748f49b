"""The wrapper of ZeRO stage 3: parameters, gradients and optimizer state are sharded."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from zero._torch import as_plain_tensors, children_of
from zero.fsdp.build import Builder, restore_module
from zero.fsdp.choice import UnitChoice
from zero.fsdp.compile import BETWEEN_UNITS, RECORDING, Compiling, compiling_problem
from zero.fsdp.model import Model, sharded_params
from zero.fsdp.optimizer_state import registered
from zero.fsdp.options import (
    GivenOptions,
    Options,
    ShardingStrategy,
    place,
    refuse_number_of_ranks,
    refuse_unknown,
)
from zero.fsdp.precision import CastBuffer
from zero.fsdp.prefetch import Prefetch, as_prefetch
from zero.fsdp.state_dict_guard import NO_COPIES, StateDictGuard
from zero.fsdp.step import Steps
from zero.fsdp.torch_options import NAMES, TorchMethods, as_precision, from_torch, refuse_method
from zero.fsdp.unit import Unit
from zero.fsdp.units import Policy, largest_unit
from zero.fsdp.weights import Weights
from zero.offload import NAMES as OFFLOAD
from zero.offload import take_offload
from zero.shards import norm
from zero.shards.announce import announce
from zero.shards.offload import DEVICE, Offload
from zero.shards.partition import Partition
from zero.shards.placement import Placement
from zero.tensor_parallel import parts
from zero.tensor_parallel.shown import put_into, take_out_of
from zero.wrap.buffers import BufferSync
from zero.wrap.ddp import ddp_within
from zero.wrap.wrapper import UNWRAPPED, refuse_steps

if TYPE_CHECKING:
    from zero.fsdp.precision import GivenPrecision

_GIVEN = "the models given to FSDP"


class FSDP(Weights, TorchMethods):  # type: ignore[misc]
    """Fully sharded data parallelism: each rank holds one shard of the parameters, gradients and optimizer state (ZeRO
    stage 3; Rajbhandari et al., 2020, section 5.3).

        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    The module is divided into units. A unit's parameters are gathered before its forward and its backward, and released
    afterwards. They remain the same objects under the same names, so an optimizer may be built before or after
    wrapping. At rest their data and gradient are this rank's shard, with as many dimensions as the full tensor.

    module: remains usable; its attributes can be read through the FSDP. An FSDP inside it is dissolved: its module
        takes its place, and this FSDP takes over its units with their own options.
    process_group: all ranks by default; without torch.distributed, this process alone. Hybrid strategies take a pair:
        the shard group and the replicate group.
    device_mesh: the groups as a DeviceMesh of one dimension, or of two for hybrid strategies: (replicas, shards).
    auto_wrap_policy: chooses the modules that become units; a policy of torch.distributed.fsdp.wrap. By default these
        are the blocks that the model repeats in an nn.ModuleList or nn.Sequential; see zero.fsdp.blocks.
    as_one_unit: modules, or classes of modules, that become one unit each with everything inside them, such as a
        mixture of experts where ranks run different experts.
    ignored_modules, ignored_parameters: are not sharded, and their gradients are not averaged. Quantised parameters
        and other tensor subclasses that wrap tensors are not broadcast from rank 0 either.
    partition: "even" cuts inside parameters, for optimizers that treat each element separately; "whole" assigns each
        parameter to one rank; "auto" is "even", but refuses steps of optimizers that were measured to need "whole".
    sharding_strategy: a ShardingStrategy, a member of PyTorch's enum, or the name of one.
    reshard_after_forward: False means SHARD_GRAD_OP, which saves an all-gather: parameters stay until backward.
    mixed_precision: dtypes of computing and of transfers; shards keep the dtype of the parameters. PyTorch's
        MixedPrecision has the same meaning as in PyTorch; keep_low_precision_grads is refused.
    prefetch: which units are gathered ahead, and how many are in flight; see Prefetch, MEMORY_FIRST, SPEED_FIRST. A
        BackwardPrefetch, zero's or PyTorch's, stands for a Prefetch with it.
    param_init_fn: initialises a module that was built on the meta device, instead of its `reset_parameters`. Units get
        memory one at a time. Rank 0 initialises the values, and the other ranks receive them.
    sync_module_states: start from the parameters and buffers of rank 0. Other ranks may build on the meta device.
    broadcast_buffers: broadcast the buffers of rank 0 before each forward, as DistributedDataParallel does.
    more: offload, where shards and optimizer state are stored (zero.CPUOffload, zero.DiskOffload), and options of
        PyTorch's FSDP1 that have another name here: backward_prefetch, device_id, forward_prefetch, ignored_states,
        limit_all_gathers, use_orig_params. See zero.offload and zero.fsdp.torch_options.

    docs/fsdp.md says what else goes with it, and what does not.

    Collective: the constructor, forward, backward, `state_dict`, `load_state_dict`, `summon_full_params`.
    Raises ValueError on every rank if the module cannot be sharded, if models or options differ between ranks, if a
    module cannot be initialised, or if there is no room for shards; the model is plain then, and can be wrapped again.
    Raises RuntimeError on every rank if ranks run different units.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        *,
        device_mesh: DeviceMesh | None = None,
        auto_wrap_policy: Policy = None,
        as_one_unit: Sequence[nn.Module | type[nn.Module]] = (),
        ignored_modules: Iterable[nn.Module] = (),
        ignored_parameters: Iterable[nn.Parameter] = (),
        partition: Partition = "auto",
        sharding_strategy: enum.Enum | str = "FULL_SHARD",
        reshard_after_forward: bool | None = True,
        mixed_precision: GivenPrecision = None,
        prefetch: Prefetch | enum.Enum | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        sync_module_states: bool = True,
        broadcast_buffers: bool = True,
        **more: Any,
    ) -> None:
        super().__init__()
        self.module = module
        asked = GivenOptions(prefetch, [*ignored_modules], [*ignored_parameters])
        strategy, placement, problem = place(sharding_strategy, process_group, device_mesh)
        with placement.raised_everywhere(_GIVEN):
            refuse_number_of_ranks(reshard_after_forward)
            offload = _understand(more, asked)
            precision = as_precision(mixed_precision)
            stays = strategy.keeps_parameters or reshard_after_forward is False
            options = Options(partition, precision, stays, sync_module_states, offload, as_prefetch(asked.prefetch))
        for change in asked.before:
            change(module)
        nested = _nested_in(module)
        choice = UnitChoice(module, nested, _parameters_of(nested), asked.ignored)
        problem = problem or choice.divide(auto_wrap_policy, as_one_unit, small=options.prefetch.limit == 1)
        lines = [f"{strategy}, {options.signature()}", *choice.signature()]
        placement.compare(_GIVEN, lines, problem or _problem(choice, nested, options, placement))
        put_into(module, choice.ignored)
        builder = Builder(choice, placement, options, param_init_fn)
        units, self._hooks = builder.build(), builder.hooks  # nothing after this fails
        for name, fsdp in nested.items():
            units += fsdp._hand_over(module, name, builder.cast_buffers, self._hooks)
        ignored, cast_buffers = asked.ignored_modules, builder.cast_buffers
        self._model = Model(module, units, placement, options, ignored, cast_buffers)
        self.broadcast_buffers = broadcast_buffers
        synced = broadcast_buffers and next(module.buffers(), None) is not None
        self._buffer_sync = BufferSync(module, self._model.comms) if synced else None
        self._compiling = compiling = Compiling(self._model.index, self._model.schedule)
        self._state_dicts = StateDictGuard(module, self._model.index, keeps=(Steps(self._model), compiling))
        self._model.schedule.install(compiling.hook, compiling.search_begins)
        self._unwrapped = False
        self._announce(strategy, len(choice.ignored))

    def _announce(self, strategy: ShardingStrategy, ignored: int) -> None:
        number, (largest, share) = len(self._units), largest_unit(self._units)
        units = f"{number} unit{'s' if number > 1 else ''}, the largest {largest.title} with {share} of all"
        title = f"FSDP({type(self.module).__name__}, {strategy}, {units})"
        left_out = f"{ignored} parameters, ignored as the caller asked" if ignored else ""
        announce(title, self._model.comm, self._model.index.groups, left_out, sharded="parameters and gradients")

    def _hand_over(
        self, root: nn.Module, name: str, cast_buffers: list[CastBuffer], hooks: list[RemovableHandle]
    ) -> Sequence[Unit]:
        """Puts the module back into its place in `root`. Returns the units to the FSDP around this one, and appends to
        its cast buffers and hooks."""
        self._end()
        cast_buffers += self._model.cast_buffers
        hooks += self._hooks
        for parent in root.modules():
            for child, module in children_of(parent).items():
                if module is self:
                    children_of(parent)[child] = self.module
        for unit in self._units:
            unit.move_below(name)
        return self._units

    def unwrap(self) -> nn.Module:
        """Collective. Returns the plain module, with full parameters and without gradients; see zero.unwrap."""
        self._model.refuse_moved()
        restore_module(self._units, self._model.cast_buffers, self._hooks)
        take_out_of(self.module)
        self._end()
        refuse_steps(registered(self._model))
        self._unwrapped = True
        return self.module

    def _end(self) -> None:
        self._model.dismiss()
        self._state_dicts.remove()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Collective. Runs the module's own forward.

        Raises RuntimeError if parameters were moved, cast or given other data since they were wrapped.
        """
        run = self._begin(torch.compiler.is_compiling())  # torch.compile traces the code of this method, and no other
        try:
            output = run(*args, **kwargs)
        except BaseException as error:
            self._raised(error)
            raise
        self._end_forward()
        return output

    @torch.compiler.disable(reason=BETWEEN_UNITS)  # type: ignore[untyped-decorator]
    def _begin(self, traced: bool) -> Callable[..., Any]:
        """Collective. Returns what runs the module."""
        if self._unwrapped:
            raise RuntimeError(UNWRAPPED.format("FSDP"))
        with self._model.together:
            run = self._compiling.runner(self.module, traced=traced)
            self._model.schedule.interrupted()  # of a unit by itself, which is known only now
            self._model.begin_forward()
            if self._buffer_sync is not None:
                self._buffer_sync.before_forward()
            return run

    @torch.compiler.disable(reason=BETWEEN_UNITS)  # type: ignore[untyped-decorator]
    def _end_forward(self) -> None:
        if self._buffer_sync is not None:
            self._buffer_sync.after_forward(reduced=self._model.backward.reduces)

    @torch.compiler.disable(reason=BETWEEN_UNITS)  # type: ignore[untyped-decorator]
    def _raised(self, error: BaseException) -> None:
        """Collective but for KeyboardInterrupt and SystemExit, after which torch calls no hooks of modules: what the
        user saves then is to be saved as after any other forward."""
        self._model.schedule.interrupted()
        self._model.together.tell(error)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates full gradients on every rank, without reducing them. The first backward outside reduces them.

        Call both forward and backward inside. Meanwhile `param.grad` is this rank's own full gradient, as with
        DistributedDataParallel: it may be written in place, and None drops it. Another tensor in its place is refused.
        """
        backward = self._model.backward
        before, backward.reduces = backward.reduces, False
        try:
            yield
        finally:
            backward.reduces = before

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, params: Collection[nn.Parameter] | None = None
    ) -> Tensor:
        """Collective. Scales all gradients so that their norm, as one vector over all ranks, is at most max_norm.

        Returns the norm before scaling, 0-dim, equal on every rank. norm_type: 1, 2, any p > 0, or inf. Use it instead
        of torch.nn.utils.clip_grad_norm_, which sees this rank's shards only. params: of the model; by default all.
        """
        total, params = self.grad_norm(norm_type, params=params), self._among(params)
        with as_plain_tensors():
            gradients = [param.grad for param in params if param.grad is not None]
            norm.clip(gradients, total, float(max_norm), offloaded=self._offload.active)
        return total

    def _among(self, params: Collection[nn.Parameter] | None) -> list[nn.Parameter]:
        """Those of the model's parameters that are in `params`, or all."""
        chosen = None if params is None else {*params}
        return [param for param in self._model.index if chosen is None or param in chosen]

    def grad_norm(self, norm_type: float = 2.0, *, params: Collection[nn.Parameter] | None = None) -> Tensor:
        """Collective. Returns the norm of all gradients, as one vector over all ranks, 0-dim, equal on every rank.

        Call it between backward and step: a norm of `param.grad` is that of this rank's shards. norm_type: as of
        `clip_grad_norm_`. params: of the model; by default all. Raises RuntimeError on every rank after a backward
        under no_sync.
        """
        every = [*self._model.index]
        self._model.refuse_unreduced()
        with as_plain_tensors():
            return norm.total_norm(
                [(param, param.grad) for param in self._among(params)],
                self._model.comm,
                self._model.norm_channel,
                float(norm_type),
                every[0].device,
                {param.dtype for param in every},
                self._offload,
            )

    @property
    def _offload(self) -> Offload:
        """Where shards lie that are not on the device."""
        return next((group.offload for group in self._model.index.groups if group.offload.active), DEVICE)

    @property
    def require_backward_grad_sync(self) -> bool:
        """False within no_sync, as with DistributedDataParallel, where some scripts set it instead of calling that."""
        return self._model.backward.reduces

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, reduces: bool) -> None:
        self._model.backward.reduces = reduces

    def __getstate__(self) -> NoReturn:
        raise TypeError(NO_COPIES)

    def __getattr__(self, name: str) -> Any:
        if name in children_of(self):
            return super().__getattr__(name)
        if not hasattr(self.module, name):
            refuse_method(name)
        return getattr(self.module, name)


def running_model(fsdp: FSDP) -> Model:
    """Returns what an FSDP runs. No attribute of it, as those are the module's own."""
    return fsdp._model


def _understand(more: dict[str, Any], asked: GivenOptions) -> Offload:
    """Takes offload and options of PyTorch's names out of `more`. Returns where shards lie."""
    refuse_unknown(more, known=(*OFFLOAD, *NAMES))
    offload, wrong = take_offload(more)
    if wrong is not None:
        raise ValueError(wrong)
    from_torch(more, asked)
    return offload


def _nested_in(module: nn.Module) -> dict[str, FSDP]:
    """Returns the FSDPs in the module by name. None contains another: each has dissolved those inside it."""
    return {name: child for name, child in module.named_modules() if isinstance(child, FSDP)}


def _parameters_of(nested: dict[str, FSDP]) -> set[nn.Parameter]:
    return {param for fsdp in nested.values() for param in fsdp._model.index}


def _problem(choice: UnitChoice, nested: dict[str, FSDP], options: Options, placement: Placement) -> str | None:
    """Returns an error message if the module cannot be wrapped with these options, else None."""
    frees = placement.comm.world > 1 or options.offload.active or options.precision.param_dtype is not None
    records = frees and any(device.type in RECORDING for device in choice.devices())
    units = [module for name, module in choice.units.items() if name]
    units += [unit.module for fsdp in nested.values() for unit in fsdp._units[1:]]
    return (
        options.problem()
        or _nesting_problem(nested, placement)
        or compiling_problem(choice.module, units, records=records)
        or ddp_within(choice.module, choice.ignored)
        or parts.problem(choice.own(), placement.all_groups())
        or choice.unusable(synced=options.synced, sharded=sharded_params())
        or placement.comm.device_problem(choice.devices())
    )


def _nesting_problem(nested: dict[str, FSDP], placement: Placement) -> str | None:
    if "" in nested:
        return "the module is an FSDP already. Wrap it once, and choose units by auto_wrap_policy."
    for name, fsdp in nested.items():
        if fsdp._model.placement.groups != placement.groups:
            return (
                f"{name!r} is an FSDP over another process group than the FSDP around it. Wrap both over the same "
                "groups, or leave its parameters out by ignored_modules and average their gradients yourself."
            )
    return None
