"""What optimizers are found to be, and what OSS makes of it: the right cut, or an error with the true reason."""

import random
import re
import time
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ranks
import zero
from assertions import same_weights
from optimizers import (
    ByPlace,
    Clipping,
    Curious,
    Eight,
    Estimating,
    Grouped,
    Hooked,
    Lamb,
    Lion,
    Moments,
    Noisy,
    Sam,
    Shampoo,
    TrainedLion,
)
from runs import distributed, take_step
from zero.measure import probe
from zero.measure.kinds import Finding, Kind, finding_of
from zoo import OddNet, built, odd_batch, odd_loss

KINDS = {
    "element-wise, wants train()": (Lion, {}, Kind.ELEMENTWISE, ""),
    "an option that does not couple": (Clipping, {"most": None}, Kind.ELEMENTWISE, ""),
    "by groups, which do not say so": (Grouped, {"most": None}, Kind.ELEMENTWISE, ""),
    "torch's": (partial(Adam, lr=0.1), {}, Kind.ELEMENTWISE, ""),
    "a subclass": (type("Own", (Adafactor,), {}), {}, Kind.TENSORWISE, r"the state .* is of shape \[12, 1\]"),
    "norms": (Lamb, {}, Kind.TENSORWISE, "stepped to other values than its shards"),
    "matrices": (Shampoo, {}, Kind.TENSORWISE, r"the state 'left' .* is of shape \[12, 12\]"),
    "8 bits from 4,096 elements on": (Eight, {}, Kind.TENSORWISE, r"shape \[5120\] was stepped to other values"),
    "a norm of all": (Clipping, {}, Kind.COUPLED, "beside other tensors"),
    "a number of all, for later": (Estimating, {}, Kind.COUPLED, "it wrote 'd' .* where it had some of the parameters"),
    "random numbers": (Noisy, {}, Kind.COUPLED, "draws random numbers, for one tensor after another"),
    "its place in the list": (ByPlace, {"most": None}, Kind.COUPLED, "another place in the list"),
    "at random in 16 bits only": (Moments, {"at_random": True}, Kind.ELEMENTWISE, ""),
    "hooks": (Hooked, {}, Kind.HOOKED, ""),
    "a closure": (Sam, {"base_optimizer": SGD, "lr": 0.1}, Kind.COUPLED, "beside other tensors"),
    "what is not told": (Curious, {"secret": "other"}, Kind.UNKNOWN, "AssertionError"),
}


@pytest.mark.parametrize("name", KINDS)
def test_optimizers_are_found_to_be_what_they_are(name, fresh):
    optim, options, kind, reason = KINDS[name]
    found = finding_of(optim, options)
    assert found.kind is kind, found
    assert re.search(reason, found.reason), found
    assert found.writes_numbers == (optim in (Lion, Estimating) or kind is Kind.UNKNOWN)


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr("zero.measure.kinds._found", type(zero.measure.kinds._found)())


def test_options_of_groups_and_cuts_at_blocks_make_a_difference_rates_do_not(fresh, monkeypatch):
    groups = [{"lr": 0.1}, {"lr": 0.2}, {"rank": 4}]
    probed = []
    monkeypatch.setattr("zero.measure.kinds.probe", lambda *given: probed.append(given) or probe.probe(*given))
    assert finding_of(Grouped, {"most": None}, groups[:2]).kind is Kind.ELEMENTWISE
    assert finding_of(Grouped, {"most": None}, groups).kind is Kind.TENSORWISE
    assert finding_of(partial(Grouped, most=None), None, groups).kind is Kind.TENSORWISE
    assert len(probed) == 2
    assert finding_of(Eight, granularity=256).kind is Kind.TENSORWISE
    assert finding_of(Lamb, granularity=4096).kind is Kind.TENSORWISE


def state_of_generators():
    return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()), torch.is_grad_enabled()]


def test_measuring_is_seen_by_nobody(fresh, capsys):
    class Loud(Noisy):
        def step(self, closure=None):
            print("step")
            random.random()
            np.random.rand()
            super().step(closure)

    seen = []
    handle = register_optimizer_step_pre_hook(lambda *given: seen.append(given))
    before = state_of_generators()
    with torch.device("meta"), torch.no_grad():
        assert finding_of(Loud).kind is Kind.COUPLED
    assert state_of_generators() == before
    assert not seen and not capsys.readouterr().out
    SGD([nn.Parameter(torch.ones(1))]).step()
    assert len(seen) == 1
    handle.remove()


