"""Models built on the meta device: on every rank, with values made by rank 0, or on all ranks but rank 0."""

import zlib
from collections.abc import Callable
from typing import Any

import lines
import pytest
import torch
from lines import Block, Line
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import matrix
import ranks
import zero
from assertions import same
from runs import reference, train_case
from zoo import CASES, OPTIMIZERS, WIDTH, data


class Waves(nn.Module):
    """No parameters, but a buffer that its constructor computes, and so does reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.waves.copy_(torch.linspace(0, 3, WIDTH, device="cpu").sin())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.waves


class Net(lines.Net):
    """With a layer shared by two units, frozen parameters, buffers of all kinds, and two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.waves, self.statistics, self.norm = Waves(), nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH)
        self.last = Line(WIDTH, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.statistics(super().forward(self.waves(x)))).double())


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        model = build()
    assert all(param.is_meta for param in model.parameters())
    return model


OPTIONS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "every layer": {"auto_wrap_policy": ModuleWrapPolicy({Block, Line, nn.LayerNorm, nn.BatchNorm1d})},
    "whole": {"partition": "whole"},
    "not sharded": {"sharding_strategy": "NO_SHARD"},
}


def materialised(rank: int, world: int, options: dict[str, Any], real_on_rank_0: bool) -> None:
    torch.manual_seed(rank)  # ranks that would draw other values
    expected = Net()
    net = Net() if real_on_rank_0 and rank == 0 else on_meta(Net)
    model = zero.FSDP(net, **options)
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    same(dict(model.state_dict()), dict(expected.state_dict()))
    assert torch.equal(model.waves.waves, expected.waves.waves)
    assert model.blocks[2].down is model.blocks[0].down
    assert not any(param.requires_grad for param in model.frozen.parameters())
    assert [name for name, _ in net.named_parameters()] == [name for name, _ in expected.named_parameters()]


@matrix.combined("options, real_on_rank_0", OPTIONS, [False, True])
def test_values_are_those_of_a_model_built_with_values(options, real_on_rank_0):
    ranks.run(materialised, args=(OPTIONS[options], real_on_rank_0))


@pytest.mark.slow
@ranks.on(4)
def test_replicas_get_the_values_of_the_first_rank_of_all(rank, world):
    given = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": init_device_mesh("cpu", (2, 2))}
    materialised(rank, world, given, real_on_rank_0=False)
    materialised(rank, world, given, real_on_rank_0=True)


@ranks.on(2)
def test_with_real_weights_on_rank_0_only_training_has_the_bits_of_ddp(rank, world):
    case = CASES["convnet"]
    model = zero.FSDP(case.model() if rank == 0 else on_meta(case.build))
    losses = train_case(model, OPTIMIZERS["adamw"](model.parameters()), case, rank, steps=2)
    expected = reference(rank, case, OPTIMIZERS["adamw"], steps=2)
    assert losses == expected.losses
    same(dict(zero.full_state_dict(model, to=None)), dict(expected.weights))


def by_numbers(module: nn.Module) -> None:
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        seed = zlib.crc32(str(tuple(tensor.shape)).encode())
        values = torch.randn(tensor.shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
        tensor.copy_(values)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.scale = nn.Parameter(torch.ones(WIDTH, WIDTH)), nn.Parameter(torch.ones(()))
        self.register_buffer("shift", torch.ones(WIDTH))


def with_bare() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Bare(), nn.Sequential(Bare(), nn.Tanh()))


@ranks.on(2)
def test_param_init_fn_is_called_on_rank_0_once_for_each_module(rank, world):
    plain = with_bare()
    with torch.no_grad():
        plain.apply(by_numbers)
    called: list[nn.Module] = []

    def initialise(module: nn.Module) -> None:
        assert not torch.is_grad_enabled()
        called.append(module)
        by_numbers(module)

    net = on_meta(with_bare)
    model = zero.FSDP(net, param_init_fn=initialise)
    same(dict(model.state_dict()), dict(plain.state_dict()))
    holders = [module for module in net.modules() if next(module.parameters(recurse=False), None) is not None]
    assert (set(called) == set(holders) and len(called) == len(holders)) if rank == 0 else not called


def tied() -> nn.Module:
    net = nn.Sequential(nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 7))
    net[1].weight = net[0].weight
    return net


@ranks.on(2)
def test_a_tied_weight_is_drawn_once_and_whole_by_the_module_that_has_it_first(rank, world):
    model = zero.FSDP(on_meta(tied), auto_wrap_policy=ModuleWrapPolicy({nn.Embedding, nn.Linear}))
    weight = model.state_dict()["1.weight"]
    assert weight.shape == (7, WIDTH) and weight.abs().max() > 1, "a linear layer draws small numbers"


def wrap(rank: int, world: int, options: dict[str, Any], real_on_rank_0: bool) -> None:
    zero.FSDP(with_bare() if real_on_rank_0 and rank == 0 else on_meta(with_bare), **options)


def fails(module: nn.Module) -> None:
    raise KeyError("as told")


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "parameters": ({}, ["'1", "Bare has no reset_parameters", "param_init_fn"]),
    "param_init_fn that fails": ({"param_init_fn": fails}, ["as told"]),
    "not synchronised": ({"sync_module_states": False}, ["'0.weight' is on the meta device"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_given_values_is_refused_on_every_rank(case):
    options, words = REFUSED[case]
    ranks.expect_error(wrap, 2, ValueError, *words, args=(options, case == "not synchronised"), timeout=10)
    if case == "parameters":  # no matter where rank 0 has values
        ranks.run(wrap, args=(options, True))


@ranks.on(2)
def test_an_optimizer_built_before_wrapping_trains(rank, world):
    net = on_meta(Net)
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    model = zero.FSDP(net)
    before = model.state_dict()
    model(data(4, WIDTH, rank=rank)).square().mean().backward()
    optimizer.step()
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
