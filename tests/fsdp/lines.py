"""A model whose first values are a function of shapes alone, and that can be told to fail at them."""

import torch
from torch import Tensor, nn

from zoo import WIDTH

BLOCKS = 3


class Line(nn.Module):
    """A call of reset_parameters fails once no `calls_left`."""

    calls_left: int | None = None

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(after, before)), nn.Parameter(torch.empty(after))
        self.register_buffer("fixed", torch.empty(after))
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if Line.calls_left == 0:
            raise KeyError("as told")
        if Line.calls_left is not None:
            Line.calls_left -= 1
        self.fixed.copy_(torch.linspace(1, 2, len(self.fixed)))
        for param in self.parameters(recurse=False):
            random = torch.Generator("cpu").manual_seed(param.numel())
            param.data.copy_(torch.randn(param.shape, generator=random, device="cpu") / 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias) * self.fixed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Line(WIDTH, 13), Line(13, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """With tied weights, buffers, frozen parameters, and one that does not fill its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Line(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.blocks[2].down = self.blocks[0].down
        self.frozen = Line(WIDTH, WIDTH).requires_grad_(False)
        self.strided = nn.Parameter(torch.ones(WIDTH, 2 * WIDTH)[:, ::2])

    def reset_parameters(self) -> None:
        nn.init.ones_(self.strided)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.frozen(x) @ self.strided
