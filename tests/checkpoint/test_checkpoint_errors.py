"""Bad input: an error on every rank that names the file or parameter; model and optimizer as they were before."""

import io
import os
import pickle
import re
import shutil
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import objects
import pytest
import torch
from saved import (
    Blockwise,
    Config,
    Runs,
    adam,
    change_header,
    change_index,
    differences,
    save_and_go_on,
    steps,
    tiny,
    train,
    whole,
)
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


def header(change):
    return lambda run: change_header(run / "00000001", change)


def of_frozen(**change):
    return index(lambda told: told["tensors"][FROZEN].update(change))


def with_other_keys(told):
    for piece in told["tensors"][FROZEN]["pieces"]:
        piece["key"] = "model/nothing"


def elsewhere(told):
    for entry in told["tensors"].values():
        entry["pieces"] = [{**piece, "file": "../../else.safetensors"} for piece in entry["pieces"]]


def two_at_one_place(told):
    one, other = [path for path, entry in told["tensors"].items() if entry["shape"] == [13, 13]][:2]
    told["tensors"][one]["pieces"] = told["tensors"][other]["pieces"]


def in_the_same_bytes(told):
    one, other, *_ = [entry for key, entry in told.items() if key != "__metadata__" and entry["shape"]]
    other |= one


def more_than_there_is(told):
    entry = told["tensors"][FROZEN]
    entry.update(shape=[1 << 40, 1 << 40], pieces=[{**entry["pieces"][0], "stop": 1 << 80}])


def only_partial(run):
    (run / "00000001").rename(run / ".partial-1")
    (run / "latest").unlink()


def a_file(run):
    shutil.rmtree(run)
    run.write_text("")


SLICED = rf"{FROZEN} is cut into slices"
DAMAGE = {
    "missing file": (named(SECOND, Path.unlink), SECOND),
    "truncated": (named(FIRST, os.truncate, 5000), f"{FIRST} .*5000 bytes"),
    "longer": (named(FIRST, os.truncate, 1 << 20), f"{FIRST} .*1048576 bytes"),
    "altered value": (named(FIRST, flip, -3), f"{FIRST} was altered"),
    "altered header": (named(SECOND, flip, 40), f"{SECOND} .*header"),
    "header length": (named(SECOND, flip, 6), f"{SECOND} is no safetensors"),
    "pickle as data": (named(FIRST, crafted), FIRST),
    "two tensors in the same bytes": (header(in_the_same_bytes), "two tensors"),
    "no checksums": (header(lambda told: told.pop("__metadata__")), "block_crc32"),
    "empty checksums": (header(lambda told: told["__metadata__"].update(block_crc32="")), "checksums"),
    "altered index": (index(lambda told: told["extra"].update(step=3), False), r"index.json .*altered"),
    "half an index": (named("index.json", os.truncate, 999), "index.json is incomplete"),
    "no index": (named("index.json", Path.unlink), "'00000001', which is no checkpoint"),
    "index of others": (named("index.json", Path.write_text, "{}"), "index.json is not the index"),
    "pickle as index": (named("index.json", crafted), "index.json"),
    "an index that no memory holds": (named("index.json", os.truncate, 1 << 40), "268435456"),  # takes no room on disk
    "later version": (index(lambda told: told.update(version=9)), "index.json .*version"),
    "index without a piece": (index(lambda told: told["tensors"][FROZEN]["pieces"].pop()), f"{FROZEN} lacks elements"),
    "index with a wrong key": (index(with_other_keys), "has no model/nothing"),
    "index to elsewhere": (index(elsewhere), "none of its files"),
    "index of two tensors at one place": (index(two_at_one_place), "stored where another tensor is"),
    "index of more than there is": (index(more_than_there_is), r"differ: frozen\.weight|has no"),
    "slices beyond the shards": (of_frozen(order=[[1, 1], 0, 1]), rf"{SLICED} by \[1, 1\]"),
    "slices of too many": (of_frozen(order=[[2, 20], 0, 1]), SLICED),
    "slices of one number": (of_frozen(order=[[1], 0, 1]), SLICED),
    "slices of a list": (of_frozen(order=[[[], 8], 0, 1]), SLICED),
    "no latest": (named("latest", Path.unlink), "has the checkpoints 00000001"),
    "binary latest": (named("latest", Path.write_bytes, b"\xff\xfe"), "has the checkpoints 00000001"),
    "latest elsewhere": (named("latest", Path.write_text, "../../etc"), "no checkpoint"),
    "a latest that no memory holds": (named("latest", os.truncate, 1 << 40), "no checkpoint|embedded null"),
    "half a save": (only_partial, "no checkpoint in it"),
    "nothing": (shutil.rmtree, "is not there"),
    "a file": (a_file, "is no directory"),
}


