"""FSDP: what lies where at rest and while a unit computes, full weights in and out, what is sent, ranks out of step.

That it trains right in all kinds of loops is tested in test_parity.py and test_training.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.optim import AdamW

import gpus
import matrix
import ranks
import zero
from models import CASES, GPT, take_step
from sidebyside import SideBySide, data, sgd, side_by_side

WIDTH = 9


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.register_buffer("shift", torch.arange(float(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.shift
        for block in self.blocks:
            x = block(x)
        return x


def loss_on(x: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(x).square().mean()


def batch(rank: int, step: int = 0) -> Tensor:
    return data(3, WIDTH, rank=rank, step=step)


def total(value: float) -> float:
    """Over all ranks."""
    tensor = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item()


def assert_in_parts(model: zero.FSDP, whole: nn.Module) -> None:
    """Of every parameter each rank holds a shard of as many dimensions, and nothing more of it exists."""
    for (name, param), (whole_name, expected) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert name == whole_name
        assert param.dim() == expected.dim() or (not expected.dim() and not param.numel())  # nothing has a dimension
        assert total(param.numel()) == expected.numel()
        assert param.grad is None or param.grad.shape == param.shape
    assert all(group.full.untyped_storage().nbytes() == 0 for unit in model._units for group in unit.groups)
    held = {param.untyped_storage() for param in model.parameters()}
    padding = 64 * (1 + dist.get_world_size()) * sum(1 for _ in model.parameters())
    assert total(sum(one.nbytes() for one in held)) <= sum(param.nbytes for param in whole.parameters()) + padding


# ------------------------------------------------------------------------------------------------------ what lies where


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "options", [{}, {"partition": "whole"}, {"reshard_after_forward": False}], ids=["even", "whole", "kept"]
)
@ranks.on("world")
def test_at_rest_parameters_and_gradients_are_parts(rank, world, options):
    whole, model = Net(), zero.FSDP(Net(), **options)
    assert_in_parts(model, whole)
    model(batch(rank)).square().mean().backward()
    assert_in_parts(model, whole)
    whole(batch(rank)).square().mean().backward()
    for param, expected in zip(model.parameters(), whole.parameters(), strict=True):
        total_of_all = expected.grad.flatten()  # NCCL sends no tensor that is not contiguous
        dist.all_reduce(total_of_all)
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, None if param.grad is None else param.grad.flatten())
        shards = torch.cat([shard for shard in gathered if shard is not None])
        torch.testing.assert_close(shards, total_of_all / world, rtol=2e-6, atol=1e-8)
    model.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["resharded", "kept"])
@ranks.on(2)
def test_a_forward_that_needs_no_backward_leaves_parts(rank, world, options):
    model = zero.FSDP(Net(), **options)
    with torch.no_grad():
        model(batch(rank))
    assert_in_parts(model, Net())
    model.eval()
    with torch.inference_mode():
        model(batch(rank))
    assert_in_parts(model, Net())
    model.requires_grad_(False)
    model(batch(rank))
    assert_in_parts(model, Net())


class Probe(torch.autograd.Function):
    """Calls a function in forward and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[str], None]) -> Tensor:
        ctx.call = call
        call("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.call("backward")
        return gradient, None


def whole_meanwhile(rank: int, world: int, options: dict[str, Any]) -> dict[str, list[list[str]]]:
    model = zero.FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
    seen: dict[str, list[list[str]]] = {"forward": [], "backward": []}

    def look(phase: str) -> None:
        seen[phase].append(
            [unit.name for unit in model._units if any(group.full.untyped_storage().nbytes() for group in unit.groups)]
        )

    for block in model.blocks:
        block.norm.register_forward_hook(lambda _, __, output: Probe.apply(output, look))
    model(batch(rank)).square().mean().backward()
    return seen


@gpus.cpu_only("the next unit is gathered ahead there")
def test_only_the_root_and_the_unit_that_computes_are_whole():
    for seen in ranks.run(whole_meanwhile, args=({},)):
        assert seen["forward"] == [["", f"blocks.{number}"] for number in range(4)]
        assert seen["backward"] == [["", f"blocks.{number}"] for number in reversed(range(4))]


def test_units_that_are_kept_after_forward_go_one_by_one_in_backward():
    for seen in ranks.run(whole_meanwhile, args=({"reshard_after_forward": False},)):
        assert seen["forward"] == [["", *(f"blocks.{done}" for done in range(number + 1))] for number in range(4)]
        assert seen["backward"] == seen["forward"][::-1]


# --------------------------------------------------------------------------------------- parameters stay what they were


@ranks.on(2)
def test_parameters_keep_identity_and_names_and_attributes_are_forwarded(rank, world):
    net = Net()
    net.blocks[3].linear.weight = net.first.weight
    before = list(net.named_parameters())
    model = zero.FSDP(net)
    model(batch(rank)).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    after = list(model.module.named_parameters())
    assert [name for name, _ in before] == [name for name, _ in after]
    assert all(one is other for (_, one), (_, other) in zip(before, after, strict=True))
    assert model.module is net
    assert model.blocks is net.blocks and model.shift is net.shift
    assert net.blocks[3].linear.weight is net.first.weight
    with pytest.raises(AttributeError, match="no_such"):
        model.no_such  # noqa: B018


def by_dimensions(model: nn.Module) -> list[dict[str, Any]]:
    """As many scripts choose what decays."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": 0.3},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0, "lr": 0.01},
    ]


def in_groups_before(model: nn.Module, optim: Any) -> Any:
    optimizer = optim(by_dimensions(model))
    return zero.FSDP(model), optimizer


def in_groups_after(model: nn.Module, optim: Any) -> Any:
    wrapped = zero.FSDP(model)
    return wrapped, optim(by_dimensions(wrapped))


@pytest.mark.parametrize("build", [in_groups_before, in_groups_after], ids=["before", "after"])
@ranks.on(2)
def test_an_optimizer_with_groups_built_before_or_after_wrapping_trains_the_same(rank, world, build):
    for optim in (sgd, partial(AdamW, lr=1e-3)):
        both = SideBySide(Net(), build, optim)
        both.plain_optimizer = optim(by_dimensions(both.plain))
        for step in range(3):
            both.step(loss_on(batch(rank, step)))


class OwnsNothing(nn.Module):
    """A root that has no parameters of its own, around a unit that is frozen and one without parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False, track_running_stats=False)
        self.trained = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.trained(torch.tanh(self.norm(self.frozen(x))))


