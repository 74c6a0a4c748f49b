"""Checkpoints behind URLs: what holds on a mounted file system holds in an object store."""

import time
from contextlib import nullcontext
from unittest import mock

import objects
import pytest
import torch
from safetensors.torch import load_file
from saved import (
    Config,
    adam,
    differences,
    load_and_go_on,
    messages_of_failing_saves,
    read_plainly,
    save_and_go_on,
    tiny,
)
from torch import nn

import ranks
import zero
from zero.checkpoint.__main__ import main
from zero.checkpoint.export import export
from zero.checkpoint.storage import Remote

CONFIG = Config()


@pytest.fixture
def store(tmp_path):
    """A folder, and the URL of the objects in it."""
    folder = tmp_path / "store"
    folder.mkdir()
    return folder, f"objects://{folder}"


def test_any_stage_and_world_through_objects(store):
    folder, url = store
    at_save, _ = ranks.run(save_and_go_on, 3, (f"{url}/run", 3, CONFIG))[0]
    assert not differences(at_save, read_plainly(folder / "run" / "00000001"))
    for stage, world in [(0, 1), (2, 2), (3, 4)]:
        then, _ = ranks.run(load_and_go_on, world, ([(f"{url}/run", stage, CONFIG)],))[0][0]
        assert not differences(at_save, then)


def several(rank, world, url):
    model, optimizer = zero.setup(tiny(300), adam(), stage=3)
    told = []
    for step in range(4):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        saving = zero.checkpoint.save(url, model, optimizer, extra={"step": step}, keep=2, wait=step % 2 == 0)
    saving.wait()
    told.append(saving.path)
    told.append(zero.checkpoint.load(saving.path, model, optimizer))
    return told


def test_keeps_the_last_and_writes_behind_training(store):
    folder, url = store
    assert ranks.run(several, 2, (f"{url}/run",)) == [[f"{url}/run/00000004", {"step": 3}]] * 2
    assert sorted(one.name for one in (folder / "run").iterdir()) == ["00000003", "00000004", "latest"]
    assert sorted(one.name for one in (folder / "run" / "00000004").iterdir()) == [
        "index.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]


def full(rank, world, url, folder, slow):
    model, optimizer = zero.setup(tiny(300), adam(), stage=3)
    zero.checkpoint.save(url, model, optimizer, extra={"step": 1})
    if rank == 0:
        (folder / objects.FULL).write_text("")
    put = Remote.put

    def put_late(self, data):
        time.sleep(0.3)
        put(self, data)

    with mock.patch.object(Remote, "put", put_late) if rank == slow else nullcontext():
        told = messages_of_failing_saves(url, model, optimizer)
    assert zero.checkpoint.load(url, model, optimizer) == {"step": 1}
    return told


@pytest.mark.parametrize("slow", [None, 1])
def test_a_store_that_takes_no_more(store, slow):
    """Nor does a rank leave anything there that comes to report when the first has removed all."""
    folder, url = store
    for messages in ranks.run(full, 2, (f"{url}/run", folder, slow)):
        assert all("no more room for rank-0000" in message for message in messages), messages
    assert sorted(one.name for one in (folder / "run").iterdir()) == ["00000001", "latest"]


def test_half_a_save_is_no_checkpoint_and_is_removed_by_the_next(store):
    folder, url = store
    zero.checkpoint.save(f"{url}/run", tiny(), extra={"step": 1})
    half = folder / "run" / "00000002"
    half.mkdir()
    (half / "rank-00000.safetensors").write_bytes(b"half")
    (half / "rank-00007.safetensors").write_bytes(b"half")
    others = folder / "run" / "20261121" / "notes.txt"
    others.parent.mkdir()
    others.write_text("somebody else's")
    assert zero.checkpoint.load(f"{url}/run", tiny()) == {"step": 1}
    zero.checkpoint.save(f"{url}/run", tiny(), extra={"step": 2})
    assert not half.exists()
    made = folder / "run" / "20261122"
    assert sorted(one.name for one in made.iterdir()) == ["index.json", "rank-00000.safetensors"]
    assert others.read_text() == "somebody else's"
    assert zero.checkpoint.load(f"{url}/run", tiny()) == {"step": 2}


def test_altered_missing_and_truncated_objects(store):
    folder, url = store
    zero.checkpoint.save(f"{url}/run", tiny())
    file = folder / "run" / "00000001" / "rank-00000.safetensors"
    data = file.read_bytes()
    model = tiny()
    model[0].weight.data.fill_(5.0)
    for damaged, expected in [
        (data[:-1] + bytes([data[-1] ^ 1]), "was altered"),
        (data[:99], "has 99 bytes"),
        (None, "cannot be read"),
    ]:
        file.unlink() if damaged is None else file.write_bytes(damaged)
        with pytest.raises(zero.checkpoint.CheckpointError, match=expected):
            zero.checkpoint.load(f"{url}/run", model)
        assert (model[0].weight == 5).all()


def test_nothing_at_a_url(store):
    _, url = store
    with pytest.raises(zero.checkpoint.CheckpointError, match=f"{url}/run is not there"):
        zero.checkpoint.load(f"{url}/run", tiny())


@pytest.mark.parametrize("url", ["nothing://run", "s3://bucket/run"])
def test_a_url_that_cannot_be_served(url):
    pattern = "Protocol not known" if url.startswith("nothing") else "s3fs"
    for work in [zero.checkpoint.save, zero.checkpoint.load]:
        with pytest.raises(zero.checkpoint.CheckpointError, match=pattern):
            work(url, tiny())


def test_a_file_url_is_a_path(tmp_path):
    zero.checkpoint.save(f"file://{tmp_path}/run", tiny())
    assert sorted(one.name for one in (tmp_path / "run").iterdir()) == ["00000001", "latest"]
    zero.checkpoint.load(tmp_path / "run", tiny())


def test_in_and_out_of_memory(tmp_path, capsys):
    model, other = tiny(), nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    zero.checkpoint.save("memory://run", model)
    assert main(["inspect", "memory://run", "--check"]) == 0
    assert "every byte is as it was written" in capsys.readouterr().out
    export("memory://run", tmp_path / "out")
    other.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert not differences(dict(model.state_dict()), dict(other.state_dict()))
    assert main(["export", "memory://run", "memory://out"]) == 1
    assert "export to a mounted file system" in capsys.readouterr().err
