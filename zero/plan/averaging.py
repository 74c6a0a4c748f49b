"""A stand-in for DistributedDataParallel, which needs a process group: it holds and sends the same buckets."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero._torch import at_end_of_backward
from zero.plan.transport import Launch

_BUCKET = 25 << 20
"""The default bucket size of DistributedDataParallel, in bytes."""


class Averaged(nn.Module):
    """A module whose gradients are copied into buckets as they are computed. The buckets are never freed.

    into_buckets: whether gradients become views of the buckets (gradient_as_bucket_view); otherwise buckets are copies.
    launch: called when a bucket is sent; operators that read gradients afterwards wait for it.
    """

    def __init__(self, module: nn.Module, world: int, *, into_buckets: bool, launch: Launch) -> None:
        super().__init__()
        self.module, self._into_buckets, self._launch = module, into_buckets, launch
        self._filling: list[Tensor] = []
        self._arrived: list[tuple[Tensor, Tensor]] = []
        """Of this backward: views of buckets, and the gradients to copy them to."""
        trained = [param for param in module.parameters() if param.requires_grad and world > 1]
        for param, place in [(param, torch.zeros_like(param, requires_grad=False)) for param in trained]:
            param.register_post_accumulate_grad_hook(partial(self._take, place))

    def _take(self, place: Tensor, param: Tensor) -> None:
        """place: the view of a bucket for the parameter's gradient."""
        gradient = param.grad
        assert gradient is not None
        place.copy_(gradient)
        if self._into_buckets:
            param.grad = place
        if not self._arrived:
            at_end_of_backward(self._finish)
        self._arrived.append((place, place if self._into_buckets else gradient))
        self._filling.append(place)
        if sum(one.nbytes for one in self._filling) >= _BUCKET:
            self._send()

    def _send(self) -> None:
        if self._filling:
            self._launch("all-reduce", self._filling, sum(place.nbytes for place in self._filling))
            self._filling = []

    def _finish(self) -> None:
        self._send()
        for place, gradient in self._arrived:
            if gradient is not place:
                gradient.copy_(place)
        self._arrived = []

    def forward(self, *args: Any) -> Any:
        return self.module(*args)
