"""The input of a plan: a model without values, its units, and the options of the stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

import zero
from zero.comm import Wire
from zero.fsdp import MixedPrecision
from zero.fsdp.units import Policy, params_by_unit, unit_modules
from zero.shards.partition import Partition


@dataclass(frozen=True)
class Options:
    """The options of OSS, ShardedDDP and FSDP, besides the model; the names are theirs.

    bucket_bytes: at stages 1 and 2; by default OSS chooses.
    offload: at stages 1 to 3, from a GPU: shards, their gradients and the optimizer's state are on the host. True
        stands for zero.CPUOffload().
    broadcast_dtype, reduce_dtype: the dtypes that stages 1 and 2 send, or a wire, such as
        zero.Int8(); stage 3 sends those of `precision`.
    replicas, optimizer_sharding: at stage 3, how often the sharded model is replicated across the ranks (HYBRID_SHARD),
        and whether what is stepped is sharded over "all" ranks.
    backend: decides the cost of comparing operations between ranks, and the implementation of torch's optimizers.
    one_host: whether all ranks run on one Linux host, where over Gloo, with tensors on the CPU, they read one another's
        memory and need no buffer to receive into. Otherwise the larger figure of several hosts is planned, which holds
        also for one host where processes may not read one another. Nothing changes with NCCL.
    """

    partition: Partition = "auto"
    granularity: int | None = None
    precision: MixedPrecision = field(default_factory=MixedPrecision)
    master_dtype: torch.dtype | None = None
    broadcast_dtype: torch.dtype | Wire | None = None
    reduce_dtype: torch.dtype | Wire | None = None
    bucket_bytes: int | None = None
    offload: zero.CPUOffload | zero.DiskOffload | Literal[True] | None = None
    replicas: int = 1
    optimizer_sharding: Literal["group", "all"] = "group"
    backend: Literal["gloo", "nccl"] = "gloo"
    one_host: bool = False


@dataclass(frozen=True)
class Sizes:
    """What a plan needs to know of a model. `of_module`, `of_params`, `of_shapes` and `of_count` make one.

    module: may be on the meta device.
    unit_modules: FSDP's units by name; the root "" comes first.
    precision: as in FSDP.
    """

    module: nn.Module
    unit_modules: dict[str, nn.Module]
    precision: MixedPrecision

    def owned(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """The parameters of each unit, with their names."""
        return params_by_unit(self.module, self.unit_modules)

    @property
    def numel(self) -> int:
        return sum(param.numel() for param in self.module.parameters())

    @classmethod
    def of_module(
        cls,
        module: nn.Module,
        policy: Policy = None,
        precision: MixedPrecision | None = None,
        *,
        small: bool = False,
    ) -> Sizes:
        """The sizes of a module, which may be on the meta device.

        policy: FSDP's `auto_wrap_policy`. small: make large embeddings and heads units too, as FSDP does where a
            prefetch has a limit of 1.
        """
        return cls(module, unit_modules(module, policy, small=small), precision or MixedPrecision())

    @classmethod
    def of_shapes(
        cls,
        units: Sequence[Sequence[Sequence[int]]],
        dtype: torch.dtype = torch.float32,
        precision: MixedPrecision | None = None,
    ) -> Sizes:
        """The sizes of a model with parameters of these shapes: the root's first (it may have none), then by unit."""
        given = [[torch.empty(tuple(shape), dtype=dtype, device="meta") for shape in shapes] for shapes in units]
        if not any(given):
            raise ValueError("there is no parameter among the shapes. Pass at least one, such as [[(1024, 1024)]].")
        return cls.of_params([[*map(nn.Parameter, tensors)] for tensors in given], precision)

    @classmethod
    def of_params(cls, units: Sequence[Sequence[nn.Parameter]], precision: MixedPrecision | None = None) -> Sizes:
        """The sizes of a model with these parameters: the root's first (it may have none), then by unit."""
        root = nn.Module()
        modules = {"": root}
        for number, params in enumerate(units):
            module = root
            if number and params:
                module = modules[f"unit {number}"] = nn.Module()
                root.add_module(f"unit {number}", module)
            for index, param in enumerate(params):
                module.register_parameter(f"parameter {index}", param)
        return cls(root, modules, precision or MixedPrecision())

    @classmethod
    def of_count(
        cls,
        parameters: float,
        layers: int,
        dtype: torch.dtype = torch.float32,
        precision: MixedPrecision | None = None,
    ) -> Sizes:
        """The sizes of a model of equal blocks: each has the four matrices of a transformer's block, which have 12 w²
        elements together at width w. There are no parameters outside the blocks."""
        if not math.isfinite(parameters):
            raise ValueError(f"{parameters} parameters: give a finite number, such as 7e9.")
        if layers < 1 or parameters < layers:
            raise ValueError(f"{parameters:g} parameters in {layers} layers: each layer needs one at least.")
        total = round(parameters)
        blocks = []
        for number in range(layers):
            size = total * (number + 1) // layers - total * number // layers
            quarters = [math.floor(size * share / 12) for share in (3, 1, 4)]
            blocks.append([(quarter,) for quarter in (*quarters, size - sum(quarters))])
        return cls.of_shapes([[], *blocks], dtype, precision)
