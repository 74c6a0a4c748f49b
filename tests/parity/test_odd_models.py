"""Models, inputs, outputs and losses of odd kinds: at stages 2 and 3 numbers are those of torch alone, bit for bit.

Among them are losses of what does not leave a unit through what its forward returns, units that return their own
parameters, and several branches that read one tensor. Autograd adds their gradients in the order in which it comes to
them: units must not stand in between, and each is all the same released as soon as backward has been through it.
"""

from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim import SGD
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint_sequential

import gpus
import ranks
import zero
from assertions import close
from inner import unsharded_in_backward
from odd import AT, STAGE_3, Calling, Odds, mean, recomputed, reentrant
from runs import SideBySide, steps, take_step
from transports import READS
from zoo import WIDTH, Adapted, Block, Stack, batch, made

MODELS = odd = Odds()


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = weight_norm(self.up), spectral_norm(self.down)


Attending = made(
    Block,
    lambda self, x: x + self.inner(self.attention(x[None], x[None], x[None], need_weights=False)[0][0]),
    attention=lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
)


def evaluated(model: Any, x: Tensor) -> Tensor:
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
    hidden: Tensor
    doubled: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.doubled = self.hidden * 2


class Slots:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Packed(Block):
    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, given: Any) -> Any:
        return self.kind(hidden=super().forward(unpacked(given)))


def unpacked(given: Any) -> Tensor:
    return given["hidden"] if hasattr(given, "__getitem__") else given.hidden


InDeque = made(Calling, lambda self, x: deque([Stack.forward(self, x)]))


for kind in (Derived, partial(defaultdict, list), UserDict, SimpleNamespace, Slots):
    odd(
        f"inputs and outputs in {getattr(kind, '__name__', 'defaultdict')}",
        lambda kind=kind: InDeque(lambda block, x: unpacked(block(kind(hidden=x))), partial(Packed, kind)),
        lambda model, x: model(x)[0].square().mean(),
    )


@dataclass
class Pack:
    hidden: Tensor
    more: dict[str, Any]
    note: str = "kept"


Couple = namedtuple("Couple", "left right")


class Nested(Block):
    def forward(self, pack: Pack, *, scale: tuple[float]) -> Pack:
        left, (right, nothing) = pack.more["pair"]
        assert nothing is None and pack.note == "kept" and isinstance(pack.more, OrderedDict)
        hidden = super().forward(pack.hidden) * scale[0]
        return Pack(hidden, OrderedDict(pair=Couple(left + right, [right + 1, None]), steps=[1, "a"]))


class Packing(Stack):
    def forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        hidden, left, right = (self.first(inputs["x"])[:, None] + torch.arange(3.0).view(1, 3, 1)).unbind(1)
        pack = Pack(hidden, OrderedDict(pair=Couple(left, [right, None])))
        for block in self.blocks:
            pack = block(pack, scale=(inputs["scale"],))
        assert isinstance(pack.more["pair"], Couple) and pack.more["steps"] == [1, "a"]
        return {"deep": [(self.last(pack.hidden), pack)], "note": "text"}


def of_packed(model: Any, x: Tensor) -> Tensor:
    ((output, pack),) = model({"x": x, "scale": 0.5})["deep"]
    return output.square().mean() + pack.more["pair"].left.square().mean()


Counting = made(Block, lambda self, x: (Block.forward(self, x), x.detach().argmax(-1), torch.tensor(1)))


def counted(block: nn.Module, x: Tensor) -> Tensor:
    x, best, one = block(x)
    return x * one + (best == 1).float().mean()


odd("nested inputs and outputs", lambda: Packing(Nested, classes=3), of_packed)
odd("outputs that need no gradient beside those that do", lambda: Calling(counted, Counting, classes=3))


Viewed = made(
    Block,
    lambda self, x: (self.norm(Block.forward(self, x)) * self.gain).view(-1, 2, WIDTH),
    norm=lambda: nn.LayerNorm(WIDTH),
    gain=lambda: nn.Parameter(torch.ones(WIDTH)),
)
Viewing = made(Block, lambda self, x: (x.view(-1, 2, WIDTH), self.inner(x)))
ViewOfTheRoot = made(Stack, lambda self, x: Stack.forward(self, x).view(-1, 2, WIDTH))
Scaling = made(
    nn.Module,
    lambda self, x: x.mul_(self.scale.exp()).add_(self.shift),
    scale=lambda: nn.Parameter(torch.ones(WIDTH)),
    shift=lambda: nn.Parameter(torch.zeros(WIDTH)),
)


def written(block: nn.Module, x: Tensor) -> Tensor:
    y = block(x)
    y += 1.0
    y[..., 0] = 0
    return y.view(len(x), WIDTH)


