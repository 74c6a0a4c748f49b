"""What random models put around layers, and the models."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fuzz.cases import Case, Node
from fuzz.layers import LAYERS, NOW, Made


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
