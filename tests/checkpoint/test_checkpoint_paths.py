"""Where a checkpoint is saved, and what is said of a path where there is none."""

import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file
from saved import Counting, adam, tiny
from torch import nn

import ranks
import zero
from commands import command
from zero.checkpoint import write


def at_home(path):
    """Calls everything that takes a path."""
    zero.checkpoint.save(f"{path}/run", tiny())
    zero.checkpoint.load(f"{path}/run", tiny())
    zero.checkpoint.load(f"{path}/run/00000001", tiny())
    assert command("zero.checkpoint", "inspect", f"{path}/run", "--check") == 0
    assert command("zero.checkpoint", "export", f"{path}/run", f"{path}/out") == 0


@pytest.mark.parametrize("path", ["~", Path("~"), "file://~"])
def test_the_home_directory(path, tmp_path, monkeypatch):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for one in (home, elsewhere):
        one.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    at_home(path)
    zero.FSDP(tiny(), offload=zero.DiskOffload("~/shards"))
    assert not list(elsewhere.iterdir())
    assert {"run", "out"} < {one.name for one in home.iterdir()}


def with_a_head():
    return nn.Sequential(*tiny(), nn.Linear(3, 2))


def without_a_layer():
    return nn.Sequential(*[*tiny()][:2])


def in_a_list():
    return nn.Sequential(tiny())


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


def untied():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


OTHERS = {
    "a head more": (tiny, with_a_head, "has nothing for: 3.weight, 3.bias"),
    "a layer less": (tiny, without_a_layer, "the model has no: 2.bias, 2.weight"),
    "other names": (tiny, in_a_list, r"has nothing for: 0.0.weight.*the model has no: 0\.bias"),
    "another width": (tiny, partial(tiny, 9), r"0.weight .*float32 \[8, 4\], here float32 \[9, 4\]"),
    "tied when saved": (tied, untied, "1.weight and 0.weight were one tensor when it was saved"),
    "another module's state": (lambda: Counting(1), lambda: nn.Linear(2, 2), "extra state"),
}


RUNS = {name: {3: ""} for name in OTHERS} | {"a head more": {0: "", 2: "objects://", 3: ""}}


@pytest.mark.slow
@ranks.on(2)
def test_another_model_is_not_saved_where_a_run_has_its_checkpoints(rank, world, tmp_path):
    """It would become the run's latest, which the first could not load any more, and `keep` would remove the rest."""
    for name, stage, scheme in [(name, *one) for name, stages in RUNS.items() for one in stages.items()]:
        (first, other, facts), run = OTHERS[name], f"{scheme}{tmp_path}/{name}-{stage}"
        model, optimizer = zero.setup(first(), torch.optim.SGD, stage=stage, lr=0.1)
        zero.checkpoint.save(run, model, optimizer, extra={"step": 1}, keep=1)
        wrapped, stepped = zero.setup(other(), torch.optim.SGD, stage=stage, lr=0.1)
        for wait in (True, False):
            save = partial(zero.checkpoint.save, run, wrapped, stepped, keep=1, wait=wait)
            words = rf"^CheckpointError: .*{name}-{stage}/00000001.* another model: .*{facts}.* another path"
            assert re.search(words, told := ranks.refusal(save)), f"{name}: {told or 'nothing was raised'}"
        assert zero.checkpoint.load(run, model, optimizer) == {"step": 1}
        zero.checkpoint.save(run, model, optimizer, extra={"step": 2}, keep=1)
        assert zero.checkpoint.load(run, model, optimizer) == {"step": 2}
    assert {one.name for one in (tmp_path / "a head more-3").iterdir()} == {"00000002", "latest"}


def test_a_path_is_free_for_another_model_once_it_is_removed_or_damaged(tmp_path):
    for number, model in enumerate([tiny(), with_a_head(), tiny(9)]):
        saved = zero.checkpoint.save(tmp_path / "run", model).path
        zero.checkpoint.load(tmp_path / "run", model)
        if number:
            shutil.rmtree(tmp_path / "run")
        else:
            (saved / "index.json").write_text("{")


def test_libraries_to_which_a_path_is_one_checkpoint_replace_it(tmp_path):
    for model in (tiny(), with_a_head()):
        write.save_in_place(tmp_path, model, [], keep=1)
        zero.checkpoint.load(tmp_path, model)
    assert {one.name for one in tmp_path.iterdir()} == {"00000002", "latest"}


