"""Checkpoints behind URLs: what holds on a mounted file system holds in an object store."""

import time
from contextlib import nullcontext
from unittest import mock

import objects
import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from saved import adam, differences, messages_of_failing_saves, tiny, train

import ranks
import zero
from commands import command
from zero.checkpoint import write


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
    """Nor does a rank leave anything there that comes to report when the first has removed all."""
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
    assert sorted(one.name for one in (folder / "run").iterdir()) == ["00000001", "latest"]


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


@pytest.mark.parametrize("scheme", ["", "objects://"])
def test_a_checkpoint_is_no_run(scheme, tmp_path):
    """There load would go on to find the old one."""
    path = str(zero.checkpoint.save(f"{scheme}{tmp_path}", tiny(), extra={"step": 1}).path)
    with pytest.raises(zero.checkpoint.CheckpointError, match=rf"{path} is a checkpoint.*{tmp_path}\."):
        zero.checkpoint.save(path, tiny(), extra={"step": 2})
    assert zero.checkpoint.load(path, tiny()) == {"step": 1}


@ranks.raises(2, zero.checkpoint.CheckpointError, "has no rank-00001.safetensors.*see the same files", timeout=30)
def test_ranks_that_do_not_see_the_same_files(rank, world):
    """As on two hosts with a disk each."""
    with mock.patch.object(write, "_LAST_WAIT", 0.5):
        zero.checkpoint.save("memory://run", tiny(300), wait=False).wait()
