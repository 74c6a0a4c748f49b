"""Weights out to Hugging Face's libraries: what an export holds and leaves out, and what the command line tells."""

import contextlib
import io
import json
import re
import sys
import time
import warnings
from datetime import datetime
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from saved import CASE, Config, Counting, change_index, differences, save_and_go_on, tiny, train, with_adam
from torch import nn

import ranks
import zero
from commands import command
from inner import progress_from


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


def test_an_index_that_does_not_say_who_wrote_it_is_read(tmp_path, capsys):
    saved = zero.checkpoint.save(tmp_path, tiny()).path
    change_index(saved, lambda told: told.pop("saved"))
    zero.checkpoint.load(tmp_path, tiny())
    command("zero.checkpoint", "inspect", tmp_path)
    assert capsys.readouterr().out.splitlines()[0] == f"{saved}: saved at stage 0 on 1 ranks"
