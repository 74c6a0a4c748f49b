"""`frozen=False`: what is not trained stays where it came from, and what is trained is stored, loads and goes on."""

import json
import re
from unittest import mock

import pytest
import torch
from saved import differences, tiny, whole
from torch import nn

import ranks
import zero
from commands import command
from runs import take_step
from transports import TRANSPORTS, calling
from zero.checkpoint import CheckpointError
from zero.shards.log import logger

BASE, TRAINED = 100, 4


class Adapted(nn.Module):
    """A frozen base, of which a parameter has two names, a norm with buffers, and an adapter. base: its values."""

    def __init__(self, base=0, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(base)
        self.base = nn.Linear(BASE, BASE)
        self.again = nn.Linear(BASE, BASE)
        self.again.weight = self.base.weight
        self.norm = nn.BatchNorm1d(BASE, affine=False)
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(BASE, TRAINED), nn.Linear(TRAINED, BASE)
        self.to(dtype)

    def forward(self, x):
        return self.norm(self.again(self.base(x)) + self.up(self.down(x)))


FROZEN = ["again.bias", "base.bias", "base.weight"]  # again.weight is base.weight
ELEMENTS = 2 * BASE * TRAINED + TRAINED + BASE
BUFFERS = 2 * BASE * 4 + 8


def build(stage, base=0, **options):
    """Stages 1 and 2 with all parameters in the optimizer, as at stage 0 many a script gives them."""
    return zero.setup(Adapted(base, **options), torch.optim.Adam, stage=stage, lr=1e-2)


def steps(model, optimizer, first, count):
    for step in range(first, first + count):
        torch.manual_seed(step)
        inputs = torch.randn(6, BASE)
        take_step(optimizer, model(inputs.to(next(model.parameters()).dtype)).float().tanh().square().mean())


def save_and_go_on(rank, world, path, stage, wait):
    model, optimizer = build(stage)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    steps(model, optimizer, 0, 2)
    schedule.step()
    for step in range(2):
        how = {"keep": 1, "frozen": False, "wait": wait, "resume": schedule, "extra": {"step": step}}
        saving = zero.checkpoint.save(path, model, optimizer, **how)
    saving.wait()
    then = whole(model, optimizer)
    steps(model, optimizer, 2, 2)
    return then, whole(model, optimizer)


def load_beside(rank, world, path, stage):
    """What is loaded into a model with another base, and into one with this, and two steps later."""
    model, optimizer = build(stage, base=7)
    zero.checkpoint.load(path, model, optimizer)
    other = whole(model, optimizer)
    model, optimizer = build(stage)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    steps(model, optimizer, 5, 1)
    assert zero.checkpoint.load(path, model, optimizer, resume=schedule) == {"step": 1}
    assert schedule.get_last_lr() == [5e-3]
    then = whole(model, optimizer)
    steps(model, optimizer, 2, 2)
    return other, then, whole(model, optimizer)


def data_of(checkpoint):
    """Bytes of tensors in a checkpoint's files, which have nothing else but headers."""
    total = 0
    for file in checkpoint.glob("*.safetensors"):
        with file.open("rb") as opened:
            header = int.from_bytes(opened.read(8), "little")
        total += file.stat().st_size - 8 - header
    return total


def left_out(checkpoint):
    return sorted(json.loads((checkpoint / "index.json").read_text())["left_out"])


ROWS = [
    ((0, 2), [(0, 2), (3, 3)], TRANSPORTS[0], "", True),
    ((1, 2), [(1, 2), (0, 1)], TRANSPORTS[0], "objects://", True),
    ((2, 2), [(2, 2), (1, 3)], TRANSPORTS[-1], "", False),
    ((3, 2), [(3, 2), (2, 2)], TRANSPORTS[-1], "", True),
    ((3, 3), [(3, 3), (3, 1)], TRANSPORTS[0], "objects://", False),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:resume/.* differed:UserWarning")  # on another number of ranks
@pytest.mark.parametrize(("at", "to", "transport", "scheme", "wait"), ROWS)
def test_what_is_trained_is_stored_and_loads_beside_the_base(at, to, transport, scheme, wait, tmp_path):
    path = f"{scheme}{tmp_path / 'run'}"
    saved, end = ranks.run(calling, at[1], (transport, save_and_go_on, path, at[0], wait))[0]
    assert {one.name for one in (tmp_path / "run").iterdir()} == {"00000002", "latest"}
    assert data_of(tmp_path / "run" / "00000002") == 3 * 4 * ELEMENTS + BUFFERS  # weights and two moments
    bases = {f"model/{name}": value for name, value in Adapted(7).state_dict().items() if name[:4] in ("base", "agai")}
    for stage, world in to:
        for other, then, later in ranks.run(calling, world, (transport, load_beside, path, stage)):
            assert not differences(saved | bases, other), (stage, world)
            assert not differences(saved, then), (stage, world)
            if (stage, world) == at:
                assert not differences(end, later)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "masters"), [(0, False), (1, False), (2, False), (3, False), (1, True), (3, True)])
