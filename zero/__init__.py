"""Data-parallel training for PyTorch that shards the training state over the ranks, in three stages.

    stage 1   zero.OSS(params, optim)             shards the optimizer state
    stage 2   zero.ShardedDDP(model, optimizer)   also shards the gradients
    stage 3   zero.FSDP(model)                    also shards the parameters

Each stage trains to the same numbers; only what a rank keeps in memory changes. `setup` takes the stage as a number.
This script trains on one process, or on several that torchrun starts:

    import os
    import torch
    import torch.distributed as dist
    import zero

    if "RANK" in os.environ:  # torchrun sets it
        dist.init_process_group("gloo")  # on GPUs "nccl", after torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    model, optimizer = zero.setup(model, torch.optim.AdamW, stage=3, lr=1e-3)
    for step in range(20):
        inputs = torch.randn(32, 64)
        loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
    weights = zero.full_state_dict(model, to=0)  # on rank 0 the full tensors on the CPU, by the module's own names

`zero.plan` computes the memory of each stage before a run, `zero.report` says what a rank holds in one, and
`zero.checkpoint` saves at any stage and loads at any other.
"""

__title__ = "progressive-zero"  # by this zero/_torch/namesakes.py knows that no other distribution's file is here

from zero import checkpoint
from zero.comm import traffic
from zero.ema import EMA
from zero.fsdp import FSDP, MixedPrecision
from zero.full_state import (
    full_optimizer_state_dict,
    full_state_dict,
    full_tensors,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from zero.graphs import graphed
from zero.join import join
from zero.offload import CPUOffload, DiskOffload
from zero.oss import OSS
from zero.plan import plan
from zero.plan.report import report
from zero.sdp import ShardedDDP
from zero.setup import setup
from zero.shards.log import show_as_asked
from zero.wrappers import no_sync, unwrap

__version__ = "0.1.0"  # setup.cfg reads it

show_as_asked()

__all__ = [
    "CPUOffload",
    "DiskOffload",
    "EMA",
    "FSDP",
    "MixedPrecision",
    "OSS",
    "ShardedDDP",
    "checkpoint",
    "full_optimizer_state_dict",
    "full_state_dict",
    "full_tensors",
    "graphed",
    "join",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "no_sync",
    "plan",
    "report",
    "setup",
    "traffic",
    "unwrap",
]


def __dir__() -> list[str]:
    return ["__version__", *__all__]
