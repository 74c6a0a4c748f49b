"""The state of an optimizer of the user's own that steps parts, as the functions of OSS see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zero.oss.comm import Comm
from zero.oss.flat import FlatGroup


@dataclass
class SteppingParts:
    """An optimizer whose parameters lie in the flat groups of an FSDP; see zero.oss.state.Sharded."""

    optim: Optimizer
    flat_groups: list[FlatGroup]
    comm: Comm
    granularity: None = None
    keeps_masters: bool = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    @property
    def cuts_parameters(self) -> bool:
        return any(
            span.numel < group.layout.numels[span.index]
            for group in self.flat_groups
            for rank in range(group.layout.world)
            for span in group.layout.spans(rank)
        )

    def part(self, param: nn.Parameter) -> nn.Parameter:
        return param

    def master(self, flat: FlatGroup) -> Tensor | None:
        return None
