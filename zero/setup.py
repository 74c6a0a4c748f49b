"""The stages by number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zero._torch.modules import parameters_of
from zero.arguments import Arguments, Optim
from zero.comm import Comm
from zero.comm.together import Together, alike
from zero.fsdp import FSDP
from zero.fsdp.choice import Policy
from zero.measure.param_groups import params_of
from zero.oss import OSS
from zero.precision import Rounding, compute_under_autocast
from zero.sdp import AveragingDDP, ShardedDDP
from zero.shards.announce import without_announcing
from zero.shards.arguments import parts_of
from zero.shards.partition import Partition, Shares
from zero.state.shard_mark import refuse_shards
from zero.tensor_parallel import parts

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from zero.wrap.precision import GivenPrecision

_POLICIES = "the policies given to zero.setup"


Stage = int | Literal["3 kept"]


class SetupOptions(TypedDict, total=False):
    """Those of zero.setup, which says what they mean: a misspelt one is an error of type checkers."""

    process_group: torch.distributed.ProcessGroup | None
    device_mesh: DeviceMesh | None
    partition: Partition
    auto_wrap_policy: Policy
    offload: Any
    precision: GivenPrecision
    reshard_after_forward: bool


@overload
def setup(
    model: nn.Module, optim: Optimizer, stage: Literal[3, "3 kept"], **options: Unpack[SetupOptions]
) -> tuple[FSDP, Optimizer]: ...
@overload
def setup(
    model: nn.Module, optim: Optimizer, stage: Literal[2], **options: Unpack[SetupOptions]
) -> tuple[ShardedDDP, OSS]: ...
@overload
def setup(
    model: nn.Module, optim: Optimizer, stage: Literal[1], **options: Unpack[SetupOptions]
) -> tuple[nn.Module, OSS]: ...
@overload
def setup(
    model: nn.Module, optim: Optimizer, stage: Stage, **options: Unpack[SetupOptions]
) -> tuple[nn.Module, Optimizer]: ...
@overload
def setup(
    model: nn.Module, optim: Sequence[Optimizer], stage: Stage, **options: Unpack[SetupOptions]
) -> tuple[nn.Module, list[Optimizer]]: ...
@overload  # a class, with its own options among these
def setup(
    model: nn.Module, optim: Callable[..., Optimizer], stage: Literal[3, "3 kept"], **options: Any
) -> tuple[FSDP, Optimizer]: ...
@overload
def setup(
    model: nn.Module, optim: Callable[..., Optimizer], stage: Literal[2], **options: Any
) -> tuple[ShardedDDP, OSS]: ...
@overload
def setup(
    model: nn.Module, optim: Callable[..., Optimizer], stage: Literal[1], **options: Any
) -> tuple[nn.Module, OSS]: ...
@overload
def setup(
    model: nn.Module, optim: Callable[..., Optimizer], stage: Stage, **options: Any
) -> tuple[nn.Module, Optimizer]: ...
def setup(
    model: nn.Module,
    optim: Optim,
    stage: Stage,
    *,
    params: Iterable[Any] | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    partition: Partition = "auto",
    auto_wrap_policy: Policy = None,
    offload: Any = None,
    precision: GivenPrecision = None,
    reshard_after_forward: bool = True,
    **defaults: Any,
) -> tuple[nn.Module, Any]:
    """Collective. The wrapped model and its optimizer at a stage. Every stage trains to the same numbers.

    stage: what is sharded: 0 nothing (DistributedDataParallel), 1 optimizer state, 2 also gradients, 3 also parameters.
    optim: the optimizer that was built of model.parameters(), or its class, with its arguments as `defaults`. A built
        one goes on with its groups, hooks and state, which must be the same on every rank. Stages 0 and 3 return it;
        stages 1 and 2 return an OSS made of it, and its schedulers set the rates of that: see OSS.from_optimizer.
        Or several built ones, such as [Muon(matrices), AdamW(rest)]: a list is returned, in the same order.
    params: with a class, parameters of the model, or groups of them with options of their own; by default all.
    process_group, partition, auto_wrap_policy: as in OSS and FSDP. device_mesh: the group, as a mesh of one dimension.
    offload: at stages 1 to 3, where shards and optimizer state are stored (zero.CPUOffload, zero.DiskOffload).
    precision: "bf16", "fp16" or their dtype: a float32 model computes in these 16 bits, while master weights, sums of
        gradients and optimizer state are float32, alike at every stage; "fp32": all is float32. Inputs of the model and
        of the units of stage 3 are cast; batch normalisation and buffers stay in float32. Stage 0 computes under
        torch.autocast, which chooses dtypes by operator, so that its numbers differ. Train fp16 with
        torch.amp.GradScaler. A zero.MixedPrecision makes other choices.
    reshard_after_forward: False keeps the parameters of stage 3 from forward to backward: as stage="3 kept", which
        zero.plan has, too.

    Stage 1 averages gradients as stage 2 does, and leaves them full in `param.grad`; to use DistributedDataParallel and
    its options build that and an OSS yourself. Without torch.distributed, stages 0 and 1 return the model as it is.
    Raises ValueError on every rank for stages, options, parameters and optimizers that cannot be used, and RuntimeError
    if a launcher has started several ranks, but torch.distributed is not initialised.
    """
    if stage == "3 kept":
        stage, reshard_after_forward = 3, False
    given = {} if offload is None else {"offload": offload}
    if not reshard_after_forward:
        given["reshard_after_forward"] = reshard_after_forward
    one_mesh = device_mesh is not None and device_mesh.ndim == 1
    comm = Comm(device_mesh.get_group() if one_mesh and device_mesh is not None else process_group)
    where = process_group, device_mesh
    names = [*signature(setup).parameters]
    asked = Arguments(model, optim, stage, params, partition, precision, *where, given, defaults, names)
    asked.agree(comm)
    policy = asked.policy
    wrapped: nn.Module = model
    optimizers: Sequence[Optimizer]
    try:
        if stage in (1, 2):
            if stage == 1 and comm.group is None and policy.param_dtype is None:
                optimizers = _oss(asked, comm, asked.options)
            else:  # 16 bits are averaged in float32, also alone
                with nullcontext() if policy.param_dtype is None else alike([comm], _POLICIES):
                    rounding = Rounding(policy, model, auto_wrap_policy, comm)
                rounding.start_alike()
                how: dict[str, Any] = {**asked.options, "precision": policy, "rounded": rounding.dtypes}
                optimizers = without_announcing()(_oss)(asked, comm, how)  # the wrapper says what both do
                wrapped = rounding.wrap(AveragingDDP if stage == 1 else ShardedDDP, optimizers)
            return wrapped, optimizers[0] if asked.is_one else optimizers
        if stage:
            how = {"auto_wrap_policy": auto_wrap_policy, "precision": policy, **asked.options}
            wrapped = FSDP(model, comm, partition=asked.fsdp_partition, **how)
        elif comm.group is not None:
            wrapped = DistributedDataParallel(model, process_group=comm.group)
        try:
            with Together([comm], "the optimizers of zero.setup") as together:
                optimizers = []
                for one in asked.optims:
                    if not isinstance(one, Optimizer):
                        one = one(parts_of(asked.groups) or parameters_of(model), **defaults)
                    elif isinstance(wrapped, FSDP):
                        wrapped.register_optimizer(one)  # before the first step: the state can be saved already
                    if not stage:
                        refuse_shards(one)
                    optimizers.append(one)
                together.agree()
        except Exception:
            if isinstance(wrapped, FSDP):
                wrapped.unwrap()  # what was corrected finds the model as it was
            raise
        if not stage and policy.param_dtype is not None:
            compute_under_autocast(wrapped, policy.param_dtype)
        return wrapped, optimizers[0] if asked.is_one else optimizers
    except (ValueError, TypeError, RuntimeError) as error:  # of the constructors: begins with what the user wrote
        error.args = (f"{asked.call}: {error}",)
        raise


def _oss(asked: Arguments, comm: Comm, options: dict[str, Any]) -> list[OSS]:
    """One of each optimizer. Those of whole parameters come first: the others then make memory equal."""
    named = {parts.of(param): name for name, param in asked.model.named_parameters()}
    how: Any = {"group": comm, "partition": asked.partition, **options}
    optim = asked.optims[0]
    if not isinstance(optim, Optimizer):
        pairs = [(name, param) for param, name in named.items()]
        return [OSS(asked.groups or pairs, optim, **how, **asked.defaults)]
    if callable(asked.partition):  # the optimizers' groups have no names to ask it by
        how["partition"] = lambda _, param: "whole" if param in asked.whole else "even"
    cut = {one: sum(param.nbytes for param in params_of(one) if param not in asked.whole) for one in asked.optims}
    in_order = sorted(asked.optims, key=cut.__getitem__)
    shares = Shares(comm.world, still_cut=sum(cut[one] for one in in_order[1:]))
    made: dict[Optimizer, OSS] = {}
    for one in in_order:
        made[one] = OSS.from_optimizer(one, shares=shares, **how)
        made[one].shards.rename(made[one].param_groups, named)
        shares = made[one].shards.shares
    return [made[one] for one in asked.optims]
