"""Data that ends earlier on some ranks than on others: torch's Join with OSS, beside DDP.join() with a plain optimizer
on every rank."""

from contextlib import nullcontext

import pytest
import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR

import ranks
import zero
from reference import MOMENTUM, Net, batch, built, same
from transports import READS, between_hosts
from zero.interop.averaging import average_by_reading

WAYS = {
    "plain": {},
    "whole, clipped": {"partition": "whole", "clip": 0.05},
    "unused, no_sync": {"unused": True, "micro": 2},
    "averaged by reading": {"by_reading": True},
}


class Sometimes(Net):
    """Does without a layer on some batches."""

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs)) + self.frozen
        return hidden if inputs.sum() > 0 else hidden @ self.transposed.t().new_ones(37, 5) @ self.transposed


def trained(rank, steps, optim, defaults, *, sharded, unused=False, micro=1, clip=None, by_reading=False, **options):
    """The weights after `steps` steps, each of `micro` micro-batches, with a learning rate that falls with each."""
    net = built(Sometimes if unused else Net)
    model = DistributedDataParallel(net, find_unused_parameters=unused)
    if sharded:
        optimizer = zero.OSS(net.parameters(), optim, **options, **defaults)
        if by_reading:
            average_by_reading(model, optimizer.comm)
    else:
        optimizer = optim(net.parameters(), **defaults)
    scheduler = ExponentialLR(optimizer, 0.9)
    with Join([model, optimizer]) if sharded else model.join():
        for step in range(steps):
            optimizer.zero_grad()
            for number in range(1, micro + 1):
                with model.no_sync() if number < micro else nullcontext():
                    model(batch(rank, 10 * step + number)).square().mean().backward()
            if clip is not None and sharded:
                optimizer.clip_grad_norm(clip)
            elif clip is not None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            scheduler.step()
    return net, model, optimizer


def _uneven(rank, world, steps, way):
    for optim, defaults in ((SGD, MOMENTUM), (Adam, {"lr": 0.01})):
        expected, *_ = trained(rank, steps[rank], optim, defaults, sharded=False, **WAYS[way])
        net, model, optimizer = trained(rank, steps[rank], optim, defaults, sharded=True, **WAYS[way])
        close = 1e-6 if way in ("whole, clipped", "averaged by reading") or world > 2 else 0
        for (name, found), param in zip(net.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(found, param, rtol=close, atol=close, msg=lambda text, name=name: name + text)
        same(optimizer.comm.all_gather_text(str(net.state_dict())), [str(net.state_dict())] * world, "ranks' weights")

        optimizer.zero_grad()  # and goes on outside
        model(batch(rank, 99)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("way", WAYS)
def test_ranks_without_data_step_what_they_own(way):
    ranks.run(_uneven, 2, args=([5, 2], way), timeout=20)


def _between_hosts(rank, world, steps):
    with between_hosts():  # nothing is read from the others' memory
        _uneven(rank, world, steps, "plain")


@pytest.mark.parametrize("steps", [[0, 4, 2], [3, 3, 3]])
def test_any_rank_may_be_the_first_or_have_no_data(steps):
    ranks.run(_between_hosts, 3, args=(steps,), timeout=20)


def _early(rank, world):
    net = built()
    model = DistributedDataParallel(net)
    optimizer = zero.OSS(net.parameters(), SGD, **MOMENTUM)
    with Join([model, optimizer], throw_on_early_termination=True):
        for step in range(2 + rank):
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()


def test_early_termination_is_told_to_all():
    ranks.expect_error(_early, 2, RuntimeError, "exhausted", timeout=20)


def _alone(rank, world, join):
    net = built()
    model = DistributedDataParallel(net)
    optimizer = zero.OSS(net.parameters(), SGD, **MOMENTUM)
    with join(model, optimizer):
        for step in range(2 + rank):
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()


def of_ddp(model, optimizer):
    return model.join()


def optimizer_first(model, optimizer):
    return Join([optimizer, model])


def _other_average(rank, world):
    model, optimizer = zero.setup(built(), SGD, stage=1, lr=0.1)
    with Join([model, optimizer], divide_by_initial_world_size=False):
        for step in range(2 + rank):
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()


@pytest.mark.skipif(not READS, reason="setup averages where ranks read; elsewhere DistributedDataParallel itself does")
def test_averages_over_the_ranks_with_data_are_refused_where_setup_averages():
    ranks.expect_error(_other_average, 2, RuntimeError, r"zero\.join\(model, optimizer, divide", timeout=20)


def _with_scaler(rank, world, scaler):
    model, optimizer = zero.setup(built(), SGD, stage=1, lr=0.1)
    scaler = scaler("cpu")
    with Join([model, optimizer]):
        for step in range(2 + rank):
            scaler.scale(model(batch(rank, step)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("scaler", [zero.GradScaler, torch.amp.GradScaler])
def test_a_scaler_is_refused_as_it_may_skip_steps_that_ranks_without_data_wait_for(scaler):
    ranks.expect_error(_with_scaler, 2, RuntimeError, r"zero\.join\(ddp, opt", args=(scaler,), timeout=20)


@pytest.mark.parametrize("join", [of_ddp, optimizer_first])
def test_joining_without_the_optimizer_or_before_the_model_is_refused_at_the_first_step(join):
    ranks.expect_error(_alone, 2, RuntimeError, r"Join\(\[ddp, optimizer\]\)", args=(join,), timeout=20)


def _over(rank, world):
    """torch leaves DDP marked as inside of a join; OSS may step when the join is over, or was none."""
    net = built()
    model = DistributedDataParallel(net)
    optimizer = zero.OSS(net.parameters(), SGD, **MOMENTUM)
    with model.join():
        for step in range(1 + rank):
            model(batch(rank, step)).square().mean().backward()
    for enable in (True, False):
        model(batch(rank, 0)).square().mean().backward()
        optimizer.step()
        with model.join(enable=enable):
            pass
    optimizer.step()


def test_a_join_that_is_over_is_in_nobodys_way():
    ranks.run(_over, 2, timeout=20)


def of_sharded_ddp():
    net = built()
    return [zero.ShardedDDP(net, zero.OSS(net.parameters(), SGD, lr=0.1))]


def of_its_optimizer():
    net = built()
    optimizer = zero.OSS(net.parameters(), SGD, lr=0.1)
    zero.ShardedDDP(net, optimizer)
    return [optimizer]


def of_fsdp():
    return [zero.FSDP(built())]


def _refused(rank, world, joinables):
    with Join(joinables()):
        raise AssertionError("not refused")


@pytest.mark.parametrize("joinables", [of_sharded_ddp, of_its_optimizer, of_fsdp])
def test_stages_2_and_3_refuse_to_join(joinables):
    ranks.expect_error(_refused, 2, RuntimeError, "cannot be used with torch's Join", args=(joinables,), timeout=20)
