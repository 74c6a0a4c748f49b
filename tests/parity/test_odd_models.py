"""Models, inputs, outputs and losses of odd kinds: at stages 2 and 3 numbers are those of torch alone, bit for bit.

Among them are losses of what does not leave a unit through what its forward returns, and units that return their own
parameters.
"""

from collections import UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import gpus
import ranks
import zero
from assertions import close
from odd import STAGE_3, Calling, Odds, mean, recomputed, reentrant
from zoo import WIDTH, Block, Stack, batch

MODELS = odd = Odds()


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = weight_norm(self.up), spectral_norm(self.down)


class Attending(Block):
    """Reads the weights of a layer inside its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.attention(x[None], x[None], x[None], need_weights=False)[0][0])


def evaluated(model: Any, x: Tensor) -> Tensor:
    """Evaluates between forward and backward."""
    output = model(x)
    model.eval()
    with torch.no_grad():
        factor = model(x + 1)
    model.train()
    return (output * factor).square().mean()


def in_autocast(model: Any, x: Tensor) -> Tensor:
    """Which keeps cast copies of weights from one use to the next."""
    with torch.autocast(gpus.DEVICE, torch.bfloat16):
        output = model(x)
    return output.float().square().mean()


def adversarial(model: Any, x: Tensor) -> Tensor:
    """The loss on a batch and on what an attack by its gradient makes of it."""
    clean = mean(model, x.requires_grad_())
    (towards,) = torch.autograd.grad(clean, x, retain_graph=True)
    return clean + mean(model, (x + 0.1 * towards.sign()).detach())


class Recursive(Block):
    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        x = super().forward(x)
        return super().forward(torch.tanh(self(x, again=False))) if again else x


odd("weights that are computed from parameters", partial(Stack, Normed))
odd("attention that reads weights of a layer inside it", partial(Stack, Attending), evaluated)
odd("evaluation between forward and backward", Stack, evaluated)
odd("autocast", lambda: Calling(lambda block, x: block(block(x))), in_autocast)
odd("a graph that is gone through again", Stack, adversarial, at=STAGE_3, tolerance=1e-6)
odd("a block that calls itself", partial(Stack, Recursive, blocks=2), adversarial, at=STAGE_3, tolerance=1e-6)
for count in (1, 2):
    odd(
        f"re-entrant checkpointing of {count} blocks that run three times",
        lambda count=count: Calling(lambda b, x: reentrant(b, reentrant(b, reentrant(b, x))), blocks=count),
        at=STAGE_3,
        tolerance=1e-6,
    )


@dataclass
class Derived:
    """With a field that the constructor does not take."""

    hidden: Tensor
    doubled: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.doubled = self.hidden * 2


class Slots:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Packed(Block):
    """Takes its input in a container and returns it in one."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, given: Any) -> Any:
        return self.kind(hidden=super().forward(unpacked(given)))


def unpacked(given: Any) -> Tensor:
    return given["hidden"] if hasattr(given, "__getitem__") else given.hidden


class InDeque(Calling):
    def forward(self, x: Tensor) -> deque[Tensor]:
        return deque([super().forward(x)])


for kind in (Derived, partial(defaultdict, list), UserDict, SimpleNamespace, Slots):
    odd(
        f"inputs and outputs in {getattr(kind, '__name__', 'defaultdict')}",
        lambda kind=kind: InDeque(lambda block, x: unpacked(block(kind(hidden=x))), partial(Packed, kind)),
        lambda model, x: model(x)[0].square().mean(),
    )


class Viewed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gain = nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(super().forward(x)) * self.gain).view(-1, 2, WIDTH)


def written(block: nn.Module, x: Tensor) -> Tensor:
    """Writes into what the block returned, which is a view."""
    y = block(x)
    y += 1.0
    y[..., 0] = 0
    return y.view(len(x), WIDTH)


