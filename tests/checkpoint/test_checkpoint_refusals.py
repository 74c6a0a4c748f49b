"""What cannot be saved is refused on every rank, with what it is, and leaves nothing behind; earlier saves stay."""

import subprocess
from unittest import mock

import numpy as np
import objects
import pytest
import torch
from saved import CASE, Blockwise, Config, Counting, adam, messages_of_failing_saves, steps, tiny, train, with_adam
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

import ranks
import zero
from optimizers import ByParameter

CASES = {}


def case(*words, world=2, given=(None,)):
    """A function of rank, path and what is given that is refused on every rank with these words."""

    def take(function):
        for number, one in enumerate(given):
            name = f"{function.__name__} {number}"
            CASES[name] = pytest.param(function.__name__, one, words, world, id=name)
        return function

    return take


@case("differ between ranks", "/[01]")
def paths_that_differ(rank, path, given):
    zero.checkpoint.save(path / str(rank), *Config().build(3))


@case("differ between ranks", "[01]")
def paths_that_differ_in_a_load(rank, path, given):
    zero.checkpoint.load(path / str(rank), *Config().build(3))


@case("differ between ranks", world=4)
def a_path_of_one_replica(rank, path, given):
    mesh = init_device_mesh("cpu", (2, 2))
    model = zero.FSDP(CASE.model(), sharding_strategy="HYBRID_SHARD", device_mesh=mesh)
    zero.checkpoint.save(path / str(rank == 3), model)


@case("could not be written", given=(__file__, f"{__file__}/run", "/proc/run"))
def a_run_where_there_can_be_none(rank, path, given):
    zero.checkpoint.save(given, *Config().build(3))


@case("strings for keys", given=([1], {1: 2}))
def extra_without_names(rank, path, given):
    zero.checkpoint.save(path, zero.FSDP(tiny()), extra=given)


@case("is not in the state_dict")
def an_optimizer_of_another_model(rank, path, given):
    zero.checkpoint.save(path, Config().build(3)[0], adam()(nn.Linear(2, 2).parameters()))


@case("Save and load between steps")
def parameters_that_are_summoned(rank, path, given):
    model, _ = Config().build(3)
    with model.summon_full_params():
        zero.checkpoint.save(path, model)


@case("absmax has shape", "partition='whole'")
def state_whose_place_is_not_known(rank, path, given):
    model = CASE.model()
    optimizer = zero.OSS(model.parameters(), Blockwise, lr=0.1, granularity=8)
    steps(DistributedDataParallel(model, **CASE.ddp), optimizer, 0, 1)
    zero.checkpoint.save(path, model, optimizer)


class History(ByParameter):
    """Keeps past gradients in a list."""

    def step_one(self, param, state, group):
        state["history"] = [param.grad.clone(), torch.zeros_like(param)]


@case("history is a list of tensors", "partition='whole'", given=(1, 2, 3))
def lists_of_tensors_where_parameters_are_cut(rank, path, given):
    model, optimizer = zero.setup(tiny(100), History, stage=given, partition="even", lr=0.1)
    train(model, optimizer, 1)
    zero.checkpoint.save(path, model, optimizer)


