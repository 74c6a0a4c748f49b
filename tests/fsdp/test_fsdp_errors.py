"""What FSDP and zero.setup refuse: with a ValueError on every rank, that names what was found and says what to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import LBFGS, SGD, Adafactor

import ranks
import zero
from zero.comm import Comm


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))


def wrap(rank: int, **options: Any) -> None:
    zero.FSDP(net(), **options)


def wrap_on_one_rank_otherwise(rank: int, **options: Any) -> None:
    zero.FSDP(net(), **(options if rank else {}))


def no_parameters(rank: int) -> None:
    zero.FSDP(nn.ReLU())


def all_ignored(rank: int) -> None:
    model = net()
    zero.FSDP(model, ignored_parameters=model.parameters())


def no_parameters_on_one_rank(rank: int) -> None:
    zero.FSDP(nn.ReLU() if rank else net())


def nested_over_other_ranks(rank: int) -> None:
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    zero.FSDP(nn.Sequential(net(), zero.FSDP(net(), process_group=alone)))


def wrapped_twice(rank: int) -> None:
    zero.FSDP(zero.FSDP(net()))


def wrapped_by_two(rank: int) -> None:
    model = net()
    first = zero.FSDP(model)
    zero.FSDP(nn.Sequential(model))
    del first


def on_the_meta_device_without_values(rank: int) -> None:
    model = net()
    model[2].to("meta")
    zero.FSDP(model, sync_module_states=False)


def made_for_inference(rank: int) -> None:
    with torch.inference_mode():
        model = net()
    zero.FSDP(model)


def sparse_parameter(rank: int) -> None:
    model = net()
    model[0].weight = nn.Parameter(torch.eye(4, 3).to_sparse())
    zero.FSDP(model)


def unknown_stage(rank: int, stage: object) -> None:
    zero.setup(net(), SGD, stage=stage)  # type: ignore[arg-type]


def other_stage_on_one_rank(rank: int) -> None:
    zero.setup(net(), SGD, stage=3 if rank else 2)


def other_times_to_gather(rank: int) -> None:
    zero.FSDP(net(), reshard_after_forward=bool(rank))


def setup(rank: int, optim: Any, **options: Any) -> None:
    zero.setup(net(), optim, **options)


def in_two_ranks(rank: int, world: int, function: Callable[..., None], *args: object) -> None:
    function(rank, *args)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (no_parameters, ["without parameters", "nothing to shard"]),
        (all_ignored, ["without parameters", "nothing to shard"]),
        (no_parameters_on_one_rank, ["without parameters", r"\(on rank 1\)"]),
        (nested_over_other_ranks, ["'1' is an FSDP over another process group", "ignored_modules"]),
        (wrapped_twice, ["is an FSDP already", "auto_wrap_policy"]),
        (wrapped_by_two, [r"'0\.0\.weight' is sharded by another FSDP"]),
        (on_the_meta_device_without_values, ["'2.weight' is on the meta device"]),
        (made_for_inference, ["'0.weight' was made under torch.inference_mode"]),
        (sparse_parameter, ["'0.weight' has layout torch.sparse", "to_dense"]),
        (partial(wrap, auto_wrap_policy="Linear"), ["auto_wrap_policy is a str", "ModuleWrapPolicy"]),
        (partial(wrap_on_one_rank_otherwise, auto_wrap_policy={nn.Linear}), ["is a set", r"\(on rank 1\)"]),
        (partial(wrap, partition="rows"), ["partition='rows' is unknown", "'even'", "'whole'"]),
        (partial(wrap_on_one_rank_otherwise, partition="rows"), ["partition='rows'", r"\(on rank 1\)"]),
        (partial(wrap_on_one_rank_otherwise, partition="whole"), ["differ between ranks", "partition whole"]),
        (partial(unknown_stage, stage=4), ["stage=4 is unknown", "3 .FSDP."]),
        (partial(unknown_stage, stage="2"), ["stage='2' is unknown"]),
        (other_times_to_gather, ["differ between ranks", "reshard_after_forward"]),
        (other_stage_on_one_rank, ["stages", "differ between ranks", "rank 0 has stage 2, rank 1 has stage 3"]),
        (partial(setup, optim=SGD, stage=3, partition="columns"), ["partition='columns' is unknown"]),
        (partial(setup, optim=SGD, stage=2, partition="columns"), ["partition='columns' is unknown"]),
        (partial(setup, optim=Adafactor, stage=3, partition="even"), ["Adafactor needs each parameter whole"]),
        (partial(setup, optim=LBFGS, stage=3), ["LBFGS", "cannot be sharded"]),
    ],
    ids=lambda value: getattr(value, "__name__", None) or (str(value.keywords) if isinstance(value, partial) else ""),
)
def test_what_cannot_be_sharded_is_refused_on_every_rank(function, words):
    ranks.expect_error(in_two_ranks, 2, ValueError, *words, args=(function,), timeout=15)


def models_differ(rank: int, change: Callable[[nn.Module], object], stage: int) -> None:
    """At stage 2 in what OSS, which knows only the parameters that it is given, does not see."""
    model = net()
    optimizer = zero.OSS(model[0].parameters(), SGD, lr=0.1) if stage == 2 else None
    if rank:
        change(model)
    if stage == 3:
        zero.FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    else:
        model[1:].requires_grad_(False)
        zero.ShardedDDP(model, optimizer)


def of_other_shape(model: nn.Module) -> None:
    model[2] = nn.Linear(5, 4)


def of_other_dtype(model: nn.Module) -> None:
    model[2].bfloat16()


def in_other_order(model: nn.Module) -> None:
    model[1], model[2] = model[2], model[1]


def of_other_number(model: nn.Module) -> None:
    model.append(nn.Linear(2, 2))


def with_other_names(model: nn.Module) -> None:
    model._modules["last"] = model._modules.pop("2")


def with_other_parts_frozen(model: nn.Module) -> None:
    model[0].bias.requires_grad_(False)


def with_other_buffers(model: nn.Module) -> None:
    model[1] = nn.BatchNorm1d(4, track_running_stats=False)


DIFFERENCES = [
    (of_other_shape, [r"2\.weight: float32 \[5, 4\]", r"2\.weight: float32 \[4, 5\]"]),
    (of_other_dtype, [r"2\.weight: float32", r"2\.weight: bfloat16"]),
    (in_other_order, [r"1\.weight: float32 \[4\]", r"1\.weight: float32 \[5, 4\]"]),
    (of_other_number, [r"rank 1 has 3\.weight"]),
    (with_other_names, [r"2\.weight", r"last\.weight"]),
    (with_other_parts_frozen, [r"0\.bias: float32 \[4\], trained", r"0\.bias: float32 \[4\], frozen"]),
    (with_other_buffers, [r"1\.running_mean: float32 \[4\]", "rank 1 has nothing"]),
]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("change", "words"), DIFFERENCES, ids=[change.__name__ for change, _ in DIFFERENCES])
def test_models_that_differ_between_ranks_are_refused_on_every_rank(change, words, stage):
    if stage == 3 and change in (in_other_order, of_other_number, with_other_names):
        words = [r"units.*rank 1 has units"]  # that shows first
    expected = ["differ between ranks", "rank 0 has", "rank 1 has", "same on every rank", *words]
    ranks.expect_error(in_two_ranks, 2, ValueError, *expected, args=(models_differ, change, stage), timeout=15)


@ranks.on(3, timeout=15)
def test_a_rank_outside_the_process_group_is_refused(rank, world):
    group = dist.new_group([0, 1])
    stages = [partial(zero.setup, net(), SGD, stage=stage, process_group=group) for stage in range(4)]
    for wrap_net in [*stages, partial(zero.FSDP, net(), process_group=group)]:
        told = ranks.refusal(wrap_net)
        assert "rank 2 of the job is not in the process group" in told if rank == 2 else told == "", told


@ranks.on(bare=True)
def test_one_process_without_a_group_refuses_the_same(rank, world):
    for function, words in [
        (no_parameters, "without parameters"),
        (partial(unknown_stage, stage=7), "stage=7 is unknown"),
        (partial(wrap, partition="rows"), "partition='rows' is unknown"),
    ]:
        with pytest.raises(ValueError, match=words) as raised:
            function(0)
        assert "on rank" not in str(raised.value)


@ranks.raises(2, RuntimeError, "parameters of the root unit of FSDP have not arrived", "first error")
def test_a_unit_whose_gather_failed_is_named_instead_of_computing_with_what_is_there(rank, world):
    model = zero.FSDP(net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    with mock.patch.object(Comm, "gather", side_effect=OSError("down")), pytest.raises(OSError, match="down"):
        model(torch.ones(2, 3))
    model(torch.ones(2, 3))