class Viewing(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(-1, 2, WIDTH), self.inner(x)


def mixed(block: nn.Module, x: Tensor) -> Tensor:
    viewed, inner = block(x.clone())
    return viewed.view(-1, WIDTH).mul(2) + inner


class Scaling(nn.Module):
    """Writes into its input and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x *= self.scale.exp()
        return x.add_(self.shift)


class ViewOfTheRoot(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1, 2, WIDTH)


odd("views that are written into", lambda: Calling(written, Viewed))
odd("a view of an input beside an output", lambda: Calling(mixed, Viewing))
odd("inputs that are written into and returned", partial(Stack, Scaling))
odd("views that are written into and returned", lambda: Calling(lambda block, x: block(x.view(-1, 2, WIDTH)), Scaling))
odd("a view that the root returns", ViewOfTheRoot, lambda model, x: model(x).add_(1.0).square().mean())


class Remembering(Block):
    """Puts its hidden state by."""

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.tanh(self.up(x))
        return x + self.down(self.hidden)


class Rectified(Remembering):
    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.up(x).relu_()
        return x + self.down(self.hidden).mul_(0.5)


class Silent(Stack):
    def forward(self, x: Tensor) -> None:
        self.loss = super().forward(x).square().mean()


def squares(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.square().mean() for tensor in tensors]).sum()


def of_hidden(model: Any, x: Tensor, blocks: slice = slice(None), beside: bool = False) -> Tensor:
    output = model(x)
    return squares([block.hidden for block in model.blocks[blocks]] + [output] * beside)


def of_features(model: Any, x: Tensor) -> Tensor:
    """That hooks collect."""
    features: list[Tensor] = []
    modules = [model.first, model.blocks[0], model.blocks[1].up]
    hooks = [module.register_forward_hook(lambda *seen: features.append(seen[-1])) for module in modules]
    model(x)
    for hook in hooks:
        hook.remove()
    return squares(features)


class Energy(Block):
    """Takes forces of an energy."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.down(torch.tanh(self.up(at))).square().sum()
            (force,) = torch.autograd.grad(energy, at, create_graph=True)
        return x - 0.1 * force


class Slope(Block):
    def forward(self, x: Tensor) -> Tensor:
        at = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.inner(at).sum(), at)  # without a graph: nothing is trained by it
        return self.inner(x) * slope


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[: len(x)]


class Placed(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()

    def middle(self, x: Tensor, *blocks: slice) -> Tensor:
        return super().middle(x + self.positions(x))


class Returning(Stack):
    """Gives the loss its weights, beside the output."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), {"scale": self.scale, "weight": self.first.weight.t()}


def weighted(model: nn.Module, x: Tensor) -> Tensor:
    y, weights = model(x)
    return (y * weights["scale"]).square().mean() + weights["weight"].square().sum()


odd("hidden states beside the output", partial(Stack, Remembering), partial(of_hidden, beside=True))
odd("hidden states alone", partial(Stack, Remembering), of_hidden)
odd("the hidden state in the middle", partial(Stack, Remembering), partial(of_hidden, blocks=slice(1, 2)))
odd("hidden states of what is recomputed", lambda: Calling(recomputed, Remembering), partial(of_hidden, beside=True))
odd("hidden states that are changed in place", partial(Stack, Rectified), of_hidden)
odd("a loss that forward puts by", Silent, lambda model, x: model(x) or model.loss)
odd("features that hooks collect of one unit", Stack, of_features, units=[])
odd("forces that forward takes of an energy", partial(Stack, Energy))
odd("slopes that forward takes", partial(Stack, Slope))
odd("a view of a parameter of the root", Placed)
odd("a view of a parameter of a unit", Placed, units=[Positions, Block])
odd("parameters of the root", Returning, weighted)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "at"), MODELS.cases())
@ranks.on(2, timeout=20)
def test_numbers_are_those_of_torch(rank, world, name, at):
    MODELS[name].trains(rank, at)


@ranks.on(2)
def test_parameters_that_are_returned_in_evaluation_are_whole_and_no_hooks_pile_up_on_them(rank, world):
    model = zero.FSDP(Returning())
    before = len(model.module.scale._backward_hooks or {})
    with torch.no_grad():
        _, weights = model(batch(rank, 0))
    assert close(weights["weight"], zero.full_state_dict(model, to=None)["first.weight"].t(), 0.0)
    for step in range(5):
        weighted(model, batch(rank, step)).backward()
    assert weights["scale"].tolist() == [2.0]
    assert len(model.module.scale._backward_hooks or {}) == before
