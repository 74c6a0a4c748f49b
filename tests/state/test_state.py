"""Optimizer state: whole it is the plain optimizer's own, and goes anywhere; in shards it goes back where it was."""

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
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import StepLR

import matrix
import ranks
import zero
from assertions import same, same_weights
from optimizers import Lamb
from ranks import refusal
from runs import pair, take_step, train
from transports import TRANSPORTS, by
from zero import traffic
from zero.checkpoint import files, write
from zero.fsdp import full_weights
from zero.measure.kinds import ELEMENTWISE, SINGLE
from zero.shards.sharded_parameter import Shard
from zero.state import gathered, given
from zoo import OddNet, data, filled, matrices, odd_loss


def strided():
    """Memory order is not row order, in four dimensions."""
    conv = nn.Conv2d(3, 8, (2, 3)).to(memory_format=torch.channels_last)
    return nn.Sequential(nn.Unflatten(1, (3, 2, 4)), conv, nn.Flatten())


def groups_of(model):
    """Two groups with options of their own; the first rank may own nothing of one of them."""
    params = [*model.parameters()]
    return [{"params": params[:1], "lr": torch.tensor(0.02)}, {"params": params[1:]}]


CASES = {
    "SGD momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, OddNet),
    "AdamW": (AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}, OddNet),
    "AdamW, strided": (AdamW, {}, strided),
    "AdamW, in groups": (AdamW, {"lr": torch.tensor(0.01), "foreach": False, "params": groups_of}, OddNet),
    "Adam with a rate in a tensor": (Adam, {"lr": torch.tensor(0.01), "foreach": False}, OddNet),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1}, OddNet),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1}, filled),
    "Muon": (torch.optim.Muon, {"lr": 0.1}, matrices),
    "LAMB by hand": (Lamb, {"lr": 0.1}, OddNet),
}


shards_travel = pytest.mark.filterwarnings("ignore:this state_dict.. is only one rank's shard:UserWarning")
"""From the ranks to the test, as bytes."""


def plain_and_sharded(name, partition="auto"):
    optim, options, make = CASES[name]
    return pair(optim, partition, make, **options)


def is_shard(state):
    return all("zero_shard" in group for group in state["param_groups"])


# --------------------------------------------------------------------------------------------------------------- Whole


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
@ranks.on("world")
def test_consolidated_it_equals_the_plain_optimizers(rank, world):
    for name in CASES if world == 2 else ["AdamW"]:
        (model, plain), (sharded_model, sharded) = plain_and_sharded(name, "whole" if world == 3 else "auto")
        for step in range(2):
            if step:  # at first before any step
                train(model, plain, rank, range(2))
                train(sharded_model, sharded, rank, range(2))
            for to in (0, world - 1, None):
                sharded.consolidate_state_dict(to=to)
                state = sharded.state_dict()
                assert is_shard(state) == (to not in (None, rank))
                if to in (None, rank):
                    same(state, plain.state_dict(), f"{name}: what came to {to}")
        same_weights(sharded_model, model)


@ranks.on(2)
def test_options_are_those_of_now_also_after_consolidating(rank, world):
    both = pair(AdamW, lr=0.01)
    for model, optimizer in both:
        schedule = StepLR(optimizer, 1, gamma=0.5)
        train(model, optimizer, rank, range(1))
        if optimizer is both[1][1]:
            optimizer.consolidate_state_dict(to=0)
        schedule.step()
    (_, plain), (_, sharded) = both
    told = sharded.state_dict()
    assert is_shard(told) == (rank != 0)
    groups = [{key: value for key, value in group.items() if key != "zero_shard"} for group in told["param_groups"]]
    same(groups, plain.state_dict()["param_groups"], "the groups")


@ranks.on(2)
def test_parameters_that_were_not_stepped_have_no_state(rank, world):
    (model, plain), (sharded_model, sharded) = plain_and_sharded("AdamW")
    for each, optimizer in ((model, plain), (sharded_model, sharded)):
        odd_loss(each, rank, 0).backward()
        each.module.first.weight.grad = None
        each.module.scale.grad = None
        optimizer.step()
    sharded.consolidate_state_dict(to=None)
    same(sharded.state_dict(), plain.state_dict(), "the state")
    assert len(plain.state_dict()["state"]) == len([p for p in model.parameters() if p.requires_grad]) - 2


@ranks.on(2)
def test_what_was_consolidated_holds_until_the_next_step_or_load(rank, world):
    """Asking for it sends nothing, also on one rank alone."""
    _, (sharded_model, sharded) = plain_and_sharded("SGD momentum")
    before = traffic()
    if rank == 0:
        assert is_shard(sharded.state_dict()) and not sharded.state_dict()["state"]
    assert traffic() == before
    train(sharded_model, sharded, rank, range(1))
    sharded.consolidate_state_dict(to=None)
    assert not is_shard(sharded.state_dict())
    kept = sharded.state_dict()
    before = copy.deepcopy(kept)
    train(sharded_model, sharded, rank, range(1, 2))
    assert is_shard(sharded.state_dict()), "a state from before the last step is given out"
    same(kept, before, "a state that was given out earlier")
    sharded.consolidate_state_dict(to=None)
    sharded.load_state_dict(before)
    assert is_shard(sharded.state_dict()), "a state from before the last load is given out"


# ------------------------------------------------------------------------------------------------------------ In shard


