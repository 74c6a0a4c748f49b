"""The input of a plan: a model with its units, and the options of the stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from zero.fsdp import MixedPrecision
from zero.fsdp.units import params_by_unit
from zero.offload import CPUOffload, DiskOffload
from zero.shards.partition import Partition


@dataclass(frozen=True)
class Options:
    """The options of OSS, ShardedDDP and FSDP, besides the model; the names are theirs.

    bucket_bytes: at stages 1 and 2; by default OSS chooses.
    offload: at stages 1 to 3, from a GPU: shards, their gradients and the optimizer's state are on the host.
    broadcast_dtype, reduce_dtype: the dtypes that stages 1 and 2 send; stage 3 sends those of `precision`.
    replicas: at stage 3, how often the sharded model is replicated across the ranks (HYBRID_SHARD).
    backend: "nccl", on GPUs, where torch's optimizers step all parameters at once; "gloo" on CPUs. It also decides the
        cost of comparing operations between ranks.
    one_host: whether all ranks run on one Linux host, where over Gloo, with tensors on the CPU, they read one another's
        memory and need no buffer to receive into. Otherwise the larger figure of several hosts is planned, which holds
        also for one host where processes may not read one another. Nothing changes with NCCL.
    """

    partition: Partition = "auto"
    precision: MixedPrecision = field(default_factory=MixedPrecision)
    master_dtype: torch.dtype | None = None
    broadcast_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    bucket_bytes: int | None = None
    offload: CPUOffload | DiskOffload | None = None
    replicas: int = 1
    backend: Literal["gloo", "nccl"] = "nccl"
    one_host: bool = False


@dataclass(frozen=True)
class Sizes:
    """A model, of which only shapes and dtypes count.

    module: may be on the meta device.
    unit_modules: FSDP's units by name; the root "" comes first.
    """

    module: nn.Module
    unit_modules: dict[str, nn.Module]

    def owned(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """The parameters of each unit, with their names."""
        return params_by_unit(self.module, self.unit_modules)

    @property
    def numel(self) -> int:
        return sum(param.numel() for param in self.module.parameters())
