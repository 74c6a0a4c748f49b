"""MixedPrecision(param_wire=zero.Int8(), reduce_dtype=zero.Int8()): what ranks compute with, keep, send and refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import gpus
import matrix
import ranks
import zero
from models import take_step
from sidebyside import data

WIDTH, HIDDEN = 64, 301
BF16 = torch.bfloat16
Precision = zero.MixedPrecision
INT8 = zero.Int8()
BOTH = Precision(param_wire=INT8, reduce_dtype=INT8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.places = nn.Parameter(torch.arange(7), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) + self.places.sum() / 100


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)), nn.Linear(WIDTH, 5))


def wrapped(precision: Precision, make: Callable[[], nn.Module] = blocks, **options: Any) -> zero.FSDP:
    return zero.FSDP(make(), mixed_precision=precision, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def loss_of(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    loss: Tensor = (model(data(4, WIDTH, rank=rank, step=step)).float() - 1).square().mean()
    return loss


def computed_with(model: nn.Module, rank: int) -> dict[str, Tensor]:
    """The parameters as a forward sees them."""
    seen: dict[str, Tensor] = {}

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, _: Any) -> None:
            seen.update({f"{name}.{own}": param.detach().clone() for own, param in module.named_parameters()})

        return hook

    for name, module in model.module.named_children():
        module.register_forward_pre_hook(look(name))
    loss_of(model, rank).backward()
    return seen


def weights_in_forward(
    rank: int, world: int, param_dtype: torch.dtype | None, options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = wrapped(Precision(param_dtype=param_dtype, param_wire=INT8), **options)
    seen = computed_with(model, rank)
    model.zero_grad()
    again = computed_with(model, rank)
    assert all(torch.equal(value, again[name]) for name, value in seen.items())
    precise = blocks().state_dict()
    for name, value in zero.full_state_dict(model).items():  # after forwards, in which nothing was written
        assert torch.equal(value, precise[name]), name
    return seen, precise


@matrix.combined(
    "options, param_dtype, world", [{}, {"reshard_after_forward": False}, {"partition": "whole"}], [None, BF16], [2, 3]
)
def test_all_ranks_compute_with_the_same_quantised_weights_and_shards_stay_precise(options, param_dtype, world):
    (first, precise), *others = ranks.run(weights_in_forward, world, args=(param_dtype, options))
    for seen, _ in others:
        assert all(torch.equal(value, first[name]) for name, value in seen.items())
    rounding = 0 if param_dtype is None else torch.finfo(param_dtype).eps
    for name, value in first.items():
        if not value.is_floating_point():
            assert torch.equal(value, precise[name]), name
            continue
        largest = max(other.abs().max() for other in precise.values() if other.is_floating_point())
        off = (value.float() - precise[name]).abs()
        assert off.max() <= largest * ((1 + 2**-14) / 254 + rounding), name
    assert any(not torch.equal(value.float(), precise[name]) for name, value in first.items())


class Counting(Block):
    """Writes into a parameter of its own while it is unsharded."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(()), requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            (self.count.data if self.through_data else self.count).add_(1)
        return super().forward(x) + 0 * self.count


@pytest.mark.parametrize("through_data", [False, True])
@ranks.on(2)
def test_what_a_module_writes_stays_and_the_rest_of_its_shard_keeps_its_precision(rank, world, through_data):
    Counting.through_data = through_data

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Counting(), nn.Linear(WIDTH, 5))

    model = wrapped(Precision(param_wire=INT8), make)
    for step in range(3):
        loss_of(model, rank, step).backward()
    for name, value in zero.full_state_dict(model).items():
        expected = make().state_dict()[name]
        assert torch.equal(value, expected) if name != "0.count" else abs(value - 3) < 0.1, name


