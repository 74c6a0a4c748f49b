"""A rank's shard of the optimizer's state says what it is when it is saved, and not before."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Adam

import ranks
import zero
from assertions import same
from runs import take_step
from transports import TRANSPORTS, by
from zero.checkpoint import files, write
from zero.comm import Comm
from zero.fsdp import full_weights
from zero.state import gathered
from zoo import data

SHARDED = [1, 2, 3]
TOLD = (
    r"only one rank.s shard .*\(rank . of 2, .* zero.full_optimizer_state_dict\("
    r".*checkpoint\.save\("
)


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def trained(stage: int, rank: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, optimizer = zero.setup(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3)), Adam, stage=stage, lr=0.01)
    step(model, optimizer, rank)
    return model, optimizer


def step(model: nn.Module, optimizer: Any, rank: int) -> None:
    take_step(optimizer, model(torch.full((2, 8), 1.0 + rank)).square().sum())


@pytest.mark.parametrize("stage", SHARDED)
@ranks.on(2)
def test_a_shard_warns_of_what_it_is_when_it_is_saved_and_not_before(rank, world, stage):
    """Copies, loads and full states do not warn; warnings are errors here."""
    model, optimizer = trained(stage, rank)
    shard = optimizer.state_dict()
    same(copy.deepcopy(shard), shard, "the copy")
    optimizer.load_state_dict(copy.deepcopy(shard))
    saved(zero.full_optimizer_state_dict(model, optimizer, to=None))
    shard["param_groups"] = [*shard["param_groups"], *copy.deepcopy(shard["param_groups"])]  # says it once all the same
    for dump in (saved, pickle.dumps):
        with pytest.warns(UserWarning, match=TOLD) as told:
            dump({"epoch": 1, "optimizer": shard})
        assert len(told) == 1 and f"rank {rank} of 2" in str(told[0].message)


@pytest.mark.parametrize("stage", SHARDED)
@ranks.on(2)
def test_a_shard_loads_from_the_file_of_its_own_rank_only(rank, world, stage):
    """Each rank goes on from its own file, and refuses the other's."""
    model, optimizer = trained(stage, rank)
    shard = optimizer.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = saved(shard)
    found = torch.load(io.BytesIO(own), weights_only=True)
    again, other = trained(stage, rank)
    other.load_state_dict(found)
    same(other.state_dict(), shard, "the state after loading")
    for pair in ((model, optimizer), (again, other)):
        step(*pair, rank)
    same(other.state_dict(), optimizer.state_dict(), "the state after a step more")
    files: list[Any] = [None] * world
    dist.all_gather_object(files, own)
    told = ranks.refusal(lambda: other.load_state_dict(torch.load(io.BytesIO(files[1 - rank]), weights_only=True)))
    assert told.startswith(f"ValueError: the state is one rank's shard (rank {1 - rank} of 2, "), told


