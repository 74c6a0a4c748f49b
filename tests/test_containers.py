"""Modules that contain wrapped ones: what a script asks of a model it asks of these, at every stage. The reference is
torch's own: DistributedDataParallel in the container, clipping by all parameters, state_dict()."""

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, Optimizer
from torch.optim.swa_utils import AveragedModel

import matrix
import ranks
import zero
from assertions import same
from zoo import data

STAGES = [0, 1, 2, 3]


def net(last: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, last))


def wrap(module: nn.Module, stage: int) -> tuple[Any, Any]:
    if stage < 0:
        return module, Adam(module.parameters(), lr=0.01)
    return zero.setup(module, Adam, stage=stage, lr=0.01)


class Run(NamedTuple):
    """stage -1 is the plain module."""

    module: nn.Module
    optimizers: list[Optimizer]
    losses: Callable[[Tensor], list[Tensor]]
    after: Callable[[], object] = lambda: None


def adversaries(stage: int) -> Run:
    (maker, of_maker), (judge, of_judge) = wrap(net(), stage), wrap(net(1), stage)
    both = nn.ModuleDict({"maker": maker, "judge": judge})
    return Run(both, [of_maker, of_judge], lambda x: [maker(x).square().mean(), judge(x).square().mean()])


class Holder(nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(2))
        self.backbone, self.optimizer = wrap(net(), stage)
        self.head = nn.Linear(6, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x)) * self.scale


def hand_wrapped(stage: int) -> Run:
    holder = Holder(stage)
    return Run(holder, [holder.optimizer], lambda x: [holder(x).square().mean()])


def distilled(stage: int) -> Run:
    """The teacher is in shards, too."""
    student, optimizer = wrap(net(), stage)
    teacher = net().requires_grad_(False)
    teacher = zero.FSDP(teacher) if stage == 3 else teacher
    both = nn.ModuleList([student, teacher])
    return Run(both, [optimizer], lambda x: [(student(x) - teacher(x)).square().mean()])


def averaged(stage: int) -> Run:
    inner = net()
    average = AveragedModel(inner)
    model, optimizer = wrap(inner, stage)
    if stage == 3:
        average.module = zero.FSDP(average.module)
    both = nn.ModuleDict({"model": model, "average": average})
    return Run(both, [optimizer], lambda x: [model(x).square().mean()], lambda: average.update_parameters(inner))


def at_two_stages(stage: int) -> Run:
    """A model, and one at stage 1, as where an optimizer of the second does not go with shards of parameters."""
    (model, optimizer), (other, of_other) = wrap(net(), stage), wrap(nn.Linear(6, 2), min(stage, 1))
    both = nn.ModuleDict({"model": model, "other": other})
    return Run(both, [optimizer, of_other], lambda x: [other(model(x)).square().mean()])


def beside_others(stage: int) -> Run:
    """Of one the gradients are averaged by DistributedDataParallel, of the other they are the same on every rank."""
    model, optimizer = wrap(net(), stage)
    other = DistributedDataParallel(nn.Linear(6, 2)) if stage >= 0 else nn.Linear(6, 2)
    all_three = nn.ModuleList([model, other, nn.Linear(2, 1)])
    rest = SGD([*other.parameters(), *all_three[2].parameters()], lr=0.1, momentum=0.9)
    loss = lambda x: other(model(x)).square().mean() + all_three[2](torch.ones(2)).sum()  # noqa: E731
    return Run(all_three, [optimizer, rest], lambda x: [loss(x)])


def compiled(stage: int) -> Run:
    """The wrapper is inside of torch.compile, and one wrapper is there twice."""
    model, optimizer = wrap(net(), stage)
    both = nn.ModuleDict({"model": model if stage < 0 else torch.compile(model, backend="eager"), "again": model})
    return Run(both, [optimizer], lambda x: [model(x).square().mean()])


CONTAINERS = [adversaries, hand_wrapped, distilled, averaged, at_two_stages, beside_others, compiled]


def built(container: Callable[[int], Run], stage: int, seed: int = 0) -> Run:
    torch.manual_seed(seed)
    return container(stage)


