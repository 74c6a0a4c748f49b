"""`zero.join`: training with different numbers of batches on different ranks (joined.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero._torch import uncompiled
from zero.comm import Comm
from zero.features.uneven.joined import Joined
from zero.features.uneven.messages import Ranks
from zero.fsdp import FSDP
from zero.fsdp.fsdp import running_model
from zero.sdp import ShardedDDP
from zero.sdp.sharded_ddp import sharding_of
from zero.shards.placement import Placement

Followed = Optimizer | LRScheduler | torch.amp.GradScaler


@contextmanager
def join(
    model: nn.Module,
    *others: Followed,
    divide_by_initial_world_size: bool = True,
    throw_on_early_termination: bool = False,
    enable: bool = True,
) -> Iterator[None]:
    """Collective. In this context ranks may have different numbers of batches, at least one each.

        with zero.join(model, optimizer):
            for inputs, targets in batches: ...  # forward, backward and step, as without

    model: a DistributedDataParallel, ShardedDDP or FSDP.
    others: its optimizers; and the learning rate schedulers and the GradScaler that the loop steps and updates, so that
        they stay the same on all ranks.
    divide_by_initial_world_size: gradients are averaged over all ranks, and ranks without data add zeros. With False
        they are averaged over the ranks that still have data.
    throw_on_early_termination: raise RuntimeError on every rank as soon as one rank's data has ended.
    enable: False changes nothing.

    At the end buffers are those of the first rank that had data to the end, unless broadcast_buffers is False.
    Raises RuntimeError, on every rank, where one leaves the context by an error, where ranks with data do different
    things, and where a rank had no batch at all. ValueError for a model or other objects of an unknown class.
    """
    model = uncompiled(model)
    if not isinstance(model, DistributedDataParallel | ShardedDDP | FSDP):
        raise ValueError(
            f"zero.join was given a {type(model).__name__}. It needs the wrapped model first: a "
            "DistributedDataParallel, ShardedDDP or FSDP."
        )
    if isinstance(model, FSDP):
        placement = running_model(model).placement
    else:
        comm = sharding_of(model)[0].comm if isinstance(model, ShardedDDP) else Comm(model.process_group)
        placement = Placement(comm)
    options = f"divide {divide_by_initial_world_size}, throw {throw_on_early_termination}, enable {enable}"
    given = [options, *(type(one).__name__ for one in (model, *others))]
    placement.compare("the arguments of zero.join", given, _unknown(others))
    if not enable or placement.ranks == 1:
        yield
        return
    joined = Joined(model, others, Ranks(placement), divide_by_initial_world_size, throw_on_early_termination)
    with joined.attached():
        try:
            yield
            joined.follow()
        except Exception as error:
            joined.announce_failure(error)
            raise


def _unknown(others: Sequence[object]) -> str | None:
    for one in others:
        if not isinstance(one, Followed):
            return (
                f"zero.join was given a {type(one).__name__}. After the model it takes optimizers, learning rate "
                "schedulers and a GradScaler."
            )
    if not any(isinstance(one, Optimizer) for one in others):
        return (
            "zero.join was given no optimizer, so ranks without data would not step. Write zero.join(model, optimizer)."
        )
    return None
