"""What ShardedDDP refuses: with a ValueError on every rank, that names what was found and says what to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks
import zero

sgd = partial(torch.optim.SGD, lr=0.1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))


def optimizer_of_another_model(rank: int) -> None:
    zero.ShardedDDP(net(), zero.OSS(net().parameters(), sgd))


def optimizer_of_another_model_on_one_rank(rank: int) -> None:
    model = net()
    zero.ShardedDDP(model, zero.OSS((model if rank else net()).parameters(), sgd))


def trained_parameter_in_no_optimizer(rank: int) -> None:
    model = net()
    zero.ShardedDDP(model, zero.OSS(model[0].parameters(), sgd))


def trained_parameter_in_no_optimizer_on_one_rank(rank: int) -> None:
    model = net()
    model[2].bias.requires_grad_(rank == 1)
    optimizer = zero.OSS([param for name, param in model.named_parameters() if name != "2.bias"], sgd)
    zero.ShardedDDP(model, optimizer)


def not_an_oss(rank: int) -> None:
    model = net()
    zero.ShardedDDP(model, sgd(model.parameters()))


def no_optimizer(rank: int) -> None:
    zero.ShardedDDP(net(), [])


def other_process_group(rank: int) -> None:
    model = net()
    zero.ShardedDDP(model, zero.OSS(model.parameters(), sgd), dist.new_group([0, 1]))


def other_process_group_of_one_of_two_optimizers(rank: int) -> None:
    model = net()
    group = dist.new_group([0, 1])
    zero.ShardedDDP(model, [zero.OSS(model[0].parameters(), sgd), zero.OSS(model[1:].parameters(), sgd, group)])


def optimizer_used_twice(rank: int) -> None:
    model = net()
    optimizer = zero.OSS(model.parameters(), sgd)
    zero.ShardedDDP(model, optimizer)
    zero.ShardedDDP(model, optimizer)


def models_differ(rank: int, change: Callable[[nn.Module], object]) -> None:
    """In what OSS, which knows only the parameters that it is given, does not see."""
    model = net()
    optimizer = zero.OSS(model[0].parameters(), sgd)
    model[1:].requires_grad_(False)
    if rank:
        change(model)
    zero.ShardedDDP(model, optimizer)


def of_other_shape(model: nn.Module) -> None:
    model[2] = nn.Linear(5, 4).requires_grad_(False)


def of_other_dtype(model: nn.Module) -> None:
    model[2].bfloat16()


def in_other_order(model: nn.Module) -> None:
    model[1], model[2] = model[2], model[1]


def of_other_number(model: nn.Module) -> None:
    model.append(nn.Linear(2, 2).requires_grad_(False))


def with_other_buffers(model: nn.Module) -> None:
    model[1] = nn.BatchNorm1d(4, track_running_stats=False).requires_grad_(False)


def with_other_names(model: nn.Module) -> None:
    model._modules["last"] = model._modules.pop("2")


def with_other_parts_frozen(model: nn.Module) -> None:
    model[0].bias.requires_grad_(False)


def in_two_ranks(rank: int, world: int, function: Callable[..., None], *args: object) -> None:
    function(rank, *args)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (optimizer_of_another_model, ["6 parameters that are not in the module", "same module"]),
        (optimizer_of_another_model_on_one_rank, ["not in the module", r"\(on rank 0\)"]),
        (trained_parameter_in_no_optimizer, ["4 trained parameters", "'1.weight'", "Add them to OSS, or freeze"]),
        (trained_parameter_in_no_optimizer_on_one_rank, ["1 trained param", "'2.bias'", r"\(on rank 1\)"]),
        (not_an_oss, ["SGD", r"zero\.OSS\(model\.parameters"]),
        (no_optimizer, ["no optimizer", r"zero\.OSS"]),
        (other_process_group, ["process group", "same group"]),
        (other_process_group_of_one_of_two_optimizers, ["process group", "same group"]),
        (optimizer_used_twice, ["already belongs to another ShardedDDP", "one OSS for each"]),
    ],
)
def test_what_does_not_belong_together_is_refused_on_every_rank(function, words):
    ranks.expect_error(in_two_ranks, 2, ValueError, *words, args=(function,), timeout=15)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (of_other_shape, [r"2\.weight: float32 \[5, 4\]", r"2\.weight: float32 \[4, 5\]"]),
        (of_other_dtype, [r"2\.weight: float32", r"2\.weight: bfloat16"]),
        (in_other_order, [r"1\.weight: float32 \[4\]", r"1\.weight: float32 \[5, 4\]"]),
        (of_other_number, [r"rank 1 has 3\.weight"]),
        (with_other_buffers, [r"1\.running_mean: float32 \[4\]", "rank 1 has nothing"]),
        (with_other_names, [r"2\.weight", r"last\.weight"]),
        (with_other_parts_frozen, [r"0\.bias: float32 \[4\], trained", r"0\.bias: float32 \[4\], frozen"]),
    ],
)
def test_models_that_differ_between_ranks_are_refused_on_every_rank(change, words):
    words = ["differ between ranks", "rank 0 has", "rank 1 has", "same on every rank", *words]
    ranks.expect_error(in_two_ranks, 2, ValueError, *words, args=(models_differ, change), timeout=15)
