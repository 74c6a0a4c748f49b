"""What wrapping and training leave as it was: torch's random numbers, and, after a forward whose loss was dropped, what
is full."""

import copy
import gc
import tracemalloc

import pytest
import torch

import ranks
import zero
from assertions import plain, same
from rows import Net, adam
from zoo import WIDTH, Stack, data


def elements(model: zero.FSDP) -> int:
    """That this rank has now."""
    return sum(plain(param).numel() for param in model.parameters())


@pytest.mark.parametrize("stage", range(4))
@ranks.on(2)
def test_no_random_number_is_drawn(rank, world, stage):
    net = Net()
    before = torch.get_rng_state()
    model, optimizer = zero.setup(net, adam, stage=stage)
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), before)


@ranks.on(2)
def test_reshard_releases_what_a_dropped_loss_left_full(rank, world):
    model, _ = zero.setup(Net(), adam, stage=3)
    at_rest = elements(model)
    model(torch.ones(2, WIDTH))
    assert elements(model) > at_rest
    model.reshard()
    assert elements(model) == at_rest


@ranks.on(2)
def test_a_frozen_model_that_is_called_with_gradients_keeps_nothing_of_its_forwards(rank, world):
    """As a teacher in a DDP script, without torch.no_grad()."""
    teacher = zero.FSDP(Stack(classes=WIDTH, blocks=2).requires_grad_(False)).eval()
    model, optimizer = zero.setup(Net(), adam, stage=3)
    sizes = []
    for i in range(150):
        (model(data(4, WIDTH, rank=rank, step=i)) - teacher(data(4, WIDTH, rank=rank, step=i))[:, :3]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if i == 20:
            tracemalloc.start()
        if i in (60, 149):
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[1] - sizes[0] < 20_000, sizes  # a record a unit and forward would take 70,000


@ranks.on(2)
def test_a_step_that_finds_memory_held_by_numpy_raises_on_every_rank_and_the_next_one_works(rank, world):
    net = Net()
    model, optimizer = zero.setup(net, adam, stage=3)
    reference, other = zero.setup(copy.deepcopy(Net()), adam, stage=0)
    zero.load_full_state_dict(reference, zero.full_state_dict(model, to=None))
    for i in range(3):
        for one, by in ((model, optimizer), (reference, other)):
            one(data(4, WIDTH, rank=rank, step=i)).square().mean().backward()
            if one is model:
                one(data(4, WIDTH, rank=rank, step=i))  # leaves the root unsharded
                kept = net.first.weight.detach().numpy() if rank == 0 else None
                with pytest.raises(RuntimeError, match="NumPy"):
                    by.step()
                del kept
            by.step()
            by.zero_grad()
    same(zero.full_state_dict(model, to=None), zero.full_state_dict(reference, to=None))


@ranks.on(2)
def test_torch_export_of_a_sharded_model_is_refused_and_leaves_it_whole(rank, world):
    model, optimizer = zero.setup(Net(), adam, stage=3)
    for what in (model, model.module):
        with pytest.raises(RuntimeError, match=r"zero\.unwrap"):
            torch.export.export(what, (torch.ones(2, WIDTH),), strict=False)
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
    assert len(zero.full_state_dict(model, to=None)) == len(Net().state_dict())
