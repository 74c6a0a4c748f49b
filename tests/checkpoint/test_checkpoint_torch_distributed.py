"""torch's distributed checkpoints whose pickle somebody has written on purpose: none is run, none exhausts memory.

`make faults` sets ZERO_FAULTS=1 and reads 2,000 altered ones.
"""

import os
import pickle
import random
import shutil
import struct
from contextlib import suppress
from pathlib import Path, PurePosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from saved import Runs, adam, differences, peak, tiny, train
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import zero
from zero.checkpoint.importing import import_checkpoint

ALTERED = 2000 if os.environ.get("ZERO_FAULTS") else 100
DATA = "__0_0.distcp"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A checkpoint of torch's, and the model that it is of."""
    path = tmp_path_factory.mktemp("good") / "dcp"
    model = tiny()
    optimizer = adam()(model.named_parameters())
    train(model, optimizer)
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 3}, checkpoint_id=path)
    return path, model


@pytest.fixture
def source(good, tmp_path):
    return Path(shutil.copytree(good[0], tmp_path / "dcp"))


def metadata_of(source):
    return pickle.loads((source / ".metadata").read_bytes())


def write(source, metadata, protocol=4):
    (source / ".metadata").write_bytes(pickle.dumps(metadata, protocol))


def index_of(metadata, name):
    return next(index for index in metadata.storage_data if index.fqn == name)


def test_what_torch_wrote_is_read_without_a_word(good, tmp_path, recwarn):
    path, model = good
    import_checkpoint(path, tmp_path / "run")
    other = tiny()
    assert zero.checkpoint.load(tmp_path / "run", other) == {"step": 3}
    assert not differences(model.state_dict(), other.state_dict())
    assert not recwarn


# ---------------------------------------------------------------------------------------------------------------- code


def as_all(metadata, bomb):
    return bomb


def as_planner_data(metadata, bomb):
    metadata.planner_data["step"] = bomb
    return metadata


def as_size(metadata, bomb):
    metadata.state_dict_metadata["model.0.bias"].size = bomb
    return metadata


def as_dtype(metadata, bomb):
    metadata.state_dict_metadata["model.0.bias"].properties.dtype = bomb
    return metadata


def as_key(metadata, bomb):
    metadata.storage_data[bomb] = None
    return metadata


def as_place(metadata, bomb):
    metadata.storage_data[index_of(metadata, "step")] = bomb
    return metadata


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("put", [as_all, as_planner_data, as_size, as_dtype, as_key, as_place])
def test_code_in_the_metadata_is_not_run(put, protocol, source, tmp_path):
    write(source, put(metadata_of(source), Runs(tmp_path / "ran")), protocol)
    with pytest.raises(ValueError, match=r"dcp/\.metadata is not what torch\.distributed\.checkpoint writes.*not read"):
        import_checkpoint(source, tmp_path / "run")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "run").exists()
    with suppress(Exception):
        pickle.loads((source / ".metadata").read_bytes())
    assert (tmp_path / "ran").exists(), "there was none"


def test_code_where_nobody_looks_is_not_run(source, tmp_path):
    metadata = metadata_of(source)
    metadata.storage_meta = [Runs(tmp_path / "ran")]
    write(source, metadata)
    import_checkpoint(source, tmp_path / "run")
    assert not (tmp_path / "ran").exists()


def test_code_in_a_value_is_not_run_and_the_value_left_out(tmp_path):
    dcp.save({"model": tiny().state_dict(), "step": Runs(tmp_path / "ran"), "epoch": 1}, checkpoint_id=tmp_path / "dcp")
    with pytest.warns(UserWarning, match=r"left out: 'step' of .* is no tensor or plain value"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "run")
    assert zero.checkpoint.load(tmp_path / "run", tiny()) == {"epoch": 1}
    assert not (tmp_path / "ran").exists()


