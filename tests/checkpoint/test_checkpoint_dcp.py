"""Checkpoints of torch.distributed.checkpoint: a run of PyTorch's own goes on at any stage, and a stage's by FSDP2."""

import pickle
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils._pytree import tree_map

import matrix
import ranks
import zero
from processes import command
from zero.checkpoint import CheckpointError
from zero.checkpoint.export import export
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


class Scaled(nn.Linear):
    """extra: its extra state."""

    def __init__(self, extra: Any) -> None:
        super().__init__(WIDTH, WIDTH)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Nested(Optimizer):
    """Its state is nested, and has a key with a dot."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            state = self.state[param]
            if not state:
                state |= {"mean": {"first": torch.zeros_like(param)}, "a.b": torch.zeros_like(param)}
            state["mean"]["first"].add_(param.grad)
            param.sub_(0.1 * state["mean"]["first"])


def two(params: Iterator[nn.Parameter]) -> list[Optimizer]:
    first, *others = params
    return [AdamW([first]), AdamW(others)]


def flat_of(model: nn.Module, optimizer: Any) -> Any:
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))


def whole_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def numbers_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def apart(model: nn.Module, optimizers: Any) -> dict[str, Any]:
    states = {f"optimizer_{at}": get_optimizer_state_dict(model, one) for at, one in enumerate(optimizers)}
    return {"model": model.state_dict(), **states}


def doubled(model: nn.Module) -> dict[str, Any]:
    return {name: param * 2 for name, param in model.named_parameters()}


@dataclass
class Layout:
    """save: what is given to dcp.save. optim: builds the optimizers; here: those that it is loaded into, if others."""

    save: Callable[[nn.Module, Any], dict[str, Any]]
    optim: Callable[[Any], Any] = AdamW
    here: Callable[[Any], Any] | None = None
    told: str = ""
    extra_state: Any = None
    extra: dict[str, Any] = field(default_factory=dict)


LAYOUTS = {
    "an average within the model": Layout(
        lambda model, _: {"model": {**model.state_dict(), "ema": doubled(model)}},
        here=lambda _: None,
        told=r"model\.ema\.\S+ .*are tensors",
    ),
    "an average within the root": Layout(
        lambda model, _: {**model.state_dict(), "ema": doubled(model)},
        here=lambda _: None,
        told=r"ema\.\S+ .*are tensors",
    ),
    "gradients": Layout(
        lambda *both: {**whole_of(*both), "gradients": doubled(both[0])}, told=r"gradients\.\S+ .*are tensors"
    ),
    "a note by the names of parameters": Layout(
        lambda *both: {**whole_of(*both), "note": {"0.weight": "hi"}}, extra={"note": {"0.weight": "hi"}}
    ),
    "DistributedDataParallel": Layout(
        lambda model, _: {"model": {f"module.{name}": one for name, one in model.state_dict().items()}},
        here=lambda _: None,
    ),
    "numbers": Layout(numbers_of),
    "numbers of a step's own": Layout(numbers_of, optim=Nested),
    "nested state": Layout(whole_of, optim=Nested),
    "flat nested state": Layout(
        lambda *both: {"model": both[0].state_dict(), "optimizer": flat_of(*both)}, optim=Nested
    ),
    "optimizers apart": Layout(apart, optim=two),
    "two optimizers in one": Layout(whole_of, optim=two),
    "extra state that is a dictionary": Layout(whole_of, extra_state={"a": 7, "b": {"c": [1, 2]}}),
    "extra state that is a tensor": Layout(whole_of, extra_state=torch.arange(3)),
    "no extra state, which an empty dictionary is": Layout(whole_of, extra_state={}),
}

UNFIT = {
    "integers": Layout(
        lambda model, _: {"model": {name: (one * 9).to(torch.int8) for name, one in doubled(model).items()}},
        here=lambda _: None,
        told=r"differ: 0\.weight \(saved int8 \[6, 6\], here float32 \[6, 6\]\)",
    ),
    "an optimizer less": Layout(
        apart,
        optim=two,
        here=AdamW,
        told=r"none given here takes, of 0\.weight, such as optimizer_0\.state\.0\.weight\.",
    ),
    "state of another shape": Layout(
        lambda *both: {
            "model": both[0].state_dict(),
            "optimizer": {**flat_of(*both), "state.0.bias.exp_avg": torch.ones(2)},
        },
        told=r"0\.bias\.exp_avg has shape \[2\], and the parameter 0\.bias here \[6\]",
    ),
    "state of another parameter": Layout(
        lambda *both: {
            "model": both[0].state_dict(),
            "optimizer": {**flat_of(*both), "state.9.x.exp_avg": torch.ones(2)},
        },
        told=r"state of no parameter of the model: optimizer\.state\.9\.x\.exp_avg",
    ),
    "numbers in other groups": Layout(
        numbers_of,
        here=lambda params: AdamW([{"params": [one]} for one in params]),
        told=r"for the parameters of optimizer \(\[4\]\) in groups, and none of these can be the AdamW here, with \[1,",
    ),
    "extra state is missing": Layout(
        lambda model, _: {"model": {name: one for name, one in model.state_dict().items() if "extra" not in name}},
        here=lambda _: None,
        told=r"it has nothing for: 0\._extra_state",
        extra_state="as before",
    ),
}


def trained(layout: Layout, seed: int, steps: int = 2) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    extra_state = layout.extra_state if seed == 7 or layout.extra_state == {} else "of the model here"
    first = nn.Linear(WIDTH, WIDTH) if layout.extra_state is None else Scaled(extra_state)
    model = nn.Sequential(first, nn.BatchNorm1d(WIDTH, affine=False), nn.Linear(WIDTH, WIDTH))
    optim = layout.optim if seed == 7 or layout.here is None else layout.here
    optimizer = optim(model.parameters())
    for _ in range(steps):
        model(torch.randn(3, WIDTH)).square().sum().backward()
        for one in optimizer if isinstance(optimizer, list) else [optimizer]:
            one.step()
            one.zero_grad()
    return model, optimizer


def full(model: nn.Module, optimizer: Any) -> Any:
    state = optimizer and zero.full_optimizer_state_dict(model, optimizer, to=None)
    return tree_map(
        lambda one: one.tolist() if isinstance(one, torch.Tensor) else one,
        (zero.full_state_dict(model, to=None), state),
    )


def saved(layout: Layout, path: Path) -> tuple[Any, Any]:
    """What was saved, and a model and optimizers to load it into."""
    own, here = trained(layout, 7), trained(layout, 3, steps=0)
    with quiet():
        dcp.save(layout.save(*own), checkpoint_id=path)
    return own, (DistributedDataParallel(here[0]), None) if here[1] is None else zero.setup(*here, stage=3)


@ranks.on(2)
def test_each_layout_is_loaded_whole(rank, world, tmp_path):
    for name, layout in LAYOUTS.items():
        own, here = saved(layout, tmp_path / name)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            extra = zero.checkpoint.load(tmp_path / name, *here)
        left_out = [str(one.message) for one in told if "left out" in str(one.message)]
        assert full(*here) == full(own[0], here[1] and own[1]), name
        assert extra == layout.extra, name
        assert len(left_out) == bool(rank == 0 and layout.told), (name, left_out)
        assert not left_out or re.search(layout.told, left_out[0]), (name, left_out)
        assert repr(getattr(zero.unwrap(here[0])[0], "extra", None)) == repr(layout.extra_state), name


@ranks.on(2)
def test_what_would_be_lost_is_refused(rank, world, tmp_path):
    for name, layout in UNFIT.items():
        _, here = saved(layout, tmp_path / name)
        before = full(*here)
        with pytest.raises(CheckpointError, match=layout.told):
            zero.checkpoint.load(tmp_path / name, *here)
        assert full(*here) == before, name


def test_an_export_loses_nothing(tmp_path):
    extra = {"model": "llama", "optimizer": 3, "empty": {}, "steps": Counter({3: 1}), "seen": torch.ones(2)}
    layout = Layout(whole_of, extra_state={"empty": {}, 3: 1})
    model, optimizer = zero.setup(*trained(layout, 7), stage=2)
    average = zero.EMA(model, decay=0.9)
    average.update()
    zero.checkpoint.save(tmp_path / "run", model, [optimizer, average], extra=extra)
    export(tmp_path / "run", tmp_path / "out", to="dcp")
    plain, plain_optimizer = trained(layout, 3, steps=0)
    other, optimizer_here = zero.setup(plain, plain_optimizer, stage=3)
    with pytest.raises(CheckpointError, match="saved with 2 optimizers, but 1"):
        zero.checkpoint.load(tmp_path / "out", other, optimizer_here)
    average_here = zero.EMA(other, decay=0.9)
    loaded = zero.checkpoint.load(tmp_path / "out", other, [optimizer_here, average_here])
    assert repr(loaded) == repr(extra)
    assert plain[0].extra == {"empty": {}, 3: 1}
    assert full(other, [optimizer_here, average_here]) == full(model, [optimizer, average])


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
    "another shape": (lambda: of(TiedBlocks(WIDTH + 1)), r"differ: blocks\.0\.0\.weight \(saved float32 \[6, 6\]"),
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
