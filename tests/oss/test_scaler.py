"""Loss scaling beside torch.amp.GradScaler on DistributedDataParallel with the plain optimizer.

Scales are powers of two, so that gradients have the same bits with and without them.
"""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import gpus
import matrix
import ranks
import zero
from reference import FEATURES, at_stage, built, clip, loss_of, same

OPTIMIZERS = {"sgd": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}), "adam": (Adam, {"lr": 0.01})}
SCALE = {"init_scale": 2.0**8, "growth_interval": 2}
STEPS, BAD = 6, 2  # BAD: the step in which one element of one rank's gradient is infinite
AT = [("zero", stage, partition) for stage in (1, 2, 3) for partition in ("even", "whole")]
AT += [("torch", 1, "even"), ("torch", 1, "whole")]


def two_layers():
    return nn.Sequential(nn.Linear(FEATURES, 40), nn.Tanh(), nn.Linear(40, 40))


def one_weight():
    """A whole cut leaves it to one rank: the other owns no gradient."""
    return nn.Linear(FEATURES, 3, bias=False)


def built_at(stage, make, optim, partition, options):
    if stage < 3:
        return at_stage(stage, built(make), optim, partition=partition, **options)
    model = zero.FSDP(built(make), partition=partition)
    return model, optim(model.parameters(), **options)


def train(rank, model, optimizer, scaler=None, *, spoiler=None, skips=None, clipped=False):
    """The losses after each step, and the scales. spoiler: the rank with the infinite gradient; skips: a step."""
    losses, scales = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        spoiled = spoil(next(model.parameters())) if (step, rank) == (BAD, spoiler) else None
        (loss if scaler is None else scaler.scale(loss)).backward()
        if spoiled is not None:
            spoiled.remove()
        if clipped:
            if scaler is not None:
                scaler.unscale_(optimizer)
            clip(model, optimizer, 0.05)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        elif step != skips:
            optimizer.step()
        losses.append(loss_of(model, rank, step).item())
    return losses, scales


def spoil(param):
    """From now on the last element of the parameter's gradient is infinite."""

    def spoiled(gradient):
        gradient = gradient.clone()
        gradient.view(-1)[-1] = torch.inf
        return gradient

    return param.register_hook(spoiled)


def _skips(rank, world, kind, stage, partition, make, name):
    optim, options = OPTIMIZERS[name]
    for spoiler in (None, 0, 1):
        unscaled = built_at(0, make, optim, partition, options)
        losses, _ = train(rank, *unscaled, skips=None if spoiler is None else BAD)
        plain = built_at(0, make, optim, partition, options)
        assert train(rank, *plain, torch.amp.GradScaler(gpus.DEVICE, **SCALE), spoiler=spoiler)[0] == losses
        expected_scales = [256.0, 512.0, 512.0, 1024.0, 1024.0, 2048.0]
        if spoiler is not None:
            expected_scales = [256.0, 512.0, 256.0, 256.0, 512.0, 512.0]

        model, optimizer = built_at(stage, make, optim, partition, options)
        scaler = (zero if kind == "zero" else torch.amp).GradScaler(gpus.DEVICE, **SCALE)
        told = train(rank, model, optimizer, scaler, spoiler=spoiler)
        assert told == (losses, expected_scales), f"with an infinite gradient on rank {spoiler}"
        same(zero.full_state_dict(model), zero.full_state_dict(plain[0]), "weights")


@matrix.combined("at, name", AT, OPTIMIZERS)
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(at, name):
    ranks.run(_skips, 2, args=(*at, two_layers, name))


@pytest.mark.parametrize(("kind", "stage"), [("zero", 1), ("zero", 2), ("zero", 3), ("torch", 1)])
def test_a_rank_that_owns_no_gradient_skips_and_steps_as_the_others(kind, stage):
    ranks.run(_skips, 2, args=(kind, stage, "whole", one_weight, "sgd"))


@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_gradients_may_be_clipped_between_unscale_and_step(rank, world, stage):
    optim, options = OPTIMIZERS["sgd"]
    plain, sharded = (built_at(at, two_layers, optim, "even", options) for at in (0, stage))
    expected = train(rank, *plain, torch.amp.GradScaler(gpus.DEVICE, **SCALE), spoiler=1, clipped=True)
    losses, scales = train(rank, *sharded, zero.GradScaler(gpus.DEVICE, **SCALE), spoiler=1, clipped=True)
    assert scales == expected[1]
    assert losses == pytest.approx(expected[0], rel=1e-6)


@ranks.on(2)
def test_its_state_is_that_of_torchs_own(rank, world):
    """What is saved loads into torch's own, and the other way round."""
    optim, options = OPTIMIZERS["sgd"]
    model, optimizer = built_at(2, two_layers, optim, "even", options)
    scaler = zero.GradScaler(gpus.DEVICE, **SCALE)
    train(rank, model, optimizer, scaler, spoiler=0)
    other = torch.amp.GradScaler(gpus.DEVICE)
    other.load_state_dict(scaler.state_dict())
    again = zero.GradScaler(gpus.DEVICE)
    again.load_state_dict(other.state_dict())
    assert again.state_dict() == scaler.state_dict()
    assert again.get_scale() == 512.0


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_disabled_it_does_nothing(rank, world, stage):
    optim, options = OPTIMIZERS["sgd"]
    plain, sharded = (built_at(at, two_layers, optim, "even", options) for at in (0, stage))
    losses, _ = train(rank, *plain)
    assert train(rank, *sharded, zero.GradScaler(gpus.DEVICE, enabled=False)) == (losses, [1.0] * STEPS)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(3)
def test_three_ranks_agree_on_what_is_skipped(rank, world, stage):
    """Gradients are added up in another order than by Gloo's all-reduce."""
    optim, options = OPTIMIZERS["sgd"]
    plain, sharded = (built_at(at, two_layers, optim, "even", options) for at in (0, stage))
    expected = train(rank, *plain, torch.amp.GradScaler(gpus.DEVICE, **SCALE), spoiler=2)
    losses, scales = train(rank, *sharded, zero.GradScaler(gpus.DEVICE, **SCALE), spoiler=2)
    assert scales == expected[1]
    assert losses == pytest.approx(expected[0], rel=1e-5)