def test_code_in_a_value_of_the_model_is_not_run(tmp_path):
    model = {**tiny().state_dict(), "0._extra_state": Runs(tmp_path / "ran")}
    dcp.save({"model": model}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(ValueError, match=r"'model\.0\._extra_state' of .* is no tensor or plain value"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "run")
    assert not (tmp_path / "ran").exists()


# ------------------------------------------------------------------------------------------------------ what it claims


def with_a_path(metadata):
    metadata.storage_data[index_of(metadata, "step")].relative_path = "../secret"


def beyond_the_file(metadata):
    metadata.storage_data[index_of(metadata, "model.0.bias")].length = 1 << 50


def larger_than_the_file(metadata):
    described = metadata.state_dict_metadata["model.0.bias"]
    described.size = described.chunks[0].sizes = torch.Size([1 << 40])


def beyond_numbers(metadata):
    described = metadata.state_dict_metadata["model.0.bias"]
    described.size = described.chunks[0].sizes = torch.Size([1 << 32, 1 << 32])
    index = MetadataIndex("model.0.bias", [0, 0])
    described.chunks[0].offsets = index.offset
    metadata.storage_data[index] = metadata.storage_data[index_of(metadata, "model.0.weight")]


def with_a_hole(metadata):
    metadata.state_dict_metadata["model.0.bias"].size = torch.Size([100])


def of_another_dtype(metadata):
    metadata.state_dict_metadata["model.0.bias"].properties.dtype = torch.float16


def compressed(metadata):
    metadata.storage_data[index_of(metadata, "step")].transform_descriptors = ["zstd"]


def deep(metadata):
    metadata.planner_data["step"] = ("step",) * 1000


def within_a_value(metadata):
    metadata.planner_data["step"] = ("model", "0.bias", "x")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (with_a_path, r"'\.\./secret', which is no name of a file"),
        (beyond_the_file, f"more of {DATA} than there is"),
        (larger_than_the_file, r"more of 'model\.0\.bias' than its file holds"),
        (beyond_numbers, r"more of 'model\.0\.bias' than its file holds"),
        (with_a_hole, r"chunks that do not make up 'model\.0\.bias'"),
        (of_another_dtype, r"'model\.0\.bias' of .*has no torch\.float16 of size"),
        (compressed, "transformed"),
        (deep, "no path for 'step'"),
        (within_a_value, r"model\.0\.bias\.x is inside something that is no dictionary"),
    ],
)
def test_metadata_that_claims_what_is_not_so_is_refused(change, expected, source, tmp_path):
    metadata = metadata_of(source)
    change(metadata)
    write(source, metadata)
    with pytest.raises(ValueError, match=expected):
        import_checkpoint(source, tmp_path / "run")
    assert not (tmp_path / "run" / "latest").exists()


@pytest.mark.parametrize(
    "instructions",
    [
        b"r" + struct.pack("<I", 1 << 31),  # a place in the memo, for which pickle makes room up to there
        b"\x8d" + struct.pack("<Q", 1 << 40) + b"x",  # text of so many bytes
        b"\x8b" + struct.pack("<I", 1 << 30) + b"\xff",  # an integer of so many
        b"0",  # takes away what is not there
        b"t",
        b"h\x07",
        b"]K\x01K\x02s",
        b"(" * 100_000 + b"t" * 100_000,
        b")\x85" + b"\x85" * 100_000,
    ],
)
def test_instructions_that_exhaust_memory_or_make_no_sense_are_refused(instructions, source, tmp_path):
    (source / ".metadata").write_bytes(b"\x80\x04" + instructions + b".")
    before = peak()
    with pytest.raises(ValueError, match=r"is not what torch\.distributed\.checkpoint writes"):
        import_checkpoint(source, tmp_path / "run")
    assert peak() - before < 1 << 27


@pytest.mark.filterwarnings("ignore:left out:UserWarning")
def test_altered_bytes_give_an_error_or_a_checkpoint_and_nothing_else(good, tmp_path):
    """torch keeps no checksums: where numbers are altered, others arrive."""
    source, before, refusals = tmp_path / "dcp", peak(), 0
    shutil.copytree(good[0], source)
    originals = {name: (source / name).read_bytes() for name in (".metadata", DATA)}
    for number in range(ALTERED):
        draw = random.Random(number)
        name = draw.choice([".metadata", ".metadata", DATA])
        data = bytearray(originals[name])
        at, length = draw.randrange(len(data)), draw.choice([1, 1, 4, 100])
        data[at : at + length] = draw.choice([b"", draw.randbytes(length), draw.randbytes(1)])
        (source / name).write_bytes(data)
        try:
            import_checkpoint(source, tmp_path / "run")
        except ValueError:
            refusals += 1
        (source / name).write_bytes(originals[name])
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
    assert 0 < refusals < ALTERED
    assert peak() - before < 1 << 28


def test_the_classes_are_those_that_torch_pickles(good):
    """Should torch rename one, imports fail here first."""
    metadata = metadata_of(good[0])
    assert type(metadata) is Metadata
    assert PurePosixPath(metadata.storage_data[index_of(metadata, "step")].relative_path).name == DATA
