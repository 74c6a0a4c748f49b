"""PyTorch's own objects as options of FSDP: they mean what they mean to PyTorch's FSDP, or are refused by name."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ranks
import zero
from assertions import plain, same
from inner import offload_of, shard_groups
from zoo import data

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


def seen(rank: int, wrapper: Any, **precision: Any) -> tuple[list[Any], dict[str, Tensor]]:
    """Dtypes that modules see, and outputs; the buffers that are saved."""
    net = Net()
    model = wrapper(net, auto_wrap_policy=ModuleWrapPolicy({Block}), **precision)
    outputs = [model(data(8, WIDTH, rank=rank)) for _ in range(2)]
    outputs[-1].float().sum().backward()
    dtypes = [net.came_in, *(block.came_in for block in net.blocks)]
    buffers = {name: plain(value) for name, value in model.state_dict().items() if "running" in name or "shift" in name}
    return [*dtypes, *(output.detach() for output in outputs)], buffers


@pytest.mark.filterwarnings("ignore:Both mixed precision")
@pytest.mark.parametrize(
    "precision",
    [
        Precision(param_dtype=BF16, cast_forward_inputs=True, buffer_dtype=BF16),
        Precision(param_dtype=BF16, cast_root_forward_inputs=False, _module_classes_to_ignore=KEPT),
    ],
    ids=["cast inputs and buffers", "root as it is, LayerNorm kept"],
)
@ranks.on(2)
def test_mixed_precision_is_that_of_fsdp1(rank, world, precision):
    theirs = partial(fsdp.FullyShardedDataParallel, device_id=torch.device("cpu"))
    expected, expected_buffers = seen(rank, theirs, mixed_precision=precision)
    found, buffers = seen(rank, partial(zero.FSDP, broadcast_buffers=False), precision=precision)
    same([found, buffers], [expected, expected_buffers])
    assert {buffer.dtype for buffer in buffers.values()} == {torch.float32}


def test_offload_to_the_cpu_is_of_parameters():
    assert offload_of(fsdp.CPUOffload()) is offload_of(fsdp.OffloadPolicy()) is offload_of(None)
    assert offload_of(fsdp.CPUOffload(offload_params=True)) == zero.CPUOffload()
    assert offload_of(fsdp.CPUOffloadPolicy(pin_memory=False)) == zero.CPUOffload(pin_memory=False)


def trained(rank: int, **options: Any) -> dict[str, Tensor]:
    model = zero.FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(data(8, WIDTH, rank=rank)).square().mean().backward()
    optimizer.step()
    return model.state_dict()


GIVEN: dict[str, dict[str, Any]] = {
    "all of them": {
        "precision": Precision(),
        "offload": fsdp.CPUOffload(offload_params=True),
        "backward_prefetch": fsdp.BackwardPrefetch.BACKWARD_PRE,
        "sharding_strategy": fsdp.ShardingStrategy.SHARD_GRAD_OP,
    },
    "the names of torch.distributed.fsdp.FullyShardedDataParallel": {
        "cpu_offload": fsdp.CPUOffload(offload_params=True),
        "backward_prefetch": fsdp.BackwardPrefetch.BACKWARD_PRE,
        "forward_prefetch": True,
        "limit_all_gathers": True,
        "use_orig_params": True,
        "device_id": torch.device("cpu"),
        "ignored_states": None,
    },
}


@ranks.on(2)
def test_a_model_trains_with_them(rank, world):
    own = trained(rank)
    for what, options in GIVEN.items():
        same(trained(rank, **options), own, what)


@ranks.on(2)
def test_ignored_states_are_modules_or_parameters(rank, world):
    net = Net()
    model = zero.FSDP(net, ignored_states=[net.head, net.blocks[0].norm.weight])
    sharded = {param for group in shard_groups(model) for param in group.params}
    params = (net.head.weight, net.blocks[0].norm.weight, net.blocks[0].norm.bias)
    assert [param in sharded for param in params] == [False, False, True]


REFUSED: dict[tuple[str, ...], dict[str, Any]] = {
    ("keep_low_precision_grads=True",): {"precision": Precision(keep_low_precision_grads=True)},
    ("precision=torch.float64", "zero.MixedPrecision"): {"precision": torch.float64},
    ("output_dtype=torch.bfloat16", "cast"): {"precision": fsdp.MixedPrecisionPolicy(BF16, output_dtype=BF16)},
    ("offload=True", r"zero.CPUOffload\(\)"): {"offload": True},
    ("offload and cpu_offload",): {"offload": zero.CPUOffload(), "cpu_offload": zero.CPUOffload()},
    ("prefetch='BACKWARD'", "1, 2 or 3"): {"prefetch": "BACKWARD"},
    ("prefetch and forward_prefetch",): {"prefetch": 1, "forward_prefetch": True},
    ("backward_prefetch='LATER'", "BACKWARD_PRE"): {"backward_prefetch": "LATER"},
    ("reshard_after_forward=4", "HYBRID_SHARD"): {"reshard_after_forward": 4},
    ("device_id=0", "there are 0"): {"device_id": 0},
    ("ignored_states", "str"): {"ignored_states": ["head"]},
}


@pytest.mark.parametrize(("words", "options"), REFUSED.items(), ids=map("-".join, REFUSED))
@ranks.raises(2, ValueError, r"\(on rank 1\)", timeout=8)
def test_what_is_none_of_them_is_refused_on_every_rank(rank, world, words, options):
    zero.FSDP(Net(), **(options if rank else {}))


def test_a_name_that_neither_has_is_refused():
    with pytest.raises(TypeError, match=r"no option shard=\..*cpu_offload"):
        zero.FSDP(Net(), shard=True)
    with pytest.raises(TypeError, match=r"no option auto_wrap_polcy=\. Did you mean auto_wrap_policy=\?"):
        zero.FSDP(Net(), auto_wrap_polcy=None)


@pytest.mark.parametrize(
    ("name", "remedy"), [("state_dict_type", "full_state_dict"), ("full_optim_state_dict", "full_optimizer_state_dict")]
)
def test_methods_of_fsdp1_say_what_to_call(name, remedy):
    with pytest.raises(AttributeError, match=remedy):
        getattr(zero.FSDP, name)
    with pytest.raises(AttributeError, match=remedy):
        getattr(zero.FSDP(nn.Linear(2, 2)), name)


@ranks.on(2)
def test_methods_of_pytorchs_fsdp_exist_or_are_refused_with_what_to_call(rank, world):
    """Those of FSDP1 and FSDP2, of this version of torch."""
    model = zero.FSDP(nn.Linear(4, 4))
    for kind in (fsdp.FullyShardedDataParallel, fsdp.FSDPModule):
        for name in (name for name in dir(kind) if not name.startswith("_") and not hasattr(nn.Module, name)):
            told = ranks.refusal(lambda name=name: getattr(model, name))
            assert not told or re.match(f"AttributeError: zero's FSDP has no {name}: .{{20,}}", told), told or name
    assert "zero.no_sync(model)" in ranks.refusal(lambda: model.set_requires_gradient_sync(False))
