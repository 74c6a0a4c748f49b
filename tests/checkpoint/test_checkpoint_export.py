"""Weights out to Hugging Face's libraries: what an export holds and leaves out, and what the command line tells."""

import contextlib
import json
import re
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from saved import CASE, Config, Counting, differences, save_and_go_on
from torch import nn

import ranks
import zero
from commands import command


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


def test_export_leaves_what_is_there_and_refuses_what_is_no_size(run, tmp_path, capsys):
    path, _ = run
    (tmp_path / "model.safetensors").write_text("mine")
    assert export(path, tmp_path) == 1
    assert "model.safetensors already" in capsys.readouterr().err
    assert (tmp_path / "model.safetensors").read_text() == "mine"
    assert export(path, tmp_path / "out", "--max-shard-size", "7EB") == 2
    assert "'7EB' is no size" in capsys.readouterr().err


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


def test_a_configuration_that_is_there_is_not_replaced(tmp_path, capsys):
    zero.checkpoint.save(tmp_path / "run", gpt2())
    (tmp_path / "config.json").write_text("mine")
    assert export(tmp_path / "run", tmp_path) == 1
    assert "config.json already" in capsys.readouterr().err
    assert (tmp_path / "config.json").read_text() == "mine" and not list(tmp_path.glob("*.safetensors"))


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
