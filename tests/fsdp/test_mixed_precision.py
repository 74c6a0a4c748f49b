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
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import ranks
import zero
from assertions import close, plain, same
from runs import SideBySide, on_mesh, stage_3
from zoo import OPTIMIZERS, WIDTH, batch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Precision = zero.MixedPrecision


class Head(nn.Linear):
    """A layer that can be kept in float32 by its class."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(1.3))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH) / 3)

    def forward(self, x: Tensor, *, more: list[Tensor]) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x) + more[0].square().to(x.dtype)))
        return x + self.gain * (self.down(hidden) + self.frozen) + self.shift.to(x.dtype)


class Body(nn.Module):
    """Gives blocks inputs in float32 among others, as rotary tables and masks are, which they cast or not."""

    checkpointed = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = Head(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            run = partial(checkpoint, block, use_reentrant=False) if self.checkpointed else block
            x = run(x, more=[x.float().exp() / 7])
        return self.head(x)


class Net(nn.Module):
    """With a policy, its parameters and buffers are cast each time that it is called."""

    policy: Precision | None = None

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()

    def forward(self, x: Tensor) -> Tensor:
        if self.policy is None:
            return self.body(x)
        kept = [module for module in self.body.modules() if isinstance(module, self.policy.keep_fp32)]
        whole = {param for module in kept for param in module.parameters()}
        params = {
            name: p if p in whole else cast(self.policy.param_dtype, p) for name, p in self.body.named_parameters()
        }
        buffers = {name: cast(self.policy.buffer_dtype, buffer) for name, buffer in self.body.named_buffers()}
        return functional_call(self.body, params | buffers, x)

    def follow(self, policy: Precision) -> None:
        """Gradients are cast as they would be sent, to be averaged in float32."""
        self.policy, to = policy, policy.param_dtype
        for param in self.parameters():
            if param.requires_grad and policy.reduce_dtype:
                param.register_hook(lambda gradient: gradient.to(policy.reduce_dtype).float())
        for buffer in self.buffers():
            buffer.copy_(cast(policy.buffer_dtype, buffer))
        for module in self.modules():
            if to and isinstance(module, policy.keep_fp32):
                module.register_forward_pre_hook(partial(cast_arguments, FP32), with_kwargs=True)
                module.register_forward_hook(lambda _, __, output: output.to(to))
            elif isinstance(module, (Body, Block)) and policy.cast_forward_inputs:
                module.register_forward_pre_hook(partial(cast_arguments, to), with_kwargs=True)


def cast(dtype: torch.dtype | None, value: Tensor) -> Tensor:
    return value if dtype is None else value.to(dtype)


def cast_arguments(dtype: torch.dtype | None, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return tuple(cast(dtype, one) for one in args), {key: [cast(dtype, one) for one in kwargs[key]] for key in kwargs}


def loss_on(rank: int, step: int) -> Callable[[nn.Module], Tensor]:
    return lambda model: (model(batch(rank, step)).float() - 1).square().mean() / 10


def side_by_side(
    precision: Precision, options: dict[str, Any], optim: str = "sgd", tolerance: float = 0.0
) -> SideBySide:
    """With the policy, and with torch alone following it."""
    build = partial(stage_3, precision=precision, **options)
    both = SideBySide(Net(), build, OPTIMIZERS[optim], tolerance=tolerance)
    both.plain.follow(precision)
    return both


POLICIES = {
    "bf16": Precision(param_dtype=BF16),
    "fp16": Precision(param_dtype=FP16),
    "bf16, float32 sent": Precision(param_dtype=BF16, reduce_dtype=FP32),
    "float32, bf16 sent": Precision(reduce_dtype=BF16),
    "norms in float32": Precision(param_dtype=BF16, keep_fp32=(nn.LayerNorm,)),
    "blocks in float32, bf16 sent": Precision(param_dtype=BF16, reduce_dtype=BF16, keep_fp32=(nn.LayerNorm, Head)),
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
        both.step(*(loss_on(rank, micro * step + number) for number in range(micro)), unsent=unsent)
    assert all(value.dtype is FP32 for value in zero.full_state_dict(both.model, to=None).values())
    for param in both.model.parameters():
        assert param.dtype is FP32
        assert param.grad is None or param.grad.dtype is FP32


@ranks.on(2)
def test_units_that_are_computed_again_cast_their_inputs_as_in_forward(rank, world):
    both = side_by_side(POLICIES["bf16"], {"auto_wrap_policy": ModuleWrapPolicy({Block})})
    body, dtypes = both.model.module.body, set()
    body.checkpointed = True
    for block in body.blocks:
        block.register_forward_pre_hook(lambda _, __, more: dtypes.add(more["more"][0].dtype), with_kwargs=True)
    for step in range(2):
        both.step(loss_on(rank, step))
    assert dtypes == {BF16}


@ranks.on(2)
def test_a_unit_of_a_class_that_is_kept_in_float32(rank, world):
    torch.manual_seed(0)
    first, head = nn.Linear(WIDTH, WIDTH), Head(WIDTH, 3)
    precision, units = Precision(param_dtype=BF16, keep_fp32=(Head,)), ModuleWrapPolicy({Head})
    net = copy.deepcopy(nn.Sequential(first, head))
    found = zero.FSDP(net, precision=precision, auto_wrap_policy=units)(batch(rank, 0))
    assert torch.equal(found, head(first.bfloat16()(batch(rank, 0).bfloat16()).float()).bfloat16())
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


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, more=[x])
        return self.norm(x)


def wrapped() -> zero.FSDP:
    net = Normalised()
    net.blocks[1] = zero.FSDP(net.blocks[1], precision=Precision(BF16, buffer_dtype=FP16))
    return zero.FSDP(net, precision=Precision(BF16, buffer_dtype=BF16))


@ranks.on(2)
def test_buffers_are_saved_and_loaded_in_their_own_dtype(rank, world, tmp_path):
    model, plain, casts = wrapped(), Normalised(), [BF16, FP16]
    assert [block.shift.dtype for block in model.blocks] == casts
    assert {model.norm.running_mean.dtype, model.norm.weight.dtype} == {FP32}
    model(batch(0, 0)).sum().backward()  # the first rank's buffers are saved
    expected = [block.shift.to(dtype).to(FP32) for block, dtype in zip(plain.blocks, casts, strict=True)]
    own = {name: tensor.dtype for name, tensor in plain.state_dict().items()}
    zero.checkpoint.save(tmp_path, model)
    with model.summon_full_params():
        inside = model.module.state_dict()
    for state in (model.state_dict(), zero.full_state_dict(model, to=None), inside):
        assert {name: state[name].dtype for name in own} == own
        assert all(close(state[f"blocks.{i}.shift"], expected[i], 0.0) for i in range(2))
        assert all(isinstance(value, Tensor) for value in state.values())
    plain.load_state_dict(model.state_dict())
    zero.checkpoint.load(tmp_path, read := Normalised())
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