def refused(rank, world, stage, paths):
    model, optimizer = CONFIG.build(stage, seed=1)
    steps(model, optimizer, 7, 1)
    before, told = whole(model, optimizer), []
    for path in paths:
        began = time.monotonic()
        with pytest.raises(CheckpointError) as caught:
            assert not zero.checkpoint.load(path, model, optimizer), path
        assert time.monotonic() - began < 5
        assert not differences(before, whole(model, optimizer)), path
        told.append(str(caught.value))
    steps(model, optimizer, 2, 1)
    return told


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "scheme"), [(0, ""), (1, "objects://"), (3, "")])
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


# ----------------------------------------------------------------------------------------------- once all was checked


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


def refusing_optimizer(rank, load):
    refuse = mock.Mock(side_effect=RuntimeError("not this state"))
    with mock.patch.object(torch.optim.AdamW, "load_state_dict", refuse) if rank else nullcontext():
        load()


def fails_late(rank, world, path, stage, failing):
    model, optimizer = CONFIG.build(stage)
    checkpoints = []
    for step in range(2):
        steps(model, optimizer, step, 1)
        checkpoints.append((zero.checkpoint.save(path, model, optimizer).path, whole(model, optimizer)))
    steps(model, optimizer, 2, 1)
    with pytest.raises(CheckpointError) as caught:
        failing(rank, lambda: zero.checkpoint.load(path, model, optimizer))
    for saved, expected in checkpoints:
        zero.checkpoint.load(saved, model, optimizer)
        assert not differences(expected, whole(model, optimizer))
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    ("failure", "expected"), [(failing_disk, "Input/output error"), (refusing_optimizer, "not this state")]
)
def test_a_load_that_fails_late_says_on_every_rank_that_the_model_is_half_loaded(stage, failure, expected, tmp_path):
    """There is no way back without a second copy of everything; the next load makes it whole."""
    first, second = ranks.run(fails_late, 2, (f"objects://{tmp_path}", stage, failure))
    assert first == second
    assert expected in first and "partly as before and partly as saved" in first and "rank 1" in first


# ------------------------------------------------------------------------------------------------------ what differs


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


def two(params):
    params = [*params]
    return [adam()(params[:2]), adam()(params[2:])]


def renamed(model):
    del model[1]


def with_integers(model):
    model.register_buffer("count", torch.zeros(3, dtype=torch.int64))


def real_count(model):
    model[1].num_batches_tracked = torch.tensor(0.0)


def tied(model):
    model[1].weight = model[1].bias


SAVED, LOADED = partial(of, adam()), partial(of, adam(), wrap=zero.FSDP)
MISFITS = {
    "another model": (SAVED, partial(LOADED, change=renamed), "nothing for: .*1.weight.*|no: .*2.weight"),
    "more buffers": (SAVED, partial(LOADED, change=with_integers), "nothing for: count"),
    "another width": (SAVED, partial(LOADED, width=9), r"0.weight .*float32 \[8, 4\], here float32 \[9, 4\]"),
    "a count of another kind": (SAVED, partial(SAVED, change=real_count), r"num_batches_tracked .*int64.* float32"),
    "tied here": (SAVED, partial(SAVED, change=tied), r"1\.weight and 1\.bias|1\.bias and 1\.weight"),
    "tied there": (partial(SAVED, change=tied), SAVED, r"1\.weight and 1\.bias|1\.bias and 1\.weight"),
    "more groups": (SAVED, partial(of, two_groups), "1 parameter groups, .* 2"),
    "fewer parameters": (SAVED, partial(of, fewer), r"0\.weight.* Adam"),
    "more optimizers": (SAVED, partial(of, two), "1 optimizers, but 2"),
    "another optimizer": (SAVED, partial(of, sgd, wrap=zero.FSDP), "is SGD"),
    "no optimizer": (lambda: (SAVED()[0], ()), LOADED, "no optimizer"),
    "cut state": (partial(of, Blockwise), partial(of, Blockwise, wrap=zero.FSDP), "cut between ranks here"),
}


def save_misfits(rank, world, path):
    for name, (build, _, _) in MISFITS.items():
        model, optimizer = build()
        if optimizer:
            train(model, optimizer, 1)
        zero.checkpoint.save(f"{path}/{name}", model, optimizer)


def refuse_misfits(rank, world, path):
    told = []
    for name, (_, build, _) in MISFITS.items():
        model, optimizer = build()
        of_all = partial(whole, model, optimizer) if not isinstance(optimizer, list) else model.state_dict
        before = {key: value.clone() for key, value in of_all().items()}
        with pytest.raises(CheckpointError) as caught:
            zero.checkpoint.load(f"{path}/{name}", model, optimizer)
        assert not differences(before, of_all())
        told.append(str(caught.value))
    return told


def test_a_misfit_is_refused_on_every_rank_and_changes_nothing(tmp_path):
    ranks.run(save_misfits, 2, (str(tmp_path),))
    first, second, third = ranks.run(refuse_misfits, 3, (str(tmp_path),))
    assert first == second == third
    for (name, (_, _, words)), message in zip(MISFITS.items(), first, strict=True):
        assert re.search(words, message), f"{name}: {message}"
