"""ShardedDDP's options, and unusual backwards, beside DistributedDataParallel or one process on the whole batch."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

import matrix
import ranks
import zero
from models import take_step
from sidebyside import SideBySide, average_gradients, data
from zero.oss.gradients import full_gradient

WIDTH = 64
OPTIMIZERS = {"sgd": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.1), "adam": partial(Adam, lr=1e-2)}
by_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def built(make, seed=7):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def layers():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(7)), nn.LayerNorm(WIDTH))


def squares(model, rank, step):
    return model(data(5, WIDTH, rank=rank, step=step)).square().mean()


def sharded(model, optim, **options):
    optimizer = zero.OSS(model.parameters(), optim)
    return zero.ShardedDDP(model, optimizer, **options), optimizer


def pair(make, optim):
    """DistributedDataParallel with the plain optimizer, and ShardedDDP with OSS."""
    plain = DistributedDataParallel(built(make))
    return (plain, optim(plain.parameters())), sharded(built(make), optim)


def assert_same(got, expected, what=""):
    for name, value in expected.module.state_dict().items():
        found = got.module.state_dict()[name]
        assert torch.equal(found, value), f"{what} {name} differs by at most {(found - value).abs().max()}"


SIZES = [(world, size, "sgd") for world in (2, 4) for size in (None, 0, 1000, 5000, 10**9)]


@pytest.mark.parametrize(("world", "size", "name"), [*SIZES, (2, 1000, "adam")])
@ranks.on("world")
def test_whatever_the_size_numbers_are_the_same_and_gradients_take_their_share(rank, world, size, name):
    model = built(layers)
    whole = sum(param.nbytes for param in model.parameters())
    side = SideBySide(model, partial(sharded, reduce_buffer_size=size), OPTIMIZERS[name])
    if world == 2:  # where they are the same bit for bit
        for step in range(4):
            side.step(lambda each, step=step: squares(each, rank, step))
    side.zero_grad()
    squares(side.model, rank, 4).backward()
    assert all(full_gradient(param) is None for param in model.parameters())
    shards = [side.optimizer.part(param) for param in model.parameters()]
    storages = {shard.grad.untyped_storage() for shard in shards if shard.grad is not None}
    assert sum(storage.nbytes() for storage in storages) == pytest.approx(whole / world, rel=0.03)
    buckets = [[param.numel() for param in flat.params] for flat in side.optimizer.shards.shard_groups]
    if size is not None:
        assert all(sum(numels) <= size or len(numels) == 1 for numels in buckets)
    assert (max(map(len, buckets)) == 1) == (size == 0)
    assert (len(buckets) == 1) == (size in (None, 10**9))


@ranks.on(2)
def test_sizes_count_elements_of_whatever_dtype(rank, world):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lesser = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False).bfloat16() for _ in range(4))
            self.greater = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False).double() for _ in range(4))

        def forward(self, inputs):
            for layer in [*self.lesser, *self.greater]:
                inputs = torch.tanh(layer(inputs.to(layer.weight.dtype)))
            return inputs

    model = built(Mixed)
    wrapped, optimizer = sharded(model, OPTIMIZERS["sgd"], reduce_buffer_size=2 * WIDTH * WIDTH)
    assert [len(flat.params) for flat in optimizer.shards.shard_groups] == [2] * 4
    squares(wrapped, rank, 0).backward()
    optimizer.step()


@by_optimizer
@ranks.on(2)
def test_reduce_sends_what_no_sync_left(rank, world, name):
    """Two backwards under no_sync and reduce() are what DDP makes of one under no_sync and one without."""
    plain, ours = pair(layers, OPTIMIZERS[name])
    for step in range(3):
        for model, optimizer in (plain, ours):
            optimizer.zero_grad()
            with model.no_sync():
                squares(model, rank, 10 * step).backward()
                if model is ours[0]:
                    squares(model, rank, 10 * step + 1).backward()
            if model is plain[0]:
                squares(model, rank, 10 * step + 1).backward()
            else:
                assert all(param.grad is not None for param in model.parameters())
                model.reduce()
                assert all(full_gradient(param) is None for param in model.parameters())
            optimizer.step()
        assert_same(ours[0], plain[0], f"step {step}:")


@ranks.on(2)
def test_reduce_averages_with_zeros_where_a_rank_has_nothing(rank, world):
    """Only one rank has something to send: the average is with zeros. What nobody has gets no gradient."""
    model = built(layers)
    wrapped, optimizer = sharded(model, OPTIMIZERS["sgd"])
    with wrapped.no_sync():
        if rank == 1:
            wrapped.module[0](data(5, WIDTH, rank=rank)).square().mean().backward()
    expected = built(layers)
    if rank == 1:
        expected[0](data(5, WIDTH, rank=rank)).square().mean().backward()
    average_gradients(expected)
    OPTIMIZERS["sgd"](expected.parameters()).step()
    wrapped.reduce()
    optimizer.step()
    for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(param, other), name
        assert (optimizer.part(param).grad is None) == (not name.startswith("0.") or not len(optimizer.part(param)))


@ranks.on(2)
def test_reduce_without_anything_left_changes_nothing(rank, world):
    model = built(layers)
    wrapped, optimizer = sharded(model, OPTIMIZERS["sgd"])
    squares(wrapped, rank, 0).backward()
    before = [None if (grad := optimizer.part(param).grad) is None else grad.clone() for param in model.parameters()]
    wrapped.reduce()
    after = [optimizer.part(param).grad for param in model.parameters()]
    assert all(one is two if one is None else torch.equal(one, two) for one, two in zip(before, after, strict=True))


def normed():
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


@ranks.on(2)
def test_buffers_are_in_step_when_asked(rank, world):
    """After a forward each rank has those of its own data."""
    wrapped, _ = sharded(built(normed), OPTIMIZERS["sgd"], broadcast_buffers=False)
    squares(wrapped, rank, 0)
    both = [torch.empty(16), torch.empty(16)]
    for apart in (True, False):
        torch.distributed.all_gather(both, wrapped.module[1].running_mean)
        assert torch.equal(*both) != apart
        before = both[0].clone()
        wrapped.sync_buffers()
    assert torch.equal(wrapped.module[1].running_mean, before)


def _start(rank, world, sync, alike):
    model = built(normed, seed=0 if alike else rank)
    model[1].running_mean += 0 if alike else rank
    model[0].bias.requires_grad_(False)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    sent = zero.traffic()
    wrapped, optimizer = sharded(model, OPTIMIZERS["sgd"], sync_models_at_startup=sync)
    sent = (zero.traffic() - sent).total
    started = {name: value.clone() for name, value in model.state_dict().items()}
    squares(wrapped, rank, 0).backward()
    optimizer.step()
    return own, started, {name: value.clone() for name, value in model.named_parameters()}, sent


@pytest.mark.parametrize("sync", [True, False])
def test_models_start_as_the_first_ranks_or_as_they_are(sync):
    told = ranks.run(_start, 2, args=(sync, False))
    for own, started, _, _ in told:
        expected = told[0][0] if sync else own
        assert all(torch.equal(started[name], value) for name, value in expected.items())
    if sync:  # and training goes on from there, on all ranks alike
        (_, _, first, _), (_, _, second, _) = told
        assert all(torch.equal(first[name], second[name]) for name in first)
        alike = ranks.run(_start, 2, args=(False, True))
        assert all(torch.equal(first[name], alike[0][2][name]) for name in first)
        assert told[0][3] > alike[0][3] + 4 * sum(value.numel() for value in first.values()) - 1


@pytest.mark.parametrize("size", [None, 0])
@ranks.on(2)
def test_an_optimizer_steps_every_other_time_on_gradients_that_have_added_up(rank, world, size):
    kinds = partial(SGD, lr=0.05, momentum=0.9), partial(SGD, lr=0.01)
    models = built(layers), built(layers)
    shares = [(model[:3].parameters(), model[3:].parameters()) for model in models]
    both = [kind(params) for kind, params in zip(kinds, shares[0], strict=True)]
    ours = [zero.OSS(params, kind) for kind, params in zip(kinds, shares[1], strict=True)]
    plain, wrapped = DistributedDataParallel(models[0]), zero.ShardedDDP(models[1], ours, reduce_buffer_size=size)
    for step in range(6):
        for model, optimizers in ((plain, both), (wrapped, ours)):
            squares(model, rank, step).backward()
            for optimizer in optimizers[: 2 if step % 2 else 1]:
                optimizer.step()
                optimizer.zero_grad()
        for (name, param), other in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
            # DDP rounds a sum that was averaged before.
            assert torch.allclose(param, other, rtol=1e-5, atol=1e-7), f"step {step}: {name}"


def critic():
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 16), nn.Softplus(), nn.Linear(16, 1))


def penalised(model, inputs):
    """I. Gulrajani et al., Improved Training of Wasserstein GANs, 2017, equation 3."""
    inputs = inputs.clone().requires_grad_()
    scores = model(inputs)
    [slope] = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
    return scores.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


@matrix.combined("world, size", [2, 3], [None, 0])
@ranks.on("world")
def test_a_gradient_penalty_is_that_of_the_whole_batch(rank, world, size):
    model, alone = built(critic), built(critic)
    wrapped, optimizer = sharded(model, OPTIMIZERS["sgd"], reduce_buffer_size=size)
    plain = OPTIMIZERS["sgd"](alone.parameters())
    for step in range(3):
        take_step(optimizer, penalised(wrapped, data(4, WIDTH, rank=rank, step=step)))
        take_step(plain, penalised(alone, torch.cat([data(4, WIDTH, rank=peer, step=step) for peer in range(world)])))
        for (what, param), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert torch.allclose(param, other, rtol=1e-4, atol=1e-6), f"step {step}: {what}"


@ranks.on(2)
def test_inner_derivatives_by_the_parameters_are_those_of_plain_torch(rank, world):
    def loss_of(model, inputs):
        params = list(model.parameters())
        gradients = torch.autograd.grad(model(inputs).square().mean(), params, create_graph=True)
        return model(inputs).mean() + sum(gradient.square().sum() for gradient in gradients)

    side = SideBySide(built(critic), sharded, OPTIMIZERS["sgd"])
    for step in range(3):
        side.step(lambda each, step=step: loss_of(each, data(4, WIDTH, rank=rank, step=step)))


@ranks.on(2)
def test_an_inner_derivative_sends_nothing(rank, world):
    """By the input, by parameters, by both, and a backward for the input alone: bytes sent meanwhile."""
    model = built(critic)
    wrapped, optimizer = sharded(model, OPTIMIZERS["sgd"])
    sent = []
    for step, by in enumerate(["input", "parameters", "both", "backward"]):
        inputs = data(4, WIDTH, rank=rank, step=step).requires_grad_()
        scores = wrapped(inputs)
        before = zero.traffic()
        wanted = {"input": [inputs], "parameters": [*model.parameters()], "both": [inputs, *model.parameters()]}
        if by == "backward":
            scores.sum().backward(inputs=[inputs], retain_graph=True)
        else:
            torch.autograd.grad(scores.sum(), wanted[by], create_graph=step % 2 == 0, retain_graph=True)
        sent.append((zero.traffic() - before).total)
        assert all(optimizer.part(param).grad is None for param in model.parameters())
        scores.mean().backward()  # which is reduced as ever
        assert (zero.traffic() - before).reduce > 0
        optimizer.zero_grad()
    assert sent == [0] * 4


@ranks.raises(2, RuntimeError, "create_graph", "autograd.grad", r"gradient of '?4\.")
def test_a_graph_of_reduced_gradients_is_refused_with_the_remedy(rank, world):
    wrapped, _ = sharded(built(critic), OPTIMIZERS["sgd"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the cycle between parameter and gradient
        wrapped(data(4, WIDTH, rank=rank)).square().sum().backward(create_graph=True)


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH)
        self.real = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs):
        mixed = torch.fft.irfft(torch.fft.rfft(inputs) * self.filter, n=WIDTH)
        return self.real((mixed.to(torch.complex64) @ self.mix).abs())


@by_optimizer
@ranks.on(2)
def test_complex_parameters_are_trained_or_refused_with_the_remedy(rank, world, name):
    def train():
        side = SideBySide(built(Waves), sharded, OPTIMIZERS[name])
        for step in range(3):
            side.step(lambda each, step=step: squares(each, rank, step))

    told = ranks.refusal(train)
    assert not told or ("ValueError" in told and "complex" in told and "view_as_real" in told), told
