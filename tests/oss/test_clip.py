"""clip_grad_norm beside torch's clip_grad_norm_ on DistributedDataParallel with the plain optimizer."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import ranks
from reference import FEATURES, MOMENTUM, Net, at_stage, built, clip, loss_of
from zero import OSS, ShardedDDP
from zero.shards import norm

NORMS = (1.0, 2.0, 3.0, math.inf)
CASES = [(stage, partition) for stage in (1, 2) for partition in ("even", "whole")]
by_case = pytest.mark.parametrize(("stage", "partition"), CASES)


def assert_close(got, expected, what):
    """To 1e-6 of the largest element."""
    for name, value in expected.items():
        tolerance = 1e-6 * max(value.abs().max().item(), 1e-3) if value.numel() else 0.0
        difference = (got[name] - value).abs().max().item() if value.numel() else 0.0
        assert difference <= tolerance, f"{what}: {name} differs by {difference}"


def weights(model):
    return {name.removeprefix("module."): param.detach() for name, param in model.named_parameters()}


def clipped_steps(plain, sharded, rank, steps, norms=NORMS):
    """Both trained alike; gradients clipped to less than they are, so that the scale counts."""
    told = []
    for step in steps:
        for norm_type in norms:
            found = []
            for model, optimizer in (plain, sharded):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                found.append(clip(model, optimizer, 0.01, norm_type))
                optimizer.step()
            expected, norm = found
            assert expected > 0.02, "nothing would be clipped"
            assert norm.dim() == 0
            assert norm.item() == pytest.approx(expected.item(), rel=1e-6), f"norm {norm_type} in step {step}"
            assert_close(weights(sharded[0]), weights(plain[0]), f"weights clipped by norm {norm_type} in step {step}")
            told.append(norm.item())
    return told


def _clips(rank, world, stage, partition):
    """Net has frozen parameters, a tied weight, one of a single element and one of none."""
    plain = at_stage(0, built(), SGD, **MOMENTUM)
    sharded = at_stage(stage, built(), SGD, partition=partition, **MOMENTUM)
    return clipped_steps(plain, sharded, rank, range(2))


@pytest.mark.parametrize("world", [2, 3])
@by_case
def test_norm_and_step_are_those_of_torch(world, stage, partition):
    told = ranks.run(_clips, world, args=(stage, partition))
    assert all(norms == told[0] for norms in told), "the norm is the same number on every rank"


@by_case
@ranks.on(2)
def test_parameters_added_later_count(rank, world, stage, partition):
    models = built(), built()
    first = [[*model.first.parameters(), model.scale] for model in models]
    plain, sharded = SGD(first[0], **MOMENTUM), OSS(first[1], SGD, partition=partition, **MOMENTUM)
    for model, given in zip(models, first, strict=True):
        later = [param for param in model.parameters() if param.requires_grad and all(param is not p for p in given)]
        for param in later:
            param.requires_grad_(False)
    wrapped = (
        DistributedDataParallel(models[0]),
        (ShardedDDP(models[1], sharded) if stage == 2 else DistributedDataParallel(models[1])),
    )
    clipped_steps((wrapped[0], plain), (wrapped[1], sharded), rank, range(1), (2.0,))
    for model, optimizer in zip(models, (plain, sharded), strict=True):
        model.middle.requires_grad_(True)
        optimizer.add_param_group({"params": [model.middle.weight], "lr": 0.5})
    again = DistributedDataParallel(models[0]), wrapped[1] if stage == 2 else DistributedDataParallel(models[1])
    clipped_steps((again[0], plain), (again[1], sharded), rank, range(1, 2), (1.0, 2.0, math.inf))


def _subgroup(rank, world, stage, partition):
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    plain = at_stage(0, built(), SGD, group, **MOMENTUM)
    sharded = at_stage(stage, built(), SGD, group, partition=partition, **MOMENTUM)
    return clipped_steps(plain, sharded, rank, range(2), (1.0, 2.0, math.inf))


@by_case
def test_norm_is_that_of_the_group_not_of_the_job(stage, partition):
    told = ranks.run(_subgroup, 3, args=(stage, partition))
    assert told[0] == told[2]


@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_parts_without_gradient_count_as_nothing(rank, world, stage):
    """The shard that rank 0 owns gets no gradient at all in this step."""
    nets = [built(lambda: nn.ModuleList([nn.Linear(FEATURES, 40), nn.Linear(FEATURES, 40)])) for _ in range(2)]
    optimizer = OSS(nets[1].parameters(), SGD, partition="whole", **MOMENTUM)
    plain = SGD(nets[0].parameters(), **MOMENTUM)
    wrapped = [each[1] for each in nets]
    models = DistributedDataParallel(wrapped[0]), DistributedDataParallel(wrapped[1])
    if stage == 2:
        models = models[0], ShardedDDP(nets[1], optimizer)
        models[1].forward = nets[1][1].forward
    norms = []
    for model, each in zip(models, (plain, optimizer), strict=True):
        loss_of(model, rank, 0).backward()
        norms.append(clip(nets[0], each, 0.01))
        each.step()
    assert norms[1].item() == pytest.approx(norms[0].item(), rel=1e-6)
    assert_close(weights(nets[1]), weights(nets[0]), "weights")


@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_clipping_twice_scales_what_is_there(rank, world, stage):
    """Clipped in the middle of an accumulation, gradients that come later are added to the clipped ones."""
    plain, sharded = at_stage(0, built(Net), SGD, **MOMENTUM), at_stage(stage, built(Net), SGD, **MOMENTUM)
    norms = []
    for model, optimizer in (plain, sharded):
        for step in range(2):
            loss_of(model, rank, step).backward()
            norms.append(clip(model, optimizer, 0.05).item())
        optimizer.step()
    assert norms[2:] == pytest.approx(norms[:2], rel=1e-6)
    assert_close(weights(sharded[0]), weights(plain[0]), "weights")


@pytest.mark.parametrize(("max_norm", "written"), [(2.0, False), (1.0, True), (math.nan, True)])
def test_offloaded_gradients_that_are_short_enough_are_not_written(max_norm, written):
    """A product with one would change nothing."""
    gradients = [torch.full((4,), 0.75, device="cpu"), torch.zeros(0, device="cpu")]
    version = gradients[0]._version
    norm.clip(gradients, torch.tensor(1.5), max_norm, apart=True)
    assert (gradients[0]._version > version) == written
