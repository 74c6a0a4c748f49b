"""FSDP: what lies where at rest and while a unit computes, full weights in and out.

That it trains right in all kinds of loops is tested in test_parity.py and test_training.py.
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ranks
import zero
from assertions import plain, same, same_weights
from inner import Meter, at_rest, unsharded
from runs import SideBySide
from zoo import WIDTH, Gained, Stack, batch


class Net(Stack):
    def __init__(self) -> None:
        super().__init__(Gained, blocks=4)
        self.register_buffer("shift", torch.arange(float(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)


def total(value: float) -> float:
    tensor = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item()


def assert_in_parts(model: zero.FSDP, whole: nn.Module) -> None:
    """Of every parameter each rank holds a shard of as many dimensions, and nothing more of it exists."""
    for (name, param), (whole_name, expected) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert name == whole_name
        assert param.shape == expected.shape
        own = plain(param)
        assert own.dim() == expected.dim() or (not expected.dim() and not own.numel())  # nothing has a dimension
        assert total(own.numel()) == expected.numel()
        assert param.grad is None or plain(param.grad).shape == own.shape
    assert not unsharded(model)
    held = {param.untyped_storage() for param in model.parameters()}
    padding = 64 * (1 + dist.get_world_size()) * sum(1 for _ in model.parameters())
    assert total(sum(one.nbytes() for one in held)) <= sum(param.nbytes for param in whole.parameters()) + padding


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "options"), [(3, {}), (2, {"partition": "whole"}), (2, {"reshard_after_forward": False})]
)
@ranks.on("world")
def test_at_rest_parameters_and_gradients_are_parts(rank, world, options):
    whole, model = Net(), zero.FSDP(Net(), **options)
    assert_in_parts(model, whole)
    model(batch(rank, 0)).square().mean().backward()
    assert_in_parts(model, whole)
    whole(batch(rank, 0)).square().mean().backward()
    for param, expected in zip(model.parameters(), whole.parameters(), strict=True):
        total_of_all = expected.grad.flatten()  # NCCL sends no tensor that is not contiguous
        dist.all_reduce(total_of_all)
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, None if param.grad is None else plain(param.grad).flatten())
        shards = torch.cat([shard for shard in gathered if shard is not None])
        torch.testing.assert_close(shards, total_of_all / world, rtol=2e-6, atol=1e-8)
    model.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@ranks.on(2)
def test_a_forward_that_needs_no_backward_leaves_parts(rank, world):
    model = zero.FSDP(Net(), reshard_after_forward=False)
    for within in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        model.requires_grad_(within is not torch.enable_grad).train(within is torch.no_grad)
        with within():
            model(batch(rank, 0))
        assert_in_parts(model, Net())


@ranks.on(2)
def test_parameters_keep_identity_and_names_and_attributes_are_forwarded(rank, world):
    net = tied_net()
    before = list(net.named_parameters())
    model = zero.FSDP(net)
    model(batch(rank, 0)).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    after = list(model.module.named_parameters())
    assert [name for name, _ in before] == [name for name, _ in after]
    assert all(one is other for (_, one), (_, other) in zip(before, after, strict=True))
    assert model.module is net
    assert model.blocks is net.blocks and model.shift is net.shift
    assert net.blocks[3].linear.weight is net.first.weight
    with pytest.raises(AttributeError, match="no_such"):
        model.no_such  # noqa: B018


def random(seed: int, net: nn.Module) -> nn.Module:
    torch.manual_seed(seed)
    for tensor in [*net.parameters(), *net.buffers()]:
        tensor.data.normal_()
    return net


@ranks.on(2)
def test_ranks_start_from_the_weights_of_rank_0(rank, world):
    same(zero.FSDP(random(rank, Net())).state_dict(), {**random(0, Net()).state_dict()})


def tied_net() -> nn.Module:
    net = Net()
    net.blocks[3].linear.weight = net.first.weight
    return net


@ranks.on(2)
def test_state_dict_is_the_plain_one_and_plain_ones_load(rank, world):
    model, plain = zero.FSDP(tied_net()), tied_net()
    found = model.state_dict()
    assert list(found) == list(plain.state_dict())
    same({**found}, {**plain.state_dict()})
    assert not any(tensor.requires_grad for tensor in found.values())
    assert_in_parts(model, plain)

    random(1, plain)
    given, kept = plain.state_dict(), copy.deepcopy(plain).state_dict()
    assert str(model.load_state_dict(given)) == "<All keys matched successfully>"
    for weights in (given, model.state_dict(), zero.full_state_dict(model, to=None)):
        same({**weights}, {**kept})
    tied_net().load_state_dict(model.state_dict())

    with pytest.raises(RuntimeError, match=r"Missing key.*shift"):
        model.load_state_dict({name: value for name, value in given.items() if name != "shift"})
    with pytest.raises(ValueError, match="assign=False"):
        model.load_state_dict(given, assign=True)
    missing = model.load_state_dict({"shift": given["shift"]}, strict=False).missing_keys
    assert missing == [name for name in given if name != "shift"]
    assert_in_parts(model, plain)
    assert torch.equal(model(batch(rank, 0)), plain(batch(rank, 0)))


@ranks.on(2)
def test_summon_full_params_with_and_without_writeback(rank, world):
    model, plain = zero.FSDP(Net()), Net()

    def written(factor: float, **how: Any) -> None:
        with model.summon_full_params(**how), torch.no_grad():
            same_weights(model.module, plain)
            for param in model.parameters():
                param.mul_(factor)

    def unchanged() -> None:
        assert_in_parts(model, plain)
        same({**model.state_dict()}, {**plain.state_dict()})

    written(2.0)
    for param in plain.parameters():
        param.data.mul_(2)
    unchanged()
    written(3.0, writeback=False)
    unchanged()
    with pytest.raises(KeyError), model.summon_full_params():
        raise KeyError
    unchanged()
    assert torch.equal(model(batch(rank, 0)), plain(batch(rank, 0)))
    written(1.0)  # after a forward whose backward never came
    unchanged()


@ranks.raises(2, RuntimeError, "create_graph=True", "stage 2", timeout=20)
def test_gradients_of_gradients_are_refused_with_the_remedy(rank, world):
    model = zero.FSDP(Net())
    inputs = batch(rank, 0).requires_grad_()
    torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)


@ranks.on(2)
def test_gradients_that_no_sync_has_left_are_freed_where_they_are_cleared(rank, world):
    with Meter() as meter:
        model = zero.FSDP(Net())
        model(batch(rank, 0)).sum().backward()
        model.zero_grad()
        before = at_rest(meter)
        with model.no_sync():
            model(batch(rank, 1)).sum().backward()
        assert at_rest(meter) == before + sum(param.grad.nbytes for param in model.parameters())
        model.zero_grad()
        assert at_rest(meter) == before


class Branches(Stack):
    """Its second block counts in the loss only where it is asked to. kept: whether a backward may come through it."""

    seen: Tensor | None = None

    def forward(self, x: Tensor, both: bool, kept: bool) -> Tensor:
        x = self.first(x)
        one = self.blocks[0](x)
        with torch.set_grad_enabled(kept):
            self.seen = self.blocks[1](x)
        return one + self.seen if both else one


@ranks.on(2)
def test_what_no_sync_left_on_one_rank_is_averaged_by_a_backward_that_passes_the_unit_by(rank, world):
    """All ranks reduce the unit then, although one has no gradient of it."""
    both = SideBySide(Branches(blocks=2), "3 kept")
    for step in range(3):
        x = batch(rank, step)
        both.step(
            lambda model: model(x, rank == 0, True).square().mean(),  # noqa: B023
            lambda model: model(x, False, False).square().mean(),  # noqa: B023
            unsent=1,
        )
