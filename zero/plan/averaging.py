"""DistributedDataParallel stood in for, which needs a process group: what it holds of gradients, and when."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Averaged(nn.Module):
    """A module whose gradients go into buckets, that are there all the time, as they come.

    into_buckets: whether gradients are views of the buckets then (gradient_as_bucket_view), or copies beside them.
    """

    def __init__(self, module: nn.Module, world: int, *, into_buckets: bool) -> None:
        super().__init__()
        self.module, self._into_buckets = module, into_buckets
        trained = [param for param in module.parameters() if param.requires_grad]
        if world > 1:
            for param in trained:
                self._watch(param, torch.zeros_like(param, requires_grad=False))

    def _watch(self, param: nn.Parameter, place: Tensor) -> None:
        """place: of its gradient in the buckets."""

        def arrived(param: Tensor) -> None:
            assert param.grad is not None
            place.copy_(param.grad)
            if self._into_buckets:
                param.grad = place

        param.register_post_accumulate_grad_hook(arrived)

    def forward(self, *args: Any) -> Any:
        return self.module(*args)
