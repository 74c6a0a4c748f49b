"""Checkpoints that somebody has altered on purpose, checksums and all: an error or the right data, nothing else.

`make faults` sets ZERO_FAULTS=1 and reads 2,000 of them.
"""

import copy
import os
import random
import shutil
import stat
from functools import partial

import pytest
import torch
from saved import change_index, differences, peak, tiny, train, whole, with_adam

import matrix
import zero
from zero.checkpoint import CheckpointError

ALTERED = 2000 if matrix.FAULTS else 40
EXTRA = {"step": 3, "seen": (1, 2), "noise": torch.arange(3.0)}
STRANGE = [None, True, -1, 0, 1, 1 << 40, 1 << 62, 10**30, 0.5, float("nan"), float("inf")]
STRANGE += ["", "..", "/etc/passwd", "../../x", "\0", "F32", "BOOL", [], [1 << 40, 1 << 40], [-1], {}]
STRANGE += [{"$": "tensor", "dtype": "F32", "shape": [1 << 40], "base64": ""}, {"$": "tuple"}]
STRANGE += [{"$": "dict", "items": [[[], 1]]}]


def build():
    return with_adam(tiny())


def places_in(told):
    """Every container in a tree of JSON with each of its keys."""
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


@pytest.mark.slow
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
