"""Weights out to Hugging Face's libraries: what an export holds and leaves out, and what the command line tells."""

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


@pytest.mark.slow
def test_transformers_loads_an_export(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=31, n_positions=8)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    zero.checkpoint.save(tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "out", "--max-shard-size", "20KB")
    config.save_pretrained(tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded, told = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not differences(dict(model.state_dict()), dict(loaded.state_dict()))


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
