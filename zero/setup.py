"""The stages by number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zero._torch import uncompiled
from zero.averaging import Averaging
from zero.comm import Comm
from zero.fsdp import FSDP
from zero.measure.kinds import Finding, finding_of, known, title
from zero.measure.param_groups import called, options
from zero.oss import OSS
from zero.oss.optimizer import refuse_unaveraged
from zero.sdp import ShardedDDP
from zero.shards.arguments import as_groups, named_params, parts_of
from zero.shards.partition import Partition, cut_for, optimizer_problem, partition_problem
from zero.shards.shapes import shared_memory
from zero.state.shard_mark import refuse_shards
from zero.tensor_parallel import parts
from zero.tensor_parallel.shown import put_into, show_everywhere
from zero.wrap.ddp import average_by_reading
from zero.wrappers import Wrapped

if TYPE_CHECKING:
    from zero.fsdp.precision import GivenPrecision

Optim = Callable[..., Optimizer]
"""The class of an optimizer."""


@overload
def setup(model: nn.Module, optim: Optim, *, stage: Literal[3], **options: Any) -> tuple[FSDP, Optimizer]: ...
@overload
def setup(model: nn.Module, optim: Optim, *, stage: Literal[2], **options: Any) -> tuple[ShardedDDP, OSS]: ...
@overload
def setup(model: nn.Module, optim: Optim, *, stage: Literal[1], **options: Any) -> tuple[nn.Module, OSS]: ...
@overload
def setup(model: nn.Module, optim: Optim, *, stage: int, **options: Any) -> tuple[nn.Module, Optimizer]: ...
def setup(
    model: nn.Module,
    optim: Optim,
    *,
    stage: int,
    params: Iterable[Any] | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    partition: Partition = "auto",
    auto_wrap_policy: Any = None,
    offload: Any = None,
    mixed_precision: GivenPrecision = None,
    master_dtype: torch.dtype | None = None,
    **defaults: Any,
) -> tuple[nn.Module, Optimizer]:
    """Collective. The wrapped model and its optimizer at a stage. Every stage trains to the same numbers.

    stage: what is sharded: 0 nothing (DistributedDataParallel), 1 optimizer state, 2 also gradients, 3 also parameters.
    optim, defaults: the optimizer's class and arguments.
    params: parameters of the model, or groups of them with options of their own; by default all.
    process_group, partition, auto_wrap_policy: as in OSS and FSDP. device_mesh: the group, as a mesh of one dimension.
    offload: at stages 1 to 3, where shards and optimizer state are stored (zero.CPUOffload, zero.DiskOffload).
    mixed_precision: at stage 3, as in FSDP. master_dtype: at stages 1 and 2, as in OSS.

    At stage 1 DistributedDataParallel averages gradients, by a communication hook if all ranks run on one host; for a
    hook of your own construct DistributedDataParallel yourself. Without torch.distributed, stages 0 and 1 return the
    model as it is. Raises ValueError on every rank for stages, options, parameters and optimizers that cannot be used,
    and RuntimeError if a launcher has started several ranks but torch.distributed is not initialised.
    """
    comm, problem = _ranks(process_group, device_mesh, model)
    asked = {"offload": offload, "mixed_precision": mixed_precision, "master_dtype": master_dtype}
    given = {name: value for name, value in asked.items() if value is not None}
    groups, wrong = ([], None) if params is None else as_groups(params, call="zero.setup")
    problem = problem or _unusable(optim, stage, given, model) or wrong or partition_problem(partition)
    problem = problem or _foreign(model, groups)
    found, problem = (None, problem) if problem or not stage else _measured(comm, optim, defaults, groups, partition)
    comm.compare("the stages given to zero.setup", [f"stage {stage}"], problem)
    with _telling(f"zero.setup(model, {called(optim)}, stage={stage})"):
        if stage in (1, 2):
            return _with_oss(model, optim, comm, groups, stage, partition=partition, **given, **defaults)
        wrapped = model
        if stage == 3:
            cut = _cut_by_fsdp(optim, partition, found)
            wrapped = FSDP(model, process_group=comm, auto_wrap_policy=auto_wrap_policy, partition=cut, **given)
        elif comm.group is not None:
            wrapped = DistributedDataParallel(model, process_group=comm.group)
        optimizer = optim(parts_of(groups) or model.parameters(), **defaults)
        if stage == 0:
            refuse_shards(optimizer)
        return wrapped, optimizer


def _cut_by_fsdp(optim: Optim, partition: Partition, found: Finding | None) -> Partition:
    cut = cut_for(partition, found)
    # Not the measured one: FSDP then checks other optimizers that step its parameters, too.
    return partition if cut == "even" and known(optim) is not None else cut


def _with_oss(
    model: nn.Module, optim: Optim, comm: Comm, groups: list[dict[str, Any]], stage: int, **options: Any
) -> tuple[nn.Module, OSS]:
    """Stages 1 and 2."""
    averaged = _averaged(model, comm) if stage == 1 else None
    named = [(name, parts.of(param)) for name, param in model.named_parameters()]
    sharding = OSS(groups or named, optim, comm, **options)  # type: ignore[arg-type]
    if isinstance(averaged, DistributedDataParallel):
        refuse_unaveraged(sharding, Averaging(averaged).problem)
    return averaged or ShardedDDP(model, sharding), sharding


@contextmanager
def _telling(call: str) -> Iterator[None]:
    """Errors of the constructors within begin with the call that the user wrote."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:
        error.args = (f"{call}: {error}",)
        raise


