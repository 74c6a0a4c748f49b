"""ShardedDDP's options, reduce(), and unusual backwards."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ranks
import zero
from inner import held_here, shard_groups
from rows import Rows, momentum
from runs import SideBySide, average_gradients, sgd, stage_2
from zoo import WIDTH, built, data


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(7)), nn.LayerNorm(64))


def squares(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(data(5, 64, rank=rank, step=step)).square().mean()


@pytest.mark.parametrize(("world", "size"), [(2, None), (2, 0), (2, 5000), (3, 5000)])
@ranks.on("world")
def test_whatever_the_size_numbers_are_the_same_and_gradients_take_their_share(rank, world, size):
    model = built(layers)
    whole = sum(param.nbytes for param in model.parameters())
    side = SideBySide(model, partial(stage_2, bucket=size))
    if world == 2:  # where they are the same bit for bit
        for step in range(3):
            side.step(partial(squares, rank=rank, step=step))
    side.zero_grad()
    squares(side.model, rank, 4).backward()
    shards = [side.optimizer.part(param) for param in model.parameters()]
    storages = {shard.grad.untyped_storage() for shard in shards if shard.grad is not None}
    assert sum(storage.nbytes() for storage in storages) == pytest.approx(whole / world, rel=0.03)
    buckets = [[param.numel() for param in group.params] for group in shard_groups(side.optimizer)]
    if size is not None:
        assert all(sum(numels) <= size or len(numels) == 1 for numels in buckets)
    assert (max(map(len, buckets)) == 1) == (size == 0)
    assert (len(buckets) == 1) == (size is None)


@ranks.on(2)
def test_an_optimizer_steps_every_other_time_on_gradients_that_have_added_up(rank, world):
    models = built(layers), built(layers)
    kinds = sgd, partial(torch.optim.SGD, lr=0.01)
    both, ours = (
        [build(part.parameters(), kind) for part, kind in zip((model[:3], model[3:]), kinds, strict=True)]
        for model, build in zip(models, (lambda params, kind: kind(params), zero.OSS), strict=True)
    )
    plain, wrapped = DistributedDataParallel(models[0]), zero.ShardedDDP(models[1], ours)
    for step in range(4):
        for model, optimizers in ((plain, both), (wrapped, ours)):
            squares(model, rank, step).backward()
            for optimizer in optimizers[: 2 if step % 2 else 1]:
                optimizer.step()
                optimizer.zero_grad()
    for (name, param), other in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-7, msg=name)  # DDP rounds what was averaged before


row = Rows("at stage 2", __name__, same={2})


@row(optim=momentum)
def reduce_sends_what_no_sync_left(t: Any, i: int) -> None:
    with t.m.no_sync():
        t.loss(i).backward()
        if t.stage:
            t.loss(10 + i).backward()
            assert all(param.grad is not None for param in t.n.parameters())
    t.m.reduce() if t.stage else t.loss(10 + i).backward()
    assert not t.stage or all(held_here(param.grad).shape == t.o.part(param).shape for param in t.n.parameters())
    t.update(None)


@row()
def reduce_averages_with_zeros_where_a_rank_has_nothing(t: Any, i: int) -> None:
    with t.m.no_sync():
        if t.rank == 1:
            t.n.first(t.batch(i)).square().mean().backward()
    t.m.reduce() if t.stage else average_gradients(t.n)
    t.update(None)


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 16), nn.Softplus(), nn.Linear(16, 1))


def penalised(model: nn.Module, inputs: Tensor) -> Tensor:
    """I. Gulrajani et al., Improved Training of Wasserstein GANs, 2017, equation 3."""
    inputs = inputs.clone().requires_grad_()
    scores = model(inputs)
    [slope] = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
    return scores.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def derived_by_parameters(t: Any, i: int) -> None:
    gradients = torch.autograd.grad(t.loss(i), [*t.n.parameters()], create_graph=True)
    t.update(t.loss(10 + i) + sum(gradient.square().sum() for gradient in gradients))


row.of("inner derivatives are by parameters", derived_by_parameters, net=critic)
test_rows = row.tests()


@ranks.on(2)
def test_a_gradient_penalty_counts(rank, world):
    both = SideBySide(built(critic), "2")
    for step in range(3):
        both.step(partial(penalised, inputs=data(4, WIDTH, rank=rank, step=step)))


@ranks.raises(2, RuntimeError, "create_graph", "autograd.grad", r"gradient of '?4\.")
def test_a_graph_of_reduced_gradients_is_refused_with_the_remedy(rank, world):
    wrapped, _ = stage_2(built(critic), sgd)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the cycle between parameter and gradient
        wrapped(data(4, WIDTH, rank=rank)).square().sum().backward(create_graph=True)
