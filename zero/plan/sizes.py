"""What is planned for: parameters without values, the units they belong to, and the options of the stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from zero.comm.packing import batches
from zero.fsdp import MixedPrecision
from zero.fsdp.wrap import Policy, params_by_unit, unit_modules
from zero.oss.partition import Partition


@dataclass(frozen=True)
class Options:
    """What OSS, ShardedDDP and FSDP would be given besides the model; the names are theirs.

    bucket_bytes: of stages 1 and 2, by default what OSS chooses.
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
    replicas: int = 1
    backend: Literal["gloo", "nccl"] = "gloo"
    one_host: bool = False

    @property
    def reads(self) -> bool:
        """Whether ranks read one another's memory."""
        return self.one_host and self.backend == "gloo"


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

    params: by name, in the model's order, tied ones once.
    groups: of all units, as FSDP lays them out; the root unit "" comes first.
    buffers: bytes.
    messages: bytes of what is sent at a time where the buffers of one rank become those of all.
    """

    params: dict[str, nn.Parameter]
    groups: tuple[Group, ...]
    buffers: int = 0
    messages: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return sum(param.numel() for param in self.params.values())

    @property
    def units(self) -> dict[str, int]:
        """The numbers of the units by name, in their order; the root's is 0."""
        return {unit: number for number, unit in enumerate(dict.fromkeys(["", *(group.unit for group in self.groups)]))}

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
        precision = precision or MixedPrecision()
        groups = []
        for unit, owned in params_by_unit(module, unit_modules(module, policy, small=small)).items():
            for dtype, named in precision.apart(module, owned).items():
                names, params = zip(*named, strict=True)
                groups.append(Group(unit, dtype, names, params))
        cast = {one.tensor for one in precision.buffers_to_cast(module.modules())}
        computed = [
            torch.empty_like(buffer, dtype=precision.buffer_dtype, device="meta") if buffer in cast else buffer
            for buffer in module.buffers()
        ]
        buffers = {buffer.untyped_storage(): buffer.untyped_storage().nbytes() for buffer in computed}
        messages = tuple(sum(buffer.nbytes for buffer in batch) for batch in batches(computed))
        return cls(dict(module.named_parameters()), tuple(groups), sum(buffers.values()), messages)

    @classmethod
    def of_shapes(
        cls,
        units: Sequence[Sequence[Sequence[int]]],
        dtype: torch.dtype = torch.float32,
        precision: MixedPrecision | None = None,
    ) -> Sizes:
        """Of shapes of parameters, by unit: those of the root first (it may have none), then unit by unit."""
        precision = precision or MixedPrecision()
        params: dict[str, nn.Parameter] = {}
        groups = []
        for number, shapes in enumerate(units):
            unit = f"unit {number}" if number else ""
            made = {
                f"{unit or 'root'}, parameter {i}": nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device="meta"))
                for i, shape in enumerate(shapes)
            }
            params |= made
            if made:
                groups.append(Group(unit, precision.param_dtype, tuple(made), tuple(made.values())))
        if not params:
            raise ValueError("there is no parameter among the shapes. Pass at least one, such as [[(1024, 1024)]].")
        return cls(params, tuple(groups))

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
