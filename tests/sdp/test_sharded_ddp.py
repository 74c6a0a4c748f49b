"""ShardedDDP: where gradients are and what of them is shown, what is sent, and what a user sees of the module.

That it trains right in all kinds of loops is in tests/parity.
"""

import copy
import gc
import io
import sys
import warnings
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam
from torch.testing._internal.distributed.fake_pg import FakeStore

import gpus
import ranks
import zero
from assertions import same
from inner import held_here, shard_groups
from rows import Rows, momentum, trains
from runs import SideBySide, average_gradients, sgd, stage_2, take_step
from transports import TRANSPORTS, by
from zoo import WIDTH, OddNet, Stack, built, data, loss_on, odd_loss
from zoo import batch as of_stack


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


def tied() -> Net:
    net = Net()
    net.layers[3].weight = net.layers[0].weight
    return net


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(2)
def test_the_module_its_names_and_its_weights_are_the_plain_ones(rank, world, stage):
    net, plain = tied(), tied()
    before = [*net.named_parameters()]
    model, optimizer = zero.setup(net, sgd, stage=stage)
    found = model.state_dict()
    assert list(found) == list(plain.state_dict()) and not any(value.requires_grad for value in found.values())
    same({**found}, {**plain.state_dict()})
    model(batch(rank)).square().mean().backward()
    optimizer.step()
    assert model.module is net and model.layers is net.layers and model.shift is net.shift
    pairs = zip(before, model.module.named_parameters(), strict=True)
    assert all(name == now and param is one for (name, param), (now, one) in pairs)
    assert net.layers[3].weight is net.layers[0].weight
    with pytest.raises(AttributeError, match="no_such"):
        model.no_such  # noqa: B018

    other = {name: torch.full_like(value, 0.1) for name, value in plain.state_dict().items()}
    kept = copy.deepcopy(other)
    assert str(model.load_state_dict(other)) == "<All keys matched successfully>"
    for weights in (other, model.state_dict(), zero.full_state_dict(model, to=None)):
        same({**weights}, kept)
    with pytest.raises(RuntimeError, match=r"Missing key.*shift"):
        model.load_state_dict({name: value for name, value in other.items() if name != "shift"})
    with pytest.raises(ValueError, match="assign=False"):
        model.load_state_dict(other, assign=True)
    missing = model.load_state_dict({"shift": other["shift"]}, strict=False).missing_keys
    assert missing == [name for name in other if name != "shift"]
    plain.load_state_dict(model.state_dict())
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


# A wrapper is as its module is: it is indexed as containers are, and takes and returns whatever the module does.
# Building it takes no time for ranks other than this one.


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(2)
def test_a_wrapper_of_a_sequential_is_one(rank, world, stage):
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    layers = [*net]
    model, _ = zero.setup(net, sgd, stage=stage)
    assert len(model) == 3 and [*model] == layers
    assert model[0] is layers[0] and model[-1] is layers[2] and [*model[1:]] == layers[1:]
    with torch.no_grad():
        inputs = torch.ones(2, 3)
        assert torch.equal(model[2](model[1](model[0](inputs))), model(inputs))
    other, _ = zero.setup(nn.Linear(3, 4), sgd, stage=stage)
    assert other  # which has no length
    for use in (len, iter, lambda model: model[0]):
        with pytest.raises(TypeError, match="Linear"):
            use(other)


@dataclass(frozen=True)
class Shifted:
    values: Tensor
    calls: list[int] = field(default_factory=list)
    shift: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.calls.append(1)
        object.__setattr__(self, "values", self.values + 1)


class Passing(nn.Linear):
    """Computes with the values of what it takes, and returns them in another."""

    def forward(self, x: Any) -> Any:
        return Shifted(super().forward(x.values))


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(2, timeout=20)
def test_a_dataclass_that_a_module_takes_and_returns_is_not_made_anew(rank, world, stage):
    model, optimizer = zero.setup(Passing(3, 3), sgd, stage=stage)
    found = model(Shifted(torch.ones(2, 3)))
    assert found.calls == [1] and found.shift == 0.0
    found.values.sum().backward()
    optimizer.step()