@contextmanager
def each_ddps_no_sync(module: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        for one in module.modules():
            if isinstance(one, DistributedDataParallel):
                stack.enter_context(one.no_sync())
        yield


def clip(run: Run, most: float) -> Tensor:
    return clip_grad_norm_([p for one in run.optimizers for group in one.param_groups for p in group["params"]], most)


def train(run: Run, rank: int, no_sync: Any, most: float) -> list[Any]:
    losses, norms = [], []
    for step in range(3):
        with no_sync(run.module):
            for loss in run.losses(data(8, 6, rank=rank, step=2 * step)):
                loss.backward()
        for loss in run.losses(data(8, 6, rank=rank, step=2 * step + 1)):
            loss.backward()
            losses.append(loss.detach())
        norms.append(clip(run, most))
        for optimizer in run.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        run.after()
    return [losses, norms]


def states(run: Run) -> list[Any]:
    return [state["state"] for state in zero.full_optimizer_state_dict(run.module, run.optimizers, to=None)]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("container", CONTAINERS)
@ranks.on(2)
def test_a_container_trains_and_is_saved_in_full_as_with_ddp(rank, world, container, stage):
    reference, run = built(container, 0), built(container, stage)
    losses, norms = train(reference, rank, each_ddps_no_sync, 1e3)
    found, own_norms = train(run, rank, zero.no_sync, 1e3)
    same(found, losses, "losses")
    torch.testing.assert_close(own_norms, norms, rtol=1e-5, atol=0)
    names = [*built(container, -1).module.state_dict()]
    weights = dict(zip(names, copy.deepcopy([*reference.module.state_dict().values()]), strict=True))
    state = copy.deepcopy([one.state_dict()["state"] for one in reference.optimizers])
    full = zero.full_state_dict(run.module, to=None)
    same(full, weights, "weights")
    same(states(run), state, "state")
    assert list(zero.full_state_dict(run.module, to=1)) == (names if rank else [])
    streamed = dict(zero.full_tensors(run.module, run.optimizers, to=None))
    once = {name: value for name, value in streamed.items() if "/" not in name}
    same(once, {name: weights[name] for name in once}, "streamed weights")
    assert len(once) == len({value.data_ptr() for value in weights.values()})
    assert sum("/" in name for name in streamed) == sum(len(of) for one in state for of in one.values())

    other = built(container, (stage + 1) % 4, seed=1)
    on_first = rank == 0
    zero.load_full_state_dict(other.module, iter(full.items()) if on_first else None)
    given = zero.full_optimizer_state_dict(run.module, run.optimizers, to=0)
    zero.load_full_optimizer_state_dict(other.module, other.optimizers, given)
    same([zero.full_state_dict(other.module, to=None), states(other)], [weights, state], "loaded at another stage")
    again = built(container, stage, seed=2)
    zero.load_full_state_dict(again.module, full)
    pairs = [(name, value) for name, value in streamed.items() if "/" in name]
    zero.load_full_optimizer_state_dict(again.module, again.optimizers, iter(pairs) if on_first else None)
    same([zero.full_state_dict(again.module, to=None), states(again)], [weights, state], "streamed back")

    torchs = copy.deepcopy(reference.module.state_dict())  # with `module.` after the names of DDPs inside
    for given in (torchs, iter(torchs.items())):
        for value in torchs.values():
            value += 1
        zero.load_full_state_dict(again.module, given)
        same([*zero.full_state_dict(again.module, to=None).values()], [*torchs.values()], "by names of DDP")
    zero.load_full_state_dict(again.module, weights)

    clipped = train(reference, rank, each_ddps_no_sync, 1e-2)
    own = train(again, rank, zero.no_sync, 1e-2)
    torch.testing.assert_close(own, clipped, rtol=1e-5, atol=1e-6)

    report = zero.report(run.module, run.optimizers)
    assert report.stage == str(stage) and report.optimizer > 0
    plain = zero.unwrap(run.module)
    assert plain is run.module and [*plain.state_dict()] == names
    same(dict(plain.state_dict()), weights, "the plain module")


@matrix.combined("container, stage", [adversaries, at_two_stages, beside_others, compiled], STAGES, each=2)
@ranks.on(2)
def test_a_container_has_one_average(rank, world, container, stage, tmp_path):
    found = []
    for at in (0, stage):
        run, other = built(container, at), built(container, (at + 1) % 4, seed=1)
        ema, loaded = zero.EMA(run.module, 0.8), zero.EMA(other.module)
        train(run._replace(after=ema.update), rank, zero.no_sync, 1e3)
        zero.checkpoint.save(tmp_path / str(at), run.module, [*run.optimizers, ema])
        zero.checkpoint.load(tmp_path / str(at), other.module, [*other.optimizers, loaded])
        pairs = [(run.module, ema), (other.module, loaded)]
        averages = [zero.full_optimizer_state_dict(*pair, to=None)["state"] for pair in pairs]
        same(*averages)
        with loaded.swapped():
            found.append([averages, zero.full_state_dict(other.module, to=None)])
    same(found[1], found[0])


def saves(rank: int, world: int, container: Any, stage: int, run: str) -> list[Any]:
    of = built(container, stage)
    train(of, rank, zero.no_sync, 1e9)
    zero.checkpoint.save(run, of.module, of.optimizers)
    return [zero.full_state_dict(of.module, to=None), states(of)]


def loads(rank: int, world: int, container: Any, stage: int, run: str) -> list[Any]:
    of = built(container, stage, seed=1)
    zero.checkpoint.load(run, of.module, of.optimizers)
    return [zero.full_state_dict(of.module, to=None), states(of)]


@matrix.combined("container, stage, into", CONTAINERS, STAGES, STAGES)
def test_one_checkpoint_of_a_container_loads_at_another_stage_and_on_other_ranks(tmp_path, container, stage, into):
    saved = ranks.run(saves, 2, (container, stage, str(tmp_path)))[0]
    for world in (2, 3):
        same(ranks.run(loads, world, (container, into, str(tmp_path)))[0], saved, f"on {world} ranks")
    if container is not averaged:  # which has a shard of the average at stage 3 alone
        plain = built(container, -1, seed=1)
        zero.checkpoint.load(tmp_path, plain.module, plain.optimizers)
        same(dict(plain.module.state_dict()), dict(saved[0]), "the plain module")


def with_plain_head(stage: int) -> Run:
    model, optimizer = wrap(net(), stage)
    head = nn.Linear(6, 2)
    both = nn.Sequential(model, head)
    return Run(both, [optimizer, SGD(head.parameters(), lr=0.1)], lambda x: [both(x).square().mean()])


@pytest.mark.parametrize("stage", STAGES)
@ranks.on(2, timeout=20)
def test_a_plain_part_that_differs_between_ranks_is_not_saved(rank, world, stage, tmp_path):
    run = built(with_plain_head, stage)
    with torch.no_grad():
        run.module[1].weight += rank
    told = ranks.refusal(lambda: zero.checkpoint.save(tmp_path, run.module, run.optimizers))
    assert told.startswith("CheckpointError") and "model/1.weight, which no wrapper keeps the same" in told


def over(group: Any, stage: int) -> tuple[Any, Any]:
    return zero.setup(net(), Adam, stage=stage, lr=0.01, process_group=group)


@pytest.mark.parametrize("stage", STAGES)
@ranks.on(2, timeout=20)
def test_wrappers_over_different_process_groups_are_refused(rank, world, stage, tmp_path):
    alone = [dist.new_group([number]) for number in range(world)][rank]
    (one, of_one), (other, of_other) = over(None, stage), over(alone, stage)
    both, optimizers = nn.ModuleList([one, other]), [of_one, of_other]
    weights = {name: torch.zeros_like(value) for name, value in nn.ModuleList([net(), net()]).state_dict().items()}
    for call in (
        lambda: zero.full_state_dict(both, to=None),
        lambda: zero.load_full_state_dict(both, weights),
        lambda: zero.full_tensors(both, optimizers, to=None),
        lambda: zero.checkpoint.save(tmp_path, both, optimizers),
    ):
        told = ranks.refusal(call)
        assert re.search(r"Error: .*over different process groups: \w+\(Sequential\) over the ranks \[0, 1\]", told)
        assert "or call this for each" in told


@ranks.raises(2, ValueError, "2 optimizers were given 1 states", timeout=20)
def test_states_of_fewer_optimizers_are_refused_on_every_rank(rank, world):
    run = built(adversaries, 3)
    zero.load_full_optimizer_state_dict(run.module, run.optimizers, [Adam(net().parameters()).state_dict()][rank:])
