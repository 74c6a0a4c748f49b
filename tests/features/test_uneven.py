"""Data that ends earlier on some ranks than on others: zero.join at every stage, beside one process that adds up the
gradients of those ranks that have data."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

import ranks
import zero
from reference import MOMENTUM, same
from transports import between_hosts

WIDTH = 6
STAGES = [0, 1, 2, 3]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.dropout(self.norm(self.linear(x))))


class Net(nn.Module):
    """odd: a parameter is used by batches with a positive sum only, and one output by no loss."""

    def __init__(self, *, odd: bool) -> None:
        super().__init__()
        self.odd = odd
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)
        if odd:
            self.second, self.sometimes = nn.Linear(WIDTH, 2), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.odd and x.sum() > 0:
            x = x * self.sometimes
        for block in self.blocks:
            x = block(x)
        return {"out": self.head(x)} | ({"second": self.second(x)} if self.odd else {})


def built(*, odd: bool = False) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Net(odd=odd)


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * rank + number))


def loss_of(model: nn.Module, rank: int, number: int) -> Tensor:
    loss: Tensor = model(batch(rank, number))["out"].square().mean()
    return loss


@dataclass(frozen=True)
class Loop:
    """counts: batches of each rank. micro: batches a step. bad: the batch of rank 1 whose loss is infinite, where
    losses are scaled. options: of FSDP."""

    counts: tuple[int, ...] = (3, 5)
    optim: Any = SGD
    divide: bool = True
    micro: int = 1
    clip: float | None = None
    gamma: float = 1.0
    bad: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def net(self, stage: int) -> Net:
        return built(odd=stage > 1 and "auto_wrap_policy" not in self.options)

    def optimizer(self, params: Any) -> Optimizer:
        return self.optim(params, **(MOMENTUM if self.optim is SGD else {"lr": 0.01}))


@dataclass(frozen=True)
class Trained:
    """On one rank: its losses, what the model came to, and the state of the random number generator."""

    losses: list[float]
    weights: dict[str, Tensor]
    random: Tensor


def reference(loop: Loop, net: nn.Module) -> list[Trained]:
    """In one process, with buffers, random numbers and gradients of each rank apart."""
    world = len(loop.counts)
    optimizer = loop.optimizer(net.parameters())
    scheduler = ExponentialLR(optimizer, loop.gamma)
    params = [*net.parameters()]
    buffers = [[buffer.clone() for buffer in net.buffers()] for _ in range(world)]
    random = [torch.Generator().manual_seed(rank).get_state() for rank in range(world)]
    losses: list[list[float]] = [[] for _ in range(world)]
    sums: list[dict[nn.Parameter, Tensor]] = [{} for _ in range(world)]
    synchronised = True
    for number in range(max(loop.counts)):
        active = [rank for rank in range(world) if number < loop.counts[rank]]
        if synchronised:
            buffers = [[buffer.clone() for buffer in buffers[active[0]]] for _ in range(world)]
        synchronised = (number + 1) % loop.micro == 0
        for rank in active:
            torch.set_rng_state(random[rank])
            for buffer, own in zip(net.buffers(), buffers[rank], strict=True):
                buffer.copy_(own)
            net.zero_grad()
            loss = loss_of(net, rank, number)
            loss.backward()
            losses[rank].append(loss.item())
            random[rank], buffers[rank] = torch.get_rng_state(), [buffer.clone() for buffer in net.buffers()]
            for param in params:
                if param.grad is not None:
                    gradient = param.grad if loop.divide else param.grad * (world / len(active))
                    sums[rank][param] = sums[rank][param] + gradient if param in sums[rank] else gradient.clone()
        if synchronised:
            for param in params:
                given = [own[param] for own in sums if param in own]
                param.grad = sum(given[1:], given[0]) / world if given else None
            sums = [{} for _ in range(world)]
            if loop.clip is not None:
                torch.nn.utils.clip_grad_norm_(params, loop.clip)
            if number != loop.bad:
                optimizer.step()
            scheduler.step()
    for buffer, own in zip(net.buffers(), buffers[active[0]], strict=True):
        buffer.copy_(own)
    return [Trained(losses[rank], net.state_dict(), random[rank]) for rank in range(world)]


def wrapped(stage: int, loop: Loop, net: nn.Module) -> tuple[Any, Optimizer]:
    if stage == 3:
        model = zero.FSDP(net, **loop.options)
        return model, loop.optimizer(model.parameters())
    if stage == 0:
        return DistributedDataParallel(net), loop.optimizer(net.parameters())
    optimizer = zero.OSS(net.parameters(), loop.optim, **(MOMENTUM if loop.optim is SGD else {"lr": 0.01}))
    return (DistributedDataParallel(net) if stage == 1 else zero.ShardedDDP(net, optimizer)), optimizer


def clipped(model: Any, optimizer: Optimizer, max_norm: float) -> None:
    if isinstance(model, zero.FSDP):
        model.clip_grad_norm_(max_norm)
    elif isinstance(model, zero.ShardedDDP):
        optimizer.clip_grad_norm(max_norm)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def trained(rank: int, loop: Loop, stage: int) -> Trained:
    torch.manual_seed(rank)
    model, optimizer = wrapped(stage, loop, loop.net(stage))
    scheduler = ExponentialLR(optimizer, loop.gamma)
    scaler = zero.GradScaler("cpu", init_scale=1024.0, enabled=loop.bad is not None)
    losses, step = [], vars(optimizer).get("step")  # which the scheduler has put there
    with zero.join(model, optimizer, scheduler, scaler, divide_by_initial_world_size=loop.divide):
        for number in range(loop.counts[rank]):
            reduced = (number + 1) % loop.micro == 0
            if number % loop.micro == 0:
                optimizer.zero_grad()
            with nullcontext() if reduced else model.no_sync():
                loss = loss_of(model, rank, number)
                losses.append(loss.item())
                scaler.scale(loss * torch.inf if rank and number == loop.bad else loss).backward()
            if reduced:
                if loop.clip is not None:
                    clipped(model, optimizer, loop.clip)
                if number % 2:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
    assert scheduler.last_epoch == max(loop.counts) // loop.micro
    assert scaler.get_scale() == (1.0 if loop.bad is None else 512.0)
    assert vars(optimizer).get("step") is step
    random = torch.get_rng_state()
    return Trained(losses, zero.full_state_dict(model), random)


def _beside_the_reference(rank: int, world: int, stage: int, loops: list[Loop], close: float) -> None:
    for loop in loops:
        got, expected = trained(rank, loop, stage), reference(loop, loop.net(stage))[rank]
        assert torch.equal(got.random, expected.random), f"{loop}: random numbers"
        assert got.losses == pytest.approx(expected.losses, rel=close, abs=close), loop
        for name, value in expected.weights.items():
            said = f"{loop}: {name} "
            torch.testing.assert_close(got.weights[name], value, rtol=close, atol=close, msg=lambda m, s=said: s + m)


EXACT = [
    Loop((3, 5), SGD),
    Loop((3, 5), Adam, divide=False),
    Loop((5, 3), SGD, divide=False, gamma=0.8),
    Loop((5, 3), Adam, gamma=0.8),
    Loop((5, 8), SGD, micro=2),
    Loop((5, 8), SGD, divide=False, micro=2, gamma=0.8),
    Loop((3, 6), SGD, bad=4),
    Loop((3, 6), Adam, bad=5, gamma=0.8),
]
"""Two ranks, of which the sums are the same in whatever order."""
CLOSE = [Loop((5, 3), Adam, clip=0.05, gamma=0.5)]
THREE = [Loop((3, 5, 4), SGD), Loop((3, 5, 4), Adam, divide=False)]


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_to_the_bits_of_one_process(stage):
    ranks.run(_beside_the_reference, 2, args=(stage, EXACT, 0.0), timeout=30)
    ranks.run(_beside_the_reference, 2, args=(stage, CLOSE, 1e-6), timeout=30)


@pytest.mark.parametrize("stage", STAGES)
def test_three_ranks_train_to_the_numbers_of_one_process(stage):
    ranks.run(_beside_the_reference, 3, args=(stage, THREE, 1e-6), timeout=30)


PREFETCH = [zero.MEMORY_FIRST, zero.SPEED_FIRST, zero.BackwardPrefetch.BACKWARD_POST]


@pytest.mark.parametrize("options", [{"prefetch": one} for one in PREFETCH] + [{"sharding_strategy": "SHARD_GRAD_OP"}])
def test_units_are_gathered_in_the_same_order_however_far_ahead(options):
    policy = ModuleWrapPolicy({Block, nn.Linear})
    loops = [Loop((5, 3), micro=micro, options=options | {"auto_wrap_policy": policy}) for micro in (1, 2)]
    ranks.run(_beside_the_reference, 2, args=(3, loops, 0.0), timeout=30)


@ranks.on(4, timeout=30)
def test_shards_may_be_replicated(rank, world):
    within, across = [dist.new_subgroups_by_enumeration(groups)[0] for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])]
    options = {"sharding_strategy": "HYBRID_SHARD", "process_group": (within, across)}
    _beside_the_reference(rank, world, 3, [Loop((2, 3, 5, 4), divide=False, options=options)], 1e-6)


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(2, timeout=30)
def test_it_is_so_over_gloo(rank, world, stage):
    with between_hosts():
        _beside_the_reference(rank, world, stage, [Loop((3, 5)), Loop((5, 8), Adam, divide=False, micro=2)], 0.0)


class Logarithm(nn.Module):
    """Its gradient is NaN where the inputs are 0, whatever gradient its output gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().sqrt().sum()