@ranks.on(2)
def test_a_root_without_parameters_and_units_without_trained_ones(rank, world):
    policy = ModuleWrapPolicy({nn.Linear, nn.BatchNorm1d})
    both = side_by_side(OwnsNothing(), {"auto_wrap_policy": policy})
    for step in range(3):
        both.step(loss_on(batch(rank, step)))
    assert_in_parts(both.model, OwnsNothing())


@ranks.on(2)
def test_units_within_units(rank, world):
    policy = CustomPolicy(lambda module: isinstance(module, (Block, nn.Linear, nn.LayerNorm)))
    both = side_by_side(Net(), {"auto_wrap_policy": policy})
    assert len(both.model._units) == 2 + 3 * 4
    for step in range(3):
        both.step(loss_on(batch(rank, step)))
    assert_in_parts(both.model, Net())


# --------------------------------------------------------------------------------------------------------- full weight


def other_start(rank: int) -> nn.Module:
    """Ranks that start from different weights."""
    torch.manual_seed(rank + 1)
    net = Net()
    torch.manual_seed(rank + 1)
    for tensor in [*net.parameters(), *net.buffers()]:
        tensor.data.normal_()
    return net


@ranks.on(2)
def test_ranks_start_from_the_weights_of_rank_0(rank, world):
    expected = other_start(0).state_dict()
    found = zero.FSDP(other_start(rank)).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def tied_net() -> nn.Module:
    net = Net()
    net.blocks[3].linear.weight = net.first.weight
    return net


@pytest.mark.parametrize("options", [{}, {"partition": "whole"}], ids=["even", "whole"])
@ranks.on(3)
def test_state_dict_is_the_plain_one_and_plain_ones_load(rank, world, options):
    net = tied_net()
    expected = copy.deepcopy(net.state_dict())
    model = zero.FSDP(net, **options)
    found = model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not any(tensor.requires_grad for tensor in found.values())
    assert_in_parts(model, tied_net())
    for tensor in found.values():  # copies: changing them changes nothing
        tensor.fill_(7)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())

    torch.manual_seed(1)
    other = {name: torch.randn_like(value) for name, value in expected.items()}
    other["blocks.3.linear.weight"] = other["first.weight"]
    given = {name: value.clone() for name, value in other.items()}
    assert str(model.load_state_dict(other)) == "<All keys matched successfully>"
    assert all(torch.equal(value, given[name]) for name, value in other.items())
    assert all(torch.equal(value, given[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, given[name]) for name, value in zero.full_state_dict(model).items())
    tied_net().load_state_dict(model.state_dict())

    with pytest.raises(RuntimeError, match=r"Missing key.*shift"):
        model.load_state_dict({name: value for name, value in other.items() if name != "shift"})
    with pytest.raises(ValueError, match="assign=False"):
        model.load_state_dict(other, assign=True)
    missing = model.load_state_dict({"shift": torch.zeros(WIDTH)}, strict=False).missing_keys
    assert missing == [name for name in expected if name != "shift"]
    assert_in_parts(model, tied_net())
    model.load_state_dict(expected)
    plain = tied_net()
    assert torch.equal(model(batch(rank)), plain(batch(rank)))


def assert_weights(model: nn.Module, plain: nn.Module) -> None:
    found, expected = model.state_dict(), plain.state_dict()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@ranks.on(2)
def test_summon_full_params_with_and_without_writeback(rank, world):
    model, plain = zero.FSDP(Net()), Net()
    with model.summon_full_params():
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), plain.parameters(), strict=True))
        assert all(one.shape == other.shape for one, other in zip(model.parameters(), plain.parameters(), strict=True))
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
    assert_in_parts(model, plain)
    for param in plain.parameters():
        param.data.mul_(2)
    assert_weights(model, plain)
    with model.summon_full_params(writeback=False), torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert_weights(model, plain)
    with pytest.raises(KeyError), model.summon_full_params():
        raise KeyError
    assert_in_parts(model, plain)
    assert_weights(model, plain)
    assert torch.equal(model(batch(rank)), plain(batch(rank)))
    with model.summon_full_params(), torch.no_grad():  # after a forward whose backward never came
        model.first.weight.add_(1)
    plain.first.weight.data.add_(1)
    assert_weights(model, plain)


