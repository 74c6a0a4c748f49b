"""On one rank, what sends or receives full weights, state or a checkpoint has no memory for a tensor in the middle: it
raises there, and on every rank, at once and with the cause."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ranks
import zero
from runs import take_step
from transports import TRANSPORTS, by
from zero.checkpoint import files, write
from zero.fsdp import full_weights
from zero.state import gathered, given

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


BOTH, SHARDED, FULL = (1, 3), (3,), (1,)
ROWS: list[tuple[Callable[..., None], tuple[int, ...], Any, str, tuple[int, ...]]] = [
    # the call, its stages, what fails, and on which ranks
    (full_state, SHARDED, full_weights.Recipient, "moved", (0,)),
    (full_optimizer_state, BOTH, gathered, "_room", (0,)),
    (consolidated, FULL, gathered, "_room", (0,)),
    (streamed, SHARDED, full_weights.Recipient, "moved", (0,)),
    (streamed, BOTH, gathered, "_room", (0,)),
    (load_weights, BOTH, given.FromFirst, "_broadcast", (0, 1)),
    (load_stream, BOTH, given.FromFirst, "_broadcast", (0, 1)),
    (load_state, BOTH, given.FromFirst, "_broadcast", (0, 1)),
    (save, SHARDED, write, "Chunk", (0, 1)),
    (load, SHARDED, files.Source, "fill", (0, 1)),
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
