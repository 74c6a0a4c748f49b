"""PyTorch's own objects as options of FSDP: they mean what they mean to PyTorch's FSDP, or are refused by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ranks
import zero
from sidebyside import data
from zero.fsdp.offload import as_offload
from zero.fsdp.prefetch import as_prefetch

WIDTH = 6
BF16 = torch.bfloat16
Precision = fsdp.MixedPrecision
KEPT = [nn.LayerNorm, nn.BatchNorm1d]


class Block(nn.Module):
    """Notes which dtype its second input comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.batch_norm, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH) / 3)
        self.came_in: list[torch.dtype] = []

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        self.came_in += [more.dtype, self.shift.dtype]
        return self.norm(self.batch_norm(self.linear(x) + more.to(x.dtype))) + self.shift.to(x.dtype)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.came_in: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.came_in.append(x.dtype)
        x = x.to(self.head.weight.dtype)
        for block in self.blocks:
            x = block(x, x.float().exp())
        return self.head(x)


def seen(rank: int, wrapper: Any, precision: Any) -> tuple[list[Any], dict[str, Tensor]]:
    """Dtypes that modules see, and outputs; the buffers that are saved."""
    net = Net()
    model = wrapper(net, auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=precision)
    outputs = [model(data(8, WIDTH, rank=rank)) for _ in range(2)]
    outputs[-1].float().sum().backward()
    dtypes = [net.came_in, *(block.came_in for block in net.blocks)]
    buffers = {name: value for name, value in model.state_dict().items() if "running" in name or "shift" in name}
    return [*dtypes, *outputs], buffers


def as_fsdp1(rank: int, world: int, precision: Any) -> None:
    theirs = partial(fsdp.FullyShardedDataParallel, device_id=torch.device("cpu"))
    expected, expected_buffers = seen(rank, theirs, precision)
    found, buffers = seen(rank, partial(zero.FSDP, broadcast_buffers=False), precision)
    assert found[:3] == expected[:3]
    assert all(torch.equal(one, other) for one, other in zip(found[3:], expected[3:], strict=True))
    assert buffers.keys() == expected_buffers.keys()
    for name, buffer in buffers.items():
        assert buffer.dtype == expected_buffers[name].dtype == torch.float32
        assert torch.equal(buffer, expected_buffers[name])


@pytest.mark.filterwarnings("ignore:Both mixed precision")
@pytest.mark.parametrize(
    "precision",
    [
        Precision(param_dtype=BF16),
        Precision(param_dtype=BF16, cast_forward_inputs=True, buffer_dtype=BF16),
        Precision(param_dtype=BF16, cast_root_forward_inputs=False, _module_classes_to_ignore=KEPT),
        Precision(reduce_dtype=BF16),
    ],
    ids=["by default", "cast inputs and buffers", "root as it is, LayerNorm kept", "reduced only"],
)
def test_mixed_precision_is_that_of_fsdp1(precision):
    ranks.run(as_fsdp1, args=(precision,))


BOTH = fsdp.BackwardPrefetch


@pytest.mark.parametrize(
    ("given", "own"),
    [
        (BOTH.BACKWARD_PRE, zero.Prefetch("BACKWARD_PRE")),
        (BOTH.BACKWARD_POST, zero.Prefetch("BACKWARD_POST")),
        (zero.BackwardPrefetch.BACKWARD_PRE, zero.Prefetch("BACKWARD_PRE")),
        (None, zero.Prefetch()),
    ],
    ids=str,
)
def test_a_backward_prefetch_stands_for_a_prefetch_with_it(given, own):
    assert as_prefetch(given) == own


def test_offload_to_the_cpu_is_of_parameters():
    assert as_offload(fsdp.CPUOffload()) is None
    assert as_offload(fsdp.CPUOffload(offload_params=True)) == zero.CPUOffload()


def trained(rank: int, **options: Any) -> dict[str, Tensor]:
    model = zero.FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(data(8, WIDTH, rank=rank)).square().mean().backward()
    optimizer.step()
    return model.state_dict()


def with_all(rank: int, world: int) -> None:
    given = trained(
        rank,
        mixed_precision=Precision(),
        offload=fsdp.CPUOffload(offload_params=True),
        prefetch=BOTH.BACKWARD_PRE,
        sharding_strategy=fsdp.ShardingStrategy.SHARD_GRAD_OP,
    )
    own = trained(rank)
    assert all(torch.equal(given[name], own[name]) for name in own)


def test_a_model_trains_with_all_of_them():
    ranks.run(with_all)


def on_rank_1_otherwise(rank: int, world: int, options: dict[str, Any]) -> None:
    zero.FSDP(Net(), **(options if rank else {}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mixed_precision": Precision(keep_low_precision_grads=True)}, ["keep_low_precision_grads=True.*Leave it"]),
        ({"mixed_precision": BF16}, ["mixed_precision=torch.bfloat16", r"zero.MixedPrecision\(param_dtype="]),
        ({"offload": True}, ["offload=True", r"zero.CPUOffload\(\)", "None"]),
        ({"prefetch": "BACKWARD"}, ["prefetch='BACKWARD'", "zero.Prefetch", "BackwardPrefetch"]),
        ({"prefetch": [2]}, [r"prefetch=\[2\]", "zero.Prefetch"]),
        ({"sharding_strategy": ["FULL_SHARD"]}, [r"sharding_strategy=\['FULL_SHARD'\]", "FULL_SHARD, SHARD_GRAD_OP"]),
    ],
    ids=lambda value: "-".join(map(str, value)),
)
def test_what_is_none_of_them_is_refused_on_every_rank(options, words):
    ranks.expect_error(on_rank_1_otherwise, 2, ValueError, *words, r"\(on rank 1\)", args=(options,), timeout=8)
