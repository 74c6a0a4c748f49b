"""Cuts at multiples of a granularity, for an optimizer that keeps its state in 8 bits, by blocks. It runs beside itself
unsharded."""

import pytest
import torch
from torch import nn

import ranks
import zero
from assertions import same
from optimizers import ByParameter
from runs import take_step
from zoo import FEATURES, built, odd_loss

BLOCK = 256


class Blockwise(ByParameter):
    """SGD with momentum, kept as int8 with a scale for each block of 256 elements, counted from the parameter's start.

    T. Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022, with a linear code.
    """

    def __init__(self, params, lr=0.1, momentum=0.9):
        super().__init__(params, lr, momentum=momentum)

    def step_one(self, param, state, group):
        if not state:
            blocks = -(-param.numel() // BLOCK)
            state.update(code=torch.zeros_like(param, dtype=torch.int8), scale=torch.zeros(blocks))
        scale = state["scale"].repeat_interleave(BLOCK)[: param.numel()].view(param.shape)
        mean = state["code"] * scale * group["momentum"] + param.grad
        padded = nn.functional.pad(mean.flatten(), (0, -param.numel() % BLOCK)).view(-1, BLOCK)
        largest = padded.abs().amax(1)
        state["scale"].copy_(largest / 127)
        code = padded / (largest / 127).clamp(min=1e-30).unsqueeze(1)
        state["code"].copy_(code.round().flatten()[: param.numel()].view(param.shape))
        param.sub_(mean, alpha=group["lr"])


class Odd(nn.Module):
    """Of the parameters' numbers of elements few are multiples of the block, and some are less."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, 101)
        self.middle = nn.Linear(101, 128)
        self.norm = nn.LayerNorm(128)
        self.last = nn.Linear(128, 2)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs):
        return self.last(self.norm(torch.relu(self.middle(torch.tanh(self.first(inputs)))))) * self.scale


def step(number, *pairs):
    """On the same batch on every rank, of which averages are the gradients themselves, bit for bit."""
    for model, optimizer in pairs:
        take_step(optimizer, odd_loss(model, 0, number))


def assert_same(model, plain):
    same([param.detach() for param in model.parameters()], [param.detach() for param in plain.parameters()], "weights")


def _trained(rank, world, stage, blocks):
    """State is put together to the unsharded optimizer's, and goes on from there under other cuts.

    blocks: of the optimizer in each piece that is not to be cut.
    """
    inner, plain = built(Odd), built(Odd)
    optimizer = zero.OSS(inner.parameters(), Blockwise, granularity=blocks * BLOCK)
    expected = Blockwise(plain.parameters())
    model = zero.ShardedDDP(inner, optimizer) if stage == 2 else inner
    for number in range(3):
        step(number, (model, optimizer), (plain, expected))
        assert_same(inner, plain)
    cut = any(0 < optimizer.part(param).numel() < param.numel() for param in inner.parameters())
    kept = [sum(state[key].numel() for state in optimizer.state.values() if state) for key in ("code", "scale")]
    optimizer.consolidate_state_dict(to=None)
    same(optimizer.state_dict()["state"], expected.state_dict()["state"], "the state")
    again = built(Odd)
    again.load_state_dict(inner.state_dict())
    restarted = zero.OSS(again.parameters(), Blockwise, granularity=(3 - blocks) * BLOCK)
    restarted.load_state_dict(optimizer.state_dict())
    for number in range(3, 5):
        step(number, (again, restarted), (plain, expected))
    assert_same(again, plain)
    return cut, kept


@pytest.mark.slow
@pytest.mark.parametrize(("world", "stage", "blocks"), [(3, 1, 1), (2, 2, 2)])
def test_an_optimizer_that_works_in_blocks_equals_the_unsharded_one(world, stage, blocks):
    told = ranks.run(_trained, world, args=(stage, blocks))
    assert any(cut for cut, _ in told), "nothing was cut"
    numels = [param.numel() for param in Odd().parameters()]
    expected = [sum(numels), sum(-(-numel // BLOCK) for numel in numels)]
    assert [sum(of) for of in zip(*(kept for _, kept in told), strict=True)] == expected, "a block was cut"


@pytest.mark.parametrize("cut", [{"partition": "even"}, {"granularity": BLOCK // 2}], ids=str)
@ranks.raises(2, ValueError, "Blockwise .*whole", "partition='whole'")
def test_cuts_that_do_not_respect_blocks_are_refused(rank, world, cut):
    zero.OSS(built(Odd).parameters(), Blockwise, **cut)
