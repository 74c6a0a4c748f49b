"""A save is seen whole or not at all, whatever moment it ends at; older ones go when newer ones are there."""

import os
import random
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import objects
import pytest
import torch
from saved import adam, differences, read_plainly, tiny, train

import matrix
import ranks
import zero

MOMENTS = {"": 50, "objects://": 50} if matrix.WHOLE else {"": 3, "objects://": 1}
WIDTH = 40_000  # a save takes about 20 ms


def fill(model, number):
    """The model's parameters all have the value of the step, so that a mixture of two saves would show."""
    with torch.no_grad(), model.summon_full_params():
        for param in model.parameters():
            param.fill_(number)


def save_until_killed(rank, world, path, victim, delay, wait, one_before):
    """one_before: one save is made, whatever time it takes, before the time runs."""
    model, optimizer = zero.setup(tiny(WIDTH), torch.optim.SGD, stage=3, lr=0.0)
    first = zero.checkpoint.load(path, model, optimizer)["step"] + 1
    if one_before:
        fill(model, first)
        zero.checkpoint.save(path, model, optimizer, extra={"step": first}, keep=2)
        first += 1
    if rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for number in range(first, first + 1000):
        fill(model, number)
        zero.checkpoint.save(path, model, optimizer, extra={"step": number}, keep=2, wait=wait)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.matrix
@pytest.mark.parametrize("scheme", MOMENTS)
def test_a_rank_killed_at_any_moment_leaves_the_latest_whole(scheme, tmp_path):
    path = f"{scheme}{tmp_path}"
    model = tiny(WIDTH)
    zero.checkpoint.save(path, model, torch.optim.SGD(model.parameters(), lr=0.0), extra={"step": 0})
    moments, last = random.Random(0), 0
    for number in range(MOMENTS[scheme]):
        args = (path, number % 2, moments.uniform(0.02, 0.25), number % 3 != 2, number % 4 < 2)
        with pytest.raises(ranks.RankError, match="died with exit code -9"):
            ranks.run(save_until_killed, 2, args)
        step = zero.checkpoint.load(path, model)["step"]
        assert step >= last + (number % 4 < 2)
        last = step
        for name, param in model.named_parameters():
            assert (param == step).all(), f"{name} is not of the save that {tmp_path / 'latest'} names"
    saving = zero.checkpoint.save(path, model, keep=1)
    left = {one.name for one in tmp_path.iterdir() if not one.name.startswith(objects.UPLOAD)}
    assert left == {Path(saving.path).name, "latest"}, "what the killed left was not removed"


def test_a_name_is_given_when_all_that_it_names_is_on_disk(tmp_path):
    """A crash of the machine, too, leaves the latest whole: the order of syncs and renames, as the system is told."""
    synced, named, sync, rename = set(), [], os.fsync, os.replace

    def record_sync(descriptor):
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    def record_name(path, target):
        inside = {str(one) for one in Path(path).parent.rglob("*")} | {str(Path(path).parent)}
        named.append((Path(target).name, {Path(one).name for one in inside - synced}))
        rename(path, target)
        synced.discard(str(Path(target).parent))
        synced.add(target)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(os, "fsync", record_sync))
        patches.enter_context(mock.patch.object(os, "replace", record_name))
        zero.checkpoint.save(tmp_path / "run", tiny())
    part = "rank-00000.safetensors.json"
    assert [name for name, _ in named] == ["rank-00000.safetensors", part, "index.json", "latest"]
    assert [unsynced for _, unsynced in named] == [{"00000001"}, {"00000001"}, set(), set()]
    assert str(tmp_path / "run") in synced, "the last rename itself is not on disk"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(2)
def test_what_is_written_behind_training_is_what_was_there_when_it_began(rank, world, stage, tmp_path):
    model, optimizer = zero.setup(tiny(WIDTH), adam(), stage=stage)
    train(model, optimizer, 1)
    zero.checkpoint.save(tmp_path / "waiting", model, optimizer)
    handle = zero.checkpoint.save(tmp_path / "behind", model, optimizer, extra={"step": 1}, wait=False)
    torch._foreach_zero_([param.data for param in model.parameters()])
    train(model, optimizer, 1)
    second = zero.checkpoint.save(tmp_path / "behind", model, optimizer, extra={"step": 2}, wait=False)
    handle.wait()  # the second save has done it, and it may be done again
    train(model, optimizer, 1)
    second.wait()
    assert [handle.path.name, second.path.name] == ["00000001", "00000002"]
    waiting, behind = (read_plainly(tmp_path / name / "00000001") for name in ("waiting", "behind"))
    assert not differences(waiting, behind)
    assert differences(waiting, read_plainly(tmp_path / "behind" / "00000002"))


def never_waited_for(rank, world, path):
    zero.checkpoint.save(path, zero.FSDP(tiny(WIDTH)), wait=False)
    until = time.monotonic() + 5
    while rank == 0 and not os.path.exists(f"{path}/latest") and time.monotonic() < until:
        time.sleep(0.01)


@pytest.mark.slow
def test_a_save_behind_training_that_is_never_waited_for_is_there_all_the_same(tmp_path):
    ranks.run(never_waited_for, 2, (str(tmp_path),), fresh=True)
    zero.checkpoint.load(tmp_path, tiny(WIDTH))


def test_a_directory_that_may_not_be_looked_at_is_not_said_to_be_missing(tmp_path):
    with mock.patch.object(os, "stat", side_effect=PermissionError(13, "Permission denied", str(tmp_path))):
        told = ranks.refusal(lambda: zero.checkpoint.load(tmp_path, tiny()))
    assert told == f"CheckpointError: {tmp_path} cannot be read (Permission denied)."
