"""Out to others, and in from others."""

import json
import re
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from saved import (
    CASE,
    Config,
    Counting,
    Runs,
    adam,
    assert_loads,
    differences,
    save_and_go_on,
    steps,
    whole,
    with_adam,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ranks
import zero
from models import GPT, take_step
from processes import python
from zero.checkpoint.__main__ import main
from zero.checkpoint.export import export, export_dcp
from zero.checkpoint.importing import import_checkpoint


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run saved at stage 3 on 3 ranks, and its full weights and state."""
    path = tmp_path_factory.mktemp("exchange") / "run"
    at_save, _ = ranks.run(save_and_go_on, 3, (str(path), 3, Config()))[0]
    return path, at_save


def weights_of(at_save):
    return {name.removeprefix("model/"): value for name, value in at_save.items() if name.startswith("model/")}


# ------------------------------------------------------------------------------------------------------------ export


def test_export_loads_into_a_plain_module(run, tmp_path):
    path, at_save = run
    assert main(["export", str(path), str(tmp_path)]) == 0
    assert [one.name for one in tmp_path.iterdir()] == ["model.safetensors"]
    model = CASE.model(seed=3)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    assert not differences(weights_of(at_save), dict(model.state_dict()))


def test_export_in_shards(run, tmp_path):
    path, at_save = run
    files = export(path, tmp_path, max_shard_size=600, dtype=torch.bfloat16)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(files) > 3 and sorted(one.name for one in tmp_path.iterdir()) == sorted(one.name for one in files)
    assert index["metadata"]["total_size"] == sum(2 * value.numel() for value in weights_of(at_save).values())
    for name, value in weights_of(at_save).items():
        with safe_open(tmp_path / index["weight_map"][name], "pt") as file:
            assert file.metadata()["format"] == "pt"
            assert torch.equal(file.get_tensor(name), value.bfloat16())
    for file in files[:-1]:
        assert re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", file.name)


def test_export_takes_masters_where_they_say_more(tmp_path):
    at_save, _ = ranks.run(save_and_go_on, 2, (str(tmp_path / "run"), 2, Config(masters=True)))[0]
    export(tmp_path / "run", tmp_path / "as-stored")
    export(tmp_path / "run", tmp_path / "wide", dtype=torch.float32)
    narrow, wide = (load_file(tmp_path / out / "model.safetensors") for out in ("as-stored", "wide"))
    assert all(value.dtype == torch.bfloat16 for value in narrow.values())
    for name, value in weights_of(at_save).items():
        assert torch.equal(wide[name], value) and torch.equal(narrow[name], value.bfloat16())


def test_export_leaves_what_is_there(run, tmp_path):
    path, _ = run
    (tmp_path / "model.safetensors").write_text("mine")
    with pytest.raises(ValueError, match=r"has model\.safetensors already"):
        export(path, tmp_path)
    assert main(["export", str(path), str(tmp_path)]) == 1
    assert (tmp_path / "model.safetensors").read_text() == "mine"


def test_transformers_loads_an_export(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=31, n_positions=8)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    zero.checkpoint.save(tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "out", max_shard_size=20_000)
    config.save_pretrained(tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded, told = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not differences(dict(model.state_dict()), dict(loaded.state_dict()))


# ----------------------------------------------------------------------------------------------------------- inspect


def test_inspect(run, capsys):
    path, _ = run
    assert main(["inspect", str(path), "--tensors", "--check"]) == 0
    told = capsys.readouterr().out
    for expected in [
        "saved at stage 3 on 3 ranks",
        "tied: layers.2.linear.weight is layers.0.linear.weight",
        "extra: step",
    ]:
        assert expected in told
    assert "AdamW, group 0" in told and "lr=0.0125" in told
    assert re.search(r"model/frozen\.weight: float32 \[13, 13\], \d shards", told)


def test_inspect_of_nothing(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 1
    assert "has no checkpoint in it" in capsys.readouterr().err


def test_the_command_line(run, tmp_path):
    path, _ = run
    done = python("-m", "zero.checkpoint", "export", path, tmp_path, "--max-shard-size", "7EB", code=2)
    assert "'7EB' is no size" in done.stderr


# ------------------------------------------------------------------------------------------------------------ import


def trained(named=False):
    model = CASE.model()
    optimizer = adam()(model.named_parameters() if named else model.parameters())
    steps(model, optimizer, 0, 2)
    return model, optimizer


def test_import_of_torch_save(tmp_path):
    model, optimizer = trained()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    assert main(["import", str(tmp_path / "weights.pt"), str(tmp_path / "run")]) == 0
    other = CASE.model(seed=3)
    zero.checkpoint.load(tmp_path / "run", other)
    assert not differences(dict(model.state_dict()), dict(other.state_dict()))

    wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"model": wrapped, "epoch": 3, "optimizer": optimizer.state_dict()}, tmp_path / "all.pt")
    with pytest.warns(UserWarning, match="numbers its parameters"):
        import_checkpoint(tmp_path / "all.pt", tmp_path / "run")
    assert assert_loads(tmp_path / "run", (model, optimizer), with_adam(CASE.model(seed=3))) == {"epoch": 3}


def test_import_of_a_consolidated_oss(tmp_path):
    model = CASE.model()
    optimizer = zero.OSS(model.named_parameters(), torch.optim.Adam, lr=1e-2)
    steps(model, optimizer, 0, 2)
    optimizer.consolidate_state_dict()
    torch.save({"state_dict": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "all.pt")
    import_checkpoint(tmp_path / "all.pt", tmp_path / "run")
    assert_loads(tmp_path / "run", (model, optimizer), with_adam(CASE.model(seed=3)))


class Gained(nn.Linear):
    def __init__(self, dtype):
        super().__init__(6, 5, dtype=dtype)
        self.gain = nn.Parameter(torch.tensor(1.0, dtype=dtype))


def stepped_with_masters():
    """A model of 16 bits after a step, and what OSS consolidates, by name."""
    model = Gained(torch.bfloat16)
    optimizer = zero.OSS(model.parameters(), torch.optim.SGD, lr=1e-2, momentum=0.9, master_dtype=torch.float32)
    for param in model.parameters():
        param.grad = torch.rand_like(param)
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    told = optimizer.state_dict()
    groups = [{**group, "params": names} for group in told["param_groups"]]
    return model, {"state": {names[number]: each for number, each in told["state"].items()}, "param_groups": groups}


@pytest.mark.parametrize("kind", ["torch.save", "distributed"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_import_leaves_old_masters(kind, tmp_path):
    """Such as those of a parameter that a plain optimizer, which carries them along, has trained since."""
    model, state = stepped_with_masters()
    masters = {name: each["master"].clone() for name, each in state["state"].items()}
    with torch.no_grad():
        model.weight[2] += 1
    told = {"model": model.state_dict(), "optim": state}
    source = tmp_path / "source"
    torch.save(told, source) if kind == "torch.save" else dcp.save(told, checkpoint_id=source)
    import_checkpoint(source, tmp_path / "run")
    wide = Gained(torch.float32)
    zero.checkpoint.load(tmp_path / "run", wide)
    expected = {**masters, "weight": model.weight.detach().float()}
    assert not differences(expected, dict(wide.state_dict()))
    assert not torch.equal(masters["bias"].bfloat16().float(), masters["bias"]), "nothing was rounded"


def test_import_of_numbers_without_names(tmp_path):
    model, optimizer = with_adam(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "all.pt")
    with pytest.raises(ValueError, match="built with model"):
        import_checkpoint(tmp_path / "all.pt", tmp_path / "run")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_import_of_numbers_from_a_distributed_checkpoint(tmp_path):
    """Which turns the numbers of parameters into text."""
    model = net()
    optimizer = adam()(model.named_parameters())
    train_net(model, optimizer)
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=tmp_path / "dcp")
    import_checkpoint(tmp_path / "dcp", tmp_path / "run")
    again, loaded = with_adam(net())
    zero.checkpoint.load(tmp_path / "run", again, loaded)
    assert not differences(plain_state(model, optimizer), plain_state(again, loaded))


def test_import_of_a_crafted_file_runs_nothing(tmp_path):
    torch.save({"model": Runs(tmp_path / "ran")}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="was not read"):
        import_checkpoint(tmp_path / "evil.pt", tmp_path / "run")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "run").exists()


def test_import_of_safetensors(tmp_path):
    model = GPT()
    (tmp_path / "hf").mkdir()
    named = {name: value for name, value in model.state_dict().items() if name != "head.weight"}  # as save_model does
    half = len(named) // 2
    save_file(dict(list(named.items())[:half]), tmp_path / "hf" / "model-00001-of-00002.safetensors")
    save_file(dict(list(named.items())[half:]), tmp_path / "hf" / "model-00002-of-00002.safetensors")
    import_checkpoint(tmp_path / "hf", tmp_path / "run")
    other = GPT()
    zero.checkpoint.load(tmp_path / "run", other)
    assert not differences(dict(model.state_dict()), dict(other.state_dict()))


def test_import_of_an_export(run, tmp_path):
    path, at_save = run
    export(path, tmp_path / "out", max_shard_size=2000)
    import_checkpoint(tmp_path / "out", tmp_path / "run")
    model = CASE.model(seed=3)
    zero.checkpoint.load(tmp_path / "run", model)
    assert not differences(weights_of(at_save), dict(model.state_dict()))


# ------------------------------------------------------------------------------ torch's distributed checkpoints


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Linear(9, 2))


def train_net(model, optimizer, count=2):
    for step in range(count):
        inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        take_step(optimizer, model(inputs).square().mean())


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def plain_state(model, optimizer):
    """Collective."""
    weights, state = get_state_dict(model, optimizer)
    found = {f"model/{name}": full(value).clone() for name, value in weights.items()}
    for name, entries in state["state"].items():
        found |= {f"{name}/{key}": full(value).clone() for key, value in entries.items()}
    return found


def save_dcp(rank, world, path, kind):
    model = net()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    optimizer = adam()(model.parameters())
    train_net(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state, "step": 7}, checkpoint_id=path)
    return plain_state(model, optimizer)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_import_of_a_distributed_checkpoint(kind, tmp_path):
    expected = ranks.run(save_dcp, 2, (str(tmp_path / "dcp"), kind))[0]
    import_checkpoint(tmp_path / "dcp", tmp_path / "run")
    model, optimizer = with_adam(net())
    assert zero.checkpoint.load(tmp_path / "run", model, optimizer) == {"step": 7}
    assert not differences(expected, plain_state(model, optimizer))


def load_dcp(rank, world, path):
    model = net()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = adam()(model.parameters())
    train_net(model, optimizer, 1)
    weights, state = get_state_dict(model, optimizer)
    told = {"model": weights, "optim": state}
    dcp.load(told, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=told["model"], optim_state_dict=told["optim"])
    return plain_state(model, optimizer)


def save_net(rank, world, path):
    model, optimizer = with_adam(zero.FSDP(net()))
    train_net(model, optimizer)
    zero.checkpoint.save(path, model, optimizer)
    return whole(model, optimizer)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_distributed_checkpoint_for_those_who_go_back(tmp_path):
    expected = ranks.run(save_net, 3, (str(tmp_path / "run"),))[0]
    export_dcp(tmp_path / "run", tmp_path / "dcp")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["dcp", "run"]
    assert not differences(expected, ranks.run(load_dcp, 2, (str(tmp_path / "dcp"),))[0])


# ------------------------------------------------------------------------------------------------------- what is kept


def keep_extra(rank, world, path):
    model, optimizer = with_adam(CASE.model())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 3])
    scaler = zero.GradScaler("cpu", init_scale=8.0)
    torch.manual_seed(rank)
    extra = {"rng": torch.get_rng_state(), "scheduler": scheduler.state_dict(), "scaler": scaler.state_dict()}
    extra |= {"tuple": (1, None, [2.5]), "nan": float("inf")}
    zero.checkpoint.save(path, DistributedDataParallel(model, **CASE.ddp), optimizer, extra=extra)
    found = zero.checkpoint.load(path, DistributedDataParallel(model, **CASE.ddp), optimizer)
    assert isinstance(found["scheduler"]["milestones"], Counter)
    scheduler.load_state_dict(found["scheduler"])
    scaler.load_state_dict(found["scaler"])
    assert torch.equal(found.pop("rng"), extra.pop("rng"))
    assert found == extra
    assert dist.get_world_size() == world


def test_extra_comes_back_as_it_was(tmp_path):
    ranks.run(keep_extra, 2, (str(tmp_path),))
    with pytest.warns(UserWarning, match="rng of extra differed between the 2 ranks"):
        assert "rng" not in zero.checkpoint.load(tmp_path, CASE.model())


class Buffered(Counting):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def test_buffers_and_extra_state_of_modules(tmp_path):
    model, other = nn.Sequential(Buffered()), nn.Sequential(Buffered())
    model[0].seen = {"steps": 5}
    model[0].mean += 2
    model[0].scratch += 2
    zero.checkpoint.save(tmp_path, model)
    zero.checkpoint.load(tmp_path, other)
    assert other[0].seen == {"steps": 5} and (other[0].mean == 2).all() and (other[0].scratch == 0).all()
