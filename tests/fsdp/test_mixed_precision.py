"""Mixed precision: the numbers are those of the same policy by torch alone, bit for bit."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ranks
import zero
from assertions import close, plain, same
from precisions import Block, ByHand, Down, Net, loss_of
from runs import SideBySide, on_mesh, stage_3
from zoo import OPTIMIZERS, WIDTH, batch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Precision = zero.MixedPrecision


def loss_of_step(rank: int, step: int) -> Callable[[nn.Module], Tensor]:
    return partial(loss_of, rank=rank, step=step)


def side_by_side(
    precision: Precision, options: dict[str, Any], optim: str = "sgd", tolerance: float = 0.0
) -> SideBySide:
    """With the policy, and with torch alone following it."""
    build = partial(stage_3, precision=precision, **options)
    both = SideBySide(ByHand(Net(normalised=False)), build, OPTIMIZERS[optim], tolerance=tolerance)
    both.plain.follow(precision)
    return both


POLICIES = {
    "bf16": Precision(param_dtype=BF16),
    "fp16": Precision(param_dtype=FP16),
    "bf16, float32 sent": Precision(param_dtype=BF16, reduce_dtype=FP32),
    "float32, bf16 sent": Precision(reduce_dtype=BF16),
    "norms in float32": Precision(param_dtype=BF16, keep_fp32=(nn.LayerNorm,)),
    "blocks in float32, bf16 sent": Precision(param_dtype=BF16, reduce_dtype=BF16, keep_fp32=(nn.LayerNorm, Down)),
    "buffers too": Precision(param_dtype=BF16, buffer_dtype=BF16),
    "inputs as they are": Precision(param_dtype=BF16, cast_forward_inputs=False),
}


NORMS, ACCUMULATED = "norms in float32", {"micro": 2, "unsent": 1, "tolerance": 3e-2}
CASES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    **{policy: (2, policy, {}, {}) for policy in POLICIES},
    "not sharded": (2, NORMS, {"sharding_strategy": "NO_SHARD"}, {"optim": "adamw"}),
    "whole": (2, NORMS, {"partition": "whole"}, {"optim": "adamw"}),
    "gradients that add up in shards": (2, NORMS, {}, {"micro": 2}),
    "gradients that autograd adds up, in what it wrote": (2, NORMS, {}, ACCUMULATED),
    "four ranks, which add up in float32": (4, "bf16", {"replicas": 2}, {"tolerance": 1e-5}),
}


@pytest.mark.parametrize(("world", "policy", "options", "how"), CASES.values(), ids=CASES)
@ranks.on("world")
def test_numbers_are_those_of_the_policy_by_torch_alone(rank, world, policy, options, how):
    micro, unsent = how.pop("micro", 1), how.pop("unsent", 0)
    both = side_by_side(POLICIES[policy], on_mesh(world, options), **how)
    for step in range(2):
        both.step(*(loss_of_step(rank, micro * step + number) for number in range(micro)), unsent=unsent)
    assert all(value.dtype is FP32 for value in zero.full_state_dict(both.model, to=None).values())
    for param in both.model.parameters():
        assert param.dtype is FP32
        assert param.grad is None or param.grad.dtype is FP32


@ranks.on(2)
def test_units_that_are_computed_again_cast_their_inputs_as_in_forward(rank, world):
    both = side_by_side(POLICIES["bf16"], {"auto_wrap_policy": ModuleWrapPolicy({Block})})
    net, dtypes = both.model.module.net, set()
    net.recomputed = True
    for block in net.blocks:
        block.register_forward_pre_hook(lambda _, __, more: dtypes.add(more["more"][0].dtype), with_kwargs=True)
    for step in range(2):
        both.step(loss_of_step(rank, step))
    assert dtypes == {BF16}


@ranks.on(2)
def test_a_unit_of_a_class_that_is_kept_in_float32(rank, world):
    torch.manual_seed(0)
    first, last = nn.Linear(WIDTH, WIDTH), Down(WIDTH, 3)
    precision, units = Precision(param_dtype=BF16, keep_fp32=(Down,)), ModuleWrapPolicy({Down})
    net = copy.deepcopy(nn.Sequential(first, last))
    found = zero.FSDP(net, precision=precision, auto_wrap_policy=units)(batch(rank, 0))
    assert torch.equal(found, last(first.bfloat16()(batch(rank, 0).bfloat16()).float()).bfloat16())
    found.float().sum().backward()


@ranks.on(2)
def test_integers_and_booleans_stay_what_they_are(rank, world):
    net = nn.Sequential(nn.Embedding(7, WIDTH))
    net.register_buffer("order", torch.tensor([2, 0, 1]))
    net.counts = nn.Parameter(torch.arange(5), requires_grad=False)
    model = zero.FSDP(net, precision=Precision(param_dtype=BF16, buffer_dtype=BF16))
    assert model(torch.tensor([[1, 2, 3]])).dtype is BF16
    assert {value.dtype for value in (net.order, net.counts, model.state_dict()["order"])} == {torch.int64}
    assert model.state_dict()["counts"].tolist() == [0, 1, 2, 3, 4]


def wrapped() -> zero.FSDP:
    net = Net()
    net.blocks[1] = zero.FSDP(net.blocks[1], precision=Precision(BF16, buffer_dtype=FP16))
    return zero.FSDP(net, precision=Precision(BF16, buffer_dtype=BF16))


@ranks.on(2)
def test_buffers_are_saved_and_loaded_in_their_own_dtype(rank, world, tmp_path):
    model, plain, casts = wrapped(), Net(), [BF16, FP16, BF16]
    assert [block.shift.dtype for block in model.blocks] == casts
    assert {model.batch_norm.running_mean.dtype, model.batch_norm.weight.dtype} == {FP32}
    model(batch(0, 0)).sum().backward()  # the first rank's buffers are saved
    expected = [block.shift.to(dtype).to(FP32) for block, dtype in zip(plain.blocks, casts, strict=True)]
    own = {name: tensor.dtype for name, tensor in plain.state_dict().items()}
    zero.checkpoint.save(tmp_path, model)
    with model.summon_full_params():
        inside = model.module.state_dict()
    for state in (model.state_dict(), zero.full_state_dict(model, to=None), inside):
        assert {name: state[name].dtype for name in own} == own
        assert all(close(state[f"blocks.{i}.shift"], expected[i], 0.0) for i in range(3))
        assert all(isinstance(value, Tensor) for value in state.values())
    plain.load_state_dict(model.state_dict())
    zero.checkpoint.load(tmp_path, read := Net())
    (given := wrapped()).load_state_dict(plain.state_dict())
    zero.checkpoint.load(tmp_path, loaded := wrapped())
    for other in (read, given, loaded):
        same({**other.state_dict()}, {**model.state_dict()})
        assert other is read or [block.shift.dtype for block in other.blocks] == casts


@ranks.on(2)
def test_a_sum_over_ranks_does_not_overflow_what_travelled_in_float16(rank, world):
    """Sums of gradients that float16 holds, but not their sum over the ranks."""
    model = zero.FSDP(nn.Linear(4, 1, bias=False), precision=Precision(param_dtype=FP16))
    model(torch.full((1, 4), 40_000.0)).sum().backward()
    assert all(plain(param.grad).isfinite().all() for param in model.parameters() if param.grad is not None)
    assert not math.isfinite(torch.tensor(80_000.0).half().item())
