"""Mixed precision: the numbers are those of the same policy emulated in one process, bit for bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

import gpus
import ranks
import zero
from models import OPTIMIZERS, take_step
from sidebyside import data

WIDTH = 10
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
        hidden = torch.tanh(self.up(self.norm(x) + more[0].to(x.dtype)))
        return x + self.gain * (self.down(hidden) + self.frozen) + self.shift.to(x.dtype)


class Net(nn.Module):
    """Its root gives blocks inputs in float32 among others, which they cast or not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = Head(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            x = block(x, more=[x.float().exp() / 7])
        return self.head(x)


Loss = Callable[[nn.Module], Tensor]


def loss_on(rank: int, step: int) -> Loss:
    return lambda model: (model(data(4, WIDTH, rank=rank, step=step)).float() - 1).square().mean() / 10


class Emulated:
    """Trains one copy for all ranks: float32 masters, and for each rank a cast copy, whose gradients are cast and
    added up in float32, in the order of ranks within each group, then over the groups."""

    def __init__(self, world: int, precision: Precision, optim: str, groups: int = 1) -> None:
        self.world, self.precision, self.groups = world, precision, groups
        self.masters = Net()
        for module in self.masters.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(precision.buffer_dtype or buffer.dtype)
        self.optimizer = OPTIMIZERS[optim](self.masters.parameters())

    def cast_copy(self) -> nn.Module:
        model, to = copy.deepcopy(self.masters), self.precision.param_dtype
        for module in model.modules():
            keeps = isinstance(module, self.precision.keep_fp32)
            for param in module.parameters(recurse=False):
                param.grad = None
                param.data = param.data if keeps or to is None else param.data.to(to)
            if to is None:
                continue
            if keeps:
                module.register_forward_pre_hook(partial(cast_arguments, FP32), with_kwargs=True)
                module.register_forward_hook(lambda _, __, output: output.to(to))
            elif isinstance(module, (Net, Block)) and self.precision.cast_forward_inputs:
                module.register_forward_pre_hook(partial(cast_arguments, to), with_kwargs=True)
        return model

    def step(self, batches: list[list[Loss]], *, sync: bool = True, scale: float = 1.0) -> list[list[float]]:
        """batches: of each rank its micro-batches. Without sync these add up before they are cast and sent."""
        self.optimizer.zero_grad()
        losses: list[list[float]] = [[] for _ in batches]
        sendings = [[slice(number, number + 1) for number in range(len(batches[0]))], [slice(None)]][not sync]
        for sending in sendings:
            sent = []
            for rank, mine in enumerate(batches):
                model = self.cast_copy()
                for loss in mine[sending]:
                    value = loss(model)
                    (value * scale).backward()
                    losses[rank].append(value.item())
                sent.append([self.as_sent(param) for param in model.parameters()])
            for param, *gradients in zip(self.masters.parameters(), *sent, strict=True):
                if gradients[0] is not None:
                    average = sum_by_groups(gradients, self.groups) * (1 / self.world)
                    param.grad = average if param.grad is None else param.grad + average
        for param in self.masters.parameters():
            if param.grad is not None:
                param.grad /= scale
        self.optimizer.step()
        return losses

    def as_sent(self, param: nn.Parameter) -> Tensor | None:
        return None if param.grad is None else param.grad.to(self.precision.reduce_dtype or param.dtype).float()


def sum_by_groups(gradients: list[Tensor], groups: int) -> Tensor:
    size = len(gradients) // groups
    sums = []
    for first in range(0, len(gradients), size):
        total = gradients[first].clone()
        for gradient in gradients[first + 1 : first + size]:
            total += gradient
        sums.append(total)
    return torch.stack(sums).sum(0)  # of one or two groups


def cast_arguments(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return tuple(one.to(dtype) for one in args), {key: [one.to(dtype) for one in some] for key, some in kwargs.items()}


def assert_same(model: zero.FSDP, emulated: Emulated) -> None:
    found, expected = zero.full_state_dict(model), emulated.masters.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == FP32, name  # of buffers too, which the emulation has in their dtype of computing
        assert torch.equal(found[name], value.float()), f"{name} differs by {(found[name] - value).abs().max()}"


def train_step(
    model: zero.FSDP, optimizer: torch.optim.Optimizer, mine: list[Loss], *, sync: bool = True
) -> list[float]:
    optimizer.zero_grad()
    losses = []
    for number, loss in enumerate(mine):
        if sync or number == len(mine) - 1:
            value = loss(model)
            value.backward()
        else:
            with model.no_sync():
                value = loss(model)
                value.backward()
        losses.append(value.item())
    optimizer.step()
    return losses


def as_emulated(
    rank: int,
    world: int,
    precision: Precision,
    options: dict[str, Any],
    *,
    optims: tuple[str, ...] = ("sgd",),
    groups: int = 1,
    micro: int = 1,
    sync: bool = True,
) -> None:
    for optim in optims:
        emulated = Emulated(world, precision, optim, groups)
        model = zero.FSDP(Net(), mixed_precision=precision, **options)
        optimizer = OPTIMIZERS[optim](model.parameters())
        for step in range(3):
            batches = [[loss_on(one, step * micro + number) for number in range(micro)] for one in range(world)]
            expected = emulated.step(batches, sync=sync)
            assert all(math.isfinite(loss) for losses in expected for loss in losses)
            assert train_step(model, optimizer, batches[rank], sync=sync) == expected[rank]
            assert_same(model, emulated)
        for param in model.parameters():
            assert param.dtype is FP32
            assert param.grad is None or param.grad.dtype is FP32


POLICIES = {
    "bf16": Precision(param_dtype=BF16),
    "fp16": Precision(param_dtype=FP16),
    "bf16, float32 sent": Precision(param_dtype=BF16, reduce_dtype=FP32),
    "bf16, fp16 sent": Precision(param_dtype=BF16, reduce_dtype=FP16),
    "float32, bf16 sent": Precision(reduce_dtype=BF16),
    "norms in float32": Precision(param_dtype=BF16, keep_fp32=(nn.LayerNorm,)),
    "norms and head in float32": Precision(param_dtype=FP16, keep_fp32=(nn.LayerNorm, Head)),
    "blocks in float32, bf16 sent": Precision(param_dtype=BF16, reduce_dtype=BF16, keep_fp32=(nn.LayerNorm, Head)),
    "buffers too": Precision(param_dtype=BF16, buffer_dtype=BF16),
    "buffers alone": Precision(buffer_dtype=FP16),
    "inputs as they are": Precision(param_dtype=BF16, cast_forward_inputs=False),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_numbers_are_those_of_the_policy_in_one_process(policy):
    ranks.run(as_emulated, args=(POLICIES[policy], {}))


@pytest.mark.parametrize(
    "options",
    [{"sharding_strategy": "SHARD_GRAD_OP"}, {"sharding_strategy": "NO_SHARD"}, {"partition": "whole"}],
    ids=str,
)
def test_with_every_strategy_and_partition(options):
    ranks.run(as_emulated, args=(POLICIES["norms in float32"], options))


@ranks.on(4)
def test_four_ranks_add_up_in_float32(rank, world):
    as_emulated(rank, world, POLICIES["bf16"], {}, optims=("sgd",))
    mesh = init_device_mesh(gpus.DEVICE, (2, 2))
    hybrid = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": mesh}
    as_emulated(rank, world, POLICIES["bf16"], hybrid, optims=("sgd",), groups=2)


def accumulated(rank: int, world: int, sync: bool) -> None:
    for policy in ("bf16", "norms in float32"):
        as_emulated(rank, world, POLICIES[policy], {}, micro=3, sync=sync)


@pytest.mark.parametrize("sync", [True, False], ids=["accumulated", "no_sync"])
def test_accumulation(sync):
    """Between ranks and in shards gradients add up in float32; under no_sync as autograd adds up what it wrote."""
    ranks.run(accumulated, args=(sync,))


@ranks.on(bare=True)
def test_one_process_without_a_group(rank, world):
    as_emulated(rank, 1, POLICIES["bf16, float32 sent"], {})


# --------------------------------------------------------------------------------------------- dtypes, one by one


def seen(rank: int, world: int, precision: Precision) -> dict[str, set[torch.dtype]]:
    """Dtypes while computing: of each kind of parameter, buffer, input and output."""
    found: dict[str, set[torch.dtype]] = {}
    net = Net()

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        kind = type(module).__name__
        for name, param in module.named_parameters(recurse=False):
            found.setdefault(f"{kind}.{name}", set()).add(param.dtype)
        for name, buffer in module.named_buffers(recurse=False):
            found.setdefault(f"{kind}.{name}", set()).add(buffer.dtype)
        found.setdefault(f"{kind} takes", set()).update(one.dtype for one in args)
        found.setdefault(f"{kind} returns", set()).add(output.dtype)

    for module in net.modules():
        module.register_forward_hook(look)
    model = zero.FSDP(net, mixed_precision=precision)
    output = model(data(4, WIDTH, rank=rank))
    found["model returns"] = {output.dtype}
    output.float().square().mean().backward()
    found["gradients at rest"] = {param.grad.dtype for param in model.parameters() if param.grad is not None}
    return found


def test_what_computes_in_which_dtype():
    precision = Precision(param_dtype=BF16, buffer_dtype=FP16, keep_fp32=(nn.LayerNorm, Head))
    for found in ranks.run(seen, args=(precision,)):
        assert found["Linear.weight"] == found["Block.gain"] == found["Block.frozen"] == {BF16}
        assert found["Block takes"] == found["Linear takes"] == found["Linear returns"] == {BF16}
        assert found["Block.shift"] == {FP16}
        assert found["LayerNorm.weight"] == found["LayerNorm takes"] == found["Head.bias"] == {FP32}
        assert found["model returns"] == {BF16}  # though its last layer computes in float32
        assert found["gradients at rest"] == {FP32}


class Whole(nn.Module):
    """Units that are themselves of a class that is kept in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(WIDTH, WIDTH), Head(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x))


@ranks.on(2)
def test_a_unit_of_a_class_that_is_kept_in_float32(rank, world):
    precision = Precision(param_dtype=BF16, keep_fp32=(Head,))
    model = zero.FSDP(Whole(), mixed_precision=precision, auto_wrap_policy=ModuleWrapPolicy({Head}))
    plain = Whole()
    found = model(data(4, WIDTH, rank=rank))
    hidden = plain.first.bfloat16()(data(4, WIDTH, rank=rank).bfloat16())
    assert torch.equal(found, plain.head(hidden.float()).bfloat16())
    found.float().sum().backward()


@ranks.on(2)
def test_a_model_of_a_class_that_is_kept_in_float32(rank, world):
    precision = Precision(param_dtype=BF16, keep_fp32=(Head,))
    torch.manual_seed(0)
    plain = Head(WIDTH, 3)
    model = zero.FSDP(copy.deepcopy(plain), mixed_precision=precision)
    x = data(4, WIDTH, rank=rank)
    assert torch.equal(model(x), plain(x).bfloat16())


class Recomputed(Net):
    """Gives blocks, which checkpoint computes again, float32 beside 16 bits, as rotary tables and masks are."""

    checkpointed = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            more = [x.float().exp() / 7]
            x = checkpoint(block, x, more=more, use_reentrant=False) if self.checkpointed else block(x, more=more)
        return self.head(x)


def expect_cast(block: nn.Module, args: Any, kwargs: Any) -> None:
    assert kwargs["more"][0].dtype == BF16, "an input in float32 was not cast"


@ranks.on(2)
def test_units_that_are_computed_again_cast_their_inputs_as_in_forward(rank, world):
    weights = []
    for checkpointed in (True, False):
        net = Recomputed()
        for block in net.blocks:
            block.register_forward_pre_hook(expect_cast, with_kwargs=True)
        net.checkpointed = checkpointed
        model = zero.FSDP(net, mixed_precision=Precision(param_dtype=BF16), auto_wrap_policy=ModuleWrapPolicy({Block}))
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        for step in range(3):
            take_step(optimizer, loss_on(rank, step)(model))
        weights.append(model.state_dict())
    expected, found = weights
    assert all(torch.equal(found[name], value) for name, value in expected.items())


class Integers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(7, WIDTH)
        self.register_buffer("order", torch.tensor([2, 0, 1]))
        self.counts = nn.Parameter(torch.arange(5), requires_grad=False)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        assert tokens.dtype == self.order.dtype == self.counts.dtype == torch.int64
        assert mask.dtype is torch.bool
        return self.tokens(tokens[:, self.order]) * mask[..., None]


@ranks.on(2)
def test_integers_and_booleans_stay_what_they_are(rank, world):
    model = zero.FSDP(Integers(), mixed_precision=Precision(param_dtype=BF16, buffer_dtype=BF16))
    output = model(torch.tensor([[1, 2, 3]]), torch.tensor([[True, False, True]]))
    assert output.dtype is BF16
    output.sum().backward()
    found = model.state_dict()
    assert found["counts"].tolist() == [0, 1, 2, 3, 4]
    assert found["order"].dtype is torch.int64


# ----------------------------------------------------------------------------------------------------------- buffers


class Normalised(nn.Module):
    """With a buffer that is cast, one that is not, and one of batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, more=[x])
        return self.norm(x)


def wrapped(*, nested: bool) -> zero.FSDP:
    net = Normalised()
    if nested:
        net.blocks[1] = zero.FSDP(net.blocks[1], mixed_precision=Precision(BF16, buffer_dtype=FP16))
    return zero.FSDP(net, mixed_precision=Precision(BF16, buffer_dtype=BF16))


@pytest.mark.parametrize("nested", [False, True], ids=["one", "nested"])
@ranks.on(2)
def test_buffers_are_saved_and_loaded_in_their_own_dtype(rank, world, tmp_path, nested):
    model, plain = wrapped(nested=nested), Normalised()
    casts = [BF16, FP16 if nested else BF16]
    assert [block.shift.dtype for block in model.blocks] == casts
    assert {model.norm.running_mean.dtype, model.norm.weight.dtype} == {FP32}
    model(data(4, WIDTH, rank=0)).sum().backward()  # the first rank's buffers are saved
    expected = [block.shift.to(dtype).to(FP32) for block, dtype in zip(plain.blocks, casts, strict=True)]
    own = {name: tensor.dtype for name, tensor in plain.state_dict().items()}
    zero.checkpoint.save(tmp_path, model)
    with model.summon_full_params():
        inside = model.module.state_dict()
    for state in (model.state_dict(), zero.full_state_dict(model), inside):
        assert {name: state[name].dtype for name in own} == own
        assert all(torch.equal(state[f"blocks.{i}.shift"], expected[i]) for i in range(2))
        assert all(isinstance(value, Tensor) for value in state.values())
    plain.load_state_dict(model.state_dict())
    zero.checkpoint.load(tmp_path, read := Normalised())
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in read.state_dict().items())
    for load in (
        lambda other: other.load_state_dict(plain.state_dict()),
        lambda other: zero.checkpoint.load(tmp_path, other),
    ):
        other = wrapped(nested=nested)
        load(other)
        assert [block.shift.dtype for block in other.blocks] == casts
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())


