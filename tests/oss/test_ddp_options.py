"""Stage 1 beside DistributedDataParallel's own options: what DDP does with them, it does with OSS as with the plain
optimizer, bit for bit, whichever of OSS and DDP was built first."""

import pytest
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

import ranks
import zero
from assertions import same
from optimizers import MOMENTUM
from zoo import FEATURES, OddNet, built, odd_batch


def fp16(model):
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def power_sgd(model):
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, powerSGD_hook)


VARIANTS = {
    "fp16 hook": (fp16, {}),
    "PowerSGD": (power_sgd, {}),
    "PowerSGD, gradient views": (power_sgd, {"gradient_as_bucket_view": True}),
    "gradient views": (None, {"gradient_as_bucket_view": True}),
    "gradient views, fp16 hook": (fp16, {"gradient_as_bucket_view": True}),
    "static graph": (None, {"static_graph": True}),
    "static graph, gradient views": (None, {"static_graph": True, "gradient_as_bucket_view": True}),
    "find unused": (None, {"find_unused_parameters": True}),
    "small buckets": (None, {"bucket_cap_mb": 0.001}),
    "small buckets, gradient views": (None, {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}),
}


def matrices():
    """What PowerSGD takes: nothing without dimensions, nothing without elements."""
    return nn.Sequential(nn.Linear(FEATURES, 37), nn.Tanh(), nn.LayerNorm(37), nn.Linear(37, 60))


def trained(rank, make, optim, options, *, first=None, hook=None, no_sync=False, **ddp):
    """Losses and weights. first: "OSS" or "DDP", whichever is built first; None: the plain optimizer."""
    net = built(make)
    if first == "OSS":
        optimizer = zero.OSS(net.parameters(), optim, **options)
    model = DistributedDataParallel(net, **ddp)
    if first == "DDP":
        optimizer = zero.OSS(model.parameters(), optim, **options)
    if first is None:
        optimizer = optim(model.parameters(), **options)
    if hook is not None:
        hook(model)
    losses = []
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if no_sync:
            with model.no_sync():
                model(odd_batch(rank, 100 + step)).square().mean().backward()
        loss = model(odd_batch(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: param.detach().clone() for name, param in net.named_parameters()}


def _variant(rank, world, name, no_sync):
    hook, ddp = VARIANTS[name]
    make = matrices if "PowerSGD" in name else OddNet
    for optim, options, first in ((SGD, MOMENTUM, "OSS"), (Adam, {"lr": 0.01}, "DDP")):
        expected = trained(rank, make, optim, options, hook=hook, no_sync=no_sync, **ddp)
        found = trained(rank, make, optim, options, first=first, hook=hook, no_sync=no_sync, **ddp)
        same(found, expected, f"{optim.__name__}, {first} built first: losses and weights")
    return expected[0]


QUICK = ("fp16 hook", "gradient views")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in VARIANTS])
def test_trains_as_the_plain_optimizer_does_with_the_same_options(name):
    ranks.run(_variant, 2, args=(name, False))


@pytest.mark.slow
@ranks.on(2)
def test_comm_hooks_take_effect(rank, world):
    """Hooks do change the numbers: the test above compares something."""
    for hook in (fp16, power_sgd):
        with_hook, without = (trained(rank, matrices, SGD, MOMENTUM, first="OSS", hook=each) for each in (hook, None))
        assert with_hook[0] != without[0], hook.__name__


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp16 hook", "gradient views", "find unused", "small buckets"])
def test_gradients_accumulated_under_no_sync_are_stepped_with_the_rest(name):
    assert ranks.run(_variant, 2, args=(name, True)) != ranks.run(_variant, 2, args=(name, False))