def two(stage: int, partition: str) -> tuple[nn.Module, Any]:
    """Of parameters of one shape, so that shapes tell nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    return zero.setup(model, Adam, stage=stage, partition=partition, lr=0.01)


def steps(model: nn.Module, optimizer: Any, rank: int, numbers: range) -> dict[str, torch.Tensor]:
    for number in numbers:
        take_step(optimizer, model(data(4, 8, rank=rank, step=number)).square().mean())
    return zero.full_state_dict(model, to=None)


def goes_on(stage: int, partition: str, rank: int, start: dict[str, torch.Tensor], state: Any) -> Any:
    """The weights after two steps more; None where a rank refuses to load the state."""
    model, optimizer = two(stage, partition)
    zero.load_full_state_dict(model, start)
    told = ranks.refusal(lambda: optimizer.load_state_dict(copy.deepcopy(state)))
    assert not told or "one rank's shard" in told or "parameter group" in told
    refused: list[bool] = [False] * 2
    dist.all_gather_object(refused, bool(told))
    with pytest.raises(ValueError, match=r"shard|group") if any(refused) else nullcontext():  # on both ranks
        zero.load_full_optimizer_state_dict(model, optimizer, copy.deepcopy(state))
    return None if any(refused) else steps(model, optimizer, rank, range(2, 4))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:this state_dict.. is only one rank's shard:UserWarning")
@pytest.mark.parametrize("partition", ["even", "whole"])
@pytest.mark.parametrize("file", ["own", "of rank 0"])
@ranks.on(2)
def test_a_shard_is_taken_for_nothing_else_at_any_other_stage(rank, world, partition, file):
    """Also that of the optimizer inside. It loads where the same elements of the same parameters are stepped."""
    pair = two(0, partition)
    start = {name: value.clone() for name, value in steps(*pair, rank, range(2)).items()}
    expected = steps(*pair, rank, range(2, 4))
    for saver in (1, 2, 3, "inner"):
        model, optimizer = two(1 if saver == "inner" else saver, partition)
        steps(model, optimizer, rank, range(2))
        files: list[Any] = [None] * world
        dist.all_gather_object(files, (optimizer.optim if saver == "inner" else optimizer).state_dict())
        for loader in range(4):
            same_layout = file == "own" and (saver in (1, 2, "inner")) == (loader in (1, 2)) and loader
            if loader == 3 and not (saver == 3 and same_layout):
                continue  # hooks are registered in the first step, which then refuses
            found = goes_on(loader, partition, rank, start, files[rank if file == "own" else 0])
            assert (found is not None) == bool(same_layout), (saver, loader)
            if found is not None:
                same(found, expected, "weights")


# On one rank there is no memory for a tensor in the middle of a transfer: every rank raises, at once, with the cause.


WORDS = "no memory in the middle"


def full_state(model: Any, optimizer: Any, alone: bool, path: Path) -> None:
    zero.full_state_dict(model, to=0)


def full_optimizer_state(model: Any, optimizer: Any, alone: bool, path: Path) -> None:
    zero.full_optimizer_state_dict(model, optimizer, to=0)


def consolidated(model: Any, optimizer: Any, alone: bool, path: Path) -> None:
    optimizer.consolidate_state_dict(to=0)


def streamed(model: Any, optimizer: Any, alone: bool, path: Path) -> None:
    for _ in zero.full_tensors(model, optimizer, to=0):
        pass


def load_weights(model: Any, optimizer: Any, alone: bool, path: Path) -> None:
    weights = torch.load(path / "weights.pt", weights_only=True)
    zero.load_full_state_dict(model, weights if alone else None)


def load_stream(model: Any, optimizer: Any, alone: bool, path: Path) -> None:
    weights = torch.load(path / "weights.pt", weights_only=True)
    zero.load_full_state_dict(model, iter(weights.items()) if alone else None)


def load_state(model: Any, optimizer: Any, alone: bool, path: Path) -> None:
    state = torch.load(path / "state.pt", weights_only=True)
    zero.load_full_optimizer_state_dict(model, optimizer, state if alone else None)


def save(model: Any, optimizer: Any, alone: bool, path: Path) -> None:
    zero.checkpoint.save(path / "run", model, optimizer)


def load(model: Any, optimizer: Any, alone: bool, path: Path) -> None:
    zero.checkpoint.load(path / "run", model, optimizer)


BOTH, AT_3, AT_1 = (1, 3), (3,), (1,)
ROWS: list[tuple[Callable[..., None], tuple[int, ...], Any, str, tuple[int, ...]]] = [
    # the call, its stages, what fails, and on which ranks
    (full_state, AT_3, full_weights.Recipient, "moved", (0,)),
    (full_optimizer_state, BOTH, gathered, "_room", (0,)),
    (consolidated, AT_1, gathered, "_room", (0,)),
    (streamed, AT_3, full_weights.Recipient, "moved", (0,)),
    (streamed, BOTH, gathered, "_room", (0,)),
    (load_weights, BOTH, Comm, "broadcast", (0, 1)),
    (load_stream, BOTH, Comm, "broadcast", (0, 1)),
    (load_state, BOTH, Comm, "broadcast", (0, 1)),
    (save, AT_3, write, "Chunk", (0, 1)),
    (load, AT_3, files.Source, "fill", (0, 1)),
]


def fails(rank: int, world: int, transport: str, stage: int, number: int, failing: int, path: Path) -> str:
    call, _, where, name, _ = ROWS[number]
    with by(transport):
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
        wrapped = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})} if stage == 3 else {}
        model, optimizer = zero.setup(net, torch.optim.Adam, stage=stage, lr=0.1, **wrapped)
        take_step(optimizer, model(torch.randn(4, 64)).square().mean())
        weights, state = zero.full_state_dict(model, to=None), zero.full_optimizer_state_dict(model, optimizer, to=None)
        zero.checkpoint.save(path / "run", model, optimizer)
        if rank == 0:
            torch.save(weights, path / "weights.pt")
            torch.save(state, path / "state.pt")
        torch.distributed.barrier()
        works, calls = getattr(where, name), []

        def in_the_middle(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise torch.OutOfMemoryError(WORDS)
            return works(*args, **kwargs)

        with mock.patch.object(where, name, in_the_middle if rank == failing else works):
            return ranks.refusal(lambda: call(model, optimizer, rank == 0, path))


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("number", "stage", "failing"),
    [
        pytest.param(number, stage, failing, id=f"{row[0].__name__}-{row[3]}-{stage}-rank {failing}")
        for number, row in enumerate(ROWS)
        for stage in row[1]
        for failing in row[4]
    ],
)
def test_every_rank_raises_the_cause_at_once(number, stage, failing, transport, tmp_path):
    """The run ends sooner than the group's time-out would."""
    for told in ranks.run(fails, 2, (transport, stage, number, failing, tmp_path), timeout=25):
        assert WORDS in told, told or "nothing was raised"