def test_what_takes_too_long_stays_unknown(fresh, monkeypatch):
    class Slow(Lion):
        def step(self, closure=None):
            time.sleep(0.02)
            super().step(closure)

    monkeypatch.setattr(probe, "_SECONDS", 0.05)
    found = finding_of(Slow)
    assert found == Finding(
        Kind.UNKNOWN, "measuring it took more than 0.05 seconds", writes_numbers=True, writes_frozen=True
    )


# ------------------------------------------------------------------------------------------------------- OSS, on ranks


COUPLED = ["cannot be sharded", r"without zero \(stage 0\)"]
REFUSED = {
    "a norm of all": (Clipping, {}, [r"Clipping \(optimizers\)", "beside other tensors", *COUPLED]),
    "cuts asked for": (Estimating, {"partition": "even"}, COUPLED),
    "whole asked for": (Noisy, {"partition": "whole"}, ["draws random numbers", *COUPLED]),
    "norms, cut": (Lamb, {"partition": "even"}, ["partition='whole'"]),
    "8 bits, cut": (Eight, {"granularity": 256}, ["granularity=256 cuts", "partition='whole'"]),
    "hooks": (Hooked, {"partition": "even"}, ["in hooks", "Pass a plain optimizer"]),
    "unknown": (Curious, {"secret": "other"}, ["could not be measured", "partition='even'", "partition='whole'"]),
}


@pytest.mark.parametrize(("optim", "given", "words"), REFUSED.values(), ids=REFUSED)
@ranks.raises(2, ValueError, timeout=15)
def test_what_cannot_be_sharded_so_is_refused_on_every_rank_with_the_reason(rank, world, optim, given, words):
    zero.OSS(built(OddNet).parameters(), optim, **given)


@pytest.mark.parametrize("stage", [2, 3])
@ranks.raises(2, "Exception", "Moments .* draws random numbers, for one torch.bfloat16 tensor after", timeout=15)
def test_rounding_at_random_is_refused_where_parameters_have_16_bits(rank, world, stage):
    for dtype in (torch.float32, torch.bfloat16):
        model = built(OddNet).to(dtype)
        if stage == 3:
            model = zero.FSDP(model)
            optimizer = Moments(model.parameters(), at_random=True)
            model(odd_batch(rank, 0).to(dtype)).sum().backward()
            optimizer.step()
        else:
            zero.OSS(model.parameters(), Moments, at_random=True, master_dtype=None)


@ranks.raises(2, ValueError, "took more than 0 seconds", timeout=15)
def test_what_one_rank_finds_is_refused_on_all(rank, world):
    with mock.patch.object(probe, "_SECONDS", 0.0 if rank else 10.0):
        zero.OSS(built(OddNet).parameters(), type("New", (TrainedLion,), {}))


@ranks.raises(2, ValueError, "Grouped .* needs each parameter whole", timeout=15)
def test_what_a_later_group_brings_is_refused_on_all(rank, world):
    model = built(OddNet)
    optimizer = zero.OSS(model.first.parameters(), Grouped, most=None)
    optimizer.add_param_group({"params": model.middle.parameters(), "rank": 4})


@pytest.mark.parametrize(
    ("optim", "given", "cuts"),
    [(TrainedLion, {}, True), (Eight, {}, False), (Curious, {"secret": "known", "partition": "whole"}, False)],
    ids=["element-wise", "8 bits", "as the user says"],
)
@ranks.on(2)
def test_auto_is_the_cut_that_was_found_and_an_explicit_one_is_believed(rank, world, optim, given, cuts):
    model, plain = built(OddNet), built(OddNet)
    optimizer = zero.OSS(model.parameters(), optim, **given)
    assert (optimizer.shards.cut == "even") == cuts
    given = {key: value for key, value in given.items() if key != "partition"}
    expected = optim([param for param in plain.parameters() if param.requires_grad], **given)
    plain, model = distributed(plain), zero.ShardedDDP(model, optimizer)
    for step in range(4):
        for each, its in ((model, optimizer), (plain, expected)):
            take_step(its, odd_loss(each, rank, step))
    same_weights(model.module, plain.module)


@ranks.raises(2, RuntimeError, r"Estimating wrote other numbers into param_groups\[0\]", "'d': ", timeout=15)
def test_numbers_that_come_to_differ_between_ranks_are_refused_on_every_rank(rank, world):
    """That begin to differ in a later step than was looked at."""
    model = nn.Linear(24, 24)
    optimizer = zero.OSS(model.parameters(), partial(Estimating, patience=7), partition="even")
    for step in range(8):
        model(odd_batch(rank, step)).sum().backward()
        optimizer.step()
