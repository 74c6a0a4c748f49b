"""ShardedDDP: where gradients are and what of them is shown, what is sent, and what a user sees of the module.

That it trains right in all kinds of loops is in tests/parity.
"""

import copy
import io
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import gpus
import ranks
import zero
from assertions import same
from inner import held_here, shard_groups
from rows import Rows, momentum
from runs import SideBySide, average_gradients, sgd, stage_2
from zoo import WIDTH, OddNet, built, data, odd_loss


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


@pytest.mark.parametrize("bucket", [None, 0], ids=["one bucket", "each alone"])
@ranks.on(2)
def test_what_no_rank_used_has_no_gradient_and_does_not_decay(rank, world, bucket):
    """What any rank used shows a gradient on every rank, with the parameter's name."""
    model, optimizer = stage_2(Net(), sgd, bucket=bucket)
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    skip = (1,) if rank else (1, 2)  # layer 1 by nobody, layer 2 by some
    model(batch(rank), skip=skip).square().mean().backward()
    for name, param in model.named_parameters():
        used = not name.startswith(("layers.1.", "spare.", "frozen."))
        assert (param.grad is not None) == used, name
        assert (optimizer.part(param).grad is not None) == used, name
        if used:
            shown = param.grad
            assert (shown.shape, shown.dtype, shown.device) == (param.shape, param.dtype, param.device)
            assert not shown.is_sparse and name in repr(shown)
    shards = [optimizer.part(param) for param in model.parameters() if param.requires_grad]
    optimizer.step()
    assert all(shard.grad is None for shard in shards)
    changed = {name for name, value in model.module.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {f"layers.{number}.{kind}" for number in (0, 2, 3) for kind in ("weight", "bias")}


def reads(read: Any) -> Any:
    """read(parameters, optimizer) between backward and step."""
    return lambda t, i: t.update(t.loss(i), lambda t: read([*t.n.parameters()], t.o))


def unscale(_: Any, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler(gpus.DEVICE)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def noted(read: Any) -> Any:
    """read(a gradient) of each parameter, compared with stage 0's."""
    return lambda t, i: t.update(t.loss(i), lambda t: [t.note(read(p.grad)) for p in t.n.parameters()])


row = Rows("what is computed with a gradient that is sharded", __name__, same={2})
row.of("a norm of data", noted(lambda grad: grad.data.abs().max()))
row.of("an array", noted(lambda grad: torch.tensor(grad.detach().cpu().numpy())))
row.of("a list", noted(lambda grad: torch.tensor(grad.tolist())))
row.of("torch's scaler", reads(unscale))
row.of("a plain optimizer", reads(lambda params, _: torch.optim.SGD(params, lr=0.1).step()))
test_computing = row.tests()


@ranks.raises(2, TypeError, r"the gradient of '0\.weight' is spread over the ranks, and cannot be pickled")
def test_a_file_of_gradients_is_refused_on_every_rank(rank, world):
    model, _ = stage_2(nn.Sequential(nn.Linear(4, 3)), sgd)
    model(torch.ones(2, 4)).sum().backward()
    torch.save([param.grad for param in model.parameters()], io.BytesIO())


@ranks.on(2)
def test_the_module_its_names_and_its_weights_are_the_plain_ones(rank, world):
    net = Net()
    before, expected = [*net.parameters()], copy.deepcopy(net.state_dict())
    model, _ = stage_2(net, sgd)
    assert model.module is net and model.layers is net.layers and model.shift is net.shift
    assert all(one is other for one, other in zip(before, net.parameters(), strict=True))
    same(dict(model.state_dict()), dict(expected))
    with pytest.raises(AttributeError, match="no_such"):
        model.no_such  # noqa: B018

    other = {name: torch.full_like(value, 0.1) for name, value in expected.items()}
    assert str(model.load_state_dict(other)) == "<All keys matched successfully>"
    with pytest.raises(RuntimeError, match=r"Missing key.*shift"):
        model.load_state_dict({name: value for name, value in other.items() if name != "shift"})
    with pytest.raises(ValueError, match="assign=False"):
        model.load_state_dict(other, assign=True)
    plain = Net()
    plain.load_state_dict(other)
    assert torch.equal(model(batch(rank)), plain(batch(rank)))
    assert not model.eval().module.training and model.train().module.training


# ShardedDDP's options, reduce(), and unusual backwards.


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


# precision=MixedPrecision(reduce_dtype=): 16 bits on the wire alone, beside the same rounding done by hand.


class Wide(nn.Module):
    """Has a gradient that is large enough to travel by itself, beside the odd ones of OddNet; one weight is unused."""

    def __init__(self):
        super().__init__()
        self.net = OddNet()
        self.wide = nn.Linear(37, 3000)
        self.unused = nn.Linear(3, 3)

    def forward(self, inputs):
        return torch.tanh(self.wide(self.net.first(inputs))).mean(1, keepdim=True) + self.net(inputs)


def by_hand(world, dtype, *numbers):
    """All ranks' gradients in one process, rounded, added up in float32 in the order of ranks and averaged; a step."""
    model, total = built(Wide), {}
    for rank in range(world):
        model.zero_grad()
        for number in numbers:
            odd_loss(model, rank, number).backward()
        for param in model.parameters():
            if param.grad is not None:
                gradient = param.grad.to(dtype).float()
                total[param] = total[param] + gradient if param in total else gradient
    for param, gradient in total.items():
        param.data -= gradient * (1 / world)
    return dict(model.state_dict())


CASES = [(2, 0, "even", torch.float16), (3, 1, "whole", torch.bfloat16)]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("world", "held_back", "cut", "dtype"), CASES)
@ranks.on("world")
def test_gradients_travel_rounded_once_and_are_added_up_in_float32(rank, world, held_back, dtype, cut, stage):
    """Under no_sync they add up unrounded; what is sent is the sum."""
    reduced = []
    for sent_as in (None, dtype):
        policy = zero.MixedPrecision(reduce_dtype=sent_as)
        model, optimizer = zero.setup(built(Wide), SGD, stage=stage, partition=cut, precision=policy, lr=1.0)
        if held_back:
            with zero.no_sync(model):
                odd_loss(model, rank, 0).backward()
        before = zero.traffic()
        odd_loss(model, rank, 1).backward()
        reduced.append((zero.traffic() - before).reduce)
        optimizer.step()
    same(zero.full_state_dict(model, to=None), by_hand(world, dtype, *range(1 - held_back, 2)), "weights")
    assert 0 < 2 * reduced[1] <= reduced[0]
    assert stage == 1 or 2 * reduced[1] == reduced[0]  # there float32 averages travel, too
