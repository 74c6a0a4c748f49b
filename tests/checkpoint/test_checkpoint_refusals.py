"""What cannot be saved is refused on every rank, with what it is, and leaves nothing behind; earlier saves stay."""

import re
from functools import partial
from unittest import mock

import numpy as np
import objects
import pytest
import torch
from saved import Blockwise, adam, messages_of_failing_saves, tiny, train, with_adam
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import ranks
import zero
from optimizers import ByParameter
from ranks import refusal

CASES = {}


def case(*words, given=(None,)):
    """A function of rank, path and what is given that is refused on every rank with these words."""

    def take(function):
        for number, one in enumerate(given):
            CASES[f"{function.__name__} {number}"] = (partial(function, given=one), words)
        return function

    return take


@case("differ between ranks", "/[01]")
def paths_that_differ(rank, path, given):
    zero.checkpoint.save(path / str(rank), zero.FSDP(tiny()))


@case("differ between ranks")
def a_path_of_one_replica(rank, path, given):
    mesh = init_device_mesh("cpu", (2, 1))
    model = zero.FSDP(tiny(), sharding_strategy="HYBRID_SHARD", device_mesh=mesh)
    zero.checkpoint.save(path / str(rank), model)


@case("could not be written", given=(f"{__file__}/run", "/proc/run"))
def a_run_where_there_can_be_none(rank, path, given):
    zero.checkpoint.save(given, zero.FSDP(tiny()))


@case("strings for keys", given=([1], {1: 2}))
def extra_without_names(rank, path, given):
    zero.checkpoint.save(path, zero.FSDP(tiny()), extra=given)


@case("is not in the state_dict")
def an_optimizer_of_another_model(rank, path, given):
    zero.checkpoint.save(path, zero.FSDP(tiny()), adam()(nn.Linear(2, 2).parameters()))


@case("zero.checkpoint.save was called .* summon_full_params.*between steps")
def parameters_that_are_summoned(rank, path, given):
    model = zero.FSDP(tiny())
    with model.summon_full_params():
        zero.checkpoint.save(path, model)


@case("absmax has shape", "partition='whole'")
def state_whose_place_is_not_known(rank, path, given):
    model = tiny(100)
    optimizer = zero.OSS(model.parameters(), Blockwise, lr=0.1)
    train(DistributedDataParallel(model), optimizer, 7)
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


@case("differ between ranks", "rank 1 has model/0.weight")
def parameters_that_are_ignored_and_differ(rank, path, given):
    model = tiny()
    wrapped = zero.FSDP(model, ignored_parameters=[model[0].weight])
    model[0].weight.data.view(-1)[0] += rank
    zero.checkpoint.save(path, wrapped)


@case("differ between ranks", "rank 1 has optimizer/0/2.bias/exp_avg")
def plain_state_that_differs(rank, path, given):
    model, optimizer = with_adam(tiny())
    train(model, optimizer)
    optimizer.state[model[2].bias]["exp_avg"][0] += rank
    zero.checkpoint.save(path, model, optimizer)


class Moody(nn.Linear):
    def get_extra_state(self):
        raise RuntimeError("not today")


@case("on rank 1", "state_dict.. raised RuntimeError: not today")
def a_module_that_one_rank_cannot_save(rank, path, given):
    zero.checkpoint.save(path, DistributedDataParallel((Moody if rank else nn.Linear)(2, 2)))


@case("on rank 1", "16610 bits|MaskedArray", given=(10**5000, np.ma.masked_array([1.0], [True])))
def a_value_that_one_rank_cannot_save(rank, path, given):
    zero.checkpoint.save(path, DistributedDataParallel(tiny()), extra={"value": given if rank else 1})


def refused(rank, world, path):
    return {name: refusal(partial(call, rank, path / name)) for name, (call, _) in CASES.items()}


@pytest.mark.slow
def test_what_cannot_be_saved_is_refused_on_every_rank_and_leaves_nothing(tmp_path):
    for name in CASES:
        (tmp_path / name).mkdir()
    for told in ranks.run(refused, args=(tmp_path,)):
        for name, (_, words) in CASES.items():
            missing = [fact for fact in ("^CheckpointError: ", *words) if not re.search(fact, told[name])]
            assert not missing, f"{name}: {told[name] or 'nothing was raised'} lacks {missing}"
    assert {one.name for one in tmp_path.rglob("*")} == {*CASES}


@pytest.mark.slow
@ranks.on(2, timeout=20.0)
def test_a_rank_that_cannot_write_at_all_is_heard_of(rank, world, tmp_path):
    """Nor even say so."""
    url, (model, optimizer) = f"objects://{tmp_path}", with_adam(zero.FSDP(tiny()))
    zero.checkpoint.save(url, model, optimizer, extra={"step": 1})
    refuse = mock.Mock(side_effect=OSError(28, "No space left on device"))
    with mock.patch.object(objects.Upload, "close", refuse if rank else objects.Upload.close):
        told = messages_of_failing_saves(url, model, optimizer)
    assert all("rank-00001.safetensors could not be written" in message for message in told)
    assert zero.checkpoint.load(url, model, optimizer) == {"step": 1}