@pytest.mark.parametrize(("world", "hybrid"), [(2, False), (3, False), (4, True)])
@ranks.on("world")
def test_gradients_are_averages_of_what_was_quantised_and_a_quarter_of_the_bytes_is_sent(rank, world, hybrid):
    """Beside the average of all ranks' gradients in one process."""
    options: dict[str, Any] = {}
    if hybrid:
        mesh = init_device_mesh(gpus.DEVICE, (2, world // 2))
        options = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": mesh}
    plain = blocks()
    for peer in range(world):
        (loss_of(plain, peer) / world).backward()
    exact = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
    largest = max(gradient.abs().max() for gradient in exact.values()) * world
    sent = {}
    for name, precision in {"int8": BOTH, "reduced": Precision(reduce_dtype=INT8), "float32": Precision()}.items():
        model = wrapped(precision, **options)
        before = zero.traffic()
        loss_of(model, rank).backward()
        sent[name] = zero.traffic() - before
        if name != "reduced":
            continue
        with zero.FSDP.summon_full_params(model, writeback=False, with_grads=True):
            for own, param in model.named_parameters():
                if own in exact:
                    assert (param.grad - exact[own]).abs().max() <= largest / 254, own
            assert any(
                not torch.equal(param.grad, exact[own]) for own, param in model.named_parameters() if own in exact
            )
    sent = {f"{what} {name}": getattr(sent[name], what) for name in sent for what in ("gather", "reduce", "other")}
    for what in ("gather", "reduce"):
        assert 0 < sent[f"{what} int8"] <= 0.27 * sent[f"{what} float32"]
    assert sent["other int8"] == sent["other float32"]  # across replicas
    assert sent["gather reduced"] == sent["gather float32"]


@ranks.on(2)
def test_half_the_bytes_of_16_bits_are_sent(rank, world):
    found = []
    for wire in (INT8, None):
        model = wrapped(Precision(param_dtype=BF16, param_wire=wire, reduce_dtype=wire))
        before = zero.traffic()
        loss_of(model, rank).backward()
        found += [(zero.traffic() - before).gather, (zero.traffic() - before).reduce]
        assert all(param.grad is None or param.grad.dtype is torch.float32 for param in model.parameters())
    gathered, reduced, gathered_16, reduced_16 = found
    assert 0 < gathered <= 0.53 * gathered_16
    assert 0 < reduced <= 0.53 * reduced_16


@ranks.on(2)
def test_an_overflow_on_one_rank_skips_the_step_of_all(rank, world):
    model = wrapped(BOTH)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), zero.GradScaler(gpus.DEVICE, init_scale=4.0)
    before = zero.full_state_dict(model)
    scaler.scale(loss_of(model, rank) * (torch.inf if rank == 1 else 1)).backward()
    scaler.step(optimizer)
    scaler.update()
    for name, value in zero.full_state_dict(model).items():
        assert torch.equal(value, before[name]), name
    assert float(scaler.get_scale()) == 2.0


def losses(rank: int, world: int, precision: Precision, steps: int) -> list[float]:
    model = wrapped(precision)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    found = []
    for step in range(steps):
        found.append(take_step(optimizer, loss_of(model, rank, step)))
    return found


def test_training_stays_close_to_float32_and_is_the_same_each_time():
    exact, first, second = (ranks.run(losses, args=(precision, 8)) for precision in (Precision(), BOTH, BOTH))
    assert first == second
    assert first != exact
    for quantised, precise in zip(first, exact, strict=True):
        assert all(math.isclose(a, b, rel_tol=0.02) for a, b in zip(quantised, precise, strict=True))


def test_a_rank_by_itself_rounds_nothing():
    exact, quantised = (ranks.run(losses, args=(precision, 3), bare=True) for precision in (Precision(), BOTH))
    assert quantised == exact


@pytest.mark.parametrize("option", ["param_dtype", "buffer_dtype", "param_wire"])
def test_options_of_another_kind_are_refused(option):
    value = BF16 if option == "param_wire" else INT8
    with pytest.raises(ValueError, match=rf"MixedPrecision\({option}=.*Int8"):
        Precision(**{option: value})


def of_64_bits(rank: int, world: int, option: str) -> None:
    zero.FSDP(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3).double()), mixed_precision=Precision(**{option: INT8}))


@pytest.mark.parametrize("option", ["param_wire", "reduce_dtype"])
def test_parameters_of_64_bits_are_refused_by_name(option):
    ranks.expect_error(of_64_bits, 2, ValueError, "'1.weight' is torch.float64", option, args=(option,))


@ranks.raises(2, ValueError, r"Int8\(block=64\)", r"Int8\(block=128\)")
def test_blocks_that_differ_between_ranks_are_refused(rank, world):
    wrapped(Precision(param_wire=zero.Int8(64 * (1 + rank))))