@ranks.raises(2, ValueError, "differ between ranks", "bfloat16", "float16", timeout=15)
def test_policies_that_differ_between_ranks_are_refused_on_every_rank(rank, world):
    zero.FSDP(Net(), mixed_precision=Precision(param_dtype=(BF16, FP16)[rank]))


# --------------------------------------------------------------------------------------------------- fp16 and its scale

SCALE = 2.0**10
OVERFLOWS = 2
"""The step in which one rank's batch is too large for float16."""


def scaled(rank: int, world: int, scaler_of: Any, how: str, optim: str) -> list[float]:
    """Trains with a loss scale; in one step one rank overflows, in forward or in one element of one gradient."""
    precision = POLICIES["fp16"]
    emulated = Emulated(world, precision, optim)
    model = zero.FSDP(Net(), mixed_precision=precision)
    optimizer = OPTIMIZERS[optim](model.parameters())
    scaler = scaler_of(gpus.DEVICE, init_scale=SCALE, growth_interval=100)
    scales = []
    for step in range(5):
        batches = [[loss_on(one, step)] for one in range(world)]
        skips = step == OVERFLOWS and how != "never"
        optimizer.zero_grad()
        loss: Tensor = batches[rank][0](model)
        if skips and how == "everywhere" and rank == 1:
            loss = loss * 1e6
        spoiled = None
        if skips and how == "one element" and rank == 1:
            spoiled = model.blocks[1].up.weight.register_hook(with_an_infinite_element)
        scaler.scale(loss).backward()
        if spoiled is not None:
            spoiled.remove()
        scaler.step(optimizer)
        scales.append(scaler.get_scale())
        scaler.update()
        if not skips:
            expected = emulated.step(batches, scale=scales[-1])[rank][0]
            assert loss.item() == expected, f"in step {step}"
        assert_same(model, emulated)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    return scales


def with_an_infinite_element(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient.view(-1)[-1] = torch.inf
    return gradient


@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize("how", ["never", "everywhere", "one element"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(how, optim):
    expected = [SCALE] * 5 if how == "never" else [SCALE] * 3 + [SCALE / 2] * 2
    assert ranks.run(scaled, args=(zero.GradScaler, how, optim)) == [expected] * 2


@ranks.on(2, timeout=15)
def test_an_overflow_in_one_element_skips_the_step_on_all_with_torchs_own_scaler(rank, world):
    expected = [SCALE] * 3 + [SCALE / 2] * 2
    assert scaled(rank, world, torch.amp.GradScaler, "one element", "sgd") == expected


@ranks.on(2)
def test_a_sum_over_ranks_does_not_overflow_what_travelled_in_float16(rank, world):
    """Sums of gradients that float16 holds, but not their sum over the ranks."""
    model = zero.FSDP(nn.Linear(4, 1, bias=False), mixed_precision=Precision(param_dtype=FP16))
    model(torch.full((1, 4), 40_000.0)).sum().backward()
    assert all(torch.isfinite(param.grad).all() for param in model.parameters() if param.grad is not None)
    assert not math.isfinite(torch.tensor(80_000.0).half().item())
