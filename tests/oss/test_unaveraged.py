"""Steps on gradients that are not, or not yet, those of all ranks: refused on every rank, or right."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ranks
import zero
from rows import Net, Rows, changed, momentum
from zoo import WIDTH, data

row = Rows("step() on gradients that were not averaged", __name__, optim=momentum)

# ------------------------------------------------------------------------------------------------- within a backward


def within(register):
    """register(t, hook): a hook that is called within each backward."""

    def stepped(t, i):
        if i == 0:
            register(t, lambda *_: t.o.step())
        t.update(t.loss(i))

    return stepped


REFUSED = {"same": (), "refused": {1: "within a backward.*has returned", 2: "within a backward.*has returned"}}
row.of(
    "a hook after a gradient steps",
    within(lambda t, hook: t.n.first.weight.register_post_accumulate_grad_hook(hook)),
    **REFUSED,
)
row.of("a hook of a module steps", within(lambda t, hook: t.n.last.register_full_backward_hook(hook)), **REFUSED)
row.of("a hook of a tensor steps", within(lambda t, hook: t.n.first.weight.register_hook(lambda g: hook())), **REFUSED)

# ------------------------------------------------------------------------------------------- under no_sync, or around


def unsent(t, i):
    t.update(t.loss(i))
    with zero.no_sync(t.m):
        t.loss(10 + i).backward()
    t.o.step()


def around(t, i):
    t.update(t.n(t.batch(i)).square().mean())


def around_parts(t, i):
    t.update(t.n.last(t.n.first(t.batch(i))).square().mean())


def twice(t, i):
    losses = t.loss(i), t.loss(10 + i)
    losses[0].backward()
    t.update(losses[1])


def again(t, i):
    loss = t.loss(i)
    loss.backward(retain_graph=True)
    t.update(loss)


def unfrozen(t, i):
    t.n.first.requires_grad_(i > 0)
    t.update(t.loss(i))


def frozen():
    return changed(Net(), lambda net: net.first.requires_grad_(False))


row.of("the last backward is under no_sync", unsent, same=(), refused={1: r"no_sync\(\)", 2: r"no_sync\(\)"})
row.of("the inner module is called", around, same=(), refused={1: "around the DistributedDataParallel"})
row.of("modules inside are called", around_parts, same=(), refused={1: "around the DistributedDataParallel"})
row.of("two losses, one after the other", twice, same=(), refused={1: "in the first alone"})
row.of("a graph is gone through twice", again, same=(), refused={1: "in the first alone"})
row.of(
    "a layer is unfrozen after wrapping",
    unfrozen,
    net=frozen,
    same=(),
    refused={1: r"first\.(weight|bias) was frozen when.*Wrap the model again"},
)


# ---------------------------------------------------------------------------------------------------- what is right


def inner_calls(t, i):
    """Of which no gradient is left."""
    loss = t.loss(i)
    t.note(torch.autograd.grad(t.n(t.batch(10 + i)).square().mean(), t.n.last.weight)[0])
    with torch.no_grad():
        t.note(t.n(t.batch(20 + i)))
    loss.backward()
    t.n(t.batch(30 + i))
    t.m(t.batch(30 + i))
    t.update(None)


def dropped(t, i):
    with zero.no_sync(t.m):
        t.loss(10 + i).backward()
    t.n(t.batch(i)).square().mean().backward()
    t.n.zero_grad()
    t.update(t.loss(i))


row.of("the inner module is called for other things", inner_calls, same={1, 2})
row.of("gradients that were not averaged are dropped", dropped, same={1})
test_rows = row.tests()


@pytest.mark.filterwarnings("ignore:.*weights_only:FutureWarning")
@ranks.on(2)
def test_copies_and_files_of_the_module_are_watched_no_more(rank, world):
    model, optimizer = zero.setup(Net(), momentum, stage=1)
    file = io.BytesIO()
    torch.save(model.module, file)
    file.seek(0)
    model(data(4, WIDTH, rank=rank)).square().mean().backward()
    for other in (copy.deepcopy(model.module), torch.load(file, weights_only=False)):
        other(data(4, WIDTH, rank=rank)).square().mean().backward()
    optimizer.step()
    zero.unwrap(model)(data(4, WIDTH, rank=rank)).square().mean().backward()
    assert "around" in ranks.refusal(optimizer.step)


@ranks.on(2)
def test_a_layer_that_was_added_is_averaged_once_the_model_is_wrapped_again(rank, world):
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    model, optimizer = zero.setup(net, momentum(net.parameters()), stage=1)
    net.append(nn.Linear(WIDTH, WIDTH))
    optimizer.add_param_group({"params": net[1].parameters()})
    model(data(4, WIDTH, rank=rank)).square().mean().backward()
    assert "1.weight was added to the optimizer" in ranks.refusal(optimizer.step)
    optimizer.zero_grad()
    again = DistributedDataParallel(zero.unwrap(model))
    again(data(4, WIDTH, rank=rank)).square().mean().backward()
    optimizer.step()


@ranks.on(2)
def test_a_wrapper_that_is_compiled_averages(rank, world):
    model, optimizer = zero.setup(Net(), momentum, stage=1)
    compiled = torch.compile(model, backend="eager")
    for _ in range(3):
        optimizer.zero_grad()
        compiled(data(4, WIDTH, rank=rank)).square().mean().backward()
        optimizer.step()


class Two(nn.Module):
    """Of two nets that have no parameter in common."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.one(x), self.other(x)


@ranks.on(2)
def test_losses_of_different_parameters_may_have_a_backward_each(rank, world):
    """DistributedDataParallel averages each parameter's first gradient after a forward."""
    model, optimizer = zero.setup(Two(), momentum, stage=1)
    expected = Two()
    reference = momentum(expected.parameters())
    for step in range(3):
        for loss in model(data(4, WIDTH, rank=rank, step=step)):
            loss.square().mean().backward()
        reference.zero_grad()
        for one in range(2):
            for loss in expected(data(4, WIDTH, rank=one, step=step)):
                (loss.square().mean() / 2).backward()
        for each in (optimizer, reference):
            each.step()
        optimizer.zero_grad()
    for name, value in model.module.state_dict().items():
        assert torch.allclose(value, expected.state_dict()[name], atol=1e-6), name


def nothing_reached_the_other(model, optimizer, x):
    model(x)[0].sum().backward()


def the_forward_has_raised(model, optimizer, x):
    sum(model(x)).sum().backward()
    with pytest.raises(TypeError):
        model(x, x)
    optimizer.zero_grad()
    sum(model.module(x)).sum().backward()


@pytest.mark.parametrize("act", [nothing_reached_the_other, the_forward_has_raised])
@ranks.on(2)
def test_averages_that_are_not_complete_are_refused(rank, world, act):
    """DistributedDataParallel averages once all have gradients, and after a forward that has ended."""
    model, optimizer = zero.setup(Two(), momentum, stage=1)
    act(model, optimizer, data(4, WIDTH, rank=rank))
    assert "averaged over the ranks" in ranks.refusal(optimizer.step)


@ranks.on(2)
def test_a_forward_under_no_sync_within_an_averaged_backward_counts(rank, world):
    net = nn.Linear(WIDTH, WIDTH)
    model, optimizer = zero.setup(net, momentum, stage=1)
    with zero.no_sync(model):
        inner = model(data(4, WIDTH, rank=rank))
    model(inner).square().mean().backward()
    mine, others = net.weight.grad, net.weight.grad.clone()
    torch.distributed.broadcast(others, 0)
    assert torch.equal(mine, others)
    optimizer.step()
