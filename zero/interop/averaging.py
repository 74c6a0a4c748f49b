"""Gradient averaging of DistributedDataParallel for ranks of one host that can read one another's memory.

Each rank reads its shard of the gradients from all ranks and adds it up; then all ranks read the averages from their
owners. This takes a fraction of the CPU time of Gloo's all-reduce, which copies every byte through the kernel twice.
"""

# No `from __future__ import annotations`: DistributedDataParallel compares the annotations of its hooks with types.

from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from zero._torch import divides_by_ranks_with_data
from zero.comm import Comm
from zero.comm.packing import lengths
from zero.oss.gradients import refuse_sparse


def average_by_reading(model: DistributedDataParallel, comm: Comm) -> None:
    """Collective. Registers a communication hook that averages by reading, if the ranks can read one another.

    On two ranks the results are the same bit for bit.
    """
    if not comm.reads(next(model.parameters()).device):
        return
    channel = comm.channel("the averaging of DistributedDataParallel")
    joining = ref(model)

    def average(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if divides_by_ranks_with_data(joining()):
            raise RuntimeError(
                "Join with divide_by_initial_world_size=False needs gradients averaged by DistributedDataParallel "
                "without a communication hook, but zero.setup(stage=1) gave it one. Write zero.join(model, optimizer, "
                "divide_by_initial_world_size=False), or call DistributedDataParallel and zero.OSS yourself."
            )
        buffer = bucket.buffer()
        if buffer.is_sparse:
            refuse_sparse(_names(bucket, model))
        _average(buffer, comm, channel)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    model.register_comm_hook(None, average)


def _names(bucket: dist.GradBucket, model: DistributedDataParallel) -> str:
    names = {param: name for name, param in model.module.named_parameters()}
    return ", ".join(names[param] for param in bucket.parameters())


def _average(gradients: Tensor, comm: Comm, channel: int) -> None:
    bounds = [len(gradients) * rank // comm.world for rank in range(comm.world + 1)]
    low, high = bounds[comm.rank : comm.rank + 2]
    counts = lengths(bounds)
    comm.reduce([(gradients, counts)], times=1 / comm.world, into=gradients[low:high], channel=channel).wait()
    comm.gather(gradients, bounds, channel).wait()
