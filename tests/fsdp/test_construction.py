"""Construction that fails late: all ranks are told, the model is what it was, and can be wrapped later."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW

import ranks
import zero
from sidebyside import SideBySide, data, sgd
from zero.fsdp.fsdp import running_model
from zero.shards.placement import Placement

WIDTH, BLOCKS = 8, 3


class Line(nn.Module):
    """Its first values are a function of its shape. Which call of reset_parameters fails is set by `failing`."""

    calls_left: int | None = None

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(after, before)), nn.Parameter(torch.empty(after))
        self.register_buffer("calls", torch.zeros(()))
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if Line.calls_left == 0:
            raise KeyError("as told")
        if Line.calls_left is not None:
            Line.calls_left -= 1
        self.calls += 1
        for param in self.parameters(recurse=False):
            random = torch.Generator().manual_seed(param.numel())
            param.data.copy_(torch.randn(param.shape, generator=random) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Line(WIDTH, 13), Line(13, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Scale(nn.Module):
    """A parameter and a buffer that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("fixed", torch.empty(WIDTH))
        if not self.gain.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        self.fixed.copy_(torch.linspace(1, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain * self.fixed


class Net(nn.Module):
    """With tied weights, buffers, frozen parameters, and one that does not fill its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Line(WIDTH, WIDTH)
        self.scale = Scale()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.blocks[2].down = self.blocks[0].down
        self.frozen = Line(WIDTH, WIDTH).requires_grad_(False)
        self.strided = nn.Parameter(torch.ones(WIDTH, 2 * WIDTH)[:, ::2])

    def reset_parameters(self) -> None:
        nn.init.ones_(self.strided)

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.frozen(x) @ self.strided


def built(how: str, rank: int) -> nn.Module:
    if how == "meta":
        with torch.device("meta"):
            return Net()
    model = Net()
    if rank:  # other values than those that all will start from
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.scale.buffers()):
                tensor.add_(rank)
    if how == "partly meta":
        model.blocks[1].up.to("meta")
        model.frozen.to("meta")
    if how == "meta on rank 0" and rank == 0:
        model.to("meta")
    return model


class Before:
    """A model as it is now, to be compared with what becomes of it."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.modules = model, dict(model.named_modules())
        self.tensors = self._tensors()
        self.values = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        self.strides = {name: tensor.stride() for name, tensor in self.tensors.items()}

    def _tensors(self) -> dict[str, Tensor]:
        named = [*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers()]
        return dict(named)

    def is_plain_again(self) -> None:
        """The same objects in the same places; what had values has these or the first rank's, what had none is on the
        meta device."""
        first = dict(Net().named_parameters(remove_duplicate=False))
        assert dict(self.model.named_modules()) == self.modules
        now = self._tensors()
        assert list(now) == list(self.tensors)
        for name, tensor in now.items():
            assert tensor is self.tensors[name], name
            assert tensor.is_meta == self.values[name].is_meta, name
            assert tensor.shape == self.values[name].shape, name
            assert tensor.stride() == self.strides[name] or name == "strided"
            if isinstance(tensor, nn.Parameter) and not tensor.is_meta:
                assert torch.equal(tensor, self.values[name]) or torch.equal(tensor, first[name]), name
            assert tensor.grad is None
        for module in self.modules.values():
            assert not module._forward_pre_hooks and not module._forward_hooks


@contextmanager
def full_disk(rank: int, path: Path) -> Iterator[dict[str, Any]]:
    """The second rank has room for some shards."""
    room = 3 if rank == 1 else 1000
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
def failing_function(rank: int, path: Path) -> Iterator[dict[str, Any]]:
    left = 4

    def initialise(module: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyError("as told")
        module.reset_parameters()
        for buffer in module.buffers(recurse=False):
            buffer += 3

    yield {"param_init_fn": initialise}


@contextmanager
def failing_reset(rank: int, path: Path) -> Iterator[dict[str, Any]]:
    with mock.patch.object(Line, "calls_left", 4):
        yield {}


@contextmanager
def missing_reset(rank: int, path: Path) -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(Line, "reset_parameters")
        yield {}


Failure = Callable[[int, Path], Any]

CASES: list[tuple[Failure, str, list[str]]] = [
    (full_disk, "real", ["no room for the shards of unit 'blocks", "DiskOffload", "No space left", "on rank 1"]),
    (full_disk, "meta", ["no room for the shards of unit 'blocks", "on rank 1"]),
    (full_disk, "partly meta", ["no room for the shards of unit 'blocks", "on rank 1"]),
    (failing_function, "meta", ["could not be initialised: KeyError: 'as told'", "on rank 0"]),
    (failing_reset, "meta", ["could not be initialised: KeyError: 'as told'", "on rank 0"]),
    (failing_reset, "meta on rank 0", ["could not be initialised: KeyError: 'as told'", "on rank 0"]),
    (missing_reset, "meta", ["Line has no reset_parameters", "param_init_fn", "on rank 0"]),
    (missing_reset, "partly meta", ["Line has no reset_parameters", "param_init_fn", "on rank 0"]),
]


def loss(rank: int, step: int) -> Callable[[nn.Module], Tensor]:
    return lambda model: (model(data(5, WIDTH, rank=rank, step=step)) - 1).square().mean()


def trains_as(expected: nn.Module, rank: int, model: nn.Module, optim: Any, **options: Any) -> zero.FSDP:
    def stage(_: nn.Module, optim: Any) -> Any:
        optimizer = optim(model.parameters())
        return zero.FSDP(model, **options), optimizer

    both = SideBySide(expected, stage, optim)
    both.compare()
    for step in range(3):
        both.step(loss(rank, step))
    return both.model


@pytest.mark.parametrize("options", [{}, {"partition": "whole"}], ids=["even", "whole"])
@pytest.mark.parametrize(("failure", "how", "words"), CASES, ids=[f"{f.__name__}, {how}" for f, how, _ in CASES])
@ranks.on(2)
def test_after_a_late_failure_the_model_is_plain_and_can_be_wrapped(
    rank, world, tmp_path, failure, how, words, options
):
    model = built(how, rank)
    before = Before(model)
    with failure(rank, tmp_path) as given, pytest.raises(ValueError, match="on rank") as raised:
        zero.FSDP(model, **given, **options)
    before.is_plain_again()
    trains_as(built("real", rank=0), rank, model, AdamW if options else sgd, **options)
    message = str(raised.value)
    assert all(word in message for word in words), message


@ranks.on(4)
def test_where_one_rank_fails_all_replicas_are_told(rank, world, tmp_path):
    options = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": init_device_mesh("cpu", (2, 2))}
    model = built("real", rank)
    before = Before(model)
    with full_disk(rank, tmp_path) as given, pytest.raises(ValueError, match="no room") as raised:
        zero.FSDP(model, **given, **options)
    before.is_plain_again()
    with pytest.raises(ValueError, match="'columns' is unknown"):  # told by one rank, before anything is built
        zero.FSDP(model, partition="columns" if rank == 1 else "even", **options)  # type: ignore[arg-type]
    zero.FSDP(model, **options)(data(5, WIDTH, rank=rank)).sum().backward()
    told = str(raised.value)
    assert "no room for the shards of unit 'blocks" in told


@ranks.raises(2, ValueError, "an error ended an earlier FSDP", "Build the model again")
def test_a_model_that_an_error_left_half_sharded_is_not_wrapped_as_if_its_shards_were_full(rank, world):
    """Not one that ranks compare: nothing is gathered again, and some parameters are shards."""
    model = built("real", rank)
    broadcast, left = Placement.broadcast, 2

    def fail_later(self: Placement, tensors: Sequence[Tensor]) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("the link is down")
        broadcast(self, tensors)

    with mock.patch.object(Placement, "broadcast", fail_later), pytest.raises(RuntimeError, match="the link is down"):
        zero.FSDP(model)
    zero.FSDP(model)


@ranks.on(2)
def test_an_fsdp_inside_goes_on_where_the_one_around_it_failed_late(rank, world, tmp_path):
    plain, model = Net(), Net()
    inner = model.blocks[1] = zero.FSDP(model.blocks[1], reshard_after_forward=False)
    with full_disk(rank, tmp_path) as given, pytest.raises(ValueError, match=r"no room .* unit 'blocks\.2'"):
        zero.FSDP(model, **given)
    assert model.blocks[1] is inner
    assert [unit.name for unit in inner._units] == [""]
    for block in (inner, plain.blocks[1]):
        block(data(5, WIDTH, rank=0)).square().mean().backward()
    with inner.summon_full_params(writeback=False, with_grads=True):
        for (name, param), expected in zip(inner.named_parameters(), plain.blocks[1].parameters(), strict=True):
            assert torch.equal(param, expected) and torch.equal(param.grad, expected.grad), name
    model.zero_grad()
    plain.zero_grad()
    wrapped = trains_as(plain, rank, model, sgd)
    assert [unit.name for unit in wrapped._units] == ["", "blocks.0", "blocks.2", "blocks.1"]
    assert model.blocks[1] is inner.module


@ranks.on(2)
def test_what_an_fsdp_inside_ignores_is_known_by_its_own_name(rank, world):
    model = Net()
    model.blocks[1] = zero.FSDP(model.blocks[1], ignored_modules=[model.blocks[1].up])
    wrapped = trains_as(Net(), rank, model, sgd)
    names = [name for unit in wrapped._units for group in unit.groups for name in group.names]
    assert sorted(names) == sorted(name for name, _ in Net().named_parameters())


def mapped(path: Path) -> int:
    return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


@ranks.on(2)
def test_parts_that_had_found_room_are_gone_with_the_error(rank, world, tmp_path):
    found = []
    gc.disable()
    try:
        with full_disk(rank, tmp_path) as given, pytest.raises(ValueError, match="no room") as raised:
            zero.FSDP(built("real", rank), **given)
        found.append(mapped(tmp_path))
        del raised
        gc.collect()
        found.append(mapped(tmp_path))
    finally:
        gc.enable()
    in_between, after = found
    assert in_between and not after


@pytest.mark.parametrize("offloads", [False, True])
@ranks.on(2)
def test_values_go_unit_by_unit_and_all_are_gone_at_the_end(rank, world, tmp_path, offloads):
    model = built("real", rank)
    values = []
    for param in model.parameters():
        own = param.detach().numpy().copy()
        param.data = torch.from_numpy(own)
        values.append(ref(own))
        del own
    found = []
    broadcast = Placement.broadcast

    def count_and_broadcast(self: Placement, tensors: Sequence[Tensor]) -> None:
        found.append(sum(value() is not None for value in values))
        broadcast(self, tensors)

    with mock.patch.object(Placement, "broadcast", count_and_broadcast):
        wrapped = zero.FSDP(model, **({"offload": zero.DiskOffload(tmp_path)} if offloads else {}))
    assert running_model(wrapped).index.groups
    found.append(sum(value() is not None for value in values))
    assert found == sorted(found, reverse=True)
    assert found[0] > found[1] > found[2] > found[3] == 2 and found[-1] == 0
