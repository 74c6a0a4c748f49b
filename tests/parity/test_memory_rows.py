"""Parameters whose bytes overlap, and parameters that are given other data within forward."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import ranks
import zero
from rows import WIDTH, Rows, adam, changed

UNITS = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}
Change = Callable[["Net"], object]


class Net(nn.Module):
    """An embedding, layers, and an output layer, in the shapes of ties.

    change: what is done to it before it is wrapped. act: what it does to itself "before" or "after" its layers in each
    forward, or in the one that has the number `when`.
    """

    def __init__(self, change: Change = id, act: Change = id, when: object = "before") -> None:
        super().__init__()
        self.emb, self.out = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 7, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.act, self.when, self.count = act, when, 0
        change(self)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.when in ("before", self.count):
            self.act(self)
        x = self.emb(x.argmax(1) % 7) + sum((buffer.mean() for buffer in self.buffers()), torch.zeros(()))
        for block in self.blocks:
            x = torch.tanh(block(x))
        y = self.out(x + self.teacher(x))
        if self.when == "after":
            self.act(self)
        return y


def give(param: Tensor, data: Tensor) -> None:
    param.data = data


def slices(net: Net, start: int) -> None:
    both, size = torch.randn(14 * WIDTH), 7 * WIDTH
    net.emb.weight.data, net.out.weight.data = both[:size].view(7, -1), both[start : start + size].view(7, -1)


B4 = "B4: parameters that share memory"
TIED = ("out.weight", "emb.weight", "out.weight = emb.weight")
BLOCKS = ("blocks.0.weight", "blocks.1.weight")

SHARING: dict[str, tuple[Change, tuple[str, ...]]] = {
    "an output layer has the data of the embedding": (lambda n: give(n.out.weight, n.emb.weight.data), TIED),
    "a new parameter has it": (lambda n: setattr(n.out, "weight", nn.Parameter(n.emb.weight.data)), TIED),
    "it is loaded with assign": (lambda n: n.out.load_state_dict(n.emb.state_dict(), assign=True), TIED),
    "it is frozen": (lambda n: give(n.out.weight, n.emb.requires_grad_(False).weight.data), TIED),
    "on one rank alone": (lambda n: give(n.out.weight, n.emb.weight.data) if dist.get_rank() else None, TIED),
    "units have the same data": (lambda n: give(n.blocks[1].weight, n.blocks[0].weight.data), BLOCKS),
    "transposed data": (lambda n: give(n.blocks[1].weight, n.blocks[0].weight.data.t()), BLOCKS),
    "slices of one tensor overlap": (lambda n: slices(n, 3 * WIDTH), TIED[:2]),
    "slices have one element in common": (lambda n: slices(n, 7 * WIDTH - 1), TIED[:2]),
    "a bias is a row of a weight": (lambda n: give(n.blocks[0].bias, n.emb.weight.data[2]), ("blocks.0.bias", TIED[1])),
    "a view in another dtype": (
        lambda n: n.register_parameter("c", nn.Parameter(torch.view_as_complex(n.emb.weight.data.view(-1, 2)))),
        ("emb.weight", "c"),
    ),
}


def wrapped(rank: int, world: int, share: str, by: object) -> None:
    net = Net(SHARING[share][0])
    zero.setup(net, adam, stage=by) if by in (1, 2, 3) else zero.OSS(net.parameters(), adam)


@pytest.mark.parametrize("by", [1, 2, 3, "OSS without names"])
@pytest.mark.parametrize("share", SHARING)
def test_parameters_that_share_memory_are_refused_on_every_rank(share, by):
    """by: a stage, or the class."""
    told = ranks.expect_error(wrapped, 2, ValueError, args=(share, by), timeout=15)
    facts = SHARING[share][1] if by in (1, 2, 3) else ("parameter ", "of group 0")
    assert all(fact in text for fact in facts for text in told), told


@pytest.mark.parametrize("stage", [2, 3])
@ranks.raises(2, ValueError, r"'graph' has layout torch\.sparse_coo.*\.to_dense\(\)", timeout=15)
def test_a_sparse_buffer_is_refused(rank, world, stage):
    zero.setup(Net(lambda n: n.register_buffer("graph", torch.eye(3).to_sparse())), adam, stage=stage)


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


def fuse(net: nn.Module) -> None:
    """Weights come to lie side by side in one storage, as those of recurrent layers on a GPU."""
    vector_to_parameters(parameters_to_vector(net.parameters()).detach(), net.parameters())


row = Rows(B4, __name__)
row.of("weights are fused", net=lambda: changed(Recurrent(WIDTH, 5, 2, bidirectional=True), fuse))
row.of("slices of one tensor touch", net=lambda: Net(lambda n: slices(n, 7 * WIDTH)))
row.of("a weight is tied as a parameter", net=lambda: Net(lambda n: setattr(n.out, "weight", n.emb.weight)), optim=adam)
row.of("a layer is a shallow copy", net=lambda: Net(lambda n: n.blocks.append(copy.copy(n.blocks[0]))))
row.of(
    "one is empty", net=lambda: Net(lambda n: n.register_parameter("no", nn.Parameter(n.out.weight.data[2:2], False)))
)
row.of(
    "a buffer has the data of a weight",
    net=lambda: Net(lambda n: n.register_buffer("kept", n.out.weight.data)),
    or_refused="out.weight",
)

test_memory = row.tests()

NAME = r"blocks\.\d\.weight"
row = Rows("B5: p.data = ... inside forward", __name__, options=UNITS)
LOST = {"same": {3}, "refused": {1: NAME, 2: NAME}, "or_refused": NAME}
"""Refused at stages 1 and 2. At stage 3 so, too, or it counts."""


def average(net: Net) -> None:
    for mean, param in zip(net.teacher.parameters(), net.blocks[0].parameters(), strict=True):
        mean.data = 0.9 * mean.data + 0.1 * param.data


def halve(layer: nn.Module, *_: object) -> None:
    layer.weight.data = 0.5 * layer.weight.data


def clamp(net: Net) -> None:
    give(net.blocks[0].weight, net.blocks[0].weight.data.clamp(-0.1, 0.1))


TEACHER = {**LOST, "refused": dict.fromkeys((1, 2), "teacher"), "or_refused": "teacher"}
row.of("a teacher is a moving average", net=lambda: Net(act=average), **TEACHER)
row.of("so it is within one unit", net=lambda: Net(act=average), options={}, **TEACHER)
row.of("a teacher follows at the end of forward", net=lambda: Net(act=average, when="after"), optim=adam, **TEACHER)
row.of("a weight is clamped before its use", net=lambda: Net(act=clamp), **LOST)
row.of("a weight is clamped after its use", net=lambda: Net(act=clamp, when="after"), **LOST)
row.of("the second forward alone writes", net=lambda: Net(act=lambda n: halve(n.blocks[0]), when=2), **LOST)
row.of("a hook after the layer writes", net=lambda: Net(lambda n: n.blocks[0].register_forward_hook(halve)), **LOST)
row.of("a hook before the unit writes", net=lambda: Net(lambda n: n.blocks[0].register_forward_pre_hook(halve)), **LOST)
row.of("a backward hook writes", net=lambda: Net(lambda n: n.blocks[1].register_full_backward_hook(halve)), **LOST)
row.of("a weight is halved in place", net=lambda: Net(act=lambda n: n.out.weight.data.mul_(0.5)))
row.of(
    "one rank alone gives its weight a copy",
    net=lambda: Net(act=lambda n: give(n.out.weight, n.out.weight.data.clone()) if dist.get_rank() else None),
    or_refused="out.weight",
    fails={3},
)

test_forward = row.tests()