@ranks.on(2)
def test_masters_of_what_is_frozen_are_left_out_and_what_was_trained_before_is_stored(
    rank, world, stage, masters, tmp_path
):
    """Its values are nowhere else. Not every rank has state of it."""
    how = {"precision": "bf16"} if masters else {}
    model, optimizer = zero.setup(Adapted(), torch.optim.Adam, stage=stage, lr=1e-2, **how)
    steps(model, optimizer, 0, 2)
    getattr(model, "module", model).down.requires_grad_(masters)
    zero.checkpoint.save(tmp_path, model, optimizer, frozen=False)
    saved = whole(model, optimizer)
    model, optimizer = zero.setup(Adapted(), torch.optim.Adam, stage=stage, lr=1e-2, **how)
    zero.checkpoint.load(tmp_path, model, optimizer)
    assert not differences(saved, whole(model, optimizer))
    assert data_of(tmp_path / "00000001") < 15 * ELEMENTS + BUFFERS
    index = json.loads((tmp_path / "00000001" / "index.json").read_text())
    assert left_out(tmp_path / "00000001") == FROZEN and not [path for path in index["tensors"] if "base" in path]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks.on(2)
def test_what_is_trained_here_and_was_left_out_is_refused_with_its_names(rank, world, stage, tmp_path):
    model, optimizer = build(stage)
    steps(model, optimizer, 0, 1)
    zero.checkpoint.save(tmp_path, model, optimizer, frozen=False)
    saved = whole(model, optimizer)
    steps(model, optimizer, 1, 1)
    base = getattr(model, "module", model).base
    base.requires_grad_(True)
    before = whole(model, optimizer)
    told = ranks.refusal(lambda: zero.checkpoint.load(tmp_path, model, optimizer))
    words = r"^CheckpointError: .*00000001 does not fit: .*frozen=False.*trained here: base\.\w+, base\..*Freeze"
    assert re.search(words, told) and len(told) < 300 + len(str(tmp_path)), told
    assert not differences(before, whole(model, optimizer))
    base.requires_grad_(False)
    zero.checkpoint.load(tmp_path, model, optimizer)
    assert not differences(saved, whole(model, optimizer))
    base.requires_grad_(True)
    zero.checkpoint.save(tmp_path, model, optimizer, frozen=False)  # of the same model
    zero.checkpoint.load(tmp_path, model, optimizer)
    assert [left_out(tmp_path / name) for name in ("00000001", "00000002")] == [FROZEN, ["again.bias"]]


@ranks.raises(2, CheckpointError, "differ between ranks.*rank 1 has 0.weight, frozen")
def test_ranks_that_have_frozen_other_parameters(rank, world, tmp_path):
    model = tiny()
    model[0].weight.requires_grad_(rank != 1)
    zero.checkpoint.save(tmp_path, model, frozen=False)


def test_a_run_is_of_one_model_with_or_without_its_base(tmp_path):
    model = Adapted()
    for frozen in (False, True, False):
        zero.checkpoint.save(tmp_path, model, frozen=frozen)
    other = Adapted()
    other.base = nn.Linear(BASE, BASE + 1)
    with pytest.raises(CheckpointError, match=r"00000003.*another model.*base\.weight \(saved.*another path"):
        zero.checkpoint.save(tmp_path, other, frozen=False)
    with pytest.raises(CheckpointError, match=r"another model.*base\.weight \(saved float32 \[100, 100\]"):
        zero.checkpoint.load(tmp_path, other)


@pytest.mark.slow
@ranks.on(2)
def test_load_says_once_what_was_left_out(rank, world, tmp_path):
    lines = []
    zero.checkpoint.save(tmp_path, zero.FSDP(Adapted()), frozen=False)
    with mock.patch.object(logger, "info", lambda text, *given: lines.append(text % given)):
        zero.checkpoint.load(tmp_path, zero.FSDP(Adapted()))
    found = [line for line in lines if "00000001" in line]
    assert len(found) == (rank == 0)
    assert rank or re.search(r"00000001 .*frozen.* again\.bias, base\.bias, base\.weight$", found[0]), found


def test_inspect_and_export(tmp_path, capsys):
    zero.checkpoint.save(tmp_path / "run", Adapted(), frozen=False)
    assert command("zero.checkpoint", "inspect", tmp_path / "run", "--tensors", "--check") == 0
    told = capsys.readouterr().out
    assert "left out: 3 frozen parameters, 10,200 elements" in told and "tied: again.weight is base.weight" in told
    assert "model/base.weight: float32 [100, 100], left out" in told and "every byte" in told
    assert command("zero.checkpoint", "export", tmp_path / "run", tmp_path / "out") == 1
    told = capsys.readouterr().err
    assert re.search(r"frozen=False, without .*base\.weight.*zero\.checkpoint\.load", told), told
    assert len(told) < 300 + len(str(tmp_path)) and not (tmp_path / "out").exists()


class Quantised(nn.Linear):
    """As bitsandbytes' layers save themselves: with scales that are no buffers."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = torch.ones(3)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_a_quantised_base_is_left_out_with_its_scales(stage, tmp_path):
    def model():
        net = nn.Sequential(Quantised(4, 4), nn.Linear(4, 4))
        net[0].requires_grad_(False)
        return zero.setup(net, torch.optim.SGD, stage=stage, lr=0.1)

    saved, optimizer = model()
    with pytest.raises(CheckpointError, match=r"0\.weight\.absmax.*hook.*frozen=False"):
        zero.checkpoint.save(tmp_path, saved, optimizer)
    zero.checkpoint.save(tmp_path, saved, optimizer, frozen=False)
    expected = zero.full_state_dict(saved, to=None)
    loaded, optimizer = model()
    zero.checkpoint.load(tmp_path, loaded, optimizer)
    assert torch.equal(zero.full_state_dict(loaded, to=None)["1.weight"], expected["1.weight"])
