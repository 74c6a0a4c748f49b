"""PyTorch's own objects as options of FSDP, and torch's checkpoint helpers and averages of weights at every stage."""

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD, Adam, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import ranks
import zero
from assertions import plain, same
from inner import offload_of, shard_groups
from runs import at_stage, stage_3, take_step
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


OVERRIDING = fsdp.MixedPrecisionPolicy(BF16)
object.__setattr__(OVERRIDING, "param_dtype_override_fn", len)  # a field of torch 2.15

REFUSED: dict[tuple[str, ...], dict[str, Any]] = {
    ("keep_low_precision_grads=True",): {"precision": Precision(keep_low_precision_grads=True)},
    ("precision=torch.float64", "zero.MixedPrecision"): {"precision": torch.float64},
    ("output_dtype=torch.bfloat16", "cast"): {"precision": fsdp.MixedPrecisionPolicy(BF16, output_dtype=BF16)},
    ("param_dtype_override_fn=", "keep_fp32"): {"precision": OVERRIDING},
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


# torch's own checkpoint helpers at every stage: they get full weights, and no shard of an optimizer's state as if it
# were full. What `zero` gathers goes into torch's checkpoints, and comes from them. And torch's averages of weights.


OPTIONS = {
    "sharded": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "from rank 0": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 3))
    model[2].weight = model[0].weight
    model.register_buffer("positions", torch.arange(3.0), persistent=False)
    return model


OPTIMIZERS = {"adam": partial(Adam, lr=0.01), "sgd": partial(SGD, lr=0.1, momentum=0.9)}


def trained_at(stage: int, optim: str, rank: int, steps: int = 2) -> tuple[nn.Module, Optimizer]:
    build = stage_3 if stage == 3 else partial(at_stage, stage)
    model, optimizer = build(net(), OPTIMIZERS[optim])
    train(model, optimizer, rank, range(steps))
    return model, optimizer


def train(model: nn.Module, optimizer: Optimizer, rank: int, steps: range) -> list[float]:
    return [take_step(optimizer, model(data(4, 8, rank=rank, step=step)).square().mean()) for step in steps]


@pytest.mark.parametrize(("at", "to", "kind"), [(3, 2, "sharded"), (2, 3, "full"), (1, 3, "from rank 0")])
@ranks.on(2)
def test_weights_are_full_and_load_at_any_stage(rank, world, at, to, kind):
    """Given at one stage as DistributedDataParallel gives them, and taken at another."""
    plain, sharded, again = (trained_at(stage, "adam", rank)[0] for stage in (0, at, to))
    options = OPTIONS[kind]
    expected, found = (copy.deepcopy(get_model_state_dict(each, options=options)) for each in (plain, sharded))
    same(found, expected)
    set_model_state_dict(again, {} if kind == "from rank 0" and rank > 0 else found, options=options)
    weights = zero.full_state_dict(again, to=None)
    same({name: weights[name] for name, _ in plain.module.named_parameters()}, dict(plain.module.named_parameters()))


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_a_shard_of_the_state_is_refused_on_every_rank(rank, world, stage, kind):
    model, optimizer = trained_at(stage, "sgd", rank)
    with pytest.raises(RuntimeError, match=r"shard .* of '\d\.(weight|bias)'.*zero\.full_optimizer_state_dict"):
        get_optimizer_state_dict(model, optimizer, options=OPTIONS[kind])
    same(copy.deepcopy(optimizer.state_dict()), optimizer.state_dict())  # which nothing has changed


@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_a_state_that_was_consolidated_is_given(rank, world, stage):
    plain, (model, optimizer) = trained_at(0, "adam", rank), trained_at(stage, "adam", rank)
    optimizer.consolidate_state_dict(to=None)
    for _ in range(2):  # torch puts names into what it gets
        same(get_optimizer_state_dict(model, optimizer), get_optimizer_state_dict(*plain))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("at", [1, 3])
@ranks.on(2)
def test_full_state_goes_into_a_checkpoint_of_torch(rank, world, at, tmp_path):
    sharded, plain, again = trained_at(at, "sgd", rank), trained_at(0, "sgd", rank), trained_at(0, "sgd", rank, 1)
    full = {
        "model": zero.full_state_dict(sharded[0], to=None),
        "optim": zero.full_optimizer_state_dict(*sharded, to=None),
    }
    dcp.save(full, checkpoint_id=tmp_path)
    room = {"model": zero.full_state_dict(again[0], to=None), "optim": again[1].state_dict()}
    dcp.load(room, checkpoint_id=tmp_path)
    set_model_state_dict(again[0], room["model"])
    set_optimizer_state_dict(*again, room["optim"])
    assert train(*again, rank, range(2, 4)) == train(*plain, rank, range(2, 4))


KINDS: dict[str, dict[str, Any]] = {
    "EMA": {"avg_fn": get_ema_avg_fn(0.9)},
    "EMA of many, with buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
    "SWA": {},
}


def averaged(rank: int, stage: int, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """The averaged weights, and what they compute."""
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1))
    average = AveragedModel(net, **KINDS[kind])
    model, optimizer = zero.setup(net, torch.optim.Adam, stage=stage, lr=0.1)
    if stage == 3:
        average.module = zero.FSDP(average.module)
    for step in range(3):
        take_step(optimizer, model(data(4, 5, rank=rank, step=step)).square().mean())
        average.update_parameters(net)
    with torch.no_grad():
        return zero.full_state_dict(average.module, to=None), average.eval()(torch.ones(2, 5))


@pytest.mark.parametrize("kind", KINDS)
@ranks.on(2)
def test_averages_are_those_of_ddp(rank, world, kind):
    expected, computed = averaged(rank, 0, kind)
    for stage in (1, 2, 3):
        found, output = averaged(rank, stage, kind)
        same(found, expected)
        assert rank or torch.equal(output, computed)  # a forward of FSDP has the buffers of rank 0
