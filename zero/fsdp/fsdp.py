"""The wrapper of ZeRO stage 3: parameters, gradients and optimizer state are sharded."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zero._torch.compiling import named_as_compiled, never_traced
from zero._torch.modules import OwnHook, children_of, parameters_of
from zero.comm.together import Together, alike
from zero.comm.waiting import calling
from zero.fsdp import full_weights
from zero.fsdp.choice import Policy, UnitChoice, largest_unit, smallest_leaves
from zero.fsdp.compile import BETWEEN_UNITS, Compiling
from zero.fsdp.construct import build, refuse_unfit, restore_units
from zero.fsdp.full_weights import summon
from zero.fsdp.model import Model
from zero.fsdp.options import (
    NAMES,
    MoreOptions,
    Options,
    ShardingStrategy,
    TorchMethods,
    as_prefetch,
    from_torch,
    move,
    placed,
    refuse_method,
    refuse_number_of_ranks,
    refuse_unknown,
)
from zero.fsdp.step import Steps, cut_full, register, registered
from zero.offload import NAMES as OFFLOAD
from zero.offload import take_offload
from zero.shards.announce import announce
from zero.shards.answers import read_only
from zero.shards.partition import Partition, Place, whole_among
from zero.shards.shard_group import GroupState, ShardGroup
from zero.shards.sharded_parameter import NO_COPIES
from zero.tensor_parallel import parts
from zero.tensor_parallel.shown import put_into, take_out_of
from zero.wrap.buffers import BufferSync
from zero.wrap.precision import as_precision, uncast
from zero.wrap.wrapper import COPIED, NOT_SCRIPTED, UNWRAPPED, Wrapper, as_weights, refuse_scripted, retire_all

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from zero.wrap.precision import GivenPrecision

# ----------------------------------------------------------------------------------------------------------- state_dict
#
# Refuses state_dict(), load_state_dict() and copies of modules inside an FSDP, which have shards in place of full
# weights.


class StateDictGuard:
    """Registers refusals on every module that holds parameters of the index.

    keeps: what is to live as long as these modules, also if the FSDP is dropped and the module inside is used.
    """

    def __init__(self, root: nn.Module, index: Mapping[nn.Parameter, Place], keeps: object) -> None:
        self._hooks = []
        for module in root.modules():
            groups = [index[param].group for param in parameters_of(module, recurse=False) if param in index]
            if groups:
                self._hooks.append(module.register_state_dict_pre_hook(Refusal(groups, keeps)))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


class Refusal(OwnHook):
    """A hook before the state_dict() of a module, which raises RuntimeError. Copying it raises TypeError."""

    def __init__(self, groups: Sequence[ShardGroup], keeps: object) -> None:
        self._groups, self._keeps = groups, keeps

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        reads = self._groups[0].reads()
        if reads is not None and reads.without_values:  # then nothing is taken for a full weight
            return
        sharded = [one for one in self._groups if one.comm.world > 1 and one.state is not GroupState.SUMMONED]
        if sharded and not keep_vars:
            raise RuntimeError(
                f"state_dict() of a module inside FSDP ({type(module).__name__} {prefix.rstrip('.')!r}) would hold "
                "this rank's shards, not full weights. Call state_dict() of the FSDP model, or zero.full_state_dict"
                "(model), on every rank; or call this one inside summon_full_params(). keep_vars=True gives the shards."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(NO_COPIES)


# ----------------------------------------------------------------------------------------------------------------- FSDP


_GIVEN = "the models given to FSDP"


class FSDP(Wrapper, TorchMethods):  # type: ignore[misc]
    """Fully sharded data parallelism: each rank holds one shard of the parameters, gradients and optimizer state (ZeRO
    stage 3; Rajbhandari et al., 2020, section 5.3).

        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    The module is divided into units. A unit's parameters are gathered before its forward and its backward, and released
    afterwards. They remain the same objects under the same names, so an optimizer may be built before or after
    wrapping. Between steps they are this rank's shard, with as many dimensions as the full tensor (docs/stages.md).

    module: remains usable; its attributes can be read through the FSDP. An FSDP inside it is dissolved: its module
        takes its place, and this FSDP takes over its units with their own options.
    process_group: all ranks by default; without torch.distributed, this process alone. Hybrid strategies take a pair:
        the shard group and the replicate group.
    device_mesh: the groups as a DeviceMesh of one dimension, or of two for hybrid strategies: (replicas, shards).
    auto_wrap_policy: chooses the modules that become units; a policy of torch.distributed.fsdp.wrap. By default these
        are the blocks that the model repeats in an nn.ModuleList or nn.Sequential; see zero.fsdp.choice.
    as_one_unit: modules, or classes of modules, that become one unit each with everything inside them, such as a
        mixture of experts where ranks run different experts.
    ignored_modules, ignored_parameters: are not sharded, and their gradients are not averaged. Quantised parameters
        and other tensor subclasses that wrap tensors are not broadcast from rank 0 either.
    partition: "even" cuts inside parameters, for optimizers that treat each element separately; "whole" assigns each
        parameter to one rank; "auto" is "even", but refuses steps of optimizers that were measured to need "whole".
    sharding_strategy: a member of PyTorch's enum, or its name: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD,
        HYBRID_SHARD_ZERO2.
    reshard_after_forward: False means SHARD_GRAD_OP, which saves an all-gather: parameters stay until backward.
    precision: as of zero.setup: shards keep the dtype of the parameters, and are the master weights. PyTorch's
        MixedPrecision has the same meaning as in PyTorch; keep_low_precision_grads is refused.
    prefetch: how many units are in flight at once, 1 (least memory), 2 or 3 (all-gathers furthest ahead); by default 3
        where transfers overlap computing, as over NCCL, else 2. 1 also makes units of large embeddings and heads.
    param_init_fn: initialises a module that was built on the meta device, instead of its `reset_parameters`. Units get
        memory one at a time. Rank 0 initialises the values, and the other ranks receive them.
    sync_module_states: start from the parameters and buffers of rank 0. Other ranks may build on the meta device.
    broadcast_buffers: broadcast the buffers of rank 0 before each forward, as DistributedDataParallel does.
    more: offload, where shards and optimizer state are stored (zero.CPUOffload, zero.DiskOffload), and options of
        PyTorch's FSDP1 that have another name here: backward_prefetch, device_id, forward_prefetch, ignored_states,
        limit_all_gathers, use_orig_params. See zero.offload and zero.fsdp.options.

    docs/stages.md says what else goes with it, and what does not.

    Collective: the constructor, forward, backward, `state_dict`, `load_state_dict`, `summon_full_params`.
    Raises ValueError on every rank if the module cannot be sharded, if models or options differ between ranks, if a
    module cannot be initialised, or if there is no room for shards; the model is plain then, and can be wrapped again.
    Raises RuntimeError on every rank if ranks run different units.
    """

    _model: Model
    _hooks: list[RemovableHandle]

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
        precision: GivenPrecision = None,
        prefetch: int | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        sync_module_states: bool = True,
        broadcast_buffers: bool = True,
        **more: Unpack[MoreOptions],
    ) -> None:
        super().__init__()
        never_traced(FSDP, "_begin", "_end_forward", "_raised", reason=BETWEEN_UNITS)
        self.module, self.broadcast_buffers = module, broadcast_buffers
        # None of those inside contains another: each has dissolved what was inside it, as this one does.
        nested = {name: child for name, child in module.named_modules() if isinstance(child, FSDP)}
        without, also_without, others = [*ignored_modules], [*ignored_parameters], {**more}
        strategy, placement = placed(_GIVEN, sharding_strategy, process_group, device_mesh)
        with alike(placement.all_groups(), _GIVEN) as lines:  # a wrong argument raises before anything is changed
            refuse_number_of_ranks(reshard_after_forward)
            refuse_unknown(others, known=(*OFFLOAD, *NAMES), own=[*signature(FSDP).parameters][1:-1])
            offload = take_offload(others)
            prefetch, device = from_torch(others, prefetch, without, also_without)
            kept_by = ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD_ZERO2
            reshards = strategy not in kept_by and reshard_after_forward is not False
            options = Options(
                partition=partition,
                precision=as_precision(precision),
                reshard_after_forward=reshards,
                synced=sync_module_states,
                offload=offload,
                prefetch=as_prefetch(prefetch),
            )
            if device is not None:
                move(module, device)
            ignored = dict.fromkeys([*(param for one in without for param in parameters_of(one)), *also_without])
            sharded = {param for child in nested.values() for param in child._model.index}
            choice = UnitChoice(module, nested, sharded, [*ignored])
            beside = any(comm.link.overlaps(one) for comm in placement.all_groups() for one in choice.devices())
            refuse_scripted(module, inside=True)
            choice.divide(auto_wrap_policy, as_one_unit, smallest_leaves(options.prefetch, beside=beside))
            refuse_unfit(choice, {name: child._model for name, child in nested.items()}, options, placement)
            whole = whole_among(options.partition, choice.own())
            lines += [f"{strategy}, {options.signature()}, whole {[*whole.values()]}", *choice.signature()]
        put_into(module, choice.ignored)
        with Together(placement.all_groups(), "the construction of FSDP"):
            units, self._hooks = build(choice, placement, options, param_init_fn, {*map(parts.of, whole)})
        for name, child in nested.items():  # its module goes back into its place
            child._end()
            for parent in module.modules():
                children = children_of(parent)
                children.update({at: child.module for at, held in children.items() if held is child})
            for unit in child._model.units:
                unit.move_below(name)
            units, self._hooks = [*units, *child._model.units], [*self._hooks, *child._hooks]
        self._model = Model(module, units, placement, options, without)
        number, (largest, share) = len(units), largest_unit(units)
        title = f"{number} unit{'s' if number > 1 else ''}, the largest {largest.title} with {share} of all"
        left_out = f"{len(ignored)} parameters, ignored as the caller asked" if ignored else ""
        title = f"FSDP({type(module).__name__}, {strategy.name}) of {title},"
        announce(title, self._model.comm, self._model.index.groups, left_out, stage=3)
        synced = broadcast_buffers and next(module.buffers(), None) is not None
        self._buffer_sync = BufferSync(module, self._model.comms) if synced else None
        self._compiling = compiling = Compiling(self._model)
        self._state_dicts = StateDictGuard(module, self._model.index, keeps=(Steps(self._model), compiling))
        self._model.install(compiling.hook, compiling.search_begins)
        self._unwrapped, self._loads, self._inside_of = False, ExitStack(), "module."
        # Not `self.register_...`, which registers hooks on the module inside: this one takes the FSDP.
        nn.Module.register_load_state_dict_post_hook(self, _end_load)

    def unwrap(self) -> nn.Module:
        """Collective. Returns the plain module, with full parameters and without gradients; see zero.unwrap."""
        self._model.refuse_moved()
        restore_units(self._model.units)
        uncast(self.module)
        for hook in self._hooks:
            hook.remove()
        take_out_of(self.module)
        self._end()
        retire_all(registered(self._model))
        self._unwrapped = True
        return self.module

    def _end(self) -> None:
        self._model.end()
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

    def _begin(self, traced: bool) -> Callable[..., Any]:
        """Collective. Returns what runs the module."""
        if self._unwrapped:
            raise RuntimeError(UNWRAPPED.format("FSDP"))
        self._loads.close()  # of a load around it that has raised
        with self._model.together:
            run = self._compiling.runner(self.module, traced=traced)
            self._model.interrupted()  # of a unit by itself, which is known only now
            if torch.jit.is_tracing():
                raise RuntimeError(NOT_SCRIPTED.format("FSDP"))
            self._model.refuse_moved()
            self._model.refuse_replaced()
            if self._buffer_sync is not None:
                self._buffer_sync.before_forward()
            return run

    def _end_forward(self) -> None:
        if self._buffer_sync is not None:
            self._buffer_sync.after_forward(reduced=self._model.reduces)

    def _raised(self, error: BaseException) -> None:
        """Collective but for KeyboardInterrupt and SystemExit, after which torch calls no hooks of modules: what the
        user saves then is to be saved as after any other forward."""
        self._model.interrupted()
        self._model.together.tell(error)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates full gradients on every rank, without reducing them. The first backward outside reduces them.

        Call both forward and backward inside. Meanwhile `param.grad` is this rank's own full gradient, as with
        DistributedDataParallel: it may be written in place, and None drops it. Another tensor in its place is refused.
        """
        model = self._model
        before, model.reduces = model.reduces, False
        try:
            yield
        finally:
            model.reduces = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Collective. torch.nn.utils.clip_grad_norm_ of all parameters: the name that PyTorch's FSDP has for it."""
        norm: Tensor = clip_grad_norm_(self.parameters(), max_norm, norm_type)
        return norm

    @property
    def require_backward_grad_sync(self) -> bool:
        """False within no_sync, as with DistributedDataParallel, where some scripts set it instead of calling that."""
        return self._model.reduces

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, reduces: bool) -> None:
        self._model.reduces = reduces

    # -------------------------------------------------------------------------- weights and optimizer state, in full

    def reshard(self) -> None:
        """Collective. Reshards units that a forward without backward may have left unsharded. Call it between steps."""
        with self._model.together:
            for unit in self._model.units:
                unit.reshard()
            self._model.together.agree()

    def summon_full_params(  # of `module`, not self: called on the class it takes any module, as PyTorch's does
        module: nn.Module,
        *,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """Collective. Unshards all parameters on every rank, in their own dtype, within the context.

            with model.summon_full_params(): ...
            with FSDP.summon_full_params(module): ...  # an FSDP, a module that contains FSDPs, or one inside an FSDP

        Run forwards inside under no_grad; they gather nothing, which suits `generate()`. A module inside an FSDP
        unshards all units that hold its parameters. Without sharded parameters nothing happens.

        recurse: False unshards only the module's own unit, not the units inside it.
        writeback: writes changes back, those of each shard's owner; with False all changes are lost.
        rank0_only: unshards on the first rank of the group only; requires writeback=False.
        offload_to_cpu: puts the full parameters into the memory of the CPU.
        with_grads: unshards averaged gradients in `param.grad`, too; not with offload_to_cpu.

        Raises ValueError for rank0_only with writeback and for with_grads with offload_to_cpu. Raises ValueError on
        every rank if parameters were given other data inside and writeback is True. Raises RuntimeError if they were
        given other data before, and within forward, backward or another summon_full_params.
        """
        return summon(
            module,
            wrapped=module.module if isinstance(module, FSDP) else module,
            recurse=recurse,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        )

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Collective. Calls fn with every module, as nn.Module.apply, on full parameters; keeps rank 0's results."""
        with self.summon_full_params():
            super().apply(fn)
            params = [parts.of(param) for param in parameters_of(self.module)]
            self._model.placement.broadcast([*params, *self.module.buffers()])
        return self

    @calling("model.state_dict()")
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Collective. Returns copies of full parameters and buffers on the CPU, by the module's names, on every rank.

        A write into one of them raises: it would not reach the model. Pickled, or cloned, they are plain tensors. With
        keep_vars=True each tells whether its parameter requires a gradient.

        Raises RuntimeError if parameters were moved, cast or given other data.
        """
        with self._model.together:
            self._model.refuse_moved()
            # Within summon_full_params() one rank may call it alone.
            sends = not all(unit.summoned for unit in self._model.units if unit.groups)
            if sends:
                self._model.together.agree()  # before anybody sends
            own = [(self._model, [*self._model.units])]
            destination = kwargs.get("destination", args[0] if args else None)
            before = {} if destination is None else dict(destination)
            weights = full_weights.state_dict(self.module, own, full_weights.Recipient(), *args, **kwargs)
            trained: dict[str, nn.Parameter] = {}
            if kwargs.get("keep_vars", len(args) > 2 and args[2]):
                prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
                trained = dict(self.named_parameters(prefix.rstrip("."), remove_duplicate=False))
            for name, value in weights.items():
                if isinstance(value, Tensor) and before.get(name) is not value:
                    if name in trained:
                        value.requires_grad_(trained[name].requires_grad)
                    read_only(value, COPIED)
            if sends:
                self._model.together.agree()  # hooks of the user's may have raised on one rank
            return as_weights(weights) if destination is None else weights

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *of_torch: Any) -> None:
        """Collective. Called by `load_state_dict` of a plain module around the FSDP, which then loads the module
        inside, and calls `_end_load`."""
        metadata, _, _, _, error_msgs = of_torch
        if metadata.get("assign_to_params_buffers", False):
            error_msgs.append(_ASSIGNED)
        self._inside_of = f"{prefix}module."
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[self._inside_of + name.removeprefix(prefix)] = state_dict.pop(name)
        self._loads.enter_context(full_weights.loading([self._model]))

    @calling("model.load_state_dict()")
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Collective. Loads full weights by the module's own names, with or without `_orig_mod.` in them; every rank
        must be given the same.

        Raises ValueError for assign=True, which would replace the tensors that the optimizer holds.
        """
        if assign:
            raise ValueError(_ASSIGNED)
        self._loads.close()  # of a load around it that has raised
        with self._model.together, full_weights.loading([self._model]):
            loaded = self.module.load_state_dict(named_as_compiled(self.module, state_dict), strict)
            self._model.together.agree()
            return loaded

    def register_optimizer(self, optimizer: Optimizer) -> None:
        """Cuts state that the optimizer had before the model was wrapped, the same on every rank; and lets
        `optimizer.load_state_dict` take full state from now on, as it does after its first step anyway."""
        cut_full(self._model, optimizer)
        register(self._model, optimizer)

    def __getstate__(self) -> NoReturn:
        raise TypeError(NO_COPIES)

    def __getattr__(self, name: str) -> Any:
        if name in children_of(self):
            return super().__getattr__(name)
        # The user's module may have an attribute by the name of a method of PyTorch's FSDP1.
        if not hasattr(self.module, name):
            refuse_method(name)
        return getattr(self.module, name)


_ASSIGNED = "assign=True replaces the parameters that are sharded. Load with assign=False."


def _end_load(fsdp: FSDP, keys: Any) -> None:
    """Ends `_load_from_state_dict`. Names in `keys` are as they are without the FSDP."""
    fsdp._loads.close()
    inside = fsdp._inside_of
    around = inside.removesuffix("module.")
    for names in keys:
        names[:] = [around + name.removeprefix(inside) if name.startswith(inside) else name for name in names]


def running_model(fsdp: FSDP) -> Model:
    """Returns what an FSDP runs. No attribute of it, as those are the module's own."""
    return fsdp._model
