"""`extra` and modules' extra state: a run goes on with what remembers as if it were not interrupted."""

import math
import random
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from saved import Counting, adam, tiny
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler as schedulers

import ranks
import zero

SCHEDULERS = {
    0: partial(schedulers.MultiStepLR, milestones=[1, 4, 4]),  # keeps a Counter
    1: lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, total_iters=2), schedulers.ExponentialLR(optimizer, gamma=0.5)],
        milestones=[3],
    ),
    2: partial(schedulers.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    3: partial(schedulers.ReduceLROnPlateau, patience=0, threshold=10.0),  # keeps infinities
}
"""By stage."""


class Run:
    """A training with everything that remembers: dropout, draws of all three generators, scheduler, scaler."""

    def __init__(self, stage, seed):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.model, self.optimizer = zero.setup(model, torch.optim.Adam, stage=stage, lr=1e-2)
        self.scheduler = SCHEDULERS[stage](self.optimizer)
        self.scaler = zero.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.drawn = np.random.default_rng(seed)
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)

    def step(self):
        inputs = torch.randn(5, 4) + random.random() + np.random.random() + self.drawn.random()
        self.optimizer.zero_grad()
        loss = self.model(inputs).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        plateau = isinstance(self.scheduler, schedulers.ReduceLROnPlateau)
        self.scheduler.step(loss.item()) if plateau else self.scheduler.step()
        return loss.item(), self.optimizer.param_groups[0]["lr"], self.scaler.get_scale()

    def extra(self):
        return {
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "drawn": (torch.get_rng_state(), np.random.get_state(), random.getstate(), self.drawn.bit_generator.state),
        }

    def take(self, extra):
        self.scheduler.load_state_dict(extra["scheduler"])
        self.scaler.load_state_dict(extra["scaler"])
        by_torch, by_numpy, by_python, self.drawn.bit_generator.state = extra["drawn"]
        torch.set_rng_state(by_torch)
        np.random.set_state(by_numpy)
        random.setstate(by_python)


def interrupted_and_not(rank, world, path, stage):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on schedulers that are called in an order it does not expect
        run = Run(stage, seed=rank)
        for _ in range(2):
            run.step()
        zero.checkpoint.save(path, run.model, run.optimizer, extra=run.extra())
        expected = [run.step() for _ in range(4)]
        other = Run(stage, seed=100 + rank)
        other.step()
        other.take(zero.checkpoint.load(path, other.model, other.optimizer))
        assert [other.step() for _ in range(4)] == expected
        assert len({rate for _, rate, _ in expected}) > 1 and len({scale for _, _, scale in expected}) > 1
        return expected


@pytest.mark.parametrize("stage", SCHEDULERS)
def test_a_run_goes_on_as_if_it_had_not_been_interrupted(stage, tmp_path):
    first, second = ranks.run(interrupted_and_not, 2, (str(tmp_path), stage))
    assert [loss for loss, _, _ in first] != [loss for loss, _, _ in second], "ranks drew the same numbers"


def save_own(rank, world, path):
    extra = {"own": rank, "shared": (1, None), "nan": math.nan}
    zero.checkpoint.save(path, DistributedDataParallel(tiny()), extra=extra)
    return zero.checkpoint.load(path, DistributedDataParallel(tiny()))


def test_what_differs_between_ranks_returns_to_the_same_ranks_alone(tmp_path):
    """NaN, which is not equal to itself, does not differ."""
    found = ranks.run(save_own, 2, (str(tmp_path),))
    with pytest.warns(UserWarning, match="^own of extra differed between the 2 ranks"):
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
