"""In which shape optimizers are given what a rank has of a parameter."""

from __future__ import annotations

import torch


def shard_shape(shape: torch.Size, numel: int) -> tuple[int, ...]:
    """Of `numel` elements out of a parameter: as many dimensions as the parameter has, all but the first of length 1.

    So `param.dim()`, by which scripts choose which parameters decay, says the same before and after sharding.
    """
    return (numel, *(1 for _ in shape[1:]))
