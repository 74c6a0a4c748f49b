"""Checkpoints of torch.distributed.checkpoint: a run of PyTorch's own goes on at any stage, and a stage's by FSDP2."""

import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import matrix
import ranks
import zero
from processes import command
from zero.checkpoint import CheckpointError
from zoo import TiedBlocks, built, data

WIDTH = 6
OPTIMIZERS = {
    "adamw": lambda params: AdamW(params, 1e-2),
    "sgd": lambda params: SGD(params, 1e-2, momentum=0.9),
    "sgd without state": lambda params: SGD(params, 1e-2),
}


@dataclass
class Loop:
    """model: wrapped. One of the optimizer's two groups has another weight decay."""

    model: nn.Module
    optimizer: Optimizer
    schedule: StepLR

    def losses(self, *steps: int) -> list[float]:
        found = []
        for step in steps:
            loss = self.model(data(5, WIDTH, rank=dist.get_rank(), step=step)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            found.append(loss.item())
        return found


def loop(optim: str, wrap: Callable[[nn.Module], nn.Module] | int, seed: int = 7) -> Loop:
    """wrap: by PyTorch; or a stage."""
    torch.manual_seed(seed)
    model = built(lambda: TiedBlocks(WIDTH)) if seed == 7 else TiedBlocks(WIDTH)
    wrapped = model if isinstance(wrap, int) else wrap(model)
    params = dict(model.named_parameters())
    decayed = [param for name, param in params.items() if name.endswith("weight")]
    others = [param for name, param in params.items() if not name.endswith("weight")]
    optimizer: Optimizer = OPTIMIZERS[optim]([{"params": decayed, "weight_decay": 0.1}, {"params": others}])
    if isinstance(wrap, int):
        wrapped, optimizer = zero.setup(model, optimizer, stage=wrap)
    return Loop(wrapped, optimizer, StepLR(optimizer, 2, 0.5))


def fsdp1(model: nn.Module) -> nn.Module:
    ignored = [model.head.bias]  # PyTorch's FSDP1 names no state of a frozen one
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"), ignored_states=ignored)


def by_state_dict(one: Loop, **how: Any) -> tuple[Any, Any]:
    return get_state_dict(one.model, one.optimizer, options=StateDictOptions(**how))


def by_fsdp1(one: Loop) -> tuple[Any, Any]:
    with FullyShardedDataParallel.state_dict_type(one.model, StateDictType.SHARDED_STATE_DICT):
        return one.model.state_dict(), FullyShardedDataParallel.optim_state_dict(one.model, one.optimizer)


def save(one: Loop, path: Path, kind: str) -> None:
    how: Any = {"flatten_optimizer_state_dict": True} if kind == "flat" else {}
    model, state = by_fsdp1(one) if kind == "fsdp1" else by_state_dict(one, **how)
    rest = {"schedule": one.schedule.state_dict(), "step": 3, "seen": torch.ones(2)}
    whole = {"model": model, "optimizer": state, **rest}
    if kind == "nested":
        whole = {"app": {"model": model, "optim": state, "ema": {name: one * 2 for name, one in model.items()}}, **rest}
    if kind == "weights at the root":
        whole = {**model, "optimizer": state, **rest}
    dcp.save(whole, checkpoint_id=path)


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp2": fully_shard,
    "flat": fully_shard,
    "nested": fully_shard,
    "weights at the root": fully_shard,
    "fsdp1": fsdp1,
    "ddp": DistributedDataParallel,
}


@matrix.combined("kind, optim", KINDS, OPTIMIZERS)
@ranks.on(2)
def test_what_pytorch_has_saved_in_shards_goes_on_at_any_stage(rank, world, kind, optim, tmp_path):
    with quiet():
        own = loop(optim, KINDS[kind])
        own.losses(0, 1, 2)
        save(own, tmp_path, kind)
        expected = own.losses(3, 4, 5)
        for stage in range(4):
            one = loop(optim, stage, seed=stage)
            extra = zero.checkpoint.load(tmp_path, one.model, one.optimizer)
            assert extra["step"] == 3 and [*extra] == ["schedule", "step"]
            one.schedule.load_state_dict(extra["schedule"])
            assert one.losses(3, 4, 5) == expected, stage


