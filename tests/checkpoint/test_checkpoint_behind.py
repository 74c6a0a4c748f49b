"""A save behind training (wait=False): what fails there is heard of, and nobody reads past one that is unfinished."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
import torch.distributed as dist
from saved import Config, adam, differences, read_plainly, steps, tiny

import ranks
import zero
from processes import ROOT
from ranks import refusal
from zero.checkpoint import CheckpointError, write
from zero.checkpoint.write import Saving

ON_FULL_DISK = """
import atexit, sys
from unittest import mock
import torch
from zero.checkpoint import save, write
atexit.register(print, "left well")
with mock.patch.object(write, "write", side_effect=OSError(28, "No space left on device")):
    saving = save(sys.argv[1], torch.nn.Linear(2, 2), wait=False)
    saving._written.wait()
print("trained")
"""


@pytest.mark.slow
def test_a_last_save_that_fails_and_is_not_waited_for_is_told_at_exit(tmp_path):
    command = [sys.executable, "-c", ON_FULL_DISK, str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.stdout == "trained\nleft well\n"
    assert ended.returncode == 120, ended.stderr
    [line] = ended.stderr.splitlines()
    assert all(words in line for words in (str(tmp_path / "run"), "No space left on device", "wait()"))


def slowly(work):
    def later(*args, **options):
        time.sleep(0.3)
        return work(*args, **options)

    return later


@pytest.mark.slow
@ranks.on(2)
def test_a_load_waits_for_the_save_that_is_being_written_and_raises_what_that_raises(rank, world, tmp_path):
    model, optimizer = zero.setup(tiny(), adam(), stage=3)
    zero.checkpoint.save(tmp_path, model, optimizer, extra={"step": 1})
    with mock.patch.object(write, "write_rank_file", slowly(write.write_rank_file)):
        zero.checkpoint.save(tmp_path, model, optimizer, extra={"step": 2}, wait=False)
        assert zero.checkpoint.load(tmp_path, model, optimizer) == {"step": 2}
        zero.checkpoint.save(tmp_path, model, optimizer, extra={"step": 3}, wait=False)
        assert zero.checkpoint.load(tmp_path / "00000003", model, optimizer) == {"step": 3}
    with mock.patch.object(write, "write_rank_file", raising(OSError(28, "full")) if rank else write.write_rank_file):
        zero.checkpoint.save(tmp_path, model, optimizer, extra={"step": 4}, wait=False)
        told = refusal(lambda: zero.checkpoint.load(tmp_path, model, optimizer))
    assert told.startswith("CheckpointError") and "rank-00001.safetensors could not be written (full)" in told
    assert zero.checkpoint.load(tmp_path, model, optimizer) == {"step": 3}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_masters_are_written_as_they_were_whatever_training_does_to_parameters_meanwhile(rank, world, stage, tmp_path):
    model, optimizer = Config(masters=True).build(stage)
    steps(model, optimizer, 0, 2)
    zero.checkpoint.save(tmp_path / "waiting", model, optimizer)
    with mock.patch.object(write, "write_rank_file", slowly(write.write_rank_file)):
        saving = zero.checkpoint.save(tmp_path / "behind", model, optimizer, wait=False)
        steps(model, optimizer, 2, 1)
        saving.wait()
    waiting, behind = (read_plainly(tmp_path / name / "00000001") for name in ("waiting", "behind"))
    assert not differences(waiting, behind)


@pytest.mark.slow
@ranks.on(2)
def test_a_load_by_some_of_the_ranks_that_save_says_to_wait_first_until_all_is_written(rank, world, tmp_path):
    alone = [dist.new_group([one]) for one in range(world)][rank]
    with mock.patch.object(write, "write_rank_file", slowly(write.write_rank_file)):
        saving = zero.checkpoint.save(tmp_path, zero.FSDP(tiny()), extra={"step": 1}, wait=False)
        told = refusal(lambda: zero.checkpoint.load(tmp_path, tiny(), process_group=alone))
        saving._thread.join()
    assert "still being saved by 2 ranks" in told and "Call wait()" in told
    dist.barrier()
    assert zero.checkpoint.load(tmp_path, tiny(), process_group=alone) == {"step": 1}


def raising(what):
    return mock.Mock(side_effect=what)


FORBIDDEN = PermissionError(1, "Operation not permitted")
CANNOT_ALLOCATE = RuntimeError("can't allocate memory")


@pytest.mark.slow
@ranks.on(2, timeout=20.0)
def test_whatever_raises_before_or_on_the_thread_is_raised_on_every_rank(rank, world, tmp_path):
    """In a container that forbids priorities, the save succeeds."""
    model, told = zero.FSDP(tiny()), []
    with mock.patch.object(os, "setpriority", raising(FORBIDDEN)):
        zero.checkpoint.save(tmp_path, model, extra={"step": 1}, wait=False).wait()
    staged = write.staged
    with mock.patch.object(write, "staged", raising(CANNOT_ALLOCATE) if rank else staged):
        told.append(refusal(lambda: zero.checkpoint.save(tmp_path, model, wait=False)))
    with mock.patch.object(write, "staged", lambda *given: (staged(*given)[0], raising(CANNOT_ALLOCATE))):
        told.append(refusal(zero.checkpoint.save(tmp_path, model, wait=False).wait))
    assert all("can't allocate memory" in one and one.startswith("CheckpointError") for one in told), told
    assert zero.checkpoint.load(tmp_path, model) == {"step": 1}


@pytest.fixture
def interruptible():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_wait_that_is_interrupted_while_a_file_is_written_can_be_called_again(interruptible, tmp_path):
    with mock.patch.object(write, "write_rank_file", slowly(write.write_rank_file)):
        saving = zero.checkpoint.save(tmp_path, tiny(), extra={"step": 1}, wait=False)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            saving.wait()
        with pytest.raises(RuntimeError, match="still being written"):
            print(saving.path)
        saving.wait()
    assert saving.path == tmp_path / "00000001"
    assert zero.checkpoint.load(tmp_path, tiny()) == {"step": 1}


def test_a_wait_that_is_interrupted_among_ranks_does_not_return_as_if_all_were_complete(tmp_path):
    saving = zero.checkpoint.save(tmp_path, tiny(), wait=False)
    with mock.patch.object(Saving, "_agree", raising(KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
        saving.wait()
    with pytest.raises(CheckpointError, match=r"interrupted \(KeyboardInterrupt\(\)\).* nobody knows"):
        saving.wait()
    with pytest.raises(RuntimeError, match="interrupted"):
        print(saving.path)
    zero.checkpoint.save(tmp_path, tiny(), extra={"step": 2})
    assert zero.checkpoint.load(tmp_path, tiny()) == {"step": 2}


@pytest.mark.slow
@ranks.on(2, timeout=20.0)
def test_a_save_whose_files_somebody_removes_does_not_wait_for_them(rank, world, tmp_path):
    def instead_of_writing(file, *given, **how):
        time.sleep(0.2)
        file.parent.remove()

    with mock.patch.object(write, "write_rank_file", instead_of_writing if rank else write.write_rank_file):
        told = refusal(zero.checkpoint.save(tmp_path, zero.FSDP(tiny()), wait=False).wait)
    assert re.search(r"^CheckpointError: .*could not be written \(No such file", told)
