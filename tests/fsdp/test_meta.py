"""Models built on the meta device: on every rank, with values made by rank 0, or on all ranks but rank 0."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.functional import linear

import matrix
import ranks
import zero
from assertions import same
from inner import unit_names
from runs import SideBySide, reference, stage_3, steps, train_case
from zoo import CASES, OPTIMIZERS, WIDTH, data


class Line(nn.Module):
    """A layer whose first values depend on its shape alone, not on which layers had theirs before."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(after, before))
        self.bias = nn.Parameter(torch.empty(after))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for param in self.parameters():
            random = torch.Generator().manual_seed(param.numel())
            param.data.copy_(torch.randn(param.shape, generator=random, device="cpu") / 3)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), Line(WIDTH, 17), Line(17, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """With buffers of both kinds, a layer shared by two units, frozen parameters, and two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.waves, self.statistics = Line(WIDTH, WIDTH), Waves(), nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[2].down = self.blocks[0].down
        self.frozen = Line(WIDTH, WIDTH).requires_grad_(False)
        self.last = Line(WIDTH, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.statistics(self.waves(self.first(x)))
        for block in self.blocks:
            x = block(x)
        return self.last(self.frozen(x).double())


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        model = build()
    assert all(param.is_meta for param in model.parameters())
    return model


def assert_materialised(model: nn.Module) -> None:
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


OPTIONS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "every layer": {"auto_wrap_policy": ModuleWrapPolicy({Block, Line, nn.LayerNorm, nn.BatchNorm1d})},
    "one unit": {"auto_wrap_policy": ModuleWrapPolicy({nn.Conv1d})},
    "whole": {"partition": "whole"},
    "kept": {"sharding_strategy": "SHARD_GRAD_OP"},
    "not sharded": {"sharding_strategy": "NO_SHARD"},
}


def materialised(rank: int, world: int, options: dict[str, Any], real_on_rank_0: bool) -> None:
    torch.manual_seed(rank)  # ranks that would draw other values
    expected = Net()
    net = Net() if real_on_rank_0 and rank == 0 else on_meta(Net)
    model = zero.FSDP(net, **options)
    assert_materialised(model)
    same(dict(model.state_dict()), dict(expected.state_dict()))
    assert torch.equal(model.waves.waves, expected.waves.waves)
    assert model.blocks[2].down is model.blocks[0].down
    assert not any(param.requires_grad for param in model.frozen.parameters())
    assert [name for name, _ in net.named_parameters()] == [name for name, _ in expected.named_parameters()]


@matrix.combined("options, real_on_rank_0", OPTIONS, [False, True])
def test_values_are_those_of_a_model_built_with_values(options, real_on_rank_0):
    ranks.run(materialised, 3, args=(OPTIONS[options], real_on_rank_0))


@pytest.mark.slow
@ranks.on(4)
def test_replicas_get_the_values_of_the_first_rank_of_all(rank, world):
    given = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": init_device_mesh("cpu", (2, 2))}
    materialised(rank, world, given, real_on_rank_0=False)
    materialised(rank, world, given, real_on_rank_0=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpt", "convnet"])
@ranks.on(2)
def test_with_real_weights_on_rank_0_only_training_has_the_bits_of_ddp(rank, world, case):
    net = CASES[case].model() if rank == 0 else on_meta(CASES[case].build)
    model = zero.FSDP(net)
    losses = train_case(model, OPTIMIZERS["adamw"](model.parameters()), CASES[case], rank)
    expected = reference(rank, CASES[case], OPTIMIZERS["adamw"])
    assert losses == expected.losses
    same(dict(zero.full_state_dict(model)), dict(expected.weights))


class Untied(Net):
    """Whose BatchNorm takes the batch as it is, on one rank and on many."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].down = Line(17, WIDTH)
        self.statistics = nn.Identity()


def beside(build: Callable[[], nn.Module], **options: Any) -> SideBySide:
    """A model whose values were made here, and one built with them."""

    def sharded(_: nn.Module, optim: Any) -> tuple[nn.Module, Any]:
        return stage_3(on_meta(build), optim, **options)

    both = SideBySide(build(), sharded)
    both.compare()
    return both


@ranks.on(bare=True)
def test_one_process_without_a_group_materialises_as_well(rank, world):
    steps(beside(Untied), rank)


@ranks.on(2)
def test_every_layer_by_itself_trains_as_one_process(rank, world):
    both = beside(Untied, **OPTIONS["every layer"])
    assert len(unit_names(both.model)) > 10
    steps(both, rank)


# ------------------------------------------------------------------------------------------------------- param_init_fn


def by_numbers(module: nn.Module) -> None:
    """Values by the shape of a tensor; of modules of all kinds."""
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        seed = zlib.crc32(str(tuple(tensor.shape)).encode())
        values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
        tensor.copy_(values)


class Bare(nn.Module):
    """Parameters and a buffer, and no reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.scale = nn.Parameter(torch.ones(WIDTH, WIDTH)), nn.Parameter(torch.ones(()))
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix * self.scale + self.shift


class WithBare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(Bare(), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@ranks.on(2)
def test_param_init_fn_is_called_on_rank_0_once_for_each_module(rank, world):
    plain = WithBare()
    with torch.no_grad():
        plain.apply(by_numbers)
    called: list[nn.Module] = []

    def initialise(module: nn.Module) -> None:
        assert not torch.is_grad_enabled()
        called.append(module)
        by_numbers(module)

    net = on_meta(WithBare)
    model = zero.FSDP(net, param_init_fn=initialise)
    same(dict(model.state_dict()), dict(plain.state_dict()))
    holders = [module for module in net.modules() if next(module.parameters(recurse=False), None) is not None]
    assert (set(called) == set(holders) and len(called) == len(holders)) if rank == 0 else not called


class Tokens(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class TiedHead(nn.Module):
    """The head's weight is the embedding's, its bias is its own: as units of their own they share the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = Tokens(7, WIDTH), nn.Linear(WIDTH, 7)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.tokens(tokens))


