"""Checkpoints that somebody has altered on purpose, checksums and all: an error or the right data, nothing else.

`make faults` sets ZERO_FAULTS=1 and reads 2,000 of them.
"""

import copy
import json
import os
import random
import shutil
import stat
import zlib

import pytest
import torch
from saved import differences, peak, sign, tiny, train, whole, with_adam

import zero
from zero.checkpoint import CheckpointError

ALTERED = 2000 if os.environ.get("ZERO_FAULTS") else 100
FILE = "rank-00000.safetensors"
EXTRA = {"step": 3, "seen": (1, 2), "noise": torch.arange(3.0)}
STRANGE = [
    None,
    True,
    -1,
    0,
    1,
    1 << 40,
    1 << 62,
    10**30,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "..",
    "/etc/passwd",
    "../../x",
    "\0",
    "F32",
    "BOOL",
    [],
    [1 << 40, 1 << 40],
    [-1],
    {},
    {"$": "tensor", "dtype": "F32", "shape": [1 << 40], "base64": ""},
    {"$": "tuple"},
    {"$": "dict", "items": [[[], 1]]},
]


def build():
    return with_adam(tiny())


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A checkpoint, and what a model is that has loaded it."""
    path = tmp_path_factory.mktemp("good") / "run"
    model, optimizer = build()
    train(model, optimizer)
    zero.checkpoint.save(path, model, optimizer, extra=EXTRA)
    return path, whole(model, optimizer)


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
            holder[draw.choice(["", "..", "$", "model/nothing", "order"])] = holder.pop(key)
        elif act == 2:
            other, there = draw.choice(list(places_in(told)))
            holder[key] = copy.deepcopy(other[there])
        else:
            holder[key] = draw.choice(STRANGE)


def alter_index(checkpoint, draw):
    told = json.loads((checkpoint / "index.json").read_text())
    alter_tree(told, draw)
    sign(told)
    (checkpoint / "index.json").write_text(json.dumps(told))


def change_header(checkpoint, change):
    """Of the safetensors file, with its checksum in the index."""
    file, told = checkpoint / FILE, json.loads((checkpoint / "index.json").read_text())
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header)
    written = json.dumps(header).encode()
    data = len(written).to_bytes(8, "little") + written + data[end:]
    file.write_bytes(data)
    told["files"][FILE] = {"bytes": len(data), "header_crc32": zlib.crc32(written)}
    sign(told)
    (checkpoint / "index.json").write_text(json.dumps(told))


def alter_header(checkpoint, draw):
    change_header(checkpoint, lambda header: alter_tree(header, draw))


def alter_bytes(checkpoint, draw):
    file = checkpoint / draw.choice([FILE, FILE, "index.json", "../latest"])
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


def test_an_altered_checkpoint_is_refused_or_read_right_and_nothing_else(good, tmp_path):
    """What its own checksums do not match is read right or refused. What they do match may hold other numbers."""
    run, expected = good
    model, optimizer = build()
    refusals, memory = 0, peak()
    for number in range(ALTERED):
        path, draw = tmp_path / f"run-{number}", random.Random(number)
        shutil.copytree(run, path)
        alter = draw.choice([alter_index, alter_header, alter_bytes])
        alter(path / "00000001", draw)
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


def two_at_one_place(told):
    one, other = [path for path, entry in told["tensors"].items() if entry["shape"] == [8]][:2]
    told["tensors"][one]["pieces"] = told["tensors"][other]["pieces"]


def more_than_there_is(told):
    entry = told["tensors"]["model/0.bias"]
    entry["shape"] = [1 << 40, 1 << 40]
    entry["pieces"][0]["stop"] = 1 << 80


def slices(order):
    def change(told):
        told["tensors"]["model/0.weight"]["order"] = order

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (slices([[1, 1], 0, 1]), r"model/0.weight is cut into slices by \[1, 1\]"),  # more than it has shards
        (slices([[2, 8], 0, 1]), "cut into slices"),
        (slices([[1], 0, 1]), "cut into slices"),
        (slices([[[], 8], 0, 1]), "cut into slices"),
        (two_at_one_place, "is stored where another tensor is"),
        (more_than_there_is, "these differ: 0.bias|has no"),
    ],
)
def test_an_index_of_more_than_there_is(change, expected, good, tmp_path):
    shutil.copytree(good[0], tmp_path / "run")
    index = tmp_path / "run" / "00000001" / "index.json"
    told = json.loads(index.read_text())
    change(told)
    sign(told)
    index.write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match=expected):
        zero.checkpoint.load(tmp_path / "run", *build())


def test_an_index_that_no_memory_holds_is_not_read(good, tmp_path):
    shutil.copytree(good[0], tmp_path / "run")
    os.truncate(tmp_path / "run" / "00000001" / "index.json", 1 << 40)  # takes no room on the disk
    with pytest.raises(CheckpointError, match="more than the 268435456 that an index may have"):
        zero.checkpoint.load(tmp_path / "run", *build())
    os.truncate(tmp_path / "run" / "latest", 1 << 40)
    with pytest.raises(CheckpointError, match=r"which is no checkpoint|embedded null"):
        zero.checkpoint.load(tmp_path / "run", *build())


def in_the_same_bytes(header):
    header["model/0.bias"]["data_offsets"] = header["model/1.bias"]["data_offsets"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (in_the_same_bytes, "two tensors have byte"),
        (lambda header: header.pop("__metadata__"), "block_crc32"),
        (lambda header: header["__metadata__"].update(block_crc32=""), "lacks checksums"),
    ],
)
def test_a_file_whose_header_cannot_be_trusted_is_refused(change, expected, good, tmp_path):
    shutil.copytree(good[0], tmp_path / "run")
    change_header(tmp_path / "run" / "00000001", change)
    with pytest.raises(CheckpointError, match=expected):
        zero.checkpoint.load(tmp_path / "run", *build())


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_files_have_the_modes_that_the_user_gives_all_files(umask, file, folder, tmp_path):
    before = os.umask(umask)
    try:
        zero.checkpoint.save(tmp_path / "run", *build())
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(one.stat().st_mode): one for one in (tmp_path / "run").rglob("*") if one.is_file()}
    assert [*modes] == [file]
    assert {stat.S_IMODE(one.stat().st_mode) for one in (tmp_path / "run", tmp_path / "run" / "00000001")} == {folder}
