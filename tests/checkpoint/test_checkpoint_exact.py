"""What a checkpoint must neither change nor lose: training goes on after it, and values come back, or are refused."""

import copy
import enum

import numpy as np
import pytest
import torch
from saved import tiny, train, with_adam
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

import ranks
import zero
from optimizers import ByParameter
from zero.checkpoint import write


def kept(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return with_adam(zero.FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), reshard_after_forward=False))


@ranks.on(2)
def test_parameters_that_are_kept_whole_train_on_after_a_save_and_a_load(rank, world, tmp_path):
    """Shards that are given up while parameters are unsharded are written, and read into, without being pinned down."""
    model, optimizer = kept()
    train(model, optimizer)
    zero.checkpoint.save(tmp_path, model, optimizer)
    other, other_optimizer = kept(seed=1)
    zero.checkpoint.load(tmp_path, other, other_optimizer)
    expected, found = train(model, optimizer), train(other, other_optimizer)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_model_is_saved_to_two_runs_at_once(tmp_path):
    model, other = nn.Linear(2000, 2000), nn.Linear(2000, 2000)
    saving = []
    for number, run in enumerate(("last", "best")):
        with torch.no_grad():
            model.weight.fill_(number)
        saving.append(zero.checkpoint.save(tmp_path / run, model, wait=False))
    for number, (one, run) in enumerate(zip(saving, ("last", "best"), strict=True)):
        one.wait()
        zero.checkpoint.load(tmp_path / run, other)
        assert (other.weight == number).all()


def test_a_save_that_failed_fails_whenever_it_is_waited_for(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(5, "on fire")

    monkeypatch.setattr(write, "write_rank_file", fail)
    saving = zero.checkpoint.save(tmp_path / "run", tiny(), wait=False)
    for _ in range(2):
        with pytest.raises(zero.checkpoint.CheckpointError, match="on fire"):
            saving.wait()
    with pytest.raises(RuntimeError, match=r"no checkpoint.*on fire"):
        _ = saving.path


class History(ByParameter):
    """Keeps past gradients in a list."""

    def step_one(self, param, state, group):
        state["history"] = [param.grad.clone(), torch.zeros_like(param)]


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.raises(2, "CheckpointError", "history is a list of tensors", "partition='whole'")
def test_lists_of_tensors_are_refused_where_parameters_are_cut(rank, world, stage, tmp_path):
    partition = "even"
    model, optimizer = zero.setup(nn.Linear(64, 64), History, stage=stage, partition=partition, lr=0.1)
    model(torch.ones(5, 64)).sum().backward()
    optimizer.step()
    zero.checkpoint.save(tmp_path, model, optimizer)


class Sharding(SGD):
    """Has another optimizer step what this rank owns, as torch's ZeroRedundancyOptimizer does."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.optim = Adam(self.param_groups[0]["params"][:1])


def test_an_optimizer_that_keeps_its_state_in_another_is_refused(tmp_path):
    model = tiny()
    with pytest.raises(zero.checkpoint.CheckpointError, match=r"the Sharding keeps its state .*\(Adam\).*zero.OSS"):
        zero.checkpoint.save(tmp_path, model, Sharding(model.parameters()))


def mastered(dtype):
    model = nn.Linear(64, 64, bias=False).to(dtype)
    return model, zero.OSS(model.parameters(), SGD, lr=0.0, master_dtype=torch.float32)


def test_masters_are_those_that_were_saved_whatever_16_bits_the_parameters_have(tmp_path):
    model, optimizer = mastered(torch.float16)
    [flat] = optimizer.shards.shard_groups
    flat.master.add_(torch.randn_like(flat.master) * 1e-5)
    with torch.no_grad():
        flat.shard.copy_(flat.master)
    saved = copy.deepcopy(flat.master)
    zero.checkpoint.save(tmp_path, model, optimizer)
    model, optimizer = mastered(torch.bfloat16)
    zero.checkpoint.load(tmp_path, model, optimizer)
    model(torch.ones(1, 64).bfloat16()).sum().backward()
    optimizer.step()  # at a learning rate of nothing
    assert torch.equal(optimizer.shards.shard_groups[0].master, saved)


class Precision(str, enum.Enum):
    HALF = "bf16"


def test_members_of_enums_come_back_as_their_values(tmp_path):
    zero.checkpoint.save(tmp_path, nn.Linear(2, 2), extra={"precision": Precision.HALF})
    assert zero.checkpoint.load(tmp_path, nn.Linear(2, 2)) == {"precision": "bf16"}


class Moody(nn.Linear):
    def get_extra_state(self):
        raise RuntimeError("not today")


@pytest.mark.parametrize(
    ("what", "words"),
    [("state", "state_dict.. raised RuntimeError: not today"), ("integer", "16610 bits"), ("masked", "MaskedArray")],
)
@ranks.raises(2, "CheckpointError", "on rank 1", timeout=20)
def test_what_one_rank_cannot_save_is_heard_of_on_all(rank, world, what, words, tmp_path):
    model = Moody(2, 2) if rank and what == "state" else nn.Linear(2, 2)
    extra = {"value": {"integer": 10**5000, "masked": np.ma.masked_array([1.0], [True])}.get(what, 1) if rank else 1}
    zero.checkpoint.save(tmp_path, DistributedDataParallel(model), extra=extra)
