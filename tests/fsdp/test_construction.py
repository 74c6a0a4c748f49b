"""Construction that fails late: all ranks are told, the model is what it was, and can be wrapped later."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
from lines import BLOCKS, Line, Net
from torch import Tensor, nn
from torch.optim import AdamW

import gpus
import matrix
import ranks
import zero
from inner import before_scatters, unit_names
from runs import SideBySide, sgd, stage_3, steps


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
def full_disk(rank: int, path: Path) -> Iterator[dict[str, Any]]:
    """The second rank has room for some shards."""
    room = 2 if rank == 1 else 1000
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
CASES: list[tuple[Callable[[int, Path], Any], str, list[str]]] = [
    (full_disk, "real", ROOM),
    (full_disk, "partly meta", ROOM),
    (failing_reset, "meta", FIRST),
    (failing_reset, "meta on rank 0", FIRST),
]


@pytest.mark.slow
@matrix.combined("case, options", CASES, [{}, {"partition": "whole"}])
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
