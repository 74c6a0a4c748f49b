"""Where a checkpoint is saved, and what is said of a path where there is none."""

import re
import shutil
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from unittest import mock

import objects
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from safetensors.torch import load_file, save_file
from saved import Counting, adam, differences, messages_of_failing_saves, tiny, train
from torch import nn

import ranks
import zero
from processes import command
from zero.checkpoint import write
from zero.checkpoint.storage import beside, place


def at_home(path):
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


def folder_of(*files):
    def make(path):
        for name in files:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text("global_step7")
        return path

    return make


def half_of_latest(path):
    zero.checkpoint.save(path, tiny())
    (path / "latest").write_text("")


# What a script may write before its first save, and what a save leaves that was killed.
LOGS = ("events.out.tfevents.1", "config.yaml", "00000001/rank-00000.safetensors.partial")
AFRESH = ("empty", "nothing", "logs")  # where a run starts that is told that there may be nothing


LOADS_WEIGHTS = r"zero\.load_full_state_dict\(model, "
STRANGERS = {
    "latest": (in_a_run("latest"), r"latest is the file that names .*pass the run's path, .*/run"),
    "a file inside": (in_a_run("00000001/index.json"), r"is a file of a checkpoint.* pass .*/run/00000001"),
    "weights.pt": (by_torch, LOADS_WEIGHTS + r"torch\.load\(.*weights\.pt', weights_only=True\)\)"),
    "model.safetensors": (by_safetensors, LOADS_WEIGHTS + r"safetensors\.torch\.load_file\(.*model\.safetensors"),
    "transformers": (folder_of("config.json", "model-00001-of-00002.safetensors"), r"transformers: .*from_pretrained"),
    "older": (folder_of("config.json", "pytorch_model.bin"), r"transformers: .*from_pretrained"),
    "deepspeed": (folder_of("latest", "global_step7/mp_rank_00_model_states.pt"), r"DeepSpeed.*zero_to_fp32\.py"),
    "shards of weights": (folder_of("model-00001-of-00002.safetensors"), LOADS_WEIGHTS),
    "a save that was killed": (folder_of("rank-00000.safetensors"), "incomplete"),
    "of another library": (folder_of("optimizer.bin", "scheduler.bin"), "no checkpoint.*, but optimizer.bin, "),
    "an empty latest": (half_of_latest, "latest names ''"),
    "empty": (Path.mkdir, "no checkpoint in it: nothing was saved there"),
    "nothing": (lambda path: None, "is not there"),
    "logs": (folder_of(*LOGS), "no checkpoint"),
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
        assert re.search(f"^CheckpointError: .*{words}", afresh) if name not in AFRESH else not afresh, (
            f"{name}: {afresh}"
        )


@ranks.on(2)
def test_arguments_in_another_order_are_told_the_right_one(rank, world):
    model = tiny()
    for call in (zero.checkpoint.save, zero.checkpoint.load):
        for given in ((model, "run"), ({"a": 1}, "run"), ("run", {"a": 1}), ("run", adam()(model.parameters()))):
            told = ranks.refusal(lambda: call(*given))  # noqa: B023
            assert re.search(rf"^TypeError: .*zero\.checkpoint\.{call.__name__}\(path, model, optimizer\)", told), told
    assert not Path("run").exists()


# Checkpoints behind URLs: what holds on a mounted file system holds in an object store.


@pytest.fixture
def store(tmp_path):
    """A folder, and the URL of the objects in it."""
    folder = tmp_path / "store"
    folder.mkdir()
    return folder, f"objects://{folder}"


@ranks.on(2)
def test_keeps_the_last_and_writes_behind_training(rank, world, store):
    folder, url = store
    model, optimizer = zero.setup(tiny(300), adam(), stage=3)
    for step in range(4):
        train(model, optimizer, 1)
        how = {"extra": {"step": step}, "keep": 2, "wait": step % 2 == 0}
        saving = zero.checkpoint.save(f"{url}/run", model, optimizer, **how)
    saving.wait()
    assert saving.path == f"{url}/run/00000004"
    assert zero.checkpoint.load(saving.path, model, optimizer) == {"step": 3}
    assert {one.name for one in (folder / "run").iterdir()} == {"00000003", "00000004", "latest"}
    files = {one.name for one in (folder / "run" / "00000004").iterdir()}
    assert files == {"index.json", "rank-00000.safetensors", "rank-00001.safetensors"}


@pytest.mark.slow
@ranks.on(2)
def test_a_store_that_takes_no_more(rank, world, store):
    """What was written there by then, also by a rank that is late, the next save removes."""
    (folder, url), (model, optimizer) = store, zero.setup(tiny(300), adam(), stage=3)
    zero.checkpoint.save(f"{url}/run", model, optimizer, extra={"step": 1})
    if rank == 0:
        (folder / objects.FULL).write_text("")
    close = objects.Upload.close

    def close_late(upload):
        time.sleep(0.2)
        close(upload)

    with mock.patch.object(objects.Upload, "close", close_late) if rank == 1 else nullcontext():
        told = messages_of_failing_saves(f"{url}/run", model, optimizer)
    assert all("no more room for rank-0000" in message for message in told), told
    assert zero.checkpoint.load(f"{url}/run", model, optimizer) == {"step": 1}
    dist.barrier()
    if rank == 0:
        (folder / objects.FULL).unlink()
    dist.barrier()
    name = Path(zero.checkpoint.save(f"{url}/run", model, optimizer).path).name
    assert sorted(one.name for one in (folder / "run").iterdir()) == ["00000001", name, "latest"]


@pytest.mark.parametrize("scheme", ["", "objects://"])
def test_half_a_save_is_no_checkpoint_and_is_removed_by_the_next(scheme, tmp_path):
    """Its number is not used again: somebody may still write there."""
    run = f"{scheme}{tmp_path}"
    zero.checkpoint.save(run, tiny(), extra={"step": 1})
    others, half = tmp_path / "20261121" / "notes.txt", tmp_path / "20261122"
    for one in [others.parent, half]:
        one.mkdir()
    others.write_text("somebody else's")
    for name in ["rank-00000.safetensors", "rank-00000.safetensors.json", "rank-00007.safetensors.partial"]:
        (half / name).write_bytes(b"half")
    (half / "index.json.partial").write_bytes(b"half")
    assert zero.checkpoint.load(run, tiny()) == {"step": 1}
    zero.checkpoint.save(run, tiny(), extra={"step": 2})
    assert not half.exists()
    made = tmp_path / "20261123"
    assert sorted(one.name for one in made.iterdir()) == ["index.json", "rank-00000.safetensors"]
    assert others.read_text() == "somebody else's"
    assert zero.checkpoint.load(run, tiny()) == {"step": 2}


@pytest.mark.parametrize(("url", "words"), [("nothing://run", "Protocol not known"), ("s3://bucket/run", "s3fs")])
def test_a_url_that_cannot_be_served(url, words, capsys):
    for work in [zero.checkpoint.save, zero.checkpoint.load]:
        with pytest.raises(zero.checkpoint.CheckpointError, match=words):
            work(url, tiny())
    assert command("zero.checkpoint", "inspect", url) == 1
    message = capsys.readouterr().err
    assert message.startswith("inspect: ") and words in message and message.count("\n") == 1


def test_in_and_out_of_memory(tmp_path, capsys):
    model, other = tiny(), tiny()
    train(model, adam()(model.parameters()))
    zero.checkpoint.save("memory://run", model)
    assert command("zero.checkpoint", "inspect", "memory://run", "--check") == 0
    assert "every byte is as it was written" in capsys.readouterr().out
    assert command("zero.checkpoint", "export", "memory://run", tmp_path / "out") == 0
    other.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert not differences(dict(model.state_dict()), dict(other.state_dict()))
    assert command("zero.checkpoint", "export", "memory://run", "memory://out") == 1
    assert "export to a mounted file system" in capsys.readouterr().err


def test_a_save_that_failed_fails_whenever_it_is_waited_for(store):
    folder, url = store
    (folder / objects.FULL).write_text("")
    saving = zero.checkpoint.save(f"{url}/run", tiny(300), wait=False)
    for _ in range(2):
        with pytest.raises(zero.checkpoint.CheckpointError, match="no more room"):
            saving.wait()
    with pytest.raises(RuntimeError, match=r"no checkpoint.*no more room"):
        _ = saving.path


def test_no_other_run_is_removed_whose_name_a_pattern_fits():
    for run in ("memory://runs/lr1", "memory://runs/lr[1]"):
        for step in range(3):
            zero.checkpoint.save(run, tiny(), extra={"step": step}, keep=None if run.endswith("1") else 1)
    assert zero.checkpoint.load("memory://runs/lr1/00000001", tiny()) == {"step": 0}
    with pytest.raises(zero.checkpoint.CheckpointError, match=r"lr\[1\]/00000002"):
        zero.checkpoint.load("memory://runs/lr[1]/00000002", tiny())


@pytest.mark.parametrize("scheme", ["", "memory:/"])
def test_a_file_and_a_directory_take_one_anothers_name_when_they_are_complete(scheme, tmp_path):
    path = place(f"{scheme}{tmp_path}/lr[1]")
    kinds = {"a file": {"": b"1"}, "a directory": {"/one": b"2", "/more/two": b"3"}}

    def put(at, files):
        for name, data in files.items():
            one = at if not name else place(at.url + name)
            one.parent.make()
            one.put(data)

    def found():
        inside = path.system.find(path.parent.path)
        return {one.removeprefix(path.path): path.system.cat_file(one) for one in inside}

    put(path, kinds["a file"])
    before = kinds["a file"]
    for files in [kinds["a directory"], kinds["a file"]]:
        put(place(f"{path.url}.new"), before)  # what an interrupted save has left
        with suppress(OSError), beside(path, moves=True) as new:
            put(new, files)
            assert found().items() > before.items()
            raise OSError("no more room")
        assert found() == before
        with mock.patch.object(type(path), "move", side_effect=[None, OSError("gone"), None]) as moved:
            with pytest.raises(OSError, match="gone"), beside(path, moves=True) as new:
                put(new, files)
            assert moved.call_count == 3 and found() == before
        with beside(path, moves=True) as new:
            put(new, files)
        assert found() == files
        before = files


@pytest.mark.parametrize("scheme", ["", "objects://"])
def test_a_checkpoint_is_no_run(scheme, tmp_path):
    """There load would go on to find the old one."""
    path = str(zero.checkpoint.save(f"{scheme}{tmp_path}", tiny(), extra={"step": 1}).path)
    with pytest.raises(zero.checkpoint.CheckpointError, match=rf"{path} is a checkpoint.*{tmp_path}\."):
        zero.checkpoint.save(path, tiny(), extra={"step": 2})
    assert zero.checkpoint.load(path, tiny()) == {"step": 1}


@ranks.raises(2, zero.checkpoint.CheckpointError, "has no rank-00001.safetensors.*see the same files", timeout=30)
def test_ranks_that_do_not_see_the_same_files(rank, world):
    with mock.patch.object(write, "_LAST_WAIT", 0.5):
        zero.checkpoint.save("memory://run", tiny(300), wait=False).wait()
