"""A save behind training (wait=False): what fails there is heard of, and nobody reads past one that is unfinished."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from itertools import product
from pathlib import Path
from unittest import mock

import objects
import pytest
import torch
import torch.distributed as dist
from saved import Config, adam, differences, read_plainly, steps, tiny
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import matrix
import ranks
import zero
from processes import ROOT
from ranks import refusal
from runs import take_step
from transports import TRANSPORTS, by
from zero.checkpoint import CheckpointError, storage, write
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
@pytest.mark.parametrize(("stage", "masters"), [(1, True), (2, True), (3, True), (2, False), (3, False)])
@ranks.on(2)
def test_what_is_written_is_what_was_there_when_the_save_began(rank, world, stage, masters, tmp_path):
    """Whatever training does to parameters, and writes into their data, meanwhile."""
    model, optimizer = Config(masters=masters).build(stage)
    steps(model, optimizer, 0, 2)
    zero.checkpoint.save(tmp_path / "waiting", model, optimizer)
    with mock.patch.object(write, "write_rank_file", slowly(write.write_rank_file)):
        handle = zero.checkpoint.save(tmp_path / "behind", model, optimizer, extra={"step": 1}, wait=False)
        if not masters:
            torch._foreach_zero_([param.data for param in model.parameters()])
        steps(model, optimizer, 2, 1)
        second = zero.checkpoint.save(tmp_path / "behind", model, optimizer, extra={"step": 2}, wait=False)
        handle.wait()  # the second save has done it, and it may be done again
        second.wait()
    assert [handle.path.name, second.path.name] == ["00000001", "00000002"]
    waiting, behind = (read_plainly(tmp_path / name / "00000001") for name in ("waiting", "behind"))
    assert not differences(waiting, behind)
    assert differences(waiting, read_plainly(tmp_path / "behind" / "00000002"))


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


# A save is seen whole or not at all, whatever moment it ends at; older ones go when newer ones are there.


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


CALLS = ("fsync", "replace", "unlink", "rmdir")
"""Of the system, by which a save changes what is on disk."""


class AtACall:
    """A context in which one of the calls is interrupted: by Ctrl-C, which the main thread has seen when the call goes
    on, or by an error. left: how many calls still succeed. on_thread: those of a thread count alone, and wait for
    `may_begin`."""

    def __init__(self, how, left, *, on_thread):
        self.how, self.left, self.on_thread = how, left, on_thread
        self.seen, self.may_begin, self.patches = threading.Event(), threading.Event(), ExitStack()

    def __enter__(self):
        for name in CALLS:
            self.patches.enter_context(mock.patch.object(os, name, partial(self.call, getattr(os, name))))
        before = signal.signal(signal.SIGINT, self.interrupt)
        self.patches.callback(signal.signal, signal.SIGINT, before)
        return self

    def __exit__(self, *_):
        self.patches.close()

    def interrupt(self, *_):
        self.seen.set()
        raise KeyboardInterrupt

    def call(self, real, *args, **how):
        if not self.on_thread or threading.current_thread() is not threading.main_thread():
            self.left -= 1
            if self.left == -1 and self.how == "Ctrl-C":
                assert not self.on_thread or self.may_begin.wait(10)
                os.kill(os.getpid(), signal.SIGINT)
                assert self.seen.wait(10)
            elif self.left == -1:
                raise OSError(5, "Input/output error")
        return real(*args, **how)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("how", ["Ctrl-C", "an error"])
def test_a_save_that_is_interrupted_at_any_call_loses_no_complete_checkpoint(how, wait, tmp_path):
    """Also where it removes the one before. The next save goes on, and removes what was left."""
    for number in range(100):
        run, model = tmp_path / str(number), tiny()
        zero.checkpoint.save(run, model, extra={"step": 1}, keep=1)
        with AtACall(how, number, on_thread=not wait) as at, suppress(KeyboardInterrupt, CheckpointError):
            saving = zero.checkpoint.save(run, model, extra={"step": 2}, keep=1, wait=wait)
            at.may_begin.set()
            saving.wait()
        with suppress(CheckpointError):  # where it has waited for its own file alone, it says now how it ended
            zero.checkpoint.load(run, model)
        assert zero.checkpoint.load(run, model)["step"] in (1, 2), number
        zero.checkpoint.save(run, model, extra={"step": 3}, keep=1)
        assert zero.checkpoint.load(run, model) == {"step": 3}
        assert len([one for one in run.iterdir() if one.is_dir()]) == 1, number
        if at.left >= 0:
            break
    assert 10 < number < 99


# Two programs that save to one run need not both succeed. No complete checkpoint is lost, and the latest is one.


def complete(checkpoint, keep=None):
    (checkpoint / "rank-00000.safetensors").put(b"data")
    storage.publish(checkpoint, b"{}", keep)


def test_a_save_that_another_program_takes_for_interrupted_fails_alone(tmp_path):
    run = storage.place(tmp_path)
    one = storage.begin(run)
    other = storage.begin(run)
    assert (one.name, other.name) == ("00000001", "00000002")
    with pytest.raises(FileNotFoundError):
        complete(one)
    complete(other)
    assert storage.resolve(run) == other and {each.name for each in run.inside()} == {other.name, "latest"}


def test_a_save_that_completes_while_another_program_takes_it_for_interrupted_stays(tmp_path):
    run, move = storage.place(tmp_path), storage.Place.move
    one = storage.begin(run)

    def completed_before(place, to):
        if place == one:
            complete(one)
        move(place, to)

    with mock.patch.object(storage.Place, "move", completed_before):
        other = storage.begin(run)
    assert storage.resolve(run) == one
    complete(other)
    assert storage.checkpoints(run) == [one, other] and storage.resolve(run) == other


def test_two_saves_that_begin_at_once_are_two_and_the_newer_stays(tmp_path):
    run = storage.place(tmp_path)
    with mock.patch.object(storage.Place, "inside", return_value=[]):  # neither sees the other
        one, other = storage.begin(run), storage.begin(run)
    assert one != other
    complete(other, keep=1)
    complete(one, keep=1)
    assert storage.resolve(run) == other and storage.checkpoints(run) == [other]


def test_a_run_by_a_link_is_the_run(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with mock.patch.object(write, "write_rank_file", slowly(write.write_rank_file)):
        behind = zero.checkpoint.save(tmp_path / "link", tiny(), extra={"step": 1}, wait=False)
        zero.checkpoint.save(tmp_path / "run", tiny(), extra={"step": 2})
    for path, step in [(behind.path, 1), (tmp_path / "link", 2)]:
        assert zero.checkpoint.load(path, tiny()) == {"step": step}


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


# A save at any moment of a step, on all ranks or on one alone: what it writes is what there is, or every rank raises.


WITHIN_A_STEP = {
    "backward": lambda model, optimizer, act: model.module[1][0].weight.register_post_accumulate_grad_hook(act),
    "a gradient": lambda model, optimizer, act: model.module[1].register_forward_hook(
        lambda module, given, out: out.register_hook(act) and None
    ),
    "forward": lambda model, optimizer, act: model.module[1][1].register_forward_hook(act),
    "before the step": lambda model, optimizer, act: optimizer.register_step_pre_hook(act),
    "after the step": lambda model, optimizer, act: optimizer.register_step_post_hook(act),
}
REFUSED = {"backward", "a gradient", "forward"}
"""At stage 3."""


def build(stage):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
    wrapped = {"auto_wrap_policy": ModuleWrapPolicy({nn.Sequential})} if stage == 3 else {}
    return zero.setup(model, adam(), stage=stage, **wrapped)


def at_a_moment(rank, world, transport, stage, moment, count, call, path):
    """What each rank is told where all act, then where one does; and the weights that were saved, and those then."""
    with by(transport):
        model, optimizer = build(stage)
        zero.checkpoint.save(path, model, optimizer)
        acting, then = [], []

        def act(*_):
            if rank in acting:
                acting.clear()
                call(path, model, optimizer)

        handle = WITHIN_A_STEP[moment](model, optimizer, act)
        batch = torch.randn(4, 8)

        def step():
            take_step(optimizer, model(batch).square().mean())

        for _ in range(count):
            step()
        then.append(zero.full_state_dict(model, to=None))
        acting += range(world)
        all_told = ranks.refusal(step)
        assert not acting
        then.append(zero.full_state_dict(model, to=None))
        if not all_told and call is zero.checkpoint.save:
            other = build(0)[0]
            zero.checkpoint.load(path, other)
            saved = zero.full_state_dict(other, to=None)
            expected = then[moment == "after the step"]
            assert all(torch.equal(saved[name], value) for name, value in expected.items())
        step()
        acting += [1]
        one_told = ranks.refusal(lambda: [step() for _ in range(2)])
        handle.remove()
        return all_told, one_told


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "stage", "transport"), [*product(WITHIN_A_STEP, (1, 2, 3), TRANSPORTS)])
def test_a_save_in_a_step_is_right_or_refused_on_every_rank(moment, stage, transport, tmp_path):
    for count in (0, 4) if stage == 3 else (2,):
        args = (transport, stage, moment, count, zero.checkpoint.save, str(tmp_path / str(count)))
        found = ranks.run(at_a_moment, 2, args)
        words = r"zero\.checkpoint\.save was called .*within forward, backward.*Call it between steps"
        for all_told, one_told in found:
            refused = stage == 3 and moment in REFUSED
            assert re.search(f"^CheckpointError: {words}", all_told) if refused else not all_told, all_told
            assert re.search(words if refused else "out of step", one_told), one_told
        assert "zero.checkpoint.save" in found[1][1]
