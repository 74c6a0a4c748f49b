"""A stand-in for DistributedDataParallel, which needs a process group: it holds and sends the same buckets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zero._torch import at_end_of_backward
from zero.plan.trace import Transfers

_BUCKET = 25 << 20
"""The default bucket size of DistributedDataParallel, in bytes."""


class Averaged(nn.Module):
    """A module whose gradients are copied into buckets as they are computed. The buckets are never freed.

    into_buckets: whether gradients become views of the buckets (gradient_as_bucket_view); otherwise buckets are copies.
    transfers: records when a bucket is sent; operators that read gradients afterwards wait for it.
    """

    def __init__(self, module: nn.Module, world: int, *, into_buckets: bool, transfers: Transfers | None) -> None:
        super().__init__()
        self.module, self._into_buckets, self._transfers = module, into_buckets, transfers
        self._filling: list[Tensor] = []
        self._arrived: list[tuple[Tensor, Tensor]] = []
        """Of this backward: views of buckets, and the gradients to copy them to."""
        trained = [param for param in module.parameters() if param.requires_grad]
        if world > 1:
            for param in trained:
                self._watch(param, torch.zeros_like(param, requires_grad=False))

    def _watch(self, param: nn.Parameter, place: Tensor) -> None:
        """place: the view of a bucket for the parameter's gradient."""

        def arrived(param: Tensor) -> None:
            assert param.grad is not None
            place.copy_(param.grad)
            if self._transfers is not None:
                self._take(place, param.grad)
            if self._into_buckets:
                param.grad = place

        param.register_post_accumulate_grad_hook(arrived)

    def _take(self, place: Tensor, gradient: Tensor) -> None:
        if not self._arrived:
            at_end_of_backward(self._finish)
        self._arrived.append((place, place if self._into_buckets else gradient))
        self._filling.append(place)
        if sum(one.nbytes for one in self._filling) >= _BUCKET:
            self._send()

    def _send(self) -> None:
        if self._transfers is not None and self._filling:
            nbytes = sum(place.nbytes for place in self._filling)
            self._transfers.launch("all-reduce", self._filling, nbytes)
            self._filling = []

    def _finish(self) -> None:
        self._send()
        for place, gradient in self._arrived:
            if gradient is not place:
                gradient.copy_(place)
        self._arrived = []

    def forward(self, *args: Any) -> Any:
        return self.module(*args)
