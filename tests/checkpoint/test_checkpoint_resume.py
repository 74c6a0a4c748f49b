"""`resume`: a run goes on with all that remembers as if it were not interrupted."""

import random
import re
import warnings
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from saved import Counting, adam, differences, tiny, train, whole
from torch import nn
from torch.optim import lr_scheduler as schedulers

import ranks
import zero
from ranks import refusal
from transports import TRANSPORTS, calling
from zero.checkpoint import storage
from zero.shards.log import logger

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
    """A training with everything that remembers: dropout, draws of all generators, scheduler, scaler."""

    def __init__(self, stage, seed):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.model, self.optimizer = zero.setup(model, torch.optim.Adam, stage=stage, lr=1e-2)
        self.scheduler = SCHEDULERS[stage](self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.data = torch.Generator().manual_seed(seed)
        self.resume = [self.scheduler, self.scaler, self.data]
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)

    def step(self):
        inputs = torch.randn(5, 4) + random.random() + np.random.random() + torch.rand((), generator=self.data)
        self.optimizer.zero_grad()
        loss = self.model(inputs).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        plateau = isinstance(self.scheduler, schedulers.ReduceLROnPlateau)
        self.scheduler.step(loss.item()) if plateau else self.scheduler.step()
        return loss.item(), self.optimizer.param_groups[0]["lr"], self.scaler.get_scale()


def interrupted_and_not(rank, world, path, stage):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on schedulers that are called in an order it does not expect
        run = Run(stage, seed=rank)
        for _ in range(2):
            run.step()
        zero.checkpoint.save(path, run.model, run.optimizer, extra={"step": 2}, resume=run.resume, wait=stage % 2 == 0)
        expected = [run.step() for _ in range(4)]
        other = Run(stage, seed=100 + rank)
        other.step()
        assert zero.checkpoint.load(path, other.model, other.optimizer, resume=other.resume) == {"step": 2}
        assert [other.step() for _ in range(4)] == expected
        assert len({rate for _, rate, _ in expected}) > 1 and len({scale for _, _, scale in expected}) > 1
        return expected


@pytest.mark.parametrize("stage", SCHEDULERS)
def test_a_run_goes_on_as_if_it_had_not_been_interrupted(stage, tmp_path):
    first, second = ranks.run(interrupted_and_not, 2, (str(tmp_path), stage))
    assert [loss for loss, _, _ in first] != [loss for loss, _, _ in second], "ranks drew the same numbers"


def seeded(seed):
    """What the generators of Python, numpy and torch draw next, which are then as before."""
    for seed_one in (torch.manual_seed, np.random.seed, random.seed):
        seed_one(seed)


def drawn():
    return random.random(), np.random.random(), torch.rand(()).item()


def saved_by_two(rank, world, path):
    """Python's generator differs between ranks, the others do not."""
    model, optimizer = zero.setup(tiny(), adam(), stage=1)
    schedule = schedulers.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, 1)
    schedule.step()
    seeded(7)
    random.seed(rank)
    zero.checkpoint.save(path, model, optimizer, resume=schedule)
    return drawn()


def test_on_other_ranks_what_was_the_same_on_all_comes_back_and_the_rest_stays(tmp_path):
    expected = ranks.run(saved_by_two, 2, (str(tmp_path),))
    model = tiny()
    optimizer = adam()(model.parameters())
    schedule = schedulers.StepLR(optimizer, 1, gamma=0.5)
    seeded(8)
    words = r"^resume/random differed between the 2 ranks .* 1 now: left out"
    with pytest.warns(UserWarning, match=words):
        assert zero.checkpoint.load(tmp_path, model, optimizer, resume=schedule) == {}
    assert schedule.get_last_lr() == [5e-3] and optimizer.param_groups[0]["lr"] == 5e-3
    own = random.Random(8).random()
    assert drawn() == (own, *expected[0][1:]) == (own, *expected[1][1:])


def test_without_it_a_load_draws_and_returns_nothing_of_it(tmp_path, recwarn):
    ranks.run(saved_by_two, 2, (str(tmp_path),))
    model = tiny()
    seeded(8)
    assert zero.checkpoint.load(tmp_path, model) == {}
    found = drawn()
    seeded(8)
    assert found == drawn() and not recwarn.list


def test_the_generator_of_the_device_comes_back(tmp_path):
    state = [torch.tensor([1, 2], dtype=torch.uint8)]
    device = mock.Mock(get_rng_state=lambda: state[-1], set_rng_state=state.append)
    accelerator = mock.Mock(current_accelerator=lambda check_available: torch.device("cuda"))
    with mock.patch.multiple(torch, get_device_module=lambda kind: device, accelerator=accelerator):
        zero.checkpoint.save(tmp_path, tiny(), resume=[])
        state.append(None)
        zero.checkpoint.load(tmp_path, tiny(), resume=[])
    assert torch.equal(state[-1], state[0])
    zero.checkpoint.load(tmp_path, tiny(), resume=[])  # where there is no such device


