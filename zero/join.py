"""`zero.join`: training with different numbers of batches on different ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from typing import Any, TypeVar

import torch
from torch import nn

from zero._torch.modules import parameters_of
from zero.comm.oplog import COUNT
from zero.wrappers import comms_of, unwrapped

T = TypeVar("T")

_END: Any = object()  # in place of a batch, once those of this rank have ended


def join(batches: Iterable[T], model: nn.Module) -> Iterator[tuple[T, float]]:
    """Collective. Yields this rank's batches, each with the weight of its loss, until no rank has a batch left.

        for batch, weight in zero.join(batches, model):
            optimizer.zero_grad()
            (weight * loss(batch)).backward()
            optimizer.step()

    A rank whose batches have ended gets its last one again, as the loop has left it, with weight 0.0. Where n of W
    ranks have a batch, the weight of these is W / n: each step averages gradients over W ranks, and is that of one
    process on the batches that counted, within rounding. With equally many batches on every rank all weights are 1.0,
    and the numbers those of a loop without join, bit for bit.

    batches: of this rank, at least one. One is taken when the loop asks for it, and none ahead.
    model: the model that trains, as zero.setup or a wrapper returned it, or a plain one of a single process.

    Before each batch, and once at the end, the ranks of the model sum one number. All ranks must go the same way
    through the loop: step, clip, save and leave it (`break`) on all of them or on none. Where one ends by an error, the
    others raise as in any loop, in an operation that it does not reach.

    To accumulate gradients, join the micro-batches: a weight is that of its own micro-batch. Call backward for a batch
    before the loop takes the next: while the weight is 0.0, elements of gradients that are infinite or NaN become 0,
    because 0 x NaN is NaN, and this rank's last batch may have a loss that is not finite.

    What is measured on a repeated batch counts as well: multiply metrics by the weight, too, or leave them out where it
    is 0.0. Forward runs as ever: running statistics of BatchNorm see repeated batches, and SyncBatchNorm has the others
    compute with them. A parameter that only repeated batches use gets a gradient of zeros instead of none.

    Raises ValueError, on every rank, where a rank has no batch at all.
    """
    comms = comms_of(unwrapped(model)[1])
    ranks, batch = math.prod(comm.world for comm in comms), _END
    for given in chain(batches, repeat(_END)):
        having = torch.tensor(int(given is not _END), device="cpu")
        for comm in comms:
            comm.log.begin_schedule()
            comm.all_reduce(having, channel=COUNT)
        if batch is _END and having < ranks:
            flags = "1" if given is _END else "0"
            for comm in comms:
                flags = "".join(comm.all_gather_text(flags))
            which = ", ".join(str(rank) for rank, flag in enumerate(flags) if flag == "1")
            raise ValueError(
                f"zero.join was given no batch on rank {which} of {len(flags)}, which has none to repeat while others "
                "train. Give every rank one batch at least: spread the data anew, or build the model on fewer ranks."
            )
        if not having:
            return
        batch, weight = (batch, 0.0) if given is _END else (given, ranks / int(having))
        trained = () if weight else [param for param in parameters_of(model) if param.requires_grad]
        hooks = [param.register_hook(lambda gradient: gradient.nan_to_num(0.0, 0.0, 0.0)) for param in trained]
        try:
            yield batch, weight
        finally:
            for hook in hooks:
                hook.remove()