def mixed(block: nn.Module, x: Tensor) -> Tensor:
    viewed, inner = block(x.clone())
    return viewed.view(-1, WIDTH).mul(2) + inner


odd("views that are written into", lambda: Calling(written, Viewed))
odd("a view of an input beside an output", lambda: Calling(mixed, Viewing))
odd("inputs that are written into and returned", partial(Stack, Scaling))
odd("views that are written into and returned", lambda: Calling(lambda block, x: block(x.view(-1, 2, WIDTH)), Scaling))
odd("a view that the root returns", ViewOfTheRoot, lambda model, x: model(x).add_(1.0).square().mean())


class Remembering(Block):
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
    features: list[Tensor] = []
    modules = [model.first, model.blocks[0], model.blocks[1].up]
    hooks = [module.register_forward_hook(lambda *seen: features.append(seen[-1])) for module in modules]
    model(x)
    for hook in hooks:
        hook.remove()
    return squares(features)


class Energy(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.down(torch.tanh(self.up(at))).square().sum()
            (force,) = torch.autograd.grad(energy, at, create_graph=True)
        return x - 0.1 * force


Positions = made(nn.Module, lambda self, x: self.table[: len(x)], table=lambda: nn.Parameter(torch.randn(6, WIDTH)))
Placed = made(Stack, lambda self, x: self.middle((y := self.first(x)) + self.positions(y)), positions=Positions)
Returning = made(
    Stack,
    lambda self, x: (Stack.forward(self, x), {"scale": self.scale, "weight": self.first.weight.t()}),
    scale=lambda: nn.Parameter(torch.tensor([2.0])),
)


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
odd("a view of a parameter of the root", Placed)
odd("a view of a parameter of a unit", Placed, units=[Positions, Block])
odd("parameters of the root", Returning, weighted)


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


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.query, self.key, self.value, self.out = Adapted(), Adapted(), Adapted(), Adapted()

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm(x)
        scores = self.query(seen) @ self.key(seen).transpose(-1, -2)
        return x + self.out(scores.softmax(-1) @ self.value(seen))


class Side(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Adapted() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = (branch(x) for branch in self.branches)
        return x + first * torch.sigmoid(second) * third


Leaves = made(Calling, lambda self, x: self.middle(x.requires_grad_()))
"""Its blocks read the model's input, of which a gradient is asked for, and what checkpointing hands on."""


class Mixed(Stack):
    """MultiheadAttention computes otherwise where query, key and value are not one tensor."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True), blocks=1)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 3 * WIDTH, batch_first=True, dropout=0.0)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([self.first(x), x.flip(0), x.cos()], dim=1)
        x = self.encoder(self.gru(self.blocks[0](x)[0])[0])
        return self.attention(x, x, x)[0]


NESTED = [Attention, Adapted, nn.Linear]
odd("adapters in blocks", partial(Stack, Attention))
odd("adapters in units of their own", partial(Stack, Attention), units=[Adapted])
odd("adapters in units within units", partial(Stack, Attention, blocks=1), units=NESTED)
odd("adapters recomputed", lambda: Calling(recomputed, Attention, blocks=1), units=NESTED)
odd("adapters under re-entrant checkpointing", lambda: Calling(reentrant, Attention, blocks=1), units=NESTED)
odd("leaves that several units read", lambda: Leaves(reentrant, Side), units=[Adapted])
odd("recurrent layers and attention", Mixed, units=[nn.LSTM, nn.GRU, nn.TransformerEncoderLayer, nn.MultiheadAttention])


segments = made(Stack, lambda self, x: checkpoint_sequential([*self.blocks], 2, self.first(x), use_reentrant=False))
odd("segments recomputed", partial(segments, blocks=8), units=[Block])
odd("siblings", lambda: Stack(Side), units=[Adapted])
odd("siblings under re-entrant checkpointing", lambda: Calling(reentrant, Side), units=[Adapted])


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "at"), MODELS.cases())
@ranks.on(2, timeout=20)
def test_numbers_are_those_of_torch(rank, world, name, at):
    MODELS[name].trains(rank, at)


@pytest.mark.slow
@gpus.cpu_only("there units are gathered ahead")
@pytest.mark.parametrize("at", ["3", "3 memory first"])
@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith(("segments", "siblings"))])
@ranks.on(2, timeout=20)
def test_units_that_read_one_tensor_or_are_recomputed_together_are_released_one_by_one(rank, world, name, at):
    model = MODELS[name]
    both = SideBySide(model.net(), partial(AT[at], **model.options))
    steps(both, rank, 1)
    counts = unsharded_in_backward(both.model, [one.up.weight for one in units(both.model)])
    steps(both, rank, 2)
    assert max(counts) <= (1 if READS or at == "3 memory first" else 2)  # over Gloo one more is gathered half-way


def units(model: nn.Module) -> list[nn.Module]:
    return [one for one in model.modules() if isinstance(one, (Adapted, Block))]


# Frozen weights that wrap other tensors (quantised) and are left out of sharding: nobody sends them.


class Quantised(nn.Module):
    """Weights as a high and a low shard, and a buffer of the same kind."""

    def __init__(self, device: str = gpus.DEVICE) -> None:
        super().__init__()
        high, low = torch.randn(WIDTH, WIDTH, device=device), torch.randn(WIDTH, WIDTH, device=device) / 64
        self.weight = nn.Parameter(TwoTensor(high, low), requires_grad=False)
        self.register_buffer("scale", TwoTensor(high[0].clone(), low[0].clone()))

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return x @ (weight.a + weight.b) * (self.scale.a + self.scale.b)


class Net(nn.Module):
    def __init__(self, device: str = gpus.DEVICE) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.adapter, self.norm = Quantised(device), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.base(x) + self.adapter(x))


def trained(wrapped, optimizer, rank):
    losses = []
    for step in range(4):
        x = torch.randn(5, WIDTH, generator=gpus.generator(10 * rank + step))
        losses.append(take_step(optimizer, wrapped(x).square().mean()))
    return losses


def by_ddp(net):
    net._ddp_params_and_buffers_to_ignore = ["base.weight", "base.scale"]
    return DistributedDataParallel(net), SGD(net.adapter.parameters(), lr=0.1, momentum=0.9)


def by_oss(net):
    wrapped, _ = by_ddp(net)
    return wrapped, zero.OSS(net.adapter.parameters(), SGD, lr=0.1, momentum=0.9)


def by_sharded_ddp(net):
    optimizer = zero.OSS(net.adapter.parameters(), SGD, lr=0.1, momentum=0.9)
    net.norm.requires_grad_(False)
    return zero.ShardedDDP(net, optimizer), optimizer


def by_fsdp(net):
    net.norm.requires_grad_(False)
    wrapped = zero.FSDP(net, ignored_modules=[net.base])
    return wrapped, SGD(net.adapter.parameters(), lr=0.1, momentum=0.9)


def by_fsdp_without_the_parameter(net):
    net.norm.requires_grad_(False)
    wrapped = zero.FSDP(net, ignored_parameters=[net.base.weight])
    return wrapped, SGD(net.adapter.parameters(), lr=0.1, momentum=0.9)


WAYS = [by_oss, by_sharded_ddp, by_fsdp, by_fsdp_without_the_parameter]


@pytest.mark.parametrize("wrap", WAYS)
@ranks.on(2, timeout=20)
def test_quantised_weights_left_out_of_sharding_stay_as_they_are(rank, world, wrap):
    plain = Net()
    expected = trained(*by_ddp(plain), rank)
    net = Net()
    wrapped, optimizer = wrap(net)
    assert trained(wrapped, optimizer, rank) == expected
    with torch.no_grad():
        net.base.weight.a.add_(rank)  # each rank's own
    if isinstance(wrapped, zero.FSDP):
        wrapped.apply(lambda module: None)
    elif isinstance(wrapped, zero.ShardedDDP):
        wrapped.sync_buffers()
    weights = zero.full_state_dict(wrapped, device=None, to=None)
    assert torch.equal(weights["adapter.weight"], plain.adapter.weight)
    assert torch.equal(weights["base.weight"].a, plain.base.weight.a + rank)
    wrapped.load_state_dict(wrapped.state_dict())
    assert torch.equal(net.base.weight.b, plain.base.weight.b)


@ranks.raises(2, ValueError, "'base.weight' is a TwoTensor on the meta device", timeout=20)
def test_quantised_weights_without_values_are_refused_as_nobody_could_send_them(rank, world):
    by_fsdp(Net("meta" if rank else "cpu"))


@ranks.on(2)
def test_an_optimizer_may_have_parameters_that_are_not_sharded_beside_files(rank, world, tmp_path):
    """Its step is one step for them, and for its hooks, however many pieces of files it steps."""
    outside, steps = nn.Parameter(torch.ones(3)), list[int]()
    model = zero.FSDP(nn.Linear(5, 5), offload=zero.DiskOffload(tmp_path))
    optimizer = SGD([*model.parameters(), outside], lr=0.1, momentum=0.9)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    for _ in range(3):
        take_step(optimizer, model(torch.ones(2, 5)).sum() + outside.sum())
    assert len(steps) == 3
    assert outside.tolist() == pytest.approx([1 - 0.1 * (1 + 1.9 + 2.71)] * 3)