class Sharding(SGD):
    """Has another optimizer step what this rank owns, as torch's ZeroRedundancyOptimizer does."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.optim = Adam(self.param_groups[0]["params"][:1])


@case(r"Sharding .*\(Adam\)", "zero.OSS")
def an_optimizer_that_keeps_its_state_in_another(rank, path, given):
    model = tiny()
    zero.checkpoint.save(path, DistributedDataParallel(model), Sharding(model.parameters()))


def save_differing(rank, path, model, param, in_state=False):
    """In the first element of the parameter, or of its state."""
    optimizer = adam()([param for param in model.parameters() if param.requires_grad])
    train(model, optimizer)
    with torch.no_grad():
        (optimizer.state[param]["exp_avg"] if in_state else param).view(-1)[0] += rank
    zero.checkpoint.save(path, model, optimizer)


@case("differ between ranks", "rank 1 has model/0.weight")
def parameters_that_are_ignored_and_differ(rank, path, given):
    model = tiny()
    save_differing(rank, path, zero.FSDP(model, ignored_parameters=[model[0].weight]), model[0].weight)


@case("differ between ranks", "rank 1 has model/2.bias")
def plain_parameters_that_differ(rank, path, given):
    model = tiny()
    save_differing(rank, path, model, model[2].bias)


@case("differ between ranks", "rank 1 has optimizer/0/2.bias/exp_avg")
def plain_state_that_differs(rank, path, given):
    model = tiny().requires_grad_(False)
    save_differing(rank, path, model, model[2].bias.requires_grad_(), in_state=True)


class Moody(nn.Linear):
    def get_extra_state(self):
        raise RuntimeError("not today")


@case("on rank 1", "state_dict.. raised RuntimeError: not today")
def a_module_that_one_rank_cannot_save(rank, path, given):
    zero.checkpoint.save(path, DistributedDataParallel((Moody if rank else nn.Linear)(2, 2)))


@case("on rank 1", "16610 bits|MaskedArray", given=(10**5000, np.ma.masked_array([1.0], [True])))
def a_value_that_one_rank_cannot_save(rank, path, given):
    zero.checkpoint.save(path, DistributedDataParallel(tiny()), extra={"value": given if rank else 1})


@pytest.mark.parametrize(("name", "given", "words", "world"), CASES.values())
def test_what_cannot_be_saved_is_refused_on_every_rank_and_leaves_nothing(name, given, words, world, tmp_path):
    ranks.expect_error(refused, world, "CheckpointError", *words, args=(name, tmp_path, given), timeout=20)
    assert not list(tmp_path.iterdir())


def refused(rank, world, name, path, given):
    globals()[name](rank, path, given)


# ------------------------------------------------------------------------------ extra state that a module refuses


class Choosy(Counting):
    def set_extra_state(self, state):
        if state > 5:
            raise RuntimeError("too many")
        super().set_extra_state(state)


@ranks.on(2)
def test_modules_that_took_their_extra_state_get_theirs_back_when_another_refuses(rank, world, tmp_path):
    """On one rank."""
    model, optimizer = with_adam(zero.FSDP(nn.Sequential(Counting(), (Choosy if rank else Counting)())))
    for seen in (1, 9):
        for module in model.module:
            module.seen = seen
        for param in model.parameters():
            param.data.fill_(seen)
        zero.checkpoint.save(tmp_path / str(seen), model, optimizer)
    zero.checkpoint.load(tmp_path / "1", model, optimizer)
    with pytest.raises(zero.checkpoint.CheckpointError, match=r"too many.*rank 1"):
        zero.checkpoint.load(tmp_path / "9", model, optimizer)
    assert all((value == 1).all() for value in zero.full_state_dict(model).values() if isinstance(value, torch.Tensor))
    assert [module.seen for module in model.module] == [1, 1]


# --------------------------------------------------------------------------------------------------------- full disks


def full_disk(rank, world, path):
    model, optimizer = with_adam(tiny(60_000))
    zero.checkpoint.save(path, model, optimizer, extra={"step": 1})
    train(model, optimizer, 1)
    told = messages_of_failing_saves(path, model, optimizer)
    assert zero.checkpoint.load(path, model) == {"step": 1}
    return told


def save_tiny(rank, world, path):
    zero.checkpoint.save(path, zero.FSDP(tiny()))


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
        ranks.expect_error(save_tiny, 2, "CheckpointError", "Read-only file system", args=(str(disk),))
    finally:
        subprocess.run(["umount", disk], check=True)


def one_rank_cannot_write(rank, world, url):
    """Not even to say so."""
    model, optimizer = Config().build(3)
    zero.checkpoint.save(url, model, optimizer, extra={"step": 1})
    refuse = mock.Mock(side_effect=OSError(28, "No space left on device"))
    with mock.patch.object(objects.Upload, "close", refuse if rank else objects.Upload.close):
        told = messages_of_failing_saves(url, model, optimizer)
    assert zero.checkpoint.load(url, model, optimizer) == {"step": 1}
    return told


@pytest.mark.slow
def test_a_rank_that_cannot_write_at_all_is_heard_of(tmp_path):
    for messages in ranks.run(one_rank_cannot_write, 2, (f"objects://{tmp_path}",), timeout=20.0):
        assert all("rank-00001.safetensors could not be written" in message for message in messages)
