"""The stages by number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zero.comm import Comm
from zero.fsdp import FSDP
from zero.interop.ddp import average_by_reading
from zero.measure.kinds import finding_of, known, title
from zero.measure.named import build
from zero.oss import OSS
from zero.sdp import ShardedDDP
from zero.shards.partition import Partition, cut_for, optimizer_problem, partition_problem


def setup(
    model: nn.Module,
    optim: Callable[..., Optimizer],
    *,
    stage: int,
    process_group: torch.distributed.ProcessGroup | None = None,
    partition: Partition = "auto",
    auto_wrap_policy: Any = None,
    **defaults: Any,
) -> tuple[nn.Module, Optimizer]:
    """Collective. The wrapped model and its optimizer at a stage. Every stage trains to the same numbers.

    stage: what is sharded: 0 nothing (DistributedDataParallel), 1 optimizer state, 2 also gradients, 3 also parameters.
    optim, defaults: the optimizer's class and arguments.
    partition, auto_wrap_policy: as in OSS and FSDP.

    At stage 1 DistributedDataParallel averages gradients, by a communication hook if all ranks run on one host; for a
    hook of your own construct DistributedDataParallel yourself.
    Without torch.distributed, stages 0 and 1 return the model as it is. Raises ValueError for an unknown stage, and
    RuntimeError if a launcher has started several ranks but torch.distributed is not initialised.
    """
    comm = Comm(process_group)
    problem = None
    if stage not in (0, 1, 2, 3):
        problem = f"stage={stage!r} is unknown. Choose 0 (DDP), 1 (OSS), 2 (ShardedDDP) or 3 (FSDP)."
    problem, found = problem or partition_problem(partition), None
    if stage and problem is None:
        found = known(optim) if comm.world == 1 else finding_of(optim, defaults)
        problem = optimizer_problem(title(optim), found, partition) if found else None
    comm.compare("the stages given to zero.setup", [f"stage {stage}"], problem)
    named = [*model.named_parameters()]
    if stage == 3:
        cut: Partition = cut_for(partition, found)
        if cut == "even" and known(optim) is not None:
            cut = partition  # not the measured one: FSDP then checks other optimizers that step its parameters, too
        sharded = FSDP(model, process_group=process_group, auto_wrap_policy=auto_wrap_policy, partition=cut)
        return sharded, build(optim, sharded.parameters(), named, defaults)[0]
    if stage == 2:
        sharding = OSS(named, optim, process_group, partition=partition, **defaults)
        return ShardedDDP(model, sharding, process_group), sharding
    if stage == 1:
        return _averaged(model, comm), OSS(named, optim, process_group, partition=partition, **defaults)
    plain = model if comm.group is None else DistributedDataParallel(model, process_group=process_group)
    return plain, build(optim, model.parameters(), named, defaults)[0]


def _averaged(model: nn.Module, comm: Comm) -> nn.Module:
    """Stage 1's DistributedDataParallel. Without views it would hold every gradient twice, more than stage 1 saves."""
    if comm.group is None:
        return model
    wrapped = DistributedDataParallel(model, process_group=comm.group, gradient_as_bucket_view=True)
    average_by_reading(wrapped, comm)
    return wrapped