@pytest.mark.parametrize("stage", STAGES)
@ranks.on(2, timeout=30)
def test_a_last_batch_that_gives_nan_does_not_spoil_what_others_train(rank, world, stage):
    torch.manual_seed(0)
    net = Logarithm()
    expected = net.linear.weight.detach().clone()
    model, optimizer = wrapped(stage, Loop(), net)
    with zero.join(model, optimizer):
        for number in range(1 + 2 * rank):
            optimizer.zero_grad()
            model(torch.full((1, 3), float(rank))).backward()  # of rank 0 with a gradient of NaN, which nobody steps
            if number:
                optimizer.step()
    assert zero.full_state_dict(model)["linear.weight"].isfinite().all()
    assert not torch.equal(zero.full_state_dict(model)["linear.weight"], expected)


class Heads(nn.Module):
    """Writes into its input, and returns what a head makes of it, beside what no loss uses."""

    def __init__(self, *, unused: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(3 if unused else 2))
        for param in self.parameters():
            nn.init.uniform_(param, -0.5, 0.5, generator=torch.Generator().manual_seed(param.numel()))
        self.graphs: list[Any] = []

    def forward(self, x: Tensor, *, head: int = 0) -> list[Tensor]:
        x.add_(0.1)
        for block in self.blocks:
            x = torch.tanh(block(x))
        self.graphs = [one for one in self.graphs if one() is not None] + [ref(x)]
        assert len(self.graphs) < 5, "graphs stay that no backward comes to"
        return [self.heads[head](x), *(unused(x) for unused in self.heads[2:])]


