"""The numbers are the same at every stage: those of DistributedDataParallel with the plain optimizer.

On two ranks every loss, parameter and buffer is the same bit for bit. On more, sums of three and more terms are taken
in another order than DistributedDataParallel takes them, and agree within rounding.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import matrix
import ranks
import zero
from assertions import close
from inner import Comm, unit_names
from runs import Record, reference, train_case
from transports import between_hosts
from zoo import CASES, OPTIMIZERS, Case, DecoderBlock, Layer

ODD = [case for case in CASES if case != "wide"]  # where the size of gradients makes no difference

Pair = tuple[nn.Module, Optimizer]
Build = Callable[[nn.Module, Case, Callable[..., Optimizer], dist.ProcessGroup | None], Pair]


def stage_1(model: nn.Module, case: Case, optim: Any, group: Any, **options: Any) -> Pair:
    optimizer = zero.OSS(model.parameters(), optim, group=group, **options)
    return DistributedDataParallel(model, process_group=group, **case.ddp), optimizer


def stage_2_in_small_buckets(model: nn.Module, case: Case, optim: Any, group: Any) -> Pair:
    optimizer = zero.OSS(model.parameters(), optim, process_group=group)
    return zero.ShardedDDP(model, optimizer, reduce_buffer_size=150), optimizer


def stage_3(model: nn.Module, case: Case, optim: Any, group: Any, *, units: int, **options: Any) -> Pair:
    wrapped = zero.FSDP(model, process_group=group, **options)
    assert len(unit_names(wrapped)) >= units, "the policy should choose units here"
    return wrapped, optim(wrapped.parameters())


def by_setup(model: nn.Module, case: Case, optim: Any, group: Any, *, stage: int, **options: Any) -> Pair:
    return zero.setup(model, optim, stage=stage, process_group=group, **options)


STAGES: dict[str, Build] = {
    "1": stage_1,
    "1 whole": partial(stage_1, partition="whole"),
    "2": partial(by_setup, stage=2),
    "2 whole": partial(by_setup, stage=2, partition="whole"),
    "2 small buckets": stage_2_in_small_buckets,
    "3": partial(by_setup, stage=3),
    "3 whole": partial(by_setup, stage=3, partition="whole"),
    "3 by class": partial(
        stage_3,
        auto_wrap_policy=ModuleWrapPolicy({DecoderBlock, nn.LayerNorm, Layer, nn.BatchNorm2d, nn.Tanh}),
        units=4,
    ),
    "3 by size": partial(stage_3, auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=150), units=4),
    "3 not resharded": partial(stage_3, reshard_after_forward=False, units=4),
    "3 memory first": partial(stage_3, prefetch=1, units=4),
    "3 speed first": partial(stage_3, prefetch=3, units=4),
}


def train_at(
    rank: int, world: int, case: str, optim: str, stage: str, how: dict[str, Any], members: list[int] | None
) -> Record | None:
    """Trains at a stage, in the group of `members` or of all ranks."""
    group = None
    if members:
        group = dist.new_group(members)
        if rank not in members:
            return None
        rank = members.index(rank)
    model, optimizer = STAGES[stage](CASES[case].model(), CASES[case], OPTIMIZERS[optim], group)
    losses = train_case(model, optimizer, CASES[case], rank, **how)
    return Record(losses, zero.full_state_dict(model, to=None))


def train_by_ddp(rank: int, world: int, case: str, optim: str, how: dict[str, Any]) -> Record:
    return reference(rank, CASES[case], OPTIMIZERS[optim], **how)


@cache
def ddp(world: int, case: str, optim: str, **how: Any) -> list[Record]:
    return ranks.run(train_by_ddp, world, args=(case, optim, how))


def zeros(
    world: int, case: str, optim: str, stage: str, members: list[int] | None = None, **how: Any
) -> list[Record | None]:
    return ranks.run(train_at, world, args=(case, optim, stage, how, members), timeout=20)


def assert_same(found: list[Record], expected: list[Record], tolerance: float = 0.0) -> None:
    """All bits, or within `tolerance` of each tensor's largest value."""
    for rank, (here, there) in enumerate(zip(found, expected, strict=True)):
        assert all(map(math.isfinite, there.losses))
        assert here.losses == pytest.approx(there.losses, rel=tolerance, abs=0), f"losses on rank {rank}"
        assert list(here.weights) == list(there.weights)
        different = [name for name, value in here.weights.items() if not close(value, there.weights[name], tolerance)]
        assert not different, f"on rank {rank}"


