"""The shape in which optimizers get a rank's shard of a parameter."""

from __future__ import annotations

import torch


def shard_shape(shape: torch.Size, numel: int) -> tuple[int, ...]:
    """The shape of a shard of `numel` elements: as many dimensions as the parameter, all but the first of length 1.

    So `param.dim()`, by which scripts choose the parameters to decay, is the same before and after sharding.
    """
    return (numel, *(1 for _ in shape[1:]))
