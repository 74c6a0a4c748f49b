"""Bad input: an error on every rank that names the file or parameter; model and optimizer as they were before."""

import copy
import io
import os
import pickle
import random
import re
import shutil
import stat
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import objects
import pytest
import torch
from saved import (
    Blockwise,
    Config,
    Runs,
    adam,
    change_index,
    differences,
    messages_of_failing_saves,
    peak,
    save_and_go_on,
    steps,
    tiny,
    train,
    whole,
    with_adam,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import matrix
import ranks
import zero
from optimizers import ByParameter
from ranks import refusal
from zero.checkpoint import CheckpointError

pytestmark = pytest.mark.slow

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
        there = not path.endswith(("half-a-save", "nothing"))  # elsewhere a run would start afresh
        with pytest.raises(CheckpointError) as caught:
            assert not zero.checkpoint.load(path, model, optimizer, missing_ok=there), path
        assert not differences(before, whole(model, optimizer)), path
        told.append(str(caught.value))
    steps(model, optimizer, 2, 1)
    return told


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
        run = name if name == "weights alone" else "run"
        with pytest.raises(CheckpointError) as caught:
            zero.checkpoint.load(f"{path}/{run}", model, optimizer, missing_ok=True)
        assert not differences(before, whole(model, optimizer))
        told.append(str(caught.value))
    return told


def test_a_misfit_is_refused_on_every_rank_and_changes_nothing(tmp_path):
    ranks.run(save_a_run, 2, (str(tmp_path),))
    first, second, third = ranks.run(refuse_misfits, 3, (str(tmp_path),))
    assert first == second == third
    for (name, (_, words)), message in zip(MISFITS.items(), first, strict=True):
        assert re.search(words, message), f"{name}: {message}"


# What cannot be saved is refused on every rank, with what it is, and leaves nothing behind; earlier saves stay.


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


@case(r"'0.weight' is sharded by an FSDP that is not in the module", "Pass the model that zero.setup or FSDP")
def the_module_inside(rank, path, given):
    zero.checkpoint.save(path, zero.FSDP(tiny()).module)


class Moody(nn.Linear):
    def get_extra_state(self):
        raise RuntimeError("not today")


@case("on rank 1", "state_dict.. raised RuntimeError: not today")
def a_module_that_one_rank_cannot_save(rank, path, given):
    zero.checkpoint.save(path, DistributedDataParallel((Moody if rank else nn.Linear)(2, 2)))


@case("on rank 1", "16610 bits|MaskedArray", given=(10**5000, np.ma.masked_array([1.0], [True])))
def a_value_that_one_rank_cannot_save(rank, path, given):
    zero.checkpoint.save(path, DistributedDataParallel(tiny()), extra={"value": given if rank else 1})


def refuse_each(rank, world, path):
    return {name: refusal(partial(call, rank, path / name)) for name, (call, _) in CASES.items()}


def test_what_cannot_be_saved_is_refused_on_every_rank_and_leaves_nothing(tmp_path):
    for name in CASES:
        (tmp_path / name).mkdir()
    for told in ranks.run(refuse_each, args=(tmp_path,)):
        for name, (_, words) in CASES.items():
            missing = [fact for fact in ("^CheckpointError: ", *words) if not re.search(fact, told[name])]
            assert not missing, f"{name}: {told[name] or 'nothing was raised'} lacks {missing}"
    assert {one.name for one in tmp_path.rglob("*")} == {*CASES}


@ranks.on(2, timeout=20.0)
def test_a_rank_that_cannot_write_at_all_is_heard_of(rank, world, tmp_path):
    url, (model, optimizer) = f"objects://{tmp_path}", with_adam(zero.FSDP(tiny()))
    zero.checkpoint.save(url, model, optimizer, extra={"step": 1})
    refuse = mock.Mock(side_effect=OSError(28, "No space left on device"))
    with mock.patch.object(objects.Upload, "close", refuse if rank else objects.Upload.close):
        told = messages_of_failing_saves(url, model, optimizer)
    assert all("rank-00001.safetensors could not be written" in message for message in told)
    assert zero.checkpoint.load(url, model, optimizer) == {"step": 1}


# Checkpoints that somebody has altered on purpose, checksums and all: an error or the right data, nothing else.


ALTERED = 2000 if matrix.FAULTS else 40
EXTRA = {"step": 3, "seen": (1, 2), "noise": torch.arange(3.0)}
STRANGE = [None, True, -1, 0, 1, 1 << 40, 1 << 62, 10**30, 0.5, float("nan"), float("inf")]
STRANGE += ["", "..", "/etc/passwd", "../../x", "\0", "F32", "BOOL", [], [1 << 40, 1 << 40], [-1], {}]
STRANGE += [{"$": "tensor", "dtype": "F32", "shape": [1 << 40], "base64": ""}, {"$": "tuple"}]
STRANGE += [{"$": "dict", "items": [[[], 1]]}]


def build():
    return with_adam(tiny())


def places_in(told):
    for key in list(told) if isinstance(told, dict) else range(len(told)):
        yield told, key
        if isinstance(told[key], dict | list):
            yield from places_in(told[key])


def alter_tree(told, draw):
    for _ in range(draw.randint(1, 2)):
        holder, key = draw.choice(list(places_in(told)))
        act = draw.randrange(4)
        if act == 0:
            del holder[key]
        elif act == 1 and isinstance(holder, dict):
            holder[draw.choice(["", "..", "$", "model/nothing", "order", "slices"])] = holder.pop(key)
        elif act == 2:
            other, there = draw.choice(list(places_in(told)))
            holder[key] = copy.deepcopy(other[there])
        else:
            holder[key] = draw.choice(STRANGE)


def alter_bytes(checkpoint, draw):
    data_file = "rank-00000.safetensors"
    file = checkpoint / draw.choice([data_file, data_file, "index.json", "../latest"])
    data = bytearray(file.read_bytes())
    at, length = draw.randrange(len(data)), draw.choice([1, 1, 4, 100])
    act = draw.randrange(4)
    if act == 0:
        del data[at:]
    elif act == 1:
        data[at : at + length] = draw.randbytes(length)
    elif act == 2:
        del data[at : at + length]
    else:
        data[at:at] = draw.randbytes(length)
    file.write_bytes(data)


@pytest.mark.faults
def test_an_altered_checkpoint_is_refused_or_read_right_and_nothing_else(tmp_path):
    """What its own checksums do not match is read right or refused. What they do match may hold other numbers."""
    run, (model, optimizer) = tmp_path / "good", build()
    train(model, optimizer)
    zero.checkpoint.save(run, model, optimizer, extra=EXTRA)
    expected = whole(model, optimizer)
    refusals, memory = 0, peak()
    for number in range(ALTERED):
        path, draw = tmp_path / f"run-{number}", random.Random(number)
        shutil.copytree(run, path)
        alter = draw.choice([change_index, alter_bytes])
        alter(path / "00000001", draw if alter is alter_bytes else partial(alter_tree, draw=draw))
        before = whole(model, optimizer)
        extra, refusal = loaded(path, model, optimizer)
        case, after = f"{alter.__name__} {number}: {refusal}", whole(model, optimizer)
        if refusal is None:
            if alter is alter_bytes:
                assert not differences(expected, after), case
                assert extra.keys() == EXTRA.keys()
            model, optimizer = build()
            train(model, optimizer, 1)
        elif "partly as before" in refusal:  # by an optimizer that refuses what a right checksum vouches for
            assert alter is not alter_bytes, case
            zero.checkpoint.load(run, model, optimizer)
            assert not differences(expected, whole(model, optimizer)), case
        else:
            assert not differences(before, after), case
        refusals += refusal is not None
        shutil.rmtree(path)
    assert refusals > ALTERED / 2
    assert peak() - memory < 1 << 28


def loaded(path, model, optimizer):
    """What a load returns, or why it was refused. Any other error fails the test."""
    try:
        return zero.checkpoint.load(path, model, optimizer), None
    except CheckpointError as error:
        return None, str(error)


def test_files_have_the_modes_that_the_user_gives_all_files(tmp_path):
    before = os.umask(0o077)
    try:
        zero.checkpoint.save(tmp_path / "run", *build())
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(one.stat().st_mode) for one in (tmp_path / "run").rglob("*")}
    assert modes == {0o600, 0o700}