def calls_in(world: int) -> int:
    """Of functions, in building and in a step, on one of so many ranks."""
    dist.init_process_group("fake", rank=3, world_size=world, store=FakeStore())
    net, count = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), [0]

    def called(frame: Any, event: str, _: Any) -> None:
        count[0] += event == "call"

    sys.setprofile(called)
    optimizer = zero.OSS(net.parameters(), sgd)
    model = zero.ShardedDDP(net, optimizer, reduce_buffer_size=0)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    sys.setprofile(None)
    dist.destroy_process_group()
    return count[0]


@pytest.mark.slow
@gpus.cpu_only("calls of the default device are counted, too")
@ranks.on(bare=True, fresh=True)
def test_building_takes_no_time_for_other_ranks(rank, world):
    few, many = map(calls_in, (8, 4096))
    assert many < 1.5 * few


# Wrappers that come and go, parameters that are frozen meanwhile, and ranks that do not do the same.


def sharded(model: nn.Module, optim: Any = SGD) -> tuple[nn.Module, Any]:
    return zero.setup(model, partial(optim, lr=0.1), stage=2)


def train(model: nn.Module, optimizer: Any, rank: int) -> None:
    for step in range(2):
        take_step(optimizer, loss_on(rank, step)(model))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@ranks.on(2)
def test_a_module_that_is_wrapped_again_is_trained_by_the_new_one(rank, world):
    model, other = Stack(), Stack()
    first = sharded(model)
    train(*first, rank)
    with pytest.raises(ValueError, match=r"module\.zero_grad"):
        sharded(model, Adam)
    model.zero_grad()
    again = sharded(model, Adam)
    train(*sharded(other), rank)
    other.zero_grad()
    expected = sharded(other, Adam)
    train(*again, rank)
    train(*expected, rank)
    assert torch.equal(weights(model), weights(other)) and not torch.equal(weights(model), weights(Stack()))
    with pytest.raises(RuntimeError, match="replaced by another"):
        loss_on(rank, 0)(first[0])


@ranks.on(2)
def test_without_its_wrapper_a_module_is_a_plain_one_and_everything_is_freed(rank, world):
    model = Stack()
    wrapped, optimizer = sharded(model)
    train(wrapped, optimizer, rank)
    watched = [weakref.ref(one) for one in (wrapped, optimizer, model)]
    del wrapped, optimizer
    gc.collect()
    if rank:  # alone
        loss_on(rank, 0)(model).backward()
        assert all(param.grad is not None for param in model.parameters())
    assert [one() for one in watched] == [None, None, model]
    del model
    gc.collect()
    assert watched[2]() is None


def freezing(*names: str) -> Any:
    """Layers are frozen for a second loss, as discriminators are for a generator's."""

    def program(t: Any, i: int) -> None:
        first = t.loss(i)
        frozen = [t.n.get_submodule(name).requires_grad_(False) for name in names]
        second = t.loss(10 + i)
        for layer in frozen:
            layer.requires_grad_(True)
        t.update(first + second)

    return program


row = Rows("layers are frozen for a second forward", __name__)


def frozen_when_backward_comes(t: Any, i: int) -> None:
    """Nothing is trained."""
    loss = t.loss(i)
    t.n.requires_grad_(False)
    (loss + t.m(t.batch(10 + i).requires_grad_()).square().mean()).backward()
    t.n.requires_grad_(True)
    t.update(None)
    trains(t, 20 + i)


row.of("the last one", freezing("last"))
row.of("all", freezing("first", "blocks", "last"))
row.of("all, which they still are when backward comes", frozen_when_backward_comes, same={2})
test_frozen_for_a_second = row.tests()


# What wrapping and forwards send of a model: its weights at the start, and buffers, also those that become others.


LENGTH = 4