class Refusing(torch.optim.lr_scheduler.StepLR):
    def load_state_dict(self, state):
        raise KeyError("gamma")


@pytest.mark.slow
@ranks.on(2)
def test_what_does_not_fit_is_refused_on_every_rank(rank, world, tmp_path):
    path = tmp_path
    model, optimizer = zero.setup(tiny(), adam(), stage=3)
    schedule = schedulers.StepLR(optimizer, 1)
    zero.checkpoint.save(f"{path}/with", model, optimizer, resume=schedule)
    zero.checkpoint.save(f"{path}/without", model, optimizer)
    train(model, optimizer, 1)
    before = whole(model, optimizer)

    def save(**given):
        return refusal(lambda: zero.checkpoint.save(f"{path}/none", model, optimizer, **given))

    def load(name, resume):
        return refusal(lambda: zero.checkpoint.load(f"{path}/{name}", model, optimizer, resume=resume))

    given = r"with resume=\[StepLR\], but load was given"
    for told, words in [
        (save(resume=[schedule, 3] if rank else [schedule]), r"resume\[1\] is an? int.* state_dict\(\).*rank 1"),
        (save(resume=[optimizer]), r"resume\[0\] is a Adam.*model and optimizer have arguments of their own"),
        (save(extra={"resume/0": 1}), "extra=.*resume/"),
        (save(resume=[schedule] * (rank + 1)), "the arguments of zero.checkpoint.save differ .*StepLR"),
        (load("without", schedule), r"does not fit: it was saved without resume.*extra"),
        (load("with", [torch.amp.GradScaler("cpu")]), rf"{given} \[GradScaler\]"),
        (load("with", [schedule, torch.Generator()]), rf"{given} \[StepLR, Generator\]"),
    ]:
        assert re.search(f"^CheckpointError: .*{words}", told), (words, told)
    assert not differences(before, whole(model, optimizer))
    told = load("with", type("StepLR", (Refusing,), {})(optimizer, 1) if rank else schedule)
    assert re.search("^CheckpointError: .*KeyError: 'gamma'.*partly as before.*rank 1", told), told


# `missing_ok`: where nothing was saved yet a run starts afresh, on every rank alike; all else raises as ever.


def start(path, stage):
    """What a script does each time it is started: its steps go on from those before."""
    model, optimizer = zero.setup(tiny(), adam(), stage=stage)
    before = whole(model, optimizer)
    extra = zero.checkpoint.load(path, model, optimizer, resume=[], missing_ok=True)
    if extra is None:
        assert not differences(before, whole(model, optimizer))
    train(model, optimizer, 1)
    step = 1 if extra is None else extra["step"] + 1
    zero.checkpoint.save(path, model, optimizer, resume=[], extra={"step": step}).wait()
    return step


def starts(rank, world, path, stage):
    """Whatever the others see of a file system that is slow to tell: they are not asked."""
    asked, lines = mock.Mock(side_effect=storage.resolve), []
    said = mock.patch.object(logger, "info", lambda text, *given: lines.append(text % given))
    with said, mock.patch.object(storage, "resolve", asked):
        steps = [start(path, stage), start(path, stage)]
    assert bool(asked.called) == (rank == 0)
    return steps, [line for line in lines if "afresh" in line]


ROWS = [(0, TRANSPORTS[0], ""), (1, TRANSPORTS[-1], ""), (2, TRANSPORTS[0], "objects://"), (3, TRANSPORTS[-1], "")]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "transport", "scheme"), [*ROWS, (3, TRANSPORTS[0], "objects://")])
def test_a_script_starts_afresh_once_and_then_goes_on(stage, transport, scheme, tmp_path):
    path = f"{scheme}{tmp_path / 'run'}"
    first, second = ranks.run(calling, 2, (transport, starts, path, stage))
    assert first[0] == second[0] == [1, 2]
    assert not second[1] and len(first[1]) == 1 and re.search(r"run is not there.*afresh", first[1][0])


def test_a_first_save_that_was_killed_between_its_index_and_latest_is_whole(tmp_path):
    """A job that is started again by itself would raise for ever."""
    put = storage.Place.put

    def put_all_but_latest(place, data):
        if place.name == "latest":
            raise KeyboardInterrupt
        put(place, data)

    model = Counting(3)
    killed = mock.patch.multiple(storage.Place, put=put_all_but_latest, remove=mock.DEFAULT)
    with pytest.raises(KeyboardInterrupt), killed:
        zero.checkpoint.save(tmp_path, model, extra={"step": 1})
    assert zero.checkpoint.load(tmp_path, model, missing_ok=True) == {"step": 1}
    zero.checkpoint.save(tmp_path, model, extra={"step": 2})
    assert zero.checkpoint.load(tmp_path, model, missing_ok=True) == {"step": 2}


@ranks.on(2)
def test_all_ranks_ask_alike(rank, world, tmp_path):
    model = zero.FSDP(tiny())
    told = ranks.refusal(lambda: zero.checkpoint.load(tmp_path, model, missing_ok=rank == 0))
    assert re.search("differ between ranks.*missing_ok", told), told
