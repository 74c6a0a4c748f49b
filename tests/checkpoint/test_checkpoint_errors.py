"""Bad input: an error on every rank that names the file or parameter; model and optimizer as they were before."""

import json
import os
import pickle
import re
import shutil
import subprocess
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from saved import (
    Blockwise,
    Config,
    Runs,
    adam,
    differences,
    messages_of_failing_saves,
    save_and_go_on,
    sign,
    steps,
    tiny,
    whole,
    with_adam,
)
from torch import nn

import ranks
import zero
from zero.checkpoint.files import FileProblem, SafeFile
from zero.checkpoint.storage import Local

CONFIG = Config()
CANARY = "ZERO_TEST_CANARY"
FIRST, SECOND = "rank-00000.safetensors", "rank-00001.safetensors"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "run"
    ranks.run(save_and_go_on, 2, (str(path), 3, CONFIG))
    return path


def only(path):
    return path / "00000001"


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def in_index(path, change, *, resign=False):
    file = only(path) / "index.json"
    told = json.loads(file.read_text())
    change(told)
    if resign:
        sign(told)
    file.write_text(json.dumps(told))


def other_piece(told):
    entry = told["tensors"]["model/frozen.weight"]
    entry["pieces"] = [{**piece, "key": "model/nothing"} for piece in entry["pieces"]]


def gap(told):
    told["tensors"]["model/frozen.weight"]["pieces"].pop()


def escape(told):
    for entry in told["tensors"].values():
        entry["pieces"] = [{**piece, "file": "../../else.safetensors"} for piece in entry["pieces"]]


def crafted(path):
    return pickle.dumps(Runs(path / CANARY))


def first(path):
    return only(path) / FIRST


def second(path):
    return only(path) / SECOND


def index(path):
    return only(path) / "index.json"


def only_partial(path):
    only(path).rename(path / ".partial-1")
    (path / "latest").unlink()


def a_file(path):
    shutil.rmtree(path)
    path.write_text("")


DAMAGE = {
    "missing file": (lambda p: second(p).unlink(), SECOND + " cannot be read"),
    "truncated": (lambda p: os.truncate(first(p), 5000), FIRST + " has 5000 bytes"),
    "longer": (lambda p: os.truncate(first(p), 1 << 20), FIRST + " has 1048576 bytes"),
    "altered value": (lambda p: flip(first(p), -3), FIRST + " was altered"),
    "altered header": (lambda p: flip(second(p), 40), SECOND + " does not have the header"),
    "header length": (lambda p: flip(second(p), 6), SECOND + " is no safetensors file"),
    "altered index": (lambda p: in_index(p, lambda told: told["extra"].update(step=3)), "index.json .*altered"),
    "half an index": (lambda p: os.truncate(index(p), 999), "index.json is incomplete"),
    "index of others": (lambda p: index(p).write_text("{}"), "index.json is not the index"),
    "later version": (lambda p: in_index(p, lambda told: told.update(version=9)), "index.json is of another version"),
    "index without a piece": (lambda p: in_index(p, gap, resign=True), "model/frozen.weight lacks elements"),
    "index with a wrong key": (lambda p: in_index(p, other_piece, resign=True), "has no model/nothing"),
    "index to elsewhere": (lambda p: in_index(p, escape, resign=True), "none of its files"),
    "no index": (lambda p: index(p).unlink(), "names '00000001', which is no checkpoint"),
    "no latest": (lambda p: (p / "latest").unlink(), "has the checkpoints 00000001"),
    "binary latest": (lambda p: (p / "latest").write_bytes(b"\xff\xfe"), "has the checkpoints 00000001"),
    "latest elsewhere": (lambda p: (p / "latest").write_text("../../etc"), "which is no checkpoint"),
    "half a save": (only_partial, "no checkpoint in it"),
    "nothing": (shutil.rmtree, "is not there"),
    "a file": (a_file, "is no directory"),
    "pickle as data": (lambda p: first(p).write_bytes(crafted(p)), FIRST + " has"),
    "pickle as index": (lambda p: index(p).write_bytes(crafted(p)), "index.json"),
}  # fmt: skip


def refused(rank, world, stage, paths):
    model, optimizer = CONFIG.build(stage, seed=1)
    steps(model, optimizer, 7, 1)
    before, told = whole(model, optimizer), []
    for path in paths:
        began = time.monotonic()
        with pytest.raises(zero.checkpoint.CheckpointError) as caught:
            zero.checkpoint.load(path, model, optimizer)
        assert time.monotonic() - began < 5
        assert not differences(before, whole(model, optimizer)), path
        told.append(str(caught.value))
    steps(model, optimizer, 2, 1)
    return told


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_damaged_checkpoint_is_refused_on_every_rank_and_changes_nothing(stage, good, tmp_path):
    paths = []
    for name, (damage, _) in DAMAGE.items():
        path = tmp_path / name.replace(" ", "-")
        shutil.copytree(good, path)
        damage(path)
        paths.append(str(path))
    messages = ranks.run(refused, 2, (stage, paths))
    assert messages[0] == messages[1]
    for (name, (_, expected)), message in zip(DAMAGE.items(), messages[0], strict=True):
        assert re.search(expected, message), f"{name}: {message}"
    assert not list(tmp_path.rglob(CANARY)), "a crafted file ran code"


