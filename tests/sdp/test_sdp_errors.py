"""What ShardedDDP refuses: with a ValueError on every rank, that names what was found and says what to do.

Models that differ between ranks are in fsdp/test_fsdp_errors.py, at stages 2 and 3.
"""

from __future__ import annotations

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
@ranks.raises(2, ValueError, timeout=15)
def test_what_does_not_belong_together_is_refused_on_every_rank(rank, world, function, words):
    function(rank)
