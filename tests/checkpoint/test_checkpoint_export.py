"""Weights out to Hugging Face's libraries: what an export holds and leaves out, and what the command line tells."""

import contextlib
import io
import json
import re
import sys
import time
import warnings
from datetime import datetime
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from saved import CASE, Config, Counting, change_index, differences, save_and_go_on, tiny, train, whole, with_adam
from torch import nn

import ranks
import zero
from inner import progress_from
from processes import command
from runs import take_step
from transports import TRANSPORTS, calling
from zero.checkpoint import CheckpointError
from zero.shards.log import logger


def export(*arguments):
    return command("zero.checkpoint", "export", *arguments)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run saved at stage 3 on 2 ranks, and its full weights and state."""
    path = tmp_path_factory.mktemp("exchange") / "run"
    at_save, _ = ranks.run(save_and_go_on, 2, (str(path), 3, Config()))[0]
    return path, at_save


def weights_of(at_save):
    return {name.removeprefix("model/"): value for name, value in at_save.items() if name.startswith("model/")}


def test_export_loads_into_a_plain_module(run, tmp_path):
    path, at_save = run
    assert export(path, tmp_path) == 0
    assert [one.name for one in tmp_path.iterdir()] == ["model.safetensors"]
    model = CASE.model(seed=3)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    assert not differences(weights_of(at_save), dict(model.state_dict()))


def test_export_in_shards(run, tmp_path):
    path, at_save = run
    assert export(path, tmp_path, "--max-shard-size", 600, "--dtype", "bf16") == 0
    files = sorted(tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(files) > 3 and len([*tmp_path.iterdir()]) == len(files) + 1
    assert index["metadata"]["total_size"] == sum(2 * value.numel() for value in weights_of(at_save).values())
    for name, value in weights_of(at_save).items():
        with safe_open(tmp_path / index["weight_map"][name], "pt") as file:
            assert file.metadata()["format"] == "pt"
            assert torch.equal(file.get_tensor(name), value.bfloat16())
    for file in files:
        assert re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", file.name)


def test_export_takes_masters_where_they_say_more(tmp_path):
    at_save, _ = ranks.run(save_and_go_on, 2, (str(tmp_path / "run"), 2, Config(masters=True)))[0]
    export(tmp_path / "run", tmp_path / "as-stored")
    export(tmp_path / "run", tmp_path / "wide", "--dtype", "fp32")
    narrow, wide = (load_file(tmp_path / out / "model.safetensors") for out in ("as-stored", "wide"))
    assert all(value.dtype == torch.bfloat16 for value in narrow.values())
    for name, value in weights_of(at_save).items():
        assert torch.equal(wide[name], value) and torch.equal(narrow[name], value.bfloat16())


def gpt2(**options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 31, "n_positions": 8}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **options))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_an_export(dtype, tmp_path):
    """With its configuration, in whichever dtype this asks the model for."""
    model = gpt2(dtype="bfloat16" if dtype == torch.float32 else "float32", resid_pdrop=0.25)
    model.generation_config.update(do_sample=True, temperature=0.5)
    zero.checkpoint.save(tmp_path / "run", model)
    how = ["--dtype", "bf16"] if dtype == torch.bfloat16 else []
    export(tmp_path / "run", tmp_path / "out", "--max-shard-size", "20KB", *how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded, told = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
        model.to(dtype).save_pretrained(tmp_path / "own")
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not differences(dict(model.state_dict()), dict(loaded.state_dict()))
    assert {value.dtype for value in loaded.state_dict().values()} == {dtype}
    assert loaded.config.resid_pdrop == 0.25 and loaded.generation_config.temperature == 0.5
    for name in ("config.json", "generation_config.json"):
        exported, own = (json.loads((tmp_path / folder / name).read_text()) for folder in ("out", "own"))
        assert exported == own, name


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_export_leaves_what_is_there_and_refuses_what_is_no_size(name, tmp_path, capsys):
    zero.checkpoint.save(tmp_path / "run", gpt2())
    (tmp_path / name).write_text("mine")
    assert export(tmp_path / "run", tmp_path) == 1
    assert f"{name} already" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "mine" and len([*tmp_path.iterdir()]) == 2
    assert export(tmp_path / "run", tmp_path / "out", "--max-shard-size", "7EB") == 2
    assert "'7EB' is no size" in capsys.readouterr().err


class Unwritten:
    def to_json_string(self):
        raise TypeError("dtype is not JSON serializable")


class Other(nn.Linear):
    from_pretrained = config = None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: setattr(model, "config", Unwritten()), "TypeError: dtype is not JSON"),
        (lambda model: setattr(model, "config", {"hidden": 2}), None),
        (id, None),
    ],
)
def test_a_configuration_of_another_kind_keeps_no_run_from_being_saved(change, words, tmp_path):
    model = Other(2, 2)
    change(model)
    with pytest.warns(UserWarning, match=words) if words else contextlib.nullcontext():
        zero.checkpoint.save(tmp_path / "run", model)
    assert export(tmp_path / "run", tmp_path / "out") == 0
    assert [one.name for one in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_extra_state_is_exported_where_it_is_a_tensor_and_named_where_not(tmp_path):
    zero.checkpoint.save(tmp_path / "run", nn.Sequential(Counting({"steps": 3}), Counting(torch.ones(2))))
    with pytest.warns(UserWarning, match=r"and 0\._extra_state of .* is none: left out.*strict=False"):
        export(tmp_path / "run", tmp_path / "out", "--dtype", "bf16")
    model, found = nn.Sequential(Counting(), Counting()), load_file(tmp_path / "out" / "model.safetensors")
    assert model.load_state_dict(found, strict=False).missing_keys == ["0._extra_state"]
    assert torch.equal(model[1].seen, torch.ones(2)) and model[1].seen.dtype == torch.float32


def test_inspect(run, capsys):
    path, _ = run
    assert command("zero.checkpoint", "inspect", path, "--tensors", "--check") == 0
    told = capsys.readouterr().out
    for expected in [
        "saved at stage 3 on 2 ranks",
        "tied: layers.2.linear.weight is layers.0.linear.weight",
        "extra: step",
    ]:
        assert expected in told
    assert "AdamW, group 0" in told and "lr=0.0125, betas=(0.9, 0.999)" in told
    assert re.search(r"model/frozen\.weight: float32 \[13, 13\], \d shards", told)


# A progress bar: on long work, for whoever looks at a terminal, on one rank, where tqdm is installed.


class Terminal(io.StringIO):
    def isatty(self):
        return True


def save_and_load(rank, world, path, stream, hidden, long):
    model = zero.FSDP(tiny(300)) if world > 1 else tiny(300)
    shown, missing = stream(), dict.fromkeys(hidden)
    with mock.patch.object(sys, "stderr", shown), mock.patch.dict(sys.modules, missing), progress_from(long):
        zero.checkpoint.save(path, model)
        zero.checkpoint.save(path, model, wait=False).wait()
        zero.checkpoint.load(path, model)
    return shown.getvalue()


def test_a_bar_is_shown_of_long_work_on_a_terminal_by_the_first_rank(tmp_path):
    pytest.importorskip("tqdm")
    first, second = ranks.run(save_and_load, 2, (str(tmp_path), Terminal, (), 1))
    assert "saving: 100%" in first and "checking: 100%" in first and second == ""
    for stream, hidden, long in [(io.StringIO, (), 1), (Terminal, ("tqdm",), 1), (Terminal, (), 1 << 30)]:
        assert ranks.run(save_and_load, 1, (str(tmp_path), stream, hidden, long), bare=True) == [""]
    with mock.patch.object(sys, "stderr", Terminal()) as shown, progress_from(1):
        command("zero.checkpoint", "export", tmp_path, tmp_path / "out")
    assert "exporting: 100%" in shown.getvalue()


# What the index tells, and what it may have that this version does not know.


def later(told):
    told["mesh"] = {"dims": [2, 2]}
    for table in ("tensors", "files"):
        for entry in told[table].values():
            entry["compressed"] = False
    for entry in told["tensors"].values():
        entry["shards"] = [{**shard, "sum": 7} for shard in entry["shards"]]
    for optimizer in told["optimizers"]:
        optimizer["fused"] = True
        optimizer["groups"] = [{**group, "name": "decayed"} for group in optimizer["groups"]]


def test_entries_that_are_not_known_are_left_out(tmp_path):
    model, optimizer = with_adam(tiny())
    expected = train(model, optimizer)
    saved = zero.checkpoint.save(tmp_path, model, optimizer, extra={"step": 1}).path
    change_index(saved, later)
    other, stepped = with_adam(tiny())
    assert zero.checkpoint.load(tmp_path, other, stepped) == {"step": 1}
    assert not differences(expected, dict(other.state_dict()))
    assert command("zero.checkpoint", "inspect", tmp_path, "--check") == 0


def test_the_index_says_which_versions_wrote_it_and_when(tmp_path, capsys):
    before = time.time()
    zero.checkpoint.save(tmp_path, tiny())
    command("zero.checkpoint", "inspect", tmp_path)
    found = re.search(
        rf"at stage 0 on 1 ranks, (\S+), by zero {zero.__version__} and torch {re.escape(torch.__version__)}$",
        capsys.readouterr().out.splitlines()[0],
    )
    assert before - 1 < datetime.fromisoformat(found[1]).timestamp() < time.time() + 1


@pytest.mark.parametrize("stage", range(4))
@ranks.on(2)
def test_the_index_says_at_which_stage_it_was_saved(rank, world, stage, tmp_path):
    model, optimizer = zero.setup(tiny(), torch.optim.Adam, stage=stage)
    for number, given in enumerate([(model,), (model, optimizer)], 1):
        saved = zero.checkpoint.save(tmp_path / str(number), *given)
        assert json.loads((Path(saved.path) / "index.json").read_text())["stage"] == stage


def test_an_index_that_does_not_say_who_wrote_it_is_read(tmp_path, capsys):
    saved = zero.checkpoint.save(tmp_path, tiny()).path
    change_index(saved, lambda told: told.pop("saved"))
    zero.checkpoint.load(tmp_path, tiny())
    command("zero.checkpoint", "inspect", tmp_path)
    assert capsys.readouterr().out.splitlines()[0] == f"{saved}: saved at stage 0 on 1 ranks"


# `frozen=False`: what is not trained stays where it came from, and what is trained is stored, loads and goes on.


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


def save_and_train_on(rank, world, path, stage, wait):
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
    saved, end = ranks.run(calling, at[1], (transport, save_and_train_on, path, at[0], wait))[0]
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