# ----------------------------------------------------------------------------------------------- once all was checked


def failing_disk(rank):
    """On rank 1, the third tensor that is read for good cannot be read."""
    read, calls = SafeFile.read, []

    def sometimes(self, *args):
        calls.append(args)
        if rank == 1 and len(calls) == 3:
            raise FileProblem(f"{self.place} cannot be read (Input/output error)")
        read(self, *args)

    return mock.patch.object(SafeFile, "read", sometimes)


def refusing_optimizer(rank):
    def refuse(self, state_dict):
        raise RuntimeError("not this state")

    return mock.patch.object(torch.optim.AdamW, "load_state_dict", refuse) if rank else nullcontext()


def fails_late(rank, world, path, stage, failure):
    model, optimizer = CONFIG.build(stage)
    checkpoints = []
    for step in range(2):
        steps(model, optimizer, step, 1)
        checkpoints.append((zero.checkpoint.save(path, model, optimizer).path, whole(model, optimizer)))
    steps(model, optimizer, 2, 1)
    with failure(rank), pytest.raises(zero.checkpoint.CheckpointError) as caught:
        zero.checkpoint.load(path, model, optimizer)
    for saved, expected in checkpoints:
        zero.checkpoint.load(saved, model, optimizer)
        assert not differences(expected, whole(model, optimizer))
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    ("failure", "expected"), [(failing_disk, "Input/output error"), (refusing_optimizer, "not this state")]
)
def test_a_load_that_fails_late_says_on_every_rank_that_the_model_is_half_loaded(stage, failure, expected, tmp_path):
    """There is no way back without a second copy of everything; the next load makes it whole."""
    first, second = ranks.run(fails_late, 2, (str(tmp_path), stage, failure))
    assert first == second
    assert expected in first and "partly as before and partly as saved" in first and "rank 1" in first


# ------------------------------------------------------------------------------------------------------ what differs


def load_into(rank, world, path, build):
    model, optimizer = build(rank)
    zero.checkpoint.load(path, model, optimizer)


def of_tiny(optim, width=8, **options):
    model = tiny(width)
    return model, optim(model.parameters(), **options)


def renamed(_):
    return with_adam(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)))


def two_groups(_):
    model = tiny()
    first, *rest = model.parameters()
    return model, adam()([{"params": [first]}, {"params": rest}])


def fewer(_):
    model = tiny()
    return model, adam()(list(model.parameters())[1:])


def of_integers(_):
    model, optimizer = of_tiny(adam())
    model.register_buffer("count", torch.zeros(3, dtype=torch.int64))
    return model, optimizer


def untied(_):
    model = tiny()
    return model, [adam()(model.parameters()), adam()(model.parameters())]


@pytest.fixture(scope="module")
def saved_tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "run"
    model, optimizer = of_tiny(adam())
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    zero.checkpoint.save(path, model, optimizer)
    return path


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (renamed, ["it has nothing for: 1.weight, 1.bias|the model has no: ", r"2\.weight"]),
        (of_integers, ["it has nothing for: count"]),
        (two_groups, ["has 1 parameter groups, the optimizer here has 2"]),
        (fewer, [r"state of 0\.weight, which the Adam here does not have"]),
        (untied, ["saved with 1 optimizers, but 2"]),
    ],
)
def test_another_model_or_optimizer(build, expected, saved_tiny):
    with pytest.raises(zero.checkpoint.CheckpointError) as caught:
        load_into(0, 1, saved_tiny, build)
    for pattern in expected:
        assert re.search(pattern, str(caught.value)), str(caught.value)


def of_sharded(optim, width=8, **options):
    model = zero.FSDP(tiny(width))
    return model, optim(model.parameters(), **options)


MISFITS = {  # what is saved, and what is to take it
    "another width": (adam(), lambda: of_sharded(adam(), width=9)),
    "another optimizer": (adam(), lambda: of_sharded(torch.optim.SGD, lr=0.1)),
    "cut state": (Blockwise, lambda: of_sharded(Blockwise)),  # only seen where a rank has a shard
}


def save_misfits(rank, world, path):
    for name, (optim, _) in MISFITS.items():
        model, optimizer = of_tiny(optim)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        zero.checkpoint.save(f"{path}/{name}", model, optimizer)


