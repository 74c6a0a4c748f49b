"""Models built on the meta device, on every rank or on some; and construction that fails late: all ranks are told,
the model is what it was, and can be wrapped later."""

import errno
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import AdamW

import gpus
import matrix
import ranks
import zero
from assertions import same
from inner import before_scatters, unit_names
from runs import SideBySide, reference, sgd, stage_3, steps, train_case
from zoo import CASES, OPTIMIZERS, WIDTH, data

BLOCKS = 3


class Line(nn.Module):
    """A call of reset_parameters fails once no `calls_left`."""

    calls_left: int | None = None

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(after, before)), nn.Parameter(torch.empty(after))
        self.register_buffer("fixed", torch.empty(after))
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if Line.calls_left == 0:
            raise KeyError("as told")
        if Line.calls_left is not None:
            Line.calls_left -= 1
        self.fixed.copy_(torch.linspace(1, 2, len(self.fixed)))
        for param in self.parameters(recurse=False):
            random = torch.Generator("cpu").manual_seed(param.numel())
            param.data.copy_(torch.randn(param.shape, generator=random, device="cpu") / 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias) * self.fixed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Line(WIDTH, 13), Line(13, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """With tied weights, buffers, frozen parameters, and one that does not fill its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Line(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.blocks[2].down = self.blocks[0].down
        self.frozen = Line(WIDTH, WIDTH).requires_grad_(False)
        self.strided = nn.Parameter(torch.ones(WIDTH, 2 * WIDTH)[:, ::2])

    def reset_parameters(self) -> None:
        nn.init.ones_(self.strided)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.frozen(x) @ self.strided


# Construction that fails late.


def built(how: str, rank: int) -> nn.Module:
    """On ranks after the first with other values than those that all will start from."""
    with torch.device("meta" if how == "meta" else "cpu"):
        model = Net()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(rank)
    if how == "partly meta":
        model.blocks[1].up.to("meta")
        model.frozen.to("meta")
    return model.to("meta") if how == "meta on rank 0" and rank == 0 else model


class Before:
    """A model as it is now, to be compared with what becomes of it."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.modules, self.tensors = model, dict(model.named_modules()), tensors_of(model)
        self.values = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}

    def is_plain_again(self) -> None:
        """The same objects in the same places; what had values has these or the first rank's, what had none is on the
        meta device."""
        first = dict(Net().named_parameters(remove_duplicate=False))
        assert dict(self.model.named_modules()) == self.modules
        now = tensors_of(self.model)
        assert list(now) == list(self.tensors)
        for name, tensor in now.items():
            old = self.values[name]
            assert tensor is self.tensors[name] and tensor.is_meta == old.is_meta and tensor.shape == old.shape, name
            if name in first and not tensor.is_meta:
                assert torch.equal(tensor, old) or torch.equal(tensor, first[name]), name
            assert tensor.grad is None
        for module in self.modules.values():
            assert not module._forward_pre_hooks and not module._forward_hooks


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers()])


@contextmanager
def full_disk(rank: int, path: Path, files: int = 2) -> Iterator[dict[str, Any]]:
    """The second rank has room for some shards."""
    room = files if rank == 1 else 1000
    allocate = os.posix_fallocate

    def allocate_while_there_is_room(*args: Any) -> None:
        nonlocal room
        room -= 1
        if room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(*args)

    with mock.patch("os.posix_fallocate", allocate_while_there_is_room):
        yield {"offload": zero.DiskOffload(path)}


@contextmanager
def failing_reset(rank: int, path: Path) -> Iterator[dict[str, Any]]:
    with mock.patch.object(Line, "calls_left", 4):
        yield {}


ROOM = ["no room for the shards of unit 'blocks", "No space left", "on rank 1"]
FIRST = ["could not be initialised", "KeyError: 'as told'", "on rank 0"]
FAILURES: list[tuple[Callable[[int, Path], Any], str, list[str]]] = [
    (full_disk, "real", ROOM),
    (full_disk, "partly meta", ROOM),
    (failing_reset, "meta", FIRST),
    (failing_reset, "meta on rank 0", FIRST),
]


@pytest.mark.slow
@matrix.combined("case, options", FAILURES, [{}, {"partition": "whole"}])
@ranks.on(2)
def test_after_a_late_failure_the_model_is_plain_and_can_be_wrapped(rank, world, tmp_path, case, options):
    failure, how, words = case
    model = built(how, rank)
    before = Before(model)
    with failure(rank, tmp_path) as given, pytest.raises(ValueError, match="on rank") as raised:
        zero.FSDP(model, **given, **options)
    before.is_plain_again()
    assert all(word in str(raised.value) for word in words), raised.value
    both = SideBySide(Net(), lambda _, optim: stage_3(model, optim, **options), AdamW if options else sgd)
    both.compare()
    steps(both, rank, 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_a_disk_without_room_for_state_is_refused_before_anything_is_stepped(rank, world, stage, tmp_path):
    found = []
    for fails in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        model, optimizer = zero.setup(net, AdamW, stage=stage, lr=0.1, offload=zero.DiskOffload(tmp_path))
        model(torch.full((2, 4), 1.0 + rank)).sum().backward()
        before = zero.full_state_dict(model, to=None)
        if fails:
            with full_disk(rank, tmp_path, files=1):
                told = ranks.refusal(optimizer.step)
            assert re.search("ValueError: .*no room for the state of AdamW.*No space left.*Nothing was", told), told
            same(zero.full_state_dict(model, to=None), before)
        optimizer.step()
        state = zero.full_optimizer_state_dict(model, optimizer, to=None)["state"]
        found.append((zero.full_state_dict(model, to=None), state))
    same(*found)


@ranks.raises(2, ValueError, "an error ended an earlier FSDP", "Build the model again")
def test_a_model_that_an_error_left_half_sharded_is_not_wrapped_as_if_its_shards_were_full(rank, world):
    """Not one that ranks compare: nothing is gathered again, and some parameters are shards."""
    model, left = built("real", rank), iter(range(2))
    with before_scatters(lambda: next(left)), pytest.raises((StopIteration, RuntimeError)):
        zero.FSDP(model)
    zero.FSDP(model)


@gpus.cpu_only("NumPy holds no memory of GPUs")
@ranks.on(2)
def test_values_go_unit_by_unit_and_all_are_gone_at_the_end(rank, world):
    model = built("real", rank)
    values = []
    for param in model.parameters():
        own = param.detach().numpy().copy()
        param.data = torch.from_numpy(own)
        values.append(ref(own))
        del own
    found: list[int] = []

    def count() -> None:
        found.append(sum(value() is not None for value in values))

    with before_scatters(count):
        wrapped = zero.FSDP(model)
    assert len(unit_names(wrapped)) == 1 + BLOCKS
    count()
    assert found == sorted(found, reverse=True)
    assert found[0] > found[1] > found[2] > found[3] > found[4] == 2 and found[-1] == 0


# Models built on the meta device: on every rank, with values made by rank 0, or on all ranks but rank 0.


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


class Everything(Net):
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
    expected = Everything()
    net = Everything() if real_on_rank_0 and rank == 0 else on_meta(Everything)
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
    net = on_meta(Everything)
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    model = zero.FSDP(net)
    before = model.state_dict()
    model(data(4, WIDTH, rank=rank)).square().mean().backward()
    optimizer.step()
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
