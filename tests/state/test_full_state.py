"""Full weights and optimizer state: in from every rank or from rank 0 alone, and out, at every stage; what does not fit
is refused on every rank, and changes nothing."""

import copy
import io
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import matrix
import ranks
import zero
from assertions import same
from runs import take_step
from zoo import TiedBlocks, data

OPTIMIZERS: dict[str, Any] = {
    "adam": partial(Adam, lr=0.01, betas=(0.8, 0.9)),
    "sgd": partial(SGD, lr=0.05, momentum=0.9),
}
HOWS: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2, whole": {"stage": 2, "partition": "whole"},
    "3": {"stage": 3},
    "3, whole": {"stage": 3, "partition": "whole"},
    "3, offloaded": {"stage": 3, "offload": zero.CPUOffload(pin_memory=False)},
}


def losses(model: nn.Module, optimizer: Any, rank: int) -> list[float]:
    return [take_step(optimizer, model(data(8, 7, rank=rank, step=step)).square().mean()) for step in range(2)]


def saved(optim: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights and the state that a plain training has saved."""
    torch.manual_seed(3)
    model = TiedBlocks(7)
    optimizer = optim(model.parameters())
    losses(model, optimizer, 0)
    return copy.deepcopy(dict(model.state_dict())), copy.deepcopy(optimizer.state_dict())


def groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "param_names"} for group in state["param_groups"]]


def from_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.slow
@matrix.combined("how, optim, world", HOWS, OPTIMIZERS, [2, 3, 1])
@ranks.on("world")
def test_full_weights_and_state_go_in_and_come_out(rank, world, how, optim):
    weights, state = saved(OPTIMIZERS[optim])
    plain, plain_optimizer = zero.setup(TiedBlocks(7), OPTIMIZERS[optim], stage=0)
    zero.load_full_state_dict(plain, weights)
    plain_optimizer.load_state_dict(copy.deepcopy(state))
    expected = losses(plain, plain_optimizer, rank)
    for given in (True, rank == 0):
        model, optimizer = both = zero.setup(TiedBlocks(7), partial(OPTIMIZERS[optim], lr=1.0), **HOWS[how])
        assert zero.load_full_state_dict(model, weights if given else None) == ([], [])
        zero.load_full_optimizer_state_dict(model, optimizer, copy.deepcopy(state) if given else None)
        for to in (0, world - 1, None):
            found, found_state = zero.full_state_dict(model, to=to), zero.full_optimizer_state_dict(*both, to=to)
            if to in (None, rank):
                same(found, weights)
                same(from_file(found_state)["state"], state["state"])
                assert groups(found_state) == groups(state)
            else:
                assert not found and not found_state
        assert losses(model, optimizer, rank) == pytest.approx(expected, rel=0.0 if world < 3 else 1e-5, abs=0)


def changed(full: dict[str, Any], of: str, change: Any) -> dict[str, Any]:
    made: dict[str, Any] = copy.deepcopy(full)
    change(made[of])
    return made


def reshape(states: dict[Any, Any]) -> None:
    states[0].update(exp_avg=torch.zeros(1, 2))


def texts(states: dict[Any, Any]) -> None:
    """As keys become on their way through JSON, of which nothing would be loaded."""
    for key in [*states]:
        states[str(key)] = states.pop(key)


WEIGHTS: dict[str, tuple[Any, str]] = {
    "of another shape": (lambda full: TiedBlocks(9).state_dict(), r"(?s)size mismatch for blocks.0.0.weight"),
    "without a name": (lambda full: dict([*full.items()][1:]), r"(?s)Missing key.*blocks.0.0.weight"),
    "with extra state": (lambda full: {**full, "head._extra_state": 3}, "head._extra_state"),
    "of none": (lambda full: {}, "load_full_state_dict: no rank was given any"),
}
STATES: dict[str, tuple[Any, str]] = {
    "of another model": (lambda full: Adam([nn.Parameter(torch.ones(3))]).state_dict(), r"groups of \[1\] param"),
    "of none": (lambda full: {"epoch": 3}, "param_groups"),
    "of a parameter less": (lambda full: changed(full, "param_groups", lambda of: of[0]["params"].pop()), r"\[12\]"),
    "of another shape": (lambda full: changed(full, "state", reshape), r"exp_avg.*\[1, 2\].*\[7, 7\]"),
    "of texts": (lambda full: changed(full, "state", texts), r"none of the parameters .*\(0, 1, 2, ...\)"),
    "of what cannot be sent": (
        lambda full: changed(full, "state", lambda of: of[0].update(odd={1})),
        "the state 'odd' of parameter 0 is a",
    ),
}
ALONE = ("of none", "of what cannot be sent", "of a rank")
"""What rank 0 alone cannot give."""


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2, timeout=20)
def test_what_does_not_fit_is_refused_on_every_rank_and_changes_nothing(rank, world, stage):
    weights, state = saved(Adam)
    model, optimizer = zero.setup(TiedBlocks(7), Adam, stage=stage)
    losses(model, optimizer, rank)
    own = copy.deepcopy(optimizer.state_dict())
    zero.load_full_state_dict(model, weights)
    zero.load_full_optimizer_state_dict(model, optimizer, state)
    load = partial(zero.load_full_optimizer_state_dict, model, optimizer)
    tables = [(WEIGHTS, weights, partial(zero.load_full_state_dict, model)), (STATES, state, load)]
    for table, full, give in tables:
        of_a_rank = {"of a rank": (lambda _: own, "one rank's shard")} if table is STATES else {}
        for name, (make, words) in (table | of_a_rank).items():
            alone = table is WEIGHTS or name in ALONE
            for everywhere in [False] if alone else [False, True]:
                told = ranks.refusal(partial(give, make(full) if everywhere or rank == 0 else None))
                kinds = ("ValueError: ", "RuntimeError: ") if table is WEIGHTS else "ValueError: "
                assert told.startswith(kinds) and re.search(words, told), (name, told)
    if stage == 3:
        same(dict(zero.full_state_dict(model, to=None)), weights)
    same(zero.full_optimizer_state_dict(model, optimizer, to=None)["state"], state["state"])


@pytest.mark.parametrize("stage", [1, 3])
@ranks.on(2)
def test_other_ranks_than_there_are_and_weights_of_rank_1_alone_are_refused_on_every_rank(rank, world, stage):
    model, optimizer = zero.setup(TiedBlocks(7), Adam, stage=stage)
    weights = zero.full_state_dict(model, to=1)
    told = ranks.refusal(lambda: zero.load_full_state_dict(model, weights))
    assert told.startswith("ValueError: ") and "only rank 1 of 2 was given any" in told and "rank 0" in told
    for to in (2, -1):
        told = ranks.refusal(lambda to=to: zero.full_optimizer_state_dict(model, optimizer, to=to))
        assert told.startswith("ValueError: ") and "no rank of the group of 2: choose 0 to 1, or None" in told


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("stage", range(4))
@ranks.raises(2, ValueError, "another optimizer than SGD: .*betas.* and lack dampening, momentum", timeout=15)
def test_state_of_another_class_of_optimizer_is_refused(rank, world, stage, alone):
    """SGD would go on with options and entries of Adam's. alone: rank 0 alone has it."""
    _, state = saved(OPTIMIZERS["adam"])
    model, optimizer = zero.setup(TiedBlocks(7), OPTIMIZERS["sgd"], stage=stage)
    zero.load_full_optimizer_state_dict(model, optimizer, None if alone and rank else state)
