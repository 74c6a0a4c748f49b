"""Who averages gradients at stage 1, other than DistributedDataParallel."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from runs import add, averages_over_ranks


class ByHand(nn.Module):
    """Averages gradients as the reference does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.sync = True
        self.averages: dict[nn.Parameter, Tensor] = {}
        self.local: dict[nn.Parameter, Tensor] = {}

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield

    def collect(self, *, sync: bool) -> None:
        for param in self.module.parameters():
            add(self.local, param, param.grad)
            param.grad = None
        if sync:
            for param, average in averages_over_ranks(self.module, self.local).items():
                add(self.averages, param, average)
            self.local.clear()

    def show(self) -> None:
        for param in self.module.parameters():
            param.grad = self.averages.get(param)
