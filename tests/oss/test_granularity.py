"""Cuts at multiples of a granularity, for an optimizer that keeps its state in 8 bits, by blocks. It runs beside itself
unsharded."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks
import zero
from models import take_step
from optimizers import ByParameter
from reference import FEATURES, built, loss_of, refusal, same

BLOCK = 256
CASES = [(stage, world) for stage in (1, 2) for world in (2, 3)]


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


def averaged_in_rank_order(params, world):
    """Gradients as the owner adds them up."""
    for param in params:
        told = [torch.empty_like(param.grad) for _ in range(world)]
        dist.all_gather(told, param.grad)
        param.grad = functools.reduce(torch.add, told) * (1 / world)


def _blocks(rank, world, stage):
    model, plain = built(Odd), built(Odd)
    expected = Blockwise(plain.parameters())
    optimizer = zero.OSS(model.parameters(), Blockwise, granularity=BLOCK)
    wrapped = zero.ShardedDDP(model, optimizer) if stage == 2 else model
    for step in range(6):
        for each, its in ((wrapped, optimizer), (plain, expected)):
            its.zero_grad()
            loss_of(each, rank, step).backward()
        averaged_in_rank_order(plain.parameters(), world)
        if stage == 1:
            averaged_in_rank_order(model.parameters(), world)
        optimizer.step()
        expected.step()
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            same(param.detach(), other.detach(), f"{name} in step {step}")
    cut = [0 < optimizer.part(param).numel() < param.numel() for param in model.parameters()]
    state = {"code": 0, "scale": 0}
    for each in optimizer.optim.state.values():
        for key in state:
            state[key] += each[key].numel()
    return any(cut), state


@pytest.mark.parametrize(("stage", "world"), CASES)
def test_an_optimizer_that_works_in_blocks_equals_the_unsharded_one(stage, world):
    told = ranks.run(_blocks, world, args=(stage,))
    assert any(cut for cut, _ in told), "nothing was cut"
    numels = [param.numel() for param in Odd().parameters()]
    assert sum(state["code"] for _, state in told) == sum(numels)
    assert sum(state["scale"] for _, state in told) == sum(-(-numel // BLOCK) for numel in numels), "a block was cut"


@pytest.mark.parametrize("cut", [{"partition": "even"}, {"granularity": BLOCK // 2}], ids=str)
@ranks.raises(
    2, ValueError, r"cuts inside parameters, but Blockwise .* needs each parameter whole", "partition='whole'"
)
def test_cuts_that_do_not_respect_blocks_are_refused(rank, world, cut):
    zero.OSS(built(Odd).parameters(), Blockwise, **cut)


def _step(rank, number, *pairs):
    for model, optimizer in pairs:
        take_step(optimizer, loss_of(model, rank, number))


def _consolidated(rank, world, blocks):
    """Scales by block are put together to the unsharded optimizer's, and go on from there under other cuts.

    blocks: of the optimizer in each piece that is not to be cut.
    """
    ours, plain = built(Odd), built(Odd)
    optimizer = zero.OSS(ours.parameters(), Blockwise, granularity=blocks * BLOCK)
    expected = Blockwise(plain.parameters())
    for step in range(2):
        _step(0, step, (ours, optimizer), (plain, expected))
    cut = [0 < optimizer.part(param).numel() < param.numel() for param in ours.parameters()]
    optimizer.consolidate_state_dict(to=None)
    state = optimizer.state_dict()
    same(state["state"], expected.state_dict()["state"], "the state")
    again = built(Odd)
    again.load_state_dict(ours.state_dict())
    restarted = zero.OSS(again.parameters(), Blockwise, granularity=(3 - blocks) * BLOCK)
    restarted.load_state_dict(state)
    for step in range(2, 4):
        _step(0, step, (again, restarted), (plain, expected))
    same([param.detach() for param in again.parameters()], [param.detach() for param in plain.parameters()], "weights")
    return any(cut)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_state_by_blocks_is_consolidated_and_loads_under_other_cuts(world, blocks):
    assert any(ranks.run(_consolidated, world, args=(blocks,))), "nothing was cut"


class Uneven(Blockwise):
    """Keeps three numbers a shard, whatever its length: shards of no known layout."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["moments"] = torch.ones(3)


@ranks.on(2)
def test_state_of_any_other_length_is_refused_where_parameters_are_cut(rank, world):
    ours = built(Odd)
    optimizer = zero.OSS(ours.parameters(), Uneven, granularity=BLOCK)
    _step(0, 0, (ours, optimizer))
    told = refusal(lambda: optimizer.consolidate_state_dict(to=None))
    assert told.startswith("ValueError: the state 'moments' of"), told
    assert "partition='whole'" in told


@ranks.on(2)
def test_state_by_blocks_of_a_rank_itself_continues_bit_for_bit(rank, world):
    """Without consolidation each rank's own shard is saved and loaded as it is."""
    finals = []
    for restart in (False, True):
        model = built(Odd)
        optimizer = zero.OSS(model.parameters(), Blockwise, granularity=BLOCK)
        for step in range(4):
            if restart and step == 2:
                state = optimizer.state_dict()
                optimizer = zero.OSS(model.parameters(), Blockwise, granularity=BLOCK)
                optimizer.load_state_dict(state)
            take_step(optimizer, loss_of(model, 0, step))
        finals.append([param.detach() for param in model.parameters()])
    same(finals[1], finals[0], "weights")


@ranks.on(3)
def test_parameters_added_later_are_cut_at_multiples(rank, world):
    model, plain = built(Odd), built(Odd)
    optimizer = zero.OSS(model.first.parameters(), Blockwise, granularity=BLOCK)
    expected = Blockwise(plain.first.parameters())
    for step in range(4):
        for each, its in ((model, optimizer), (plain, expected)):
            if step == 2:
                its.add_param_group({"params": each.middle.parameters(), "lr": 0.01})
            each.zero_grad()
            loss_of(each, 0, step).backward()
            its.step()
    same([p.detach() for p in model.parameters()], [p.detach() for p in plain.parameters()], "weights")
