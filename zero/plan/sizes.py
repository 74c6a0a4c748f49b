"""What is planned for: a model without values, its units, and the options of the stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from zero.fsdp import CPUOffload, DiskOffload, MixedPrecision
from zero.fsdp.wrap import Policy, params_by_unit, unit_modules
from zero.oss.partition import Partition


@dataclass(frozen=True)
class Options:
    """What OSS, ShardedDDP and FSDP would be given besides the model; the names are theirs.

    bucket_bytes: of stages 1 and 2, by default what OSS chooses.
    offload: of stages 1 and 2, from a GPU, so that its shards, gradients of them and state lie elsewhere.
    replicas: at stage 3, how often the sharded model is repeated across the ranks (HYBRID_SHARD).
    backend: decides what comparing operations between ranks takes, and which implementation torch's optimizers choose.
    one_host: whether all ranks run on one Linux host, where over Gloo, with tensors on the CPU, they read one another's
        memory, and none holds what is on its way from the others. Otherwise the larger figure of several hosts is
        planned, which is also that of a host where processes may not read one another. Nothing changes with NCCL.
    """

    partition: Partition = "auto"
    granularity: int | None = None
    precision: MixedPrecision = field(default_factory=MixedPrecision)
    master_dtype: torch.dtype | None = None
    broadcast_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    bucket_bytes: int | None = None
    offload: CPUOffload | DiskOffload | None = None
    replicas: int = 1
    backend: Literal["gloo", "nccl"] = "gloo"
    one_host: bool = False


@dataclass(frozen=True)
class Group:
    """Parameters of a unit that are computed with in one dtype (None: as they are stored)."""

    unit: str
    dtype: torch.dtype | None
    names: tuple[str, ...]
    params: tuple[nn.Parameter, ...]


@dataclass(frozen=True)
class Sizes:
    """A model as far as its memory goes. `Sizes.of_module`, `Sizes.of_shapes` and `Sizes.of_count` make one.

    module: may be on the meta device.
    unit_modules: those of FSDP by name; the root "" comes first.
    precision: as of FSDP.
    """

    module: nn.Module
    unit_modules: dict[str, nn.Module]
    precision: MixedPrecision

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """By name, in the model's order, tied ones once."""
        return dict(self.module.named_parameters())

    def owned(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """The parameters of each unit, with their names."""
        return params_by_unit(self.module, self.unit_modules)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Of all units, as FSDP lays them out."""
        return tuple(
            Group(unit, dtype, *zip(*named, strict=True))
            for unit, owned in self.owned().items()
            for dtype, named in self.precision.apart(self.module, owned).items()
        )

    @property
    def numel(self) -> int:
        return sum(param.numel() for param in self.module.parameters())

    @property
    def units(self) -> dict[str, int]:
        """The numbers of the units by name, in their order; the root's is 0."""
        return {unit: number for number, unit in enumerate(self.unit_modules)}

    @classmethod
    def of_module(
        cls,
        module: nn.Module,
        policy: Policy = None,
        precision: MixedPrecision | None = None,
        *,
        small: bool = False,
    ) -> Sizes:
        """Of a module, which may be on the meta device.

        policy: FSDP's `auto_wrap_policy`. small: make units of large embeddings and heads too, as a limit of 1 does.
        """
        return cls(module, unit_modules(module, policy, small=small), precision or MixedPrecision())

    @classmethod
    def of_shapes(
        cls,
        units: Sequence[Sequence[Sequence[int]]],
        dtype: torch.dtype = torch.float32,
        precision: MixedPrecision | None = None,
    ) -> Sizes:
        """Of shapes of parameters, by unit: those of the root first (it may have none), then unit by unit."""
        root = nn.Module()
        modules = {"": root}
        for number, shapes in enumerate(units):
            unit = f"unit {number}" if number else ""
            if number and shapes:
                modules[unit] = nn.Module()
                root.add_module(unit, modules[unit])
            for index, shape in enumerate(shapes):
                param = nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device="meta"))
                modules[unit].register_parameter(f"parameter {index}", param)
        if next(root.parameters(), None) is None:
            raise ValueError("there is no parameter among the shapes. Pass at least one, such as [[(1024, 1024)]].")
        return cls(root, modules, precision or MixedPrecision())

    @classmethod
    def of_count(
        cls,
        parameters: float,
        layers: int,
        dtype: torch.dtype = torch.float32,
        precision: MixedPrecision | None = None,
    ) -> Sizes:
        """Of so many parameters in so many equal blocks: each has the four matrices of a transformer's block, of width
        w together 12 w², and nothing lies outside them."""
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