def refuse_misfits(rank, world, path):
    told = []
    for name, (_, build) in MISFITS.items():
        model, optimizer = build()
        before = whole(model, optimizer)
        with pytest.raises(zero.checkpoint.CheckpointError) as caught:
            zero.checkpoint.load(f"{path}/{name}", model, optimizer)
        assert not differences(before, whole(model, optimizer))
        told.append(str(caught.value))
    return told


def test_a_misfit_is_refused_on_every_rank_and_changes_nothing(tmp_path):
    ranks.run(save_misfits, 2, (str(tmp_path),))
    first, second, third = ranks.run(refuse_misfits, 3, (str(tmp_path),))
    assert first == second == third
    width = "0.weight (saved float32 [8, 4], here float32 [9, 4])"
    for message, expected in zip(first, [width, "is SGD", "is cut between ranks here"], strict=True):
        assert expected in message


def test_an_optimizer_that_was_not_saved(tmp_path):
    model, optimizer = of_tiny(adam())
    zero.checkpoint.save(tmp_path, model)
    with pytest.raises(zero.checkpoint.CheckpointError, match="saved with no optimizer"):
        zero.checkpoint.load(tmp_path, model, optimizer)


def differing_paths(rank, world, path):
    model, optimizer = CONFIG.build(3)
    zero.checkpoint.save(f"{path}/{rank}", model, optimizer)


def differing_load(rank, world, path):
    model, optimizer = CONFIG.build(3)
    zero.checkpoint.load(f"{path}{rank}", model, optimizer)


def test_paths_that_differ(tmp_path):
    ranks.expect_error(
        differing_paths, 2, "CheckpointError", "differ between ranks", str(tmp_path), args=(str(tmp_path),)
    )
    ranks.expect_error(
        differing_load, 2, "CheckpointError", "differ between ranks", str(tmp_path), args=(str(tmp_path),)
    )
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------ saving


def save_somewhere(rank, world, path, extra=None):
    model, optimizer = CONFIG.build(3)
    zero.checkpoint.save(path, model, optimizer, extra=extra)


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for path in [tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")]:
        ranks.expect_error(save_somewhere, 2, "CheckpointError", "could not be written", args=(str(path),))


@pytest.mark.parametrize("extra", [[1], {1: 2}])
def test_extra_that_is_no_dictionary_of_names(extra, tmp_path):
    with pytest.raises(zero.checkpoint.CheckpointError, match="strings for keys"):
        zero.checkpoint.save(tmp_path, tiny(), extra=extra)


@ranks.raises(2, "CheckpointError", "is not in the state_dict")
def test_an_optimizer_of_another_model(rank, world, tmp_path):
    model, _ = CONFIG.build(3)
    zero.checkpoint.save(tmp_path, model, adam()(nn.Linear(2, 2).parameters()))


def full_disk(rank, world, path):
    model, optimizer = of_tiny(adam(), width=60_000)
    zero.checkpoint.save(path, model, optimizer, extra={"step": 1})
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    told = messages_of_failing_saves(path, model, optimizer)
    assert zero.checkpoint.load(path, model) == {"step": 1}
    return told


def test_a_full_disk(tmp_path):
    """Room for the first save, without optimizer state, and not for the second."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mount.stderr.strip()}")
    try:
        for messages in ranks.run(full_disk, 2, (str(disk),)):
            assert all("No space left" in message and "rank-0000" in message for message in messages)
        assert sorted(one.name for one in disk.iterdir()) == ["00000001", "latest"]
        readonly = subprocess.run(["mount", "-o", "remount,ro", disk], capture_output=True, text=True)
        assert not readonly.returncode, readonly.stderr
        ranks.expect_error(save_somewhere, 2, "CheckpointError", "Read-only file system", args=(str(disk),))
    finally:
        subprocess.run(["umount", disk], check=True)


def one_rank_cannot_write(rank, world, path):
    """Not even to say so."""
    model, optimizer = CONFIG.build(3)
    zero.checkpoint.save(path, model, optimizer, extra={"step": 1})

    def refuse(self, *args):
        raise OSError(28, "No space left on device", str(self))

    patches = [mock.patch.object(Local, name, refuse) for name in ("write", "put")] if rank else []
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        told = messages_of_failing_saves(path, model, optimizer)
    assert zero.checkpoint.load(path, model, optimizer) == {"step": 1}
    return told


def test_a_rank_that_cannot_write_at_all_is_heard_of(tmp_path):
    for messages in ranks.run(one_rank_cannot_write, 2, (str(tmp_path),), timeout=20.0):
        assert all("rank-00001.safetensors could not be written" in message for message in messages)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["00000001", "latest"]