@pytest.mark.parametrize("partition", ["whole", "even"])
@ranks.on(2, timeout=20)
def test_state_answers_as_the_full_one_on_every_rank(rank, world, partition):
    """Also where a rank owns nothing of a parameter; it is plain again in a step, and in what is saved."""
    (model, plain), (sharded_model, sharded) = plain_and_sharded("AdamW", partition)
    for steps in (range(2), range(2, 4)):
        train(model, plain, rank, steps)
        train(sharded_model, sharded, rank, steps)
        for whole, part in zip(model.parameters(), sharded_model.parameters(), strict=True):
            state, expected = sharded.state.get(part, {}), plain.state.get(whole, {})
            assert state.keys() == expected.keys()  # of what is not trained none
            for key, value in expected.items():
                assert state[key].shape == value.shape and state[key].numel() == value.numel()
                assert torch.equal(torch.as_tensor(state[key].tolist(), dtype=value.dtype), value), key
            if expected:
                state["exp_avg"].mul_(0.5)
                expected["exp_avg"].mul_(0.5)
                state["exp_avg_sq"] = torch.full_like(expected["exp_avg_sq"], 0.25)  # in full
                expected["exp_avg_sq"] = torch.full_like(expected["exp_avg_sq"], 0.25)
                assert state["exp_avg"].norm(1) == pytest.approx(expected["exp_avg"].norm(1).item())
        assert not any(isinstance(one, Shard) for of in sharded.state_dict()["state"].values() for one in of.values())


class Small(nn.Module):
    """With parameters of one element, with and without dimensions, of which most ranks own nothing."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.rare, self.once = nn.Linear(6, 6), nn.Linear(6, 6)
        self.gain, self.shift = nn.Parameter(torch.tensor(1.1)), nn.Parameter(torch.tensor([0.1]))

    def forward(self, x):
        return self.down(torch.tanh(self.up(x) * self.gain)) + self.shift + self.rare(x) + self.once(x)


def _through_a_file(model, optimizer, other, fresh, folder):
    zero.checkpoint.save(folder, model, optimizer)
    zero.checkpoint.load(folder, other, fresh)


def _in_full(model, optimizer, other, fresh, _):
    zero.load_full_optimizer_state_dict(other, fresh, zero.full_optimizer_state_dict(model, optimizer))


WAYS = {
    "as it is": lambda *_: None,
    "own": lambda model, optimizer, other, fresh, _: fresh.load_state_dict(optimizer.state_dict()),
    "full": _in_full,
    "file": _through_a_file,
}
KINDS = {kind.__name__: kind for kind in sorted(ELEMENTWISE, key=lambda kind: kind.__name__)}


@pytest.mark.filterwarnings("ignore:Sharded tensors were gathered")
@matrix.combined("stage, way, kind", [1, 2, 3], WAYS, KINDS, each=3)
@ranks.on(2)
def test_state_is_there_on_every_rank_also_once_it_was_loaded(rank, world, stage, way, kind, tmp_path):
    def start(stage):
        torch.manual_seed(0)
        net = Small()
        given = {"momentum": 0.9} if KINDS[kind] in (SGD, RMSprop) else {}
        return zero.setup(net, KINDS[kind](net.parameters(), lr=0.01, **given), stage=stage)

    def trained(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            model(data(4, 6, rank=rank, step=step)).square().mean().backward()
            for layer in [model.module.rare] * (step % 2) + [model.module.once] * (step > 0):  # it counts fewer steps
                layer.zero_grad()
            optimizer.step()

    def values(model, optimizer):
        return [
            {key: value.tolist() if isinstance(value, Tensor) else value for key, value in optimizer.state[one].items()}
            for one in model.parameters()
        ]

    (reference, plain), (model, optimizer), (other, fresh) = start(0), start(stage), start(stage)
    trained(reference, plain, range(2))
    trained(model, optimizer, range(2))
    WAYS[way](model, optimizer, other, fresh, tmp_path)
    held = (model, optimizer) if way == "as it is" else (other, fresh)
    assert values(*held) == (found := values(reference, plain))
    weight = reference.module.up.weight
    single = {key for key, one in plain.state[weight].items() if one.shape != weight.shape}
    assert single == plain.state[weight].keys() & SINGLE
    if way != "as it is":
        zero.load_full_state_dict(other, zero.full_state_dict(model, to=None))
    trained(reference, plain, range(2, 4))
    trained(*held, range(2, 4))
    assert values(*held) == values(reference, plain) != found


def _part(rank, world, partition):
    _, (model, sharded) = plain_and_sharded("AdamW", partition)
    train(model, sharded, rank, range(2))
    return copy.deepcopy(sharded.state_dict())


def _part_elsewhere(rank, world, partition, shard):
    _, (_, sharded) = plain_and_sharded("AdamW", partition)
    before = copy.deepcopy(sharded.state_dict())
    refused = refusal(lambda: sharded.load_state_dict(shard))
    if refused:
        same(sharded.state_dict(), before, "the state after the refusal")
    return refused


@pytest.mark.slow
@shards_travel
def test_a_part_is_refused_elsewhere_with_the_remedy():
    shards = ranks.run(_part, 2, args=("even",))
    told = ranks.run(_part_elsewhere, 3, args=("even", shards[0]))
    told += ranks.run(_part_elsewhere, 2, args=("whole", shards[1]))
    told += ranks.run(_part_elsewhere, args=("even", shards[0]), bare=True)
    others, own = ranks.run(_part_elsewhere, 2, args=("even", shards[1]))
    assert own == ""
    for text in [*told, others]:
        assert text.startswith("ValueError") and "one rank's shard (rank " in text and "consolidate_state_dict" in text


# A rank's shard of the optimizer's state says what it is when it is saved, and not before.


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
    for each in ((model, optimizer), (again, other)):
        step(*each, rank)
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
    (load_weights, BOTH, given.FromFirst, "_next", (0, 1)),
    (load_stream, BOTH, given.FromFirst, "_next", (0, 1)),
    (load_state, BOTH, given.FromFirst, "_next", (0, 1)),
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