SCALE = torch.ones((), requires_grad=True)


def two_losses(model: nn.Module, rank: int, number: int) -> list[Tensor]:
    inputs = batch(rank, number), batch(rank, 10 + number) * SCALE
    return [model(one)[0].square().mean() for one in inputs]


CASES = [(2, "together"), (2, "apart"), (2, "again"), (3, "together"), (3, "apart"), (3, "again")]


@pytest.mark.parametrize(("stage", "how"), CASES)
@ranks.on(2, timeout=30)
def test_several_forwards_and_backwards_may_come_before_a_step(rank, world, stage, how):
    """Two forwards a step. Between steps evaluations of another head, with and without gradients."""
    net, counts = Heads(unused=stage == 3), (2, 5)
    expected = copy.deepcopy(net)
    plain = Loop().optimizer(expected.parameters())
    for number in range(max(counts)):
        plain.zero_grad()
        for own in [one for one in range(world) if number < counts[one]]:
            one, other = two_losses(expected, own, number)
            ((one + other) * (1.5 if how == "again" else 0.5)).backward()
        plain.step()
    model, optimizer = wrapped(stage, Loop(options={"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}), net)
    with zero.join(model, optimizer):
        for number in range(counts[rank]):
            optimizer.zero_grad()
            one, other = two_losses(model, rank, number)
            if how == "apart":
                one.backward()
                other.backward()
            else:
                (one + other).backward(retain_graph=how == "again")
            if how == "again":
                (2 * (one + other)).backward()
            optimizer.step()
            model.eval()
            left = model(batch(rank, 99), head=1)  # without a backward
            with torch.no_grad():
                model(batch(rank, 99), head=1)
            model.train()
            assert left[0].requires_grad
    assert model.training
    for name, value in zero.full_state_dict(model).items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2, timeout=30)
def test_what_a_loop_does_by_hand_is_followed(rank, world, stage):
    """A schedule that zero.join is not given, gradients cleared past zero_grad, buffers of each rank for itself."""
    torch.manual_seed(rank)
    net, loop = nn.Sequential(nn.Linear(WIDTH, 4, bias=False), nn.BatchNorm1d(4)), Loop((2, 5), gamma=0.5)
    net.load_state_dict({name: torch.ones_like(value) for name, value in net.state_dict().items()})
    expected = copy.deepcopy(net)
    plain, own = loop.optimizer(expected.parameters()), [copy.deepcopy(net[1]) for _ in range(world)]
    for number in range(max(loop.counts)):
        plain.zero_grad()
        for one in [one for one in range(world) if number < loop.counts[one]]:
            expected[1].load_state_dict(
                own[one].state_dict() | {name: param.detach() for name, param in expected[1].named_parameters()}
            )
            (expected(batch(one, number)).square().mean() / world).backward()
            own[one].load_state_dict(expected[1].state_dict())
        plain.step()
        plain.param_groups[0]["lr"] *= loop.gamma
    model: Any
    if stage == 3:
        model = zero.FSDP(net, broadcast_buffers=False)
        optimizer = loop.optimizer(model.parameters())
    elif stage == 2:
        optimizer = zero.OSS(net.parameters(), SGD, **MOMENTUM)
        model = zero.ShardedDDP(net, optimizer, broadcast_buffers=False)
    else:
        model, optimizer = wrapped(stage, loop, net)
        model.broadcast_buffers = False
    scheduler = ExponentialLR(optimizer, loop.gamma)
    with zero.join(model, optimizer):
        for number in range(loop.counts[rank]):
            model(batch(rank, number)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            for group in [*optimizer.param_groups, *(optimizer.optim.param_groups if stage == 2 else ())]:
                for param in group["params"]:
                    param.grad = None
    torch.testing.assert_close(net[1].running_mean, own[rank].running_mean)
    for name, param in expected.named_parameters():
        torch.testing.assert_close(zero.full_state_dict(model)[name], param.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
@ranks.on(2, timeout=30)
def test_batches_are_repeated_under_the_autocast_that_they_had(rank, world, stage):
    """Inputs that only autocast makes fit."""
    model, optimizer = wrapped(stage, Loop(), nn.Linear(WIDTH, 2))
    with zero.join(model, optimizer):
        for number in range(1 + rank):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                output = model(batch(rank, number).bfloat16())
            output.float().square().mean().backward()
            optimizer.step()


def _gone_on(rank, world, stage):
    """Two epochs in a context each, with a schedule by steps that zero.join is given, and steps outside of it."""
    model, optimizer = wrapped(stage, Loop(), built())
    before = set(vars(optimizer)), set(vars(model))
    for _ in range(2):
        with zero.join(model, optimizer, scheduler := LambdaLR(optimizer, lambda step: 0.9**step)):
            for number in range(2 + rank):
                loss_of(model, rank, number).backward()
                optimizer.step()
                scheduler.step()
                for group in optimizer.param_groups:  # past zero_grad
                    for param in group["params"]:
                        param.grad = None
                if stage == 2:
                    optimizer.zero_grad()
        loss_of(model, rank, 50).backward()
        optimizer.step()
    assert scheduler.last_epoch == 3
    assert set(vars(model)) == before[1]
    assert set(vars(optimizer)) <= before[0] | {"step", "_opt_called"}  # as LambdaLR leaves it
    return [group["lr"] for group in optimizer.param_groups], dict(model.module.named_parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_go_on_together_afterwards(stage):
    (rates, params), other = ranks.run(_gone_on, 2, args=(stage,), timeout=30)
    assert rates == other[0] == [pytest.approx(MOMENTUM["lr"] * 0.9**3)]
    if stage < 3:
        same(params, other[1], "the ranks' weights")


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(2, timeout=30)
def test_shards_may_be_offloaded_or_stepped_in_backward(rank, world, stage, in_backward):
    net = built()
    if stage == 3:
        model = zero.FSDP(net, offload=None if in_backward else zero.CPUOffload())
        optimizer = SGD(model.parameters(), **MOMENTUM)
    else:
        optimizer = zero.OSS(net.parameters(), SGD, offload=None if in_backward else zero.CPUOffload(), **MOMENTUM)
        model = zero.ShardedDDP(net, optimizer)
    if in_backward:
        zero.step_in_backward(model, optimizer)
    torch.manual_seed(rank)
    loop = Loop((2, 4))
    with zero.join(model, optimizer):
        for number in range(loop.counts[rank]):
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
            optimizer.step()
    same(zero.full_state_dict(model), dict(reference(loop, built())[rank].weights), "weights")


# --------------------------------------------------------------------------------------------------- what is refused


def _wrong(rank, world, stage, how):
    model, optimizer = wrapped(stage, Loop(), built())
    given = {"no optimizer": [model], "a module": [built(), optimizer], "a list": [model, [optimizer]]}
    options = {"throw": {"throw_on_early_termination": True}, "other options": {"enable": bool(rank)}}
    with zero.join(*given.get(how, [model, optimizer]), **options.get(how, {})):
        for number in range((4 if rank else 2) if how != "no batch" else rank):
            if how == "an error" and number == 3:
                raise RuntimeError("rank 1: left zero.join by an error of its own")
            loss = loss_of(model, rank, number)
            if how == "no backward" and not rank and number:
                break
            loss.backward()
            if how == "changed" and number == 1:
                owner = optimizer.optim if stage == 2 else optimizer
                max(owner.param_groups[0]["params"], key=torch.numel).grad.clamp_(-0.01, 0.01)
            optimizer.step(*[float] if how == "a closure" else [])
        if how == "evaluation inside" and not rank:
            with torch.no_grad():
                model(batch(rank, 9))


@pytest.mark.parametrize(
    ("how", "stages", "error", "said"),
    [
        ("no batch", STAGES, RuntimeError, "rank 0 has had no batch"),
        ("throw", STAGES, RuntimeError, "data of rank 0 has ended"),
        ("an error", STAGES, RuntimeError, r"rank 1: left zero\.join by .*an error of its own"),
        ("evaluation inside", STAGES, RuntimeError, "evaluate outside"),
        ("no backward", [1, 3], RuntimeError, "End loops after a backward"),
        ("a closure", [0, 2], RuntimeError, r"step was given a type.*step\(\) without a closure"),
        ("changed", [2], RuntimeError, r"gradients were changed.*optimizer\.clip_grad_norm"),
        ("changed", [3], RuntimeError, r"gradients were changed.*model\.clip_grad_norm_"),
        ("no optimizer", [2], ValueError, r"zero\.join\(model, optimizer\)"),
        ("a module", [2], ValueError, "DistributedDataParallel, ShardedDDP or FSDP"),
        ("a list", [2], ValueError, "it takes optimizers, learning rate schedulers"),
        ("other options", [2], ValueError, "arguments of zero.join differ"),
    ],
)
def test_what_cannot_be_followed_is_refused_on_every_rank(how, stages, error, said):
    for stage in stages:
        ranks.expect_error(_wrong, 2, error, said, args=(stage, how), timeout=20)


def _in_backward(rank, world):
    model, optimizer = wrapped(1, Loop(), net := built())
    with zero.join(model, optimizer):
        for number in range(3):
            loss = loss_of(model, rank, number)
            if rank and number == 2:
                net.head.weight.register_hook(lambda _: int("no number"))
            loss.backward()
            optimizer.step()


def test_an_error_in_a_backward_of_distributed_data_parallel_waits_for_nobody(monkeypatch):
    monkeypatch.setattr(ranks, "GRACE", 0.5)  # the other rank waits in vain
    with pytest.raises(ranks.RankError) as raised:
        ranks.run(_in_backward, 2, timeout=10)
    assert "no number" in raised.value.outcomes[1].verdict


@pytest.mark.parametrize("stage", [2, 3])
@ranks.raises(2, RuntimeError, "out of step", timeout=20)
def test_without_it_ranks_are_told_that_they_are_out_of_step(rank, world, stage):
    model, optimizer = wrapped(stage, Loop(), built())
    for number in range(2 + rank):
        optimizer.zero_grad()
        loss_of(model, rank, number).backward()
        optimizer.step()
    zero.checkpoint.save(Path(gettempdir()) / "never", model, optimizer)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.raises(2, AttributeError, "join_hook", r"with zero\.join.* in place of torch's Join")
def test_torchs_own_join_is_refused_on_every_rank(rank, world, stage):
    model, optimizer = zero.setup(nn.Linear(4, 1), Adam, stage=stage)
    Join([model] if stage == 3 else [model, optimizer])
