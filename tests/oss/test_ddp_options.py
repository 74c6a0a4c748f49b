"""Stage 1 beside DistributedDataParallel's own options: what DDP does with them, it does with OSS as with the plain
optimizer, bit for bit, whichever of OSS and DDP was built first."""

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

import ranks
import zero
from assertions import same
from optimizers import MOMENTUM
from zoo import built, odd_batch


def fp16(model):
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


VARIANTS = {
    "fp16 hook": (fp16, {}),
    "gradient views": (None, {"gradient_as_bucket_view": True}),
    "gradient views, fp16 hook": (fp16, {"gradient_as_bucket_view": True}),
    "static graph, gradient views": (None, {"static_graph": True, "gradient_as_bucket_view": True}),
    "find unused": (None, {"find_unused_parameters": True}),
    "small buckets, gradient views": (None, {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}),
}


def trained(rank, optim, options, *, first=None, hook=None, no_sync=False, **ddp):
    """Losses and weights. first: "OSS" or "DDP", whichever is built first; None: the plain optimizer."""
    net = built()
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


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
@ranks.on(2)
def test_trains_as_the_plain_optimizer_does_with_the_same_options(rank, world, name):
    hook, ddp = VARIANTS[name]
    for optim, options, first, no_sync in ((SGD, MOMENTUM, "OSS", False), (Adam, {"lr": 0.01}, "DDP", True)):
        if no_sync and "static_graph" in ddp:
            continue  # which DistributedDataParallel does not have under no_sync
        how = {"hook": hook, "no_sync": no_sync, **ddp}
        expected = trained(rank, optim, options, **how)
        same(trained(rank, optim, options, first=first, **how), expected, f"{first} built first: losses and weights")
        if hook:
            assert trained(rank, optim, options, no_sync=no_sync, **ddp)[0] != expected[0], "the hook did nothing"