@ranks.on(2)
def test_a_module_is_initialised_once_with_all_that_it_has(rank, world):
    """reset_parameters of a head whose weight was cut already would draw it anew, for a shard, on one rank."""
    wrong: list[str] = []

    def look(module: nn.Module) -> None:
        for name, param in module.named_parameters(recurse=False):
            if param.is_meta or param.shape != ((7,) if name == "bias" else (7, WIDTH)):
                wrong.append(f"{type(module).__name__}.{name} is {list(param.shape)} on {param.device}")
            param.fill_(1.0)

    policy = ModuleWrapPolicy({nn.Embedding, nn.Linear})
    zero.FSDP(on_meta(TiedHead), auto_wrap_policy=policy, param_init_fn=look)
    assert wrong == []
    weight = zero.FSDP(on_meta(TiedHead), auto_wrap_policy=policy).state_dict()["head.weight"]
    assert weight.abs().max() < 0.2, "drawn once, by the embedding"


# ------------------------------------------------------------------------------------------------------------- refusals


def wrap(rank: int, world: int, build: Callable[[], nn.Module], options: dict[str, Any], real_on_rank_0: bool) -> None:
    with nullcontext() if real_on_rank_0 and rank == 0 else torch.device("meta"):
        model = build()
    zero.FSDP(model, **options)


class OnlyBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", torch.ones(WIDTH), persistent=False)


def with_a_buffer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), OnlyBuffer())


def only_a_buffer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, device="cpu"), OnlyBuffer())


class Mean(nn.Module):
    """A parameter that has values beside a buffer that has none, as load_state_dict(assign=True) leaves them."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH, device="cpu"))
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def reset_parameters(self) -> None:
        raise AssertionError("values would be lost")


def half_loaded() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Mean())


def fails(module: nn.Module) -> None:
    raise KeyError("as told")


NOT_SYNCED = {"sync_module_states": False}
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], list[str]]] = {
    "parameters": (WithBare, {}, [r"blocks\.0\.0", "Bare has no reset_parameters", "param_init_fn"]),
    "buffer": (with_a_buffer, {}, ["'1", "OnlyBuffer has no reset_parameters", "param_init_fn"]),
    "buffer beside values": (half_loaded, {}, [r"'1\.mean' is on the meta device", "overwrite"]),
    "param_init_fn that fails": (WithBare, {"param_init_fn": fails}, ["as told"]),
    "not synchronised": (WithBare, NOT_SYNCED, ["'first.weight' is on the meta device"]),
    "buffer not synchronised": (only_a_buffer, NOT_SYNCED, [r"'1\.inverse' is on the meta device"]),
}


@pytest.mark.parametrize(
    ("case", "real_on_rank_0"), [*((case, False) for case in REFUSED), *((case, True) for case in [*REFUSED][-2:])]
)
def test_what_cannot_be_given_values_is_refused_on_every_rank(case, real_on_rank_0):
    build, options, words = REFUSED[case]
    ranks.expect_error(wrap, 2, ValueError, *words, args=(build, options, real_on_rank_0), timeout=10)


def test_modules_without_reset_parameters_are_no_matter_where_rank_0_has_values():
    ranks.run(wrap, args=(WithBare, {}, True))
    ranks.run(wrap, args=(with_a_buffer, {}, True))


def ignored_on_meta(rank: int, world: int, real_on_rank_0: bool) -> str:
    with nullcontext() if real_on_rank_0 and rank == 0 else torch.device("meta"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    try:
        model = zero.FSDP(net, ignored_modules=[net[1]])
    except ValueError as error:
        return str(error)
    assert_materialised(model)
    model(data(4, WIDTH, rank=rank)).sum().backward()
    return "trains"


@pytest.mark.parametrize("real_on_rank_0", [False, True])
def test_ignored_parameters_are_materialised_too_or_refused(real_on_rank_0):
    one, other = ranks.run(ignored_on_meta, args=(real_on_rank_0,), timeout=10)
    assert one == other
    assert one == "trains" or "meta device" in one


@ranks.on(2)
def test_an_optimizer_built_before_wrapping_trains(rank, world):
    net = on_meta(Untied)
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    model = zero.FSDP(net)
    before = model.state_dict()
    model(data(4, WIDTH, rank=rank)).square().mean().backward()
    optimizer.step()
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