def test_what_may_change_of_a_model_while_it_is_trained(tmp_path):
    model = tiny()
    zero.checkpoint.save(tmp_path, model)
    model.double()
    model[0].requires_grad_(False)
    zero.checkpoint.save(tmp_path, model, adam()(model[2].parameters()))
    zero.checkpoint.load(tmp_path, tiny())


def in_a_run(name):
    return lambda path: Path(zero.checkpoint.save(path, tiny()).path.parent, name)


def by_torch(path):
    torch.save(tiny().state_dict(), path)
    return path


def by_safetensors(path):
    save_file(tiny().state_dict(), path)
    return path


def by_dcp(path):
    torch.distributed.checkpoint.save({"model": tiny().state_dict()}, checkpoint_id=path, no_dist=True)
    return path


def folder_of(*files):
    def make(path):
        for name in files:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text("global_step7")
        return path

    return make


LOADS_WEIGHTS = r"zero\.load_full_state_dict\(model, "
STRANGERS = {
    "latest": (in_a_run("latest"), r"latest is the file that names .*pass the run's path, .*/run"),
    "a file inside": (in_a_run("00000001/index.json"), r"is a file of a checkpoint.* pass .*/run/00000001"),
    "weights.pt": (by_torch, LOADS_WEIGHTS + r"torch\.load\(.*weights\.pt', weights_only=True\)\)"),
    "model.safetensors": (by_safetensors, LOADS_WEIGHTS + r"safetensors\.torch\.load_file\(.*model\.safetensors"),
    "dcp": (by_dcp, r"torch\.distributed\.checkpoint: .*dcp_to_torch_save\(.*dcp', .*zero\.load_full_state_dict"),
    "transformers": (folder_of("config.json", "model-00001-of-00002.safetensors"), r"transformers: .*from_pretrained"),
    "older": (folder_of("config.json", "pytorch_model.bin"), r"transformers: .*from_pretrained"),
    "deepspeed": (folder_of("latest", "global_step7/mp_rank_00_model_states.pt"), r"DeepSpeed.*zero_to_fp32\.py"),
    "shards of weights": (folder_of("model-00001-of-00002.safetensors"), LOADS_WEIGHTS),
    "a save that was killed": (folder_of("rank-00000.safetensors"), "incomplete"),
    "of another library": (folder_of("optimizer.bin", "scheduler.bin"), "no checkpoint.*, but optimizer.bin, "),
    "empty": (Path.mkdir, "no checkpoint in it: nothing was saved there"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("scheme", ["", "objects://"])
def test_what_is_no_checkpoint_is_named_with_the_call_for_it(scheme, tmp_path, capsys):
    for name, (make, words) in STRANGERS.items():
        path = tmp_path / name / ("run" if "run" in words else name)
        path.parent.mkdir()
        path = make(path) or path
        for told in [
            ranks.refusal(lambda: zero.checkpoint.load(f"{scheme}{path}", tiny())),  # noqa: B023
            command("zero.checkpoint", "inspect", f"{scheme}{path}") and f"CheckpointError: {capsys.readouterr().err}",
        ]:
            assert re.search(f"^CheckpointError: .*{words}", told), f"{name}: {told}"
            assert len(told) < 300 + 2 * len(str(path)), f"{name}: {told}"
        afresh = ranks.refusal(lambda: zero.checkpoint.load(f"{scheme}{path}", tiny(), missing_ok=True))  # noqa: B023
        assert re.search(f"^CheckpointError: .*{words}", afresh) or (name, afresh) == ("empty", ""), f"{name}: {afresh}"


@ranks.on(2)
def test_arguments_in_another_order_are_told_the_right_one(rank, world):
    model = tiny()
    for call in (zero.checkpoint.save, zero.checkpoint.load):
        for given in ((model, "run"), ({"a": 1}, "run"), ("run", {"a": 1}), ("run", adam()(model.parameters()))):
            told = ranks.refusal(lambda: call(*given))  # noqa: B023
            assert re.search(rf"^TypeError: .*zero\.checkpoint\.{call.__name__}\(path, model, optimizer\)", told), told
    assert not Path("run").exists()
