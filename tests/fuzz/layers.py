"""The layers that random models are put together of, what is put around them, and the models. Each layer takes and
returns rows of `width` floats."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from fuzz.cases import Case, Node


@dataclass
class Moment:
    """Where training is: what modules do by rank and step they read here."""

    rank: int = 0
    step: int = 0


NOW = Moment()


class Made:
    def __init__(self, width: int) -> None:
        self.width = width
        self.linears: list[nn.Linear] = []

    def linear(self, of: int) -> nn.Linear:
        if not self.linears:
            self.linears.append(nn.Linear(self.width, self.width))
        return self.linears[of % len(self.linears)]


class Layer(nn.Module):
    """Modules, parameters and others by name, and what a forward makes of a layer and its input."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Linear(Layer):
    def __init__(self, made: Made, node: Node) -> None:
        super().__init__(through_linear, linear=nn.Linear(made.width, made.width, bias=bool(node.size % 2)))
        made.linears.append(self.linear)


class Feed(Layer):
    def __init__(self, made: Made, node: Node) -> None:
        up, down = nn.Linear(made.width, node.size), nn.Linear(node.size, made.width)
        super().__init__(lambda layer, x: x + layer.down(torch.relu(layer.up(x))), up=up, down=down)


def through_linear(layer: Any, x: Tensor) -> Tensor:
    return torch.tanh(layer.linear(x))


def tied(made: Made, node: Node) -> Layer:
    layer = Layer(through_linear, linear=nn.Linear(made.width, made.width))
    layer.linear.weight = made.linear(node.of).weight
    return layer


def reads(made: Made, node: Node) -> Layer:

    def run(layer: Any, x: Tensor) -> Tensor:
        return torch.tanh(linear(x, layer.others[0].weight, layer.bias)) if layer.others else x + layer.bias

    others = [made.linear(node.of)] if made.linears else []
    return Layer(run, others=others, bias=nn.Parameter(torch.randn(made.width)))


def tiny(made: Made, node: Node) -> Layer:
    """Parameters of no dimension, of one element, and of none."""
    return Layer(
        lambda layer, x: x * layer.gain + layer.shift[0] + layer.empty.sum(),
        gain=nn.Parameter(torch.tensor(1.1)),
        shift=nn.Parameter(torch.full((1, 1, 1), 0.1)),
        empty=nn.Parameter(torch.empty(0, node.size)),
    )


def strided(made: Made, node: Node) -> Layer:
    """Parameters that are not contiguous."""
    transposed = nn.Parameter(torch.randn(made.width, node.size).t() / 3)
    skipping = nn.Parameter(torch.randn(made.width, 2 * node.size)[:, ::2] / 3)
    run = lambda layer, x: x + (x @ layer.transposed.t()) @ layer.skipping.t()  # noqa: E731
    return Layer(run, transposed=transposed, skipping=skipping)


def conv(made: Made, node: Node) -> Layer:
    made_conv = nn.Conv1d(1, node.size, 3, padding=1)
    return Layer(lambda layer, x: torch.tanh(layer.conv(x[:, None])).mean(1), conv=made_conv)


def table(made: Made, node: Node) -> Layer:
    def run(layer: Any, x: Tensor) -> Tensor:
        return x + layer.table(torch.arange(len(x), device=x.device) % layer.table.num_embeddings)

    return Layer(run, table=nn.Embedding(made.width + node.size, made.width))


def cast(dtype: torch.dtype, made: Made, node: Node) -> Layer:

    def run(layer: Any, x: Tensor) -> Tensor:
        return x + layer.linear(x.to(layer.linear.weight.dtype)).float()

    return Layer(run, linear=nn.Linear(made.width, made.width, dtype=dtype))


def unused(made: Made, node: Node) -> Layer:
    spare, used = nn.Linear(node.size, 2), nn.Parameter(torch.zeros(made.width))
    return Layer(lambda layer, x: x + layer.used, spare=spare, used=used)


def by_rank(made: Made, node: Node) -> Layer:
    """Has a parameter that only odd ranks use in even steps, and only even ranks in odd ones."""

    def run(layer: Any, x: Tensor) -> Tensor:
        return x + layer.always + (layer.sometimes if (NOW.rank + NOW.step) % 2 else 0.0)

    always, sometimes = (nn.Parameter(torch.randn(made.width)) for _ in range(2))
    return Layer(run, always=always, sometimes=sometimes)


def counts(made: Made, node: Node) -> Layer:
    """Has buffers that forward writes to, among them whole numbers, and one that is in no state dict."""

    def run(layer: Any, x: Tensor) -> Tensor:
        if layer.training:
            with torch.no_grad():
                layer.count += 1
                layer.mean.lerp_(x.detach().mean(0), 0.1)
        return x + layer.mean * layer.hidden.mean()

    layer = Layer(run)
    layer.register_buffer("count", torch.tensor(0))
    layer.register_buffer("mean", torch.zeros(made.width))
    layer.register_buffer("hidden", torch.ones(node.size), persistent=False)
    return layer


