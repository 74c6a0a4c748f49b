"""A stand-in for DistributedDataParallel, which needs a process group: it holds the same buckets."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class Averaged(nn.Module):
    """A module whose gradients have buckets, which are never freed.

    into_buckets: whether gradients become views of the buckets (gradient_as_bucket_view); otherwise buckets are copies.
    """

    def __init__(self, module: nn.Module, world: int, *, into_buckets: bool) -> None:
        super().__init__()
        self.module = module
        trained = [param for param in module.parameters() if param.requires_grad and world > 1]
        self._places = [torch.zeros_like(param, requires_grad=False) for param in trained]
        for param, place in zip(trained, self._places, strict=True) if into_buckets else ():
            param.register_post_accumulate_grad_hook(partial(_take, place))

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


def _take(place: Tensor, param: Tensor) -> None:
    """place: the view of a bucket for the parameter's gradient."""
    assert param.grad is not None
    param.grad = place.copy_(param.grad)