class Cached(nn.Module):
    """Multiplies by a table that is made as long as the longest input yet."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.register_buffer("table", torch.ones(LENGTH))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.table):
            self.table = torch.arange(1.0, len(x) + 1)
        self.steps += 1
        return self.line(x) * self.table[: len(x), None]


def grown(rank: int, world: int, stage: int, lengths: list[int], transport: str) -> list[float]:
    with by(transport):
        model, _ = zero.setup(Cached(), partial(SGD, lr=0.1), stage=stage)
        for length in (LENGTH, lengths[rank], 2):
            model(torch.ones(length, 3)).sum().backward()
    return [*model.module.table.tolist(), model.module.steps.item()]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "lengths", "transport"), [(2, [6, 4], TRANSPORTS[-1]), (3, [6, 5], TRANSPORTS[0])])
def test_buffers_of_other_sizes_on_other_ranks_are_refused_on_every_rank(stage, lengths, transport):
    """With the remedy, where one rank alone has another."""
    error = "ValueError" if 4 not in lengths else "RuntimeError"
    told = ranks.expect_error(grown, 2, error, args=(stage, lengths, transport), timeout=20)
    if 4 in lengths:
        assert "table: [6], torch.float32" in told[0] and "broadcast_buffers=False" in told[0]
    else:
        assert all("rank 0 has table: [6], torch.float32, rank 1 has table: [5]" in each for each in told)


@pytest.mark.parametrize("stage", [2, 3])
def test_buffers_that_become_the_same_on_every_rank_go_on_being_those_of_the_first(stage):
    expected = [*range(1, 7), 3]
    assert ranks.run(grown, args=(stage, [6, 6], TRANSPORTS[0])) == [expected] * 2


class Normed(nn.Sequential):
    """Other weights and buffers on each rank unless they are `alike`."""

    def __init__(self, rank: int = 0) -> None:
        torch.manual_seed(rank)
        super().__init__(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self[1].running_mean += rank
        self[0].bias.requires_grad_(False)


def with_buffers(model: nn.Module, **options: bool) -> zero.ShardedDDP:
    return zero.ShardedDDP(model, zero.OSS(model.parameters(), sgd), **options)


@ranks.on(2)
def test_buffers_are_in_step_when_asked(rank, world):
    """After a forward each rank has those of its own data."""
    wrapped = with_buffers(built(Normed), broadcast_buffers=False)
    wrapped(of_stack(rank, 0))
    both = [torch.empty(16), torch.empty(16)]
    for apart in (True, False):
        torch.distributed.all_gather(both, wrapped.module[1].running_mean)
        assert torch.equal(*both) != apart
        before = both[0].clone()
        wrapped.sync_buffers()
    assert torch.equal(wrapped.module[1].running_mean, before)


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(2)
def test_what_is_registered_after_wrapping_stays_each_ranks_own(rank, world, stage):
    """As with DistributedDataParallel."""
    model, _ = zero.setup(Normed(), sgd, stage=stage)
    model.module[0].register_buffer("late", torch.tensor(float(rank)))
    for step in range(2):
        model(of_stack(rank, step)).sum().backward()
    assert model.module[0].late == rank


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.raises(2, ValueError, "is of TorchScript.*torch.compile", timeout=15)
def test_modules_of_torchscript_are_refused(rank, world, stage):
    """Inside of others those that take no hooks are none of the wrapper's at stages 1 and 2."""
    made = torch.jit.trace(nn.Linear(WIDTH, 3), of_stack(0, 0))
    zero.setup(nn.Sequential(nn.Linear(WIDTH, WIDTH), made) if stage == 3 else made, sgd, stage=stage)


@ranks.on(2)
def test_models_start_as_the_first_ranks_or_as_they_are(rank, world):
    sent = []
    for name, sync in [("sync_models_at_startup", False), ("sync_module_states", False), ("sync_module_states", True)]:
        model, before = Normed(rank), zero.traffic()
        with_buffers(model, **{name: sync})
        sent.append((zero.traffic() - before).total)
        expected = Normed(0 if sync else rank).state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert rank or sent[-1] >= sent[0] + sum(param.nbytes for param in model.parameters())