def in_place(made: Made, node: Node) -> Layer:
    bias = nn.Parameter(torch.randn(made.width))
    return Layer(lambda layer, x: (x * 1.0).add_(layer.bias).mul_(0.5), bias=bias)


def recalls(made: Made, node: Node) -> Layer:

    def run(layer: Any, x: Tensor) -> Tensor:
        before, layer.before = layer.before, x.detach()
        return torch.tanh(layer.linear(x)) + (0.1 * before.mean(0) if before is not None else 0.0)

    return Layer(run, linear=nn.Linear(made.width, made.width), before=None)


LAYERS: dict[str, Callable[[Made, Node], nn.Module]] = {
    "linear": Linear,
    "feed": Feed,
    "tied": tied,
    "reads": reads,
    "norm": lambda made, _: nn.Sequential(nn.LayerNorm(made.width)),
    "batch norm": lambda made, _: Layer(lambda of, x: x + of.norm(x), norm=nn.BatchNorm1d(made.width, eps=1e-2)),
    "tiny": tiny,
    "strided": strided,
    "conv": conv,
    "table": table,
    "recurrent": lambda made, _: Layer(
        lambda of, x: of.recurrent(x[None])[0][0], recurrent=nn.GRU(made.width, made.width, batch_first=True)
    ),
    "double": partial(cast, torch.float64),
    "half": partial(cast, torch.bfloat16),
    "unused": unused,
    "by rank": by_rank,
    "counts": counts,
    "weight norm": lambda made, _: Layer(through_linear, linear=weight_norm(nn.Linear(made.width, made.width))),
    "drop": lambda made, _: nn.Sequential(nn.Dropout(0.3)),
    "in place": in_place,
    "recalls": recalls,
}


class Around(nn.Module):
    """Runs what is inside, one after the other."""

    def __init__(self, made: Made, node: Node) -> None:
        super().__init__()
        self.inside = nn.ModuleList(make(made, one) for one in node.inside)

    def run(self, x: Tensor) -> Tensor:
        for module in self.inside:
            x = module(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class Sequence(nn.Sequential):
    def __init__(self, made: Made, node: Node) -> None:
        super().__init__(*(make(made, one) for one in node.inside))


class Checkpointed(Around):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False)


class Reentrant(Around):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=True) if x.requires_grad else self.run(x)


class Doing(Around):
    def __init__(self, do: Callable[[Around, Tensor], Tensor], made: Made, node: Node) -> None:
        super().__init__(made, node)
        self.do = do

    def forward(self, x: Tensor) -> Tensor:
        return self.do(self, x)


def each_checkpointed(around: Around, x: Tensor) -> Tensor:
    for module in around.inside:
        x = checkpoint(module, x, use_reentrant=False)
    return x


def ignored(around: Around, x: Tensor) -> Tensor:
    around.run(x)
    return x


def without_gradients(around: Around, x: Tensor) -> Tensor:
    with torch.no_grad():
        beside = around.run(x)
    return x + beside


class Packed(Around):
    """Hands on its input and output in a dictionary, through a module of its own."""

    class Inner(nn.Module):
        def __init__(self, inside: nn.ModuleList) -> None:
            super().__init__()
            self.inside = inside

        def forward(self, pack: dict[str, list[Tensor]], *, scale: float) -> dict[str, list[Tensor]]:
            (x,) = pack["x"]
            for module in self.inside:
                x = module(x)
            return {"x": [x * scale], "before": pack["x"]}

    def __init__(self, made: Made, node: Node) -> None:
        super().__init__(made, node)
        self.inner = self.Inner(self.inside)
        del self.inside

    def forward(self, x: Tensor) -> Tensor:
        pack = self.inner({"x": [x]}, scale=0.5)
        return pack["x"][0] + pack["before"][0]


AROUND: dict[str, Callable[[Made, Node], nn.Module]] = {
    "list": Around,
    "sequence": Sequence,
    "residual": partial(Doing, lambda around, x: x + around.run(x)),
    "twice": partial(Doing, lambda around, x: around.run(torch.tanh(around.run(x)))),
    "checkpointed": Checkpointed,
    "each checkpointed": partial(Doing, each_checkpointed),
    "reentrant": Reentrant,
    "ignored": partial(Doing, ignored),
    "no grad": partial(Doing, without_gradients),
    "skipped": partial(Doing, lambda around, x: x if NOW.step % 2 else around.run(x)),  # in odd steps
    "packed": Packed,
}


class Root(nn.Module):
    """The body, and a head that is always trained."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = Made(case.width)
        self.body = nn.ModuleList(make(made, node) for node in case.body)
        self.head = nn.Linear(case.width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.body:
            x = module(x)
        return self.head(torch.tanh(x))


def make(made: Made, node: Node) -> nn.Module:
    module = (LAYERS.get(node.kind) or AROUND[node.kind])(made, node)
    if node.frozen:
        module.requires_grad_(False)
    return module