# --------------------------------------------------------------------------------------------------------- what is sent


def sent_in_a_step(rank: int, world: int, options: dict[str, Any]) -> tuple[zero.Traffic, int]:
    torch.manual_seed(0)
    case = CASES["gpt"]
    net = GPT(width=64, layers=4)
    size = sum(param.nbytes for param in net.parameters())
    model = zero.FSDP(net, **options)
    optimizer = AdamW(model.parameters())
    for step in range(2):
        before = zero.traffic()
        inputs = case.batch(rank, step).inputs
        model(*inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return zero.traffic() - before, size


@pytest.mark.parametrize("world", [2, 4])
def test_a_step_sends_at_most_one_and_a_half_times_what_ddp_sends(world):
    for options, most in [({}, 1.5), ({"partition": "whole"}, 1.5), ({"reshard_after_forward": False}, 1.02)]:
        sent = ranks.run(sent_in_a_step, world, args=(options,))
        all_reduce = 2 * (world - 1) * sent[0][1]  # over all ranks
        assert 0.98 < sum(traffic.total for traffic, _ in sent) / all_reduce <= most


# ---------------------------------------------------------------------------------------------------- ranks out of step


class Experts(nn.Module):
    """Experts, of which each rank runs its own; each is a unit."""

    def __init__(self, widths: tuple[int, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH)) for width in widths
        )

    def forward(self, x: Tensor, run: list[int], use: list[int] | None = None) -> Tensor:
        x = self.first(x)
        outputs = {number: self.experts[number](x) for number in run}
        return x + sum(outputs[number] for number in (run if use is None else use))


@matrix.combined(
    "run, widths, options",
    [[[0], [1]], [[0, 1], [1, 0]], [[0], []], [[], [1]], [[0, 1], [0]]],
    [(WIDTH, WIDTH), (500, 900)],
    [{}, {"reshard_after_forward": False}],
)
@ranks.raises(2, RuntimeError, "rank 0", "rank 1", r"experts\.\d", timeout=15)
def test_units_run_by_some_ranks_only_raise_on_every_rank(rank, world, run, widths, options):
    model = zero.FSDP(Experts(widths), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), **options)
    optimizer = sgd(model.parameters())
    for _ in range(3):
        take_step(optimizer, model(batch(rank), run[rank]).square().mean())


def experts_used_by_rank(rank: int, world: int, use: list[list[int]], options: dict[str, Any]) -> str:
    """All ranks run all experts, but their losses depend on other ones."""
    both = side_by_side(Experts((WIDTH, WIDTH)), options)
    try:
        for step in range(3):
            both.step(lambda model: model(batch(rank, step), [0, 1], use[rank]).square().mean())  # noqa: B023
    except RuntimeError as error:
        told = str(error)
        return "raised" if all(word in told for word in ("experts", "rank 0", "rank 1")) else told
    return "right"


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["resharded", "kept"])
@pytest.mark.parametrize(
    ("use", "outcome"),
    [([[0], [1]], "raised"), ([[0], []], "raised"), ([[0, 1], [1]], "right"), ([[0, 1], [0]], "raised")],
    ids=str,
)
def test_outputs_of_units_used_by_some_ranks_only_train_right_or_raise_on_every_rank(use, outcome, options):
    """Right where the unit that one rank does not use is the last that backward comes to."""
    assert ranks.run(experts_used_by_rank, args=(use, options), timeout=15) == [outcome] * 2


@ranks.raises(2, RuntimeError, "out of step", "rank 0", "rank 1", timeout=15)
def test_a_rank_that_takes_another_step_raises_on_every_rank(rank, world):
    model = zero.FSDP(Net())
    model(batch(rank)).square().mean().backward()
    if rank:
        model(batch(rank)).square().mean().backward()
    model.state_dict()


@ranks.raises(2, RuntimeError, "create_graph=True", "stage 2", timeout=20)
def test_gradients_of_gradients_are_refused_with_the_remedy(rank, world):
    model = zero.FSDP(Net())
    inputs = batch(rank).requires_grad_()
    torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
