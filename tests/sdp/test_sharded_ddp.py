"""ShardedDDP: where gradients are, what is sent, and what a user sees of the module.

That it trains right in all kinds of loops is tested in test_parity.py and test_training.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import ranks
import zero
from models import CASES, GPT, take_step
from sidebyside import close, data, sgd, stage_2
from transports import overlapping
from zero.oss.gradients import full_gradient

WIDTH = 9


class Net(nn.Module):
    """Layers, of which a forward may skip some; `spare` is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.spare = nn.Linear(WIDTH, 2)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("shift", torch.arange(float(WIDTH)))

    def forward(self, x: Tensor, skip: tuple[int, ...] = ()) -> Tensor:
        x = self.frozen(x) + self.shift
        for number, layer in enumerate(self.layers):
            x = x if number in skip else torch.tanh(layer(x))
        return x


def batch(rank: int, step: int = 0) -> Tensor:
    return data(3, WIDTH, rank=rank, step=step)


def grads_after_backward(
    rank: int, world: int, options: dict[str, Any]
) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """By name: this rank's shard of the gradient, and the full one averaged by torch."""
    torch.manual_seed(0)
    net = GPT()
    reference = DistributedDataParallel(copy.deepcopy(net))
    model, optimizer = stage_2(net, sgd, **options)
    tokens = CASES["gpt"].batch(rank, 0).inputs[0]
    model(tokens).square().mean().backward()
    reference(tokens).square().mean().backward()
    assert all(full_gradient(param) is None for param in model.parameters())
    expected = dict(reference.module.named_parameters())
    return {name: (optimizer.part(param).grad, expected[name].grad) for name, param in net.named_parameters()}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "options", [{}, {"partition": "whole"}, {"bucket": 1000}], ids=["even", "whole", "small buckets"]
)
def test_each_rank_keeps_its_part_of_the_averaged_gradients_and_no_more(options, world):
    by_rank = ranks.run(grads_after_backward, world, args=(options,))
    sizes = [sum(shard.numel() for shard, _ in grads.values() if shard is not None) for grads in by_rank]
    size = sum(expected.numel() for _, expected in by_rank[0].values())
    assert sum(sizes) == size
    assert max(sizes) < 1.2 * size / world
    for name, (_, expected) in by_rank[0].items():
        shards = [grads[name][0].flatten() for grads in by_rank if grads[name][0] is not None]
        assert close(torch.cat(shards), expected.flatten(), 1e-5), name


@pytest.mark.parametrize("bucket", [None, 0], ids=["one bucket", "each alone"])
@ranks.on(2)
def test_what_no_rank_used_has_no_gradient_and_does_not_decay(rank, world, bucket):
    model, optimizer = stage_2(Net(), sgd, bucket=bucket)
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    skip = (1,) if rank else (1, 2)  # layer 1 by nobody, layer 2 by some
    model(batch(rank), skip=skip).square().mean().backward()
    grads = {name: optimizer.part(param).grad for name, param in model.module.named_parameters()}
    owned = {name for name, param in model.module.named_parameters() if optimizer.part(param).numel()}
    for name, grad in grads.items():
        if name.startswith(("layers.1.", "spare.", "frozen.")) or name not in owned:
            assert grad is None, name
        else:
            assert grad is not None, name
    optimizer.step()
    changed = {name for name, value in model.module.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {f"layers.{number}.{kind}" for number in (0, 2, 3) for kind in ("weight", "bias")}


def sent_in_a_step(rank: int, world: int, options: dict[str, Any]) -> tuple[int, int]:
    torch.manual_seed(0)
    net = GPT(width=64, layers=4)
    size = sum(param.nbytes for param in net.parameters())
    assert size >= 400_000
    model, optimizer = stage_2(net, sgd, **options)
    for step in range(2):
        before = zero.traffic()
        take_step(optimizer, model(CASES["gpt"].batch(rank, step).inputs[0]).square().mean())
    return (zero.traffic() - before).total, size


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("options", [{}, {"partition": "whole"}, {"bucket": 50_000}], ids=["even", "whole", "buckets"])
def test_a_step_sends_what_the_all_reduce_of_ddp_sends(options, world):
    sent = ranks.run(sent_in_a_step, world, args=(options,))
    all_reduce = 2 * (world - 1) * sent[0][1]  # over all ranks
    assert sum(one for one, _ in sent) == pytest.approx(all_reduce, rel=0.02)


@ranks.on(2)
def test_gradients_are_not_all_reduced(rank, world):
    with overlapping():  # what goes over the user's own group is seen
        model, optimizer = stage_2(nn.Linear(WIDTH, WIDTH), sgd)  # all parameters of which are used
        with CommDebugMode() as ours:
            model(batch(rank).requires_grad_()).square().mean().backward()
            optimizer.step()
    with CommDebugMode() as theirs:
        dist.all_reduce(torch.ones(1))
    ours, all_reduce = list(map(str, ours.get_comm_counts())), list(map(str, theirs.get_comm_counts()))
    assert ours and all_reduce
    assert not set(ours) & set(all_reduce)


@ranks.on(2)
def test_the_module_its_names_and_its_weights_are_the_plain_ones(rank, world):
    net = Net()
    before = list(net.named_parameters())
    expected = copy.deepcopy(net.state_dict())
    optimizer = zero.OSS(net.parameters(), sgd)
    model = zero.ShardedDDP(net, optimizer)
    assert model.module is net
    assert model.layers is net.layers and model.shift is net.shift
    with pytest.raises(AttributeError, match="no_such"):
        model.no_such  # noqa: B018
    assert all(one is other for (_, one), (_, other) in zip(before, net.named_parameters(), strict=True))
    found = model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    other = {name: torch.full_like(value, 0.1) for name, value in expected.items()}
    assert str(model.load_state_dict(other)) == "<All keys matched successfully>"
    with pytest.raises(RuntimeError, match=r"Missing key.*shift"):
        model.load_state_dict({name: value for name, value in other.items() if name != "shift"})
    with pytest.raises(ValueError, match="assign=False"):
        model.load_state_dict(other, assign=True)
    plain = Net()
    plain.load_state_dict(other)
    assert torch.equal(model(batch(rank)), plain(batch(rank)))
    model(batch(rank)).square().mean().backward()
    optimizer.step()  # what was loaded is what is trained
    assert not torch.equal(model.layers[0].weight, plain.layers[0].weight)
    assert (model.layers[0].weight - plain.layers[0].weight).abs().max() < 0.1
    assert not model.eval().module.training and model.train().module.training


def out_of_step(rank: int, world: int) -> None:
    net = nn.Linear(WIDTH, WIDTH)
    model, optimizer = stage_2(net, sgd)
    model(batch(rank)).mean().backward()
    if rank:
        model(batch(rank)).mean().backward()
    optimizer.step()


def test_a_rank_that_takes_another_step_raises_on_every_rank():
    messages = ranks.expect_error(
        out_of_step, 2, RuntimeError, "rank 0", "rank 1", "the reduction of a bucket", timeout=15
    )
    assert all("step of OSS" in message for message in messages)
