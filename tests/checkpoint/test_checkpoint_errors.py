"""Bad input: an error on every rank that names the file or parameter; model and optimizer as they were before."""

import io
import os
import pickle
import re
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import objects
import pytest
from saved import Config, Runs, adam, change_index, differences, save_and_go_on, steps, tiny, train, whole
from torch import nn
from torch.optim import SGD

import ranks
import zero
from zero.checkpoint import CheckpointError

CONFIG = Config()
CANARY = "ZERO_TEST_CANARY"
FIRST, SECOND = "rank-00000.safetensors", "rank-00001.safetensors"
FROZEN = "model/frozen.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "run"
    ranks.run(save_and_go_on, 2, (str(path), 3, CONFIG))
    return path


def named(name, act, *args, **how):
    """What is done to a run's directory: to the file of that name in its checkpoint, or beside that."""
    return lambda run: act((run if name == "latest" else run / "00000001") / name, *args, **how)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def crafted(path):
    path.write_bytes(pickle.dumps(Runs(path.parents[1] / CANARY)))


def index(change, resign=True):
    return lambda run: change_index(run / "00000001", change, resign=resign)


def elsewhere(told):
    for entry in told["tensors"].values():
        entry["shards"] = [{**shard, "file": "../../else.safetensors"} for shard in entry["shards"]]


def in_the_same_bytes(told):
    for entry in told["tensors"].values():
        entry["shards"] = told["tensors"]["model/layers.0.linear.weight"]["shards"]


def without_a_checksum(told):
    told["files"][FIRST]["crc32"].pop()


def only_half(run):
    (run / "00000001" / "index.json").unlink()
    (run / "latest").unlink()


DAMAGE = {
    "missing file": (named(SECOND, Path.unlink), SECOND),
    "truncated": (named(FIRST, os.truncate, 5000), f"{FIRST} .*5000 bytes"),
    "altered value": (named(FIRST, flip, -3), f"{FIRST} was altered"),
    "altered header": (named(SECOND, flip, 40), f"{SECOND} was altered"),
    "pickle as data": (named(FIRST, crafted), FIRST),
    "tensors in the same bytes": (index(in_the_same_bytes), "or another tensor|lacks elements"),
    "no checksums": (index(without_a_checksum), f"{FIRST} was altered"),
    "altered index": (index(lambda told: told["extra"].update(step=3), False), r"index.json .*altered"),
    "half an index": (named("index.json", os.truncate, 999), "index.json is incomplete"),
    "no index": (named("index.json", Path.unlink), "'00000001', which is no checkpoint"),
    "index of others": (named("index.json", Path.write_text, "{}"), "index.json is not the index"),
    "an index that no memory holds": (named("index.json", os.truncate, 1 << 40), "268435456"),  # takes no room on disk
    "later version": (index(lambda told: told.update(version=9)), "index.json .*version"),
    "index without a shard": (index(lambda told: told["tensors"][FROZEN]["shards"].pop()), f"{FROZEN} lacks elements"),
    "index that leaves out what it does not describe": (
        index(lambda told: told.update(left_out={"frozen.weight": 3})),
        r"index\.json has an entry that this zero cannot read",
    ),
    "index to elsewhere": (index(elsewhere), "none of its files"),
    "no latest": (named("latest", Path.unlink), "has the checkpoints 00000001"),
    "latest elsewhere": (named("latest", Path.write_text, "../../etc"), "no checkpoint"),
    "a latest that no memory holds": (named("latest", os.truncate, 1 << 40), "no checkpoint|embedded null"),
    "half a save": (only_half, "no checkpoint in it"),
    "nothing": (shutil.rmtree, "is not there"),
}


def refused(rank, world, stage, paths):
    model, optimizer = CONFIG.build(stage, seed=1)
    steps(model, optimizer, 7, 1)
    before, told = whole(model, optimizer), []
    for path in paths:
        with pytest.raises(CheckpointError) as caught:
            assert not zero.checkpoint.load(path, model, optimizer), path
        assert not differences(before, whole(model, optimizer)), path
        told.append(str(caught.value))
    steps(model, optimizer, 2, 1)
    return told


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "scheme"), [(1, "objects://"), (3, "")])
def test_a_damaged_checkpoint_is_refused_on_every_rank_and_changes_nothing(stage, scheme, good, tmp_path):
    paths = []
    for name, (damage, _) in DAMAGE.items():
        path = tmp_path / name.replace(" ", "-")
        shutil.copytree(good, path)
        damage(path)
        paths.append(f"{scheme}{path}")
    messages = ranks.run(refused, 2, (stage, paths))
    assert messages[0] == messages[1]
    for (name, (_, expected)), message in zip(DAMAGE.items(), messages[0], strict=True):
        assert re.search(expected, message), f"{name}: {message}"
    assert not list(tmp_path.rglob(CANARY)), "a crafted file ran code"


