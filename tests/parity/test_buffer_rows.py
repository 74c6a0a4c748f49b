"""Several forwards of a model with buffers and one backward: rank 0's buffers are sent before each forward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import ranks
import zero
from loops import WIDTH, Loop, Rows, adam, sgd
from sidebyside import data, ddp_sends_buffers

KIND = "C3: two forwards and one backward of a model with buffers"
row = Rows(KIND)


class Net(nn.Sequential):
    def __init__(self, middle=nn.BatchNorm1d, **how) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), middle(WIDTH, **how), nn.Tanh(), nn.Linear(WIDTH, 3))


class Mask(nn.Module):
    """Its buffer is read by the graph, and never written."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mask", torch.arange(width) % 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


def spectral(width: int) -> nn.Module:
    return spectral_norm(nn.Linear(width, width))


def update(t: Loop, loss: Tensor) -> None:
    t.o.zero_grad()
    loss.backward()
    t.o.step()


@row(net=Net, fails={2, 3})
def two_forwards_have_one_backward(t, i):
    update(t, t.loss(i) + t.loss(10 + i))


@row(net=partial(Net, momentum=None), optim=adam, fails={2, 3})
def three_forwards_have_one_backward(t, i):
    update(t, t.loss(i) + t.loss(10 + i) + t.loss(20 + i))


@row(net=partial(Net, Mask), fails={2, 3})
def two_forwards_read_a_buffer_that_nothing_writes(t, i):
    update(t, t.loss(i) + t.loss(10 + i))


@row(net=partial(Net, spectral))
def two_forwards_have_a_spectral_norm(t, i):
    update(t, t.loss(i) + t.loss(10 + i))


@row(net=Net, fails={2, 3})
def a_forward_reads_the_output_of_another(t, i):
    y = t.m(t.batch(i))
    update(t, y.square().mean() + t.note(t.m(t.batch(10 + i) * y.mean()).square().mean()))


@row(net=Net, fails={2, 3})
def an_evaluation_without_gradients_is_between_forward_and_backward(t, i):
    loss = t.loss(i)
    with torch.no_grad():
        t.m.eval()
        t.loss(10 + i)
    t.m.train()
    update(t, loss)


@row(net=Net, fails={2, 3})
def a_forward_in_training_is_followed_by_one_in_evaluation(t, i):
    loss = t.loss(i)
    t.m.eval()
    loss = loss + t.loss(10 + i)
    t.m.train()
    update(t, loss)


@row(net=Net, fails={2, 3})
def a_forward_in_evaluation_is_followed_by_one_in_training(t, i):
    t.m.eval()
    loss = t.loss(i)
    t.m.train()
    update(t, loss + t.loss(10 + i))


@row(net=Net, fails={2, 3})
def two_forwards_are_in_evaluation(t, i):
    t.m.train(i == 0)
    update(t, t.loss(i) + t.loss(10 + i) if i else t.loss(i))


@row(net=Net, fails={2, 3})
def the_norm_is_frozen_in_evaluation(t, i):
    t.n[1].eval()
    update(t, t.loss(i) + t.loss(10 + i))


@row(net=Net, tolerance=1e-6, fails={2, 3})
def two_forwards_are_under_no_sync_and_two_are_not(t, i):
    t.o.zero_grad()
    with t.m.no_sync():
        (t.loss(i) + t.loss(10 + i)).backward()
    (t.loss(20 + i) + t.loss(30 + i)).backward()
    t.o.step()


@row(net=Net)
def buffers_of_one_rank_are_others_before_a_forward_in_evaluation(t, i):
    t.m.train(i == 0)
    t.n[1].running_mean.data.add_(t.rank)
    update(t, t.loss(i))


@row(net=Net, fails={2, 3})
def buffers_of_one_rank_are_others_before_two_forwards_in_evaluation(t, i):
    t.m.train(i == 0)
    t.n[1].running_var.data.mul_(1 + t.rank)
    update(t, t.loss(i) + t.loss(10 + i) if i else t.loss(i))


test_rows = row.tests()


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(2, timeout=15)
def test_buffers_that_are_not_sent_may_be_read_by_two_forwards(rank, world, stage):
    told = []
    for at in (0, stage):
        torch.manual_seed(rank)
        net = Net()
        if at == 0:
            model = nn.parallel.DistributedDataParallel(net, **ddp_sends_buffers(False))
            optimizer = sgd(net.parameters())
        elif at == 2:
            optimizer = zero.OSS(net.parameters(), sgd)
            model = zero.ShardedDDP(net, optimizer, broadcast_buffers=False)
        else:
            model = zero.FSDP(net, broadcast_buffers=False)
            optimizer = sgd(model.parameters())
        for i in range(3):
            optimizer.zero_grad()
            sum(model(data(4, WIDTH, rank=rank, step=i + 10 * k)).square().mean() for k in (0, 1)).backward()
            optimizer.step()
        told.append(zero.full_state_dict(model))
    assert all(torch.equal(told[1][name], value) for name, value in told[0].items())
