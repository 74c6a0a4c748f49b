"""`extra`, and modules' extra state."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from saved import Counting, adam, tiny
from torch.nn.parallel import DistributedDataParallel

import ranks
import zero


def save_own(rank, world, path):
    extra = {"own": rank, "shared": (1, None), "nan": math.nan}
    zero.checkpoint.save(path, DistributedDataParallel(tiny()), extra=extra)
    return zero.checkpoint.load(path, DistributedDataParallel(tiny()))


def test_what_differs_between_ranks_returns_to_the_same_ranks_alone(tmp_path):
    """NaN, which is not equal to itself, does not differ."""
    found = ranks.run(save_own, 2, (str(tmp_path),))
    with pytest.warns(UserWarning, match=r"^extra\['own'\] differed between the 2 ranks"):
        alone = zero.checkpoint.load(tmp_path, tiny())
    assert [one.pop("own") for one in found] == [0, 1]
    for one in [*found, alone]:
        assert math.isnan(one.pop("nan")) and one == {"shared": (1, None)}


def test_buffers_and_extra_state_of_modules(tmp_path):
    model, other = Counting({"steps": 5}), Counting()
    for module, value in ((model, 2.0), (other, 0.0)):
        module.register_buffer("mean", torch.full((2,), value))
        module.register_buffer("scratch", torch.full((2,), value), persistent=False)
    zero.checkpoint.save(tmp_path, model)
    zero.checkpoint.load(tmp_path, other)
    assert other.seen == {"steps": 5} and (other.mean == 2).all() and (other.scratch == 0).all()


def test_values_of_every_kind_come_back_as_they_were(tmp_path):
    extra = {
        "none": None,
        "infinite": float("-inf"),
        "nested": {"a": [(1, {"b": (2.5, "c")})], "$": 1},
        "keys": {1: "one", (2, 3): "pair"},
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3)[:, ::-1],
        "tensor": torch.arange(4, dtype=torch.bfloat16).view(2, 2),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "complex": 1 - 2j,
        "number": np.int64(1 << 40),
    }
    zero.checkpoint.save(tmp_path, tiny(), extra=extra)
    found = zero.checkpoint.load(tmp_path, tiny())
    assert list(found) == list(extra)
    extra["number"] = 1 << 40  # numpy's numbers come back as Python's
    for name, value in extra.items():
        assert type(found[name]) is type(value), name
        if isinstance(value, np.ndarray):
            assert found[name].dtype == value.dtype and np.array_equal(found[name], value)
            assert found[name].flags.writeable
        elif isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype and torch.equal(found[name], value)
        else:
            assert found[name] == value


REFUSED = [
    (np.array([object()], dtype=object), "a numpy.ndarray"),
    ({1, 2}, "a builtins.set"),
    (Path("a"), "a pathlib.PosixPath"),
    (torch.ones(2).to_sparse(), "torch.sparse_coo"),
    (adam, "a builtins.function"),
]


def test_what_cannot_be_kept_is_named(tmp_path):
    for value, words in REFUSED:
        with pytest.raises(zero.checkpoint.CheckpointError, match=rf"extra\['a'\]\['b'\] .*{words}"):
            zero.checkpoint.save(tmp_path, tiny(), extra={"a": {"b": value}})
