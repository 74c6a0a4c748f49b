"""The layers that random models are put together of. Each takes and returns rows of `width` floats."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.parametrizations import weight_norm

from fuzz.cases import Node


@dataclass
class Moment:
    """Where training is: what modules do by rank and step they read here."""

    rank: int = 0
    step: int = 0


NOW = Moment()


class Made:
    """What has been made of a model so far."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.linears: list[nn.Linear] = []

    def linear(self, of: int) -> nn.Linear:
        if not self.linears:
            self.linears.append(nn.Linear(self.width, self.width))
        return self.linears[of % len(self.linears)]


class Linear(nn.Module):
    def __init__(self, made: Made, node: Node) -> None:
        super().__init__()
        self.linear = nn.Linear(made.width, made.width, bias=bool(node.size % 2))
        made.linears.append(self.linear)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Feed(nn.Module):
    def __init__(self, made: Made, node: Node) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(made.width, node.size), nn.Linear(node.size, made.width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Tied(nn.Module):
    """A linear layer with the weight of another."""

    def __init__(self, made: Made, node: Node) -> None:
        super().__init__()
        self.linear = nn.Linear(made.width, made.width)
        self.linear.weight = made.linear(node.of).weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Reads(nn.Module):
    """Reads the weight of another layer, which is not a module of it."""

    def __init__(self, made: Made, node: Node) -> None:
        super().__init__()
        self.others = [made.linear(node.of)] if made.linears else []
        self.bias = nn.Parameter(torch.randn(made.width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(linear(x, self.others[0].weight, self.bias)) if self.others else x + self.bias


class Norm(nn.Module):
    def __init__(self, made: Made, node: Node) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(made.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class BatchNorm(nn.Module):
    def __init__(self, made: Made, node: Node) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(made.width, eps=1e-2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(x)


class Tiny(nn.Module):
    """Parameters of no dimension, of one element, and of none."""

    def __init__(self, made: Made, node: Node) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.tensor(1.1)), nn.Parameter(torch.full((1, 1, 1), 0.1))
        self.empty = nn.Parameter(torch.empty(0, node.size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.shift[0] + self.empty.sum()


class Strided(nn.Module):
    """Parameters that are not contiguous."""

    def __init__(self, made: Made, node: Node) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(made.width, node.size).t() / 3)
        self.skipping = nn.Parameter(torch.randn(made.width, 2 * node.size)[:, ::2] / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.transposed.t()) @ self.skipping.t()


class Conv(nn.Module):
    def __init__(self, made: Made, node: Node) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, node.size, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(x[:, None])).mean(1)


class Table(nn.Module):
    def __init__(self, made: Made, node: Node) -> None:
        super().__init__()
        self.table = nn.Embedding(made.width + node.size, made.width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(len(x), device=x.device) % self.table.num_embeddings)


class Recurrent(nn.Module):
    def __init__(self, made: Made, node: Node) -> None:
        super().__init__()
        self.recurrent = nn.GRU(made.width, made.width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x[None])[0][0]


class Cast(nn.Module):
    """Computes in another dtype."""

    def __init__(self, made: Made, node: Node, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(made.width, made.width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x.to(self.linear.weight.dtype)).float()


class Unused(nn.Module):
    """Has parameters that nobody uses."""

    def __init__(self, made: Made, node: Node) -> None:
        super().__init__()
        self.spare = nn.Linear(node.size, 2)
        self.used = nn.Parameter(torch.zeros(made.width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.used


class ByRank(nn.Module):
    """Has a parameter that only odd ranks use in even steps, and only even ranks in odd ones."""

    def __init__(self, made: Made, node: Node) -> None:
        super().__init__()
        self.always, self.sometimes = (nn.Parameter(torch.randn(made.width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.always + (self.sometimes if (NOW.rank + NOW.step) % 2 else 0.0)


class Counts(nn.Module):
    """Has buffers that forward writes to, among them whole numbers, and one that is in no state dict."""

    def __init__(self, made: Made, node: Node) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(made.width))
        self.register_buffer("hidden", torch.ones(node.size), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.mean.lerp_(x.detach().mean(0), 0.1)
        return x + self.mean * self.hidden.mean()


class WeightNorm(nn.Module):
    def __init__(self, made: Made, node: Node) -> None:
        super().__init__()
        self.linear = weight_norm(nn.Linear(made.width, made.width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Drop(nn.Module):
    def __init__(self, made: Made, node: Node) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x)


class InPlace(nn.Module):
    """Writes into what it was given."""

    def __init__(self, made: Made, node: Node) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(made.width))

    def forward(self, x: Tensor) -> Tensor:
        return (x * 1.0).add_(self.bias).mul_(0.5)


class Recalls(nn.Module):
    """Adds what it was given by the forward before, detached."""

    def __init__(self, made: Made, node: Node) -> None:
        super().__init__()
        self.linear, self.before = nn.Linear(made.width, made.width), None

    def forward(self, x: Tensor) -> Tensor:
        before, self.before = self.before, x.detach()
        return torch.tanh(self.linear(x)) + (0.1 * before.mean(0) if before is not None else 0.0)


LAYERS: dict[str, Callable[[Made, Node], nn.Module]] = {
    "linear": Linear,
    "feed": Feed,
    "tied": Tied,
    "reads": Reads,
    "norm": Norm,
    "batch norm": BatchNorm,
    "tiny": Tiny,
    "strided": Strided,
    "conv": Conv,
    "table": Table,
    "recurrent": Recurrent,
    "double": lambda made, node: Cast(made, node, torch.float64),
    "half": lambda made, node: Cast(made, node, torch.bfloat16),
    "unused": Unused,
    "by rank": ByRank,
    "counts": Counts,
    "weight norm": WeightNorm,
    "drop": Drop,
    "in place": InPlace,
    "recalls": Recalls,
}