def _foreign(model: nn.Module, groups: list[dict[str, Any]]) -> str | None:
    """Returns an error message for parameters that are none of the model's."""
    own = {*model.parameters()}
    foreign = [(name, param) for name, param in named_params(groups) if param not in own]
    if not foreign:
        return None
    name, param = foreign[0]
    return (
        f"zero.setup(params=) was given {len(foreign)} parameters that are not the model's, such as {name} of shape "
        f"{list(param.shape)}. Pass parameters of the same model object, as it is now; of two models, set up each, or "
        "one module that holds both."
    )


def _ranks(group: Any, mesh: DeviceMesh | None, model: nn.Module) -> tuple[Comm, str | None]:
    """Returns the ranks that train the model together, and an error message if they cannot."""
    problem = None
    if mesh is not None and mesh.ndim > 1:
        problem = (
            f"device_mesh={mesh} has {mesh.ndim} dimensions. Pass the one that the model trains over: mesh['dp']. "
            "Hybrid strategies take two: zero.FSDP(model, device_mesh=mesh, sharding_strategy='HYBRID_SHARD')."
        )
    elif mesh is not None:
        if group is not None:
            problem = "process_group and device_mesh both say which ranks train the model. Pass one of them."
        group = mesh.get_group()
    comm = Comm(group)
    return comm, problem or parts.problem(model.named_parameters(), [comm])


def _measured(
    comm: Comm,
    optim: Optim,
    defaults: Mapping[str, Any],
    groups: Iterable[dict[str, Any]],
    partition: Partition,
) -> tuple[Finding | None, str | None]:
    """Returns what is known or measured of the optimizer, and an error message if it cannot be sharded so."""
    found = (
        known(optim) if comm.world == 1 else finding_of(optim, defaults, [options(group) for group in groups or [{}]])
    )
    return found, None if found is None else optimizer_problem(title(optim), found, partition)


# The stages at which an option means something.
_STAGES = {"offload": (1, 2, 3), "mixed_precision": (3,), "master_dtype": (1, 2)}

_INSTEAD = {
    "offload": "Shards can be offloaded: take stage 1, 2 or 3.",
    "mixed_precision": "Below stage 3 train under torch.autocast, or, at stages 1 and 2, convert the model to 16 bits "
    "and pass master_dtype=torch.float32.",
    "master_dtype": "At stage 3 keep the model in float32, whose shards are the masters, and pass mixed_precision="
    "zero.MixedPrecision(param_dtype=torch.bfloat16); at stage 0 nothing keeps masters.",
}


def _unusable(optim: object, stage: object, given: Mapping[str, Any], model: nn.Module) -> str | None:
    """Returns an error message for a stage that is unknown, an optimizer, or options that mean nothing at the stage."""
    if stage not in (0, 1, 2, 3):
        return f"stage={stage!r} is unknown. Choose 0 (DDP), 1 (OSS), 2 (ShardedDDP) or 3 (FSDP)."
    wrapped = next(((name, one) for name, one in model.named_modules() if isinstance(one, Wrapped)), None)
    if wrapped is not None and (stage < 3 or isinstance(uncompiled(model), Wrapped)):
        where = f", as {wrapped[0]!r}," if wrapped[0] else ""
        return (
            f"zero.setup was given a model that is wrapped already{where} in a {type(wrapped[1]).__name__}, as in a "
            "notebook whose cell runs again. Pass what zero.unwrap(model) returns."
        )
    if isinstance(optim, Optimizer):
        name = type(optim).__name__
        return (
            f"zero.setup was given an {name} that is built already. Pass its class and its arguments, and parameter "
            f"groups as params=: zero.setup(model, {name}, stage={stage}, lr=...). To shard it as it is, see "
            "zero.OSS.from_optimizer."
        )
    if stage == 0 and any(map(parts.takes, model.parameters())):
        return "the model has DTensors, which DistributedDataParallel (stage 0) does not take. Take stage 1, 2 or 3."
    wrong = next((name for name in given if stage not in _STAGES[name]), None)
    if wrong is not None:
        return f"{wrong}={given[wrong]!r} means nothing at stage {stage}. {_INSTEAD[wrong]}"
    named = ((repr(name), param) for name, param in model.named_parameters())
    return shared_memory(named, model.named_buffers()) if stage else None


def _averaged(model: nn.Module, comm: Comm) -> nn.Module:
    """Stage 1's DistributedDataParallel. Without views it would hold every gradient twice, more than stage 1 saves."""
    if comm.group is None:
        return model
    put_into(model)
    show_everywhere(model)
    wrapped = DistributedDataParallel(model, process_group=comm.group, gradient_as_bucket_view=True)
    average_by_reading(wrapped, comm)
    return wrapped