@ranks.on(2)
def go_on_by_fsdp2(rank, world, path, optim):
    with quiet():
        one = loop(optim, fully_shard, seed=3)
        model, state = by_state_dict(one)
        whole = {"model": model, "optimizer": state, "step": 0, "schedule": one.schedule.state_dict()}
        dcp.load(whole, checkpoint_id=path)
        set_state_dict(one.model, one.optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optimizer"])
        one.schedule.load_state_dict(whole["schedule"])
        return one.losses(*range(whole["step"], 6))


def train_and_save(rank, world, path, optim, stage):
    one = loop(optim, stage)
    one.losses(0, 1, 2)
    zero.checkpoint.save(path, one.model, one.optimizer, extra={"schedule": one.schedule.state_dict(), "step": 3})
    return one.losses(3, 4, 5)


@matrix.combined("stage, optim", range(4), OPTIMIZERS)
def test_an_export_goes_on_by_fsdp2(stage, optim, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    expected = ranks.run(train_and_save, 2, (run, optim, stage))
    assert command("zero.checkpoint", "export", run, out, "--to", "dcp") == 0
    assert command("zero.checkpoint", "export", run, out, "--to", "dcp") == 1  # something is there
    assert ranks.run(go_on_by_fsdp2, 2, (out, optim)) == expected


def test_an_export_that_fails_says_so_and_leaves_nothing(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    zero.checkpoint.save(run, nn.Linear(2, 2))
    with mock.patch.object(FileSystemWriter, "write_data", side_effect=OSError(28, "No space left on device")):
        assert command("zero.checkpoint", "export", run, out, "--to", "dcp") == 1
    assert "could not be written: OSError(28, 'No space left on device')" in capsys.readouterr().err
    assert not [*out.iterdir()]


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("run",)


def dotted() -> bytes:
    """A class that a module of torch has imported, by its path from there."""
    return b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.fspath\x93."


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pickle that runs code": (
        lambda path: (path / ".metadata").write_bytes(pickle.dumps(Harmful())),
        r"\.metadata cannot be read .*names builtins\.print",
    ),
    "a path to what a module imports": (lambda path: (path / ".metadata").write_bytes(dotted()), r"names .*os\.fspath"),
    "another pickle": (lambda path: (path / ".metadata").write_bytes(pickle.dumps({})), "it holds a dict"),
    "cut off": (lambda path: (path / ".metadata").write_bytes(b"\x80"), r"\.metadata cannot be read"),
    "a file is gone": (lambda path: (path / "__1_0.distcp").unlink(), r"__1_0\.distcp is missing or truncated"),
    "a file is short": (lambda path: (path / "__0_0.distcp").write_bytes(b"1"), r"__0_0\.distcp is missing or trunc"),
}

OTHERS: dict[str, tuple[Callable[[], tuple[nn.Module, Optimizer]], str]] = {
    "another shape": (lambda: of(TiedBlocks(WIDTH + 1)), r"these differ: blocks\.0\.0\.weight \(saved \[6, 6\], here"),
    "less": (lambda: of(TiedBlocks(WIDTH).blocks), r"has none of the model's parameters, but model\."),
    "more": (lambda: of(WithMore()), r"it has nothing for: more"),
    "another model": (lambda: of(nn.Linear(3, 3)), r"has none of the model's parameters, but model\."),
    "another optimizer": (lambda: by_sgd(TiedBlocks(WIDTH)), "is of another optimizer than SGD"),
    "one group": (
        lambda: of(TiedBlocks(WIDTH)),
        r"AdamW here has a group of other parameters than it was saved with, as of blocks\.0",
    ),
}


class WithMore(TiedBlocks):
    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.more = nn.Parameter(torch.ones(2))


def of(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    return model, AdamW(model.parameters())


def by_sgd(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    return model, SGD([{"params": [param]} for param in model.parameters()], 0.1, momentum=0.9)


@ranks.on(2)
def test_what_does_not_fit_or_is_damaged_is_refused_on_every_rank_and_changes_nothing(rank, world, tmp_path):
    with quiet():
        own = loop("adamw", fully_shard)
        own.losses(0)
        save(own, tmp_path / "own", "fsdp2")
        weights, _ = by_state_dict(own)
        dcp.save({"model": weights}, checkpoint_id=tmp_path / "no state")
        dcp.save({"one": weights, "other": weights}, checkpoint_id=tmp_path / "twice")
        for make, told in OTHERS.values():
            model, optimizer = zero.setup(*make(), stage=2)
            before = zero.full_state_dict(model, to=None)
            with pytest.raises(CheckpointError, match=told):
                zero.checkpoint.load(tmp_path / "own", model, optimizer)
            after = zero.full_state_dict(model, to=None)
            assert all(map(torch.equal, before.values(), after.values()))
        one = loop("adamw", 2)
        for path, told in [("no state", "saved with no optimizer"), ("twice", r"more than once, under one\., other\.")]:
            with pytest.raises(CheckpointError, match=told):
                zero.checkpoint.load(tmp_path / path, one.model, one.optimizer)
        with pytest.raises(CheckpointError, match=r"without resume=\. Load it without"):
            zero.checkpoint.load(tmp_path / "own", one.model, one.optimizer, resume=one.schedule)
        for name, (damage, told) in DAMAGED.items():
            copy = tmp_path / name
            if rank == 0:
                shutil.copytree(tmp_path / "own", copy)
                damage(copy)
            dist.barrier()
            with pytest.raises(CheckpointError, match=told):
                zero.checkpoint.load(copy, one.model, one.optimizer)
