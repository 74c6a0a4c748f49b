"""What wrapping and forwards send of a model: its weights at the start, and buffers, also those that become others
after wrapping, such as caches that grow with the batch."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import ranks
import zero
from runs import sgd
from transports import TRANSPORTS, by
from zoo import WIDTH, batch, built

LENGTH = 4


class Cached(nn.Module):
    """Multiplies by a table that is made as long as the longest input yet."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.register_buffer("table", torch.ones(LENGTH))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.table):
            self.table = torch.arange(1.0, len(x) + 1)
        self.steps += 1
        return self.line(x) * self.table[: len(x), None]


def grown(rank: int, world: int, stage: int, lengths: list[int], transport: str) -> list[float]:
    with by(transport):
        model, _ = zero.setup(Cached(), partial(SGD, lr=0.1), stage=stage)
        for length in (LENGTH, lengths[rank], 2):
            model(torch.ones(length, 3)).sum().backward()
    return [*model.module.table.tolist(), model.module.steps.item()]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "lengths", "transport"), [(2, [6, 4], TRANSPORTS[-1]), (3, [6, 5], TRANSPORTS[0])])
def test_buffers_of_other_sizes_on_other_ranks_are_refused_on_every_rank(stage, lengths, transport):
    """With the remedy, where one rank alone has another."""
    error = "ValueError" if 4 not in lengths else "RuntimeError"
    told = ranks.expect_error(grown, 2, error, args=(stage, lengths, transport), timeout=20)
    if 4 in lengths:
        assert "table: [6], torch.float32" in told[0] and "broadcast_buffers=False" in told[0]
    else:
        assert all("rank 0 has table: [6], torch.float32, rank 1 has table: [5]" in each for each in told)


@pytest.mark.parametrize("stage", [2, 3])
def test_buffers_that_become_the_same_on_every_rank_go_on_being_those_of_the_first(stage):
    expected = [*range(1, 7), 3]
    assert ranks.run(grown, args=(stage, [6, 6], TRANSPORTS[0])) == [expected] * 2


class Normed(nn.Sequential):
    """Other weights and buffers on each rank unless they are `alike`."""

    def __init__(self, rank: int = 0) -> None:
        torch.manual_seed(rank)
        super().__init__(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self[1].running_mean += rank
        self[0].bias.requires_grad_(False)


def sharded(model: nn.Module, **options: bool) -> zero.ShardedDDP:
    return zero.ShardedDDP(model, zero.OSS(model.parameters(), sgd), **options)


@ranks.on(2)
def test_buffers_are_in_step_when_asked(rank, world):
    """After a forward each rank has those of its own data."""
    wrapped = sharded(built(Normed), broadcast_buffers=False)
    wrapped(batch(rank, 0))
    both = [torch.empty(16), torch.empty(16)]
    for apart in (True, False):
        torch.distributed.all_gather(both, wrapped.module[1].running_mean)
        assert torch.equal(*both) != apart
        before = both[0].clone()
        wrapped.sync_buffers()
    assert torch.equal(wrapped.module[1].running_mean, before)


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(2)
def test_what_is_registered_after_wrapping_stays_each_ranks_own(rank, world, stage):
    """As with DistributedDataParallel."""
    model, _ = zero.setup(Normed(), sgd, stage=stage)
    model.module[0].register_buffer("late", torch.tensor(float(rank)))
    for step in range(2):
        model(batch(rank, step)).sum().backward()
    assert model.module[0].late == rank


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.raises(2, ValueError, "is of TorchScript.*torch.compile", timeout=15)
def test_modules_of_torchscript_are_refused(rank, world, stage):
    """Inside of others those that take no hooks are none of the wrapper's at stages 1 and 2."""
    made = torch.jit.trace(nn.Linear(WIDTH, 3), batch(0, 0))
    zero.setup(nn.Sequential(nn.Linear(WIDTH, WIDTH), made) if stage == 3 else made, sgd, stage=stage)


@ranks.on(2)
def test_models_start_as_the_first_ranks_or_as_they_are(rank, world):
    sent = []
    for sync in (False, True):
        model, before = Normed(rank), zero.traffic()
        sharded(model, sync_models_at_startup=sync)
        sent.append((zero.traffic() - before).total)
        expected = Normed(0 if sync else rank).state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert rank or sent[1] >= sent[0] + sum(param.nbytes for param in model.parameters())