@matrix.combined("case, stage, optim", CASES, STAGES, OPTIMIZERS)
def test_two_ranks_get_the_bits_of_ddp(case, optim, stage):
    assert_same(zeros(2, case, optim, stage), ddp(2, case, optim))


def train_between_hosts(rank: int, world: int, case: str, optim: str, stage: str) -> tuple[Record | None, bool]:
    """Also whether anything was read from another rank's memory."""
    with between_hosts():
        record = train_at(rank, world, case, optim, stage, {}, None)
        return record, Comm().reads_memory(torch.device("cpu"))


@matrix.combined("stage, case", ["1", "2 small buckets", "3", "3 whole", "3 not resharded"], ["gpt", "wide"])
def test_so_do_two_hosts(case, stage):
    """Some of what `make hosts` runs in this way."""
    found = ranks.run(train_between_hosts, 2, args=(case, "adamw", stage), timeout=20)
    assert_same([record for record, _ in found], ddp(2, case, "adamw"))
    assert not any(reads for _, reads in found)


AT = [("1", 4), ("1 whole", 3), ("2", 3), ("2 small buckets", 4), ("3", 3), ("3", 4), ("3 whole", 3)]


@pytest.mark.slow
@matrix.combined("at, case", AT, CASES)
def test_more_ranks_agree_with_ddp_within_rounding(at, case):
    stage, world = at
    assert_same(zeros(world, case, "sgd", stage), ddp(world, case, "sgd"), 2e-6)


ACCUMULATING = ["1", "2", "2 small buckets", "3", "3 not resharded"]


@matrix.combined("stage, case", ACCUMULATING, ODD, each=2)
def test_accumulation_under_no_sync_gets_the_bits_of_ddp(case, stage):
    how = {"micro": 3, "sync": False, "steps": 3}
    assert_same(zeros(2, case, "sgd", stage, **how), ddp(2, case, "sgd", **how))


@pytest.mark.slow
@matrix.combined("stage, case", ACCUMULATING, ODD)
def test_accumulation_with_sync_agrees_with_ddp_within_rounding(case, stage):
    how = {"micro": 3, "sync": True, "steps": 3}
    assert_same(zeros(2, case, "sgd", stage, **how), ddp(2, case, "sgd", **how), 1e-5)


@matrix.combined("stage, case", ["1", "1 whole", "2", "3"], ODD)
def test_a_subgroup_computes_what_a_world_of_its_size_does(case, stage):
    first, outsider, second = zeros(3, case, "sgd", stage, members=[0, 2])
    assert outsider is None
    assert_same([first, second], ddp(2, case, "sgd"))


def train_alone(rank: int, world: int, case: str, optim: str, stage: int | None) -> Record:
    if stage is None:
        return reference(rank, CASES[case], OPTIMIZERS[optim])
    model, optimizer = zero.setup(CASES[case].model(), OPTIMIZERS[optim], stage=stage)
    losses = train_case(model, optimizer, CASES[case], rank, micro=1)
    return Record(losses, zero.full_state_dict(model, to=None))


@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize("case", ODD)
def test_one_process_without_a_group_computes_what_a_plain_loop_does(case, optim):
    def alone(stage):
        return ranks.run(train_alone, args=(case, optim, stage), bare=True)

    expected = alone(None)
    for stage in range(4):
        assert_same(alone(stage), expected)


def test_training_moves_every_trained_parameter_that_is_used():
    """What the comparisons above rest on."""
    for case in CASES:
        trained = {name for name, param in CASES[case].model().named_parameters() if param.requires_grad}
        for start, record in zip(ddp(2, case, "sgd", steps=0), ddp(2, case, "sgd"), strict=True):
            moved = {name for name, value in record.weights.items() if not close(value, start.weights[name], 0.0)}
            still = {name for name in trained - moved if not name.startswith("never.") and name != "empty"}
            assert not still
            assert not any(name.startswith("never.") for name in moved)


@pytest.mark.parametrize("members", [(0, 2), (1, 2)])
@ranks.on(3)
def test_ranks_of_a_subgroup_are_not_taken_for_ranks_of_the_job(rank, world, members):
    """FairScale compared the ones with the others: owners dropped their gradients."""
    group = dist.new_group(members)
    if rank not in members:
        return
    model, optimizer = zero.setup(nn.Linear(5, 3), OPTIMIZERS["adamw"], stage=2, process_group=group)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    optimizer.consolidate_state_dict(recipient_rank=1)
    assert ("zero_shard" not in optimizer.state_dict()["param_groups"][0]) == (dist.get_rank(group) == 1)