class Failing(io.FileIO):
    """Of whose kind only so many reads succeed."""

    left = 0

    def readinto(self, buffer):
        Failing.left -= 1
        if Failing.left == 0:
            raise OSError(5, "Input/output error")
        return super().readinto(buffer)


def failing_disk(rank, load):
    """On rank 1, the last but one of all that a load reads cannot be read."""
    with mock.patch.object(objects.ObjectStore, "_open", lambda _, path, *given, **how: Failing(path)):
        Failing.left = 0
        load()
        Failing.left = -Failing.left - 1 if rank else 0
        load()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
@ranks.on(2)
def test_a_load_that_fails_late_says_on_every_rank_that_the_model_is_half_loaded(rank, world, stage, tmp_path):
    """There is no way back without a second copy of everything; the next load makes it whole."""
    (model, optimizer), path, checkpoints = CONFIG.build(stage), f"objects://{tmp_path}", []
    for step in range(2):
        steps(model, optimizer, step, 1)
        checkpoints.append((zero.checkpoint.save(path, model, optimizer).path, whole(model, optimizer)))
    steps(model, optimizer, 2, 1)
    with pytest.raises(CheckpointError, match=r"Input/output error.*partly as before and partly as saved") as caught:
        failing_disk(rank, lambda: zero.checkpoint.load(path, model, optimizer))
    assert "rank 1" in str(caught.value)
    for saved, expected in checkpoints:
        zero.checkpoint.load(saved, model, optimizer)
        assert not differences(expected, whole(model, optimizer))


def of(optim, width=8, wrap=nn.Module.float, change=id):
    model = tiny(width)
    change(model)
    model = wrap(model)
    return model, optim(model.parameters())


def sgd(params):
    return SGD(params, lr=0.1)


def two_groups(params):
    first, *rest = params
    return adam()([{"params": [first]}, {"params": rest}])


def fewer(params):
    return adam()([*params][1:])


def renamed(model):
    del model[1]


def tied(model):
    model[1].weight = model[1].bias


LOADED = partial(of, adam(), wrap=zero.FSDP)
MISFITS = {
    "another model": (partial(LOADED, change=renamed), "nothing for: .*1.weight.*|no: .*2.weight"),
    "another width": (partial(LOADED, width=9), r"0.weight .*float32 \[8, 4\], here float32 \[9, 4\]"),
    "tied here": (partial(of, adam(), change=tied), r"1\.weight and 1\.bias|1\.bias and 1\.weight"),
    "more groups": (partial(of, two_groups), "1 parameter groups, .* 2"),
    "fewer parameters": (partial(of, fewer), r"0\.weight.* Adam"),
    "another optimizer": (partial(of, sgd, wrap=zero.FSDP), "is SGD"),
    "weights alone": (LOADED, "no optimizer"),
}


def save_a_run(rank, world, path):
    model, optimizer = of(adam())
    train(model, optimizer, 1)
    zero.checkpoint.save(f"{path}/run", model, optimizer)
    zero.checkpoint.save(f"{path}/weights alone", model)


def refuse_misfits(rank, world, path):
    told = []
    for name, (build, _) in MISFITS.items():
        model, optimizer = build()
        before = {key: value.clone() for key, value in whole(model, optimizer).items()}
        with pytest.raises(CheckpointError) as caught:
            zero.checkpoint.load(f"{path}/{name if name == 'weights alone' else 'run'}", model, optimizer)
        assert not differences(before, whole(model, optimizer))
        told.append(str(caught.value))
    return told


@pytest.mark.slow
def test_a_misfit_is_refused_on_every_rank_and_changes_nothing(tmp_path):
    ranks.run(save_a_run, 2, (str(tmp_path),))
    first, second, third = ranks.run(refuse_misfits, 3, (str(tmp_path),))
    assert first == second == third
    for (name, (_, words)), message in zip(MISFITS.items(), first, strict=True):
        assert re.search(words, message), f"{name}: {message}"
