"""What optimizers may do with parameters that lie in shards: what would be wrong is refused, on every rank."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, Adam, Muon, Optimizer

import ranks
import zero
from assertions import plain
from optimizers import Clipping, Curious, Estimating, Lamb, Noisy, Sam, TrainedLion
from runs import SideBySide
from zoo import built, matrices, odd_loss

sgd = partial(SGD, lr=0.1)


def backward(model: nn.Module, rank: int, step: int = 0) -> None:
    odd_loss(model, rank, step).backward()


def sharded(**options: Any) -> zero.FSDP:
    """Matrices alone, which is all that Muon takes; for two ranks they are cut inside one of them."""
    return zero.FSDP(built(matrices), **options)


class SamOfSGD(Sam):
    """Ascends by the norm of this rank's shard alone; the first that torch tells of is the step of the SGD inside."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, SGD, lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step()


def closed_over(params: Any) -> Optimizer:
    """LBFGS, to be stepped like others."""
    optimizer = LBFGS(params)
    optimizer.step = partial(optimizer.step, lambda: torch.zeros(()))  # type: ignore[method-assign]
    return optimizer


WHOLE = {"partition": "whole"}
NEEDS_WHOLE = [r"'.*weight' is cut between ranks", r"FSDP\(partition='whole'\)"]
COUPLES = ["cannot be sharded"]
REFUSED: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "Muon": (Muon, {}, NEEDS_WHOLE),
    "Adafactor": (partial(Adafactor, lr=0.1), {}, NEEDS_WHOLE),
    "Lamb": (Lamb, {}, NEEDS_WHOLE),
    "clips": (Clipping, WHOLE, COUPLES),
    "estimates": (Estimating, WHOLE, COUPLES),
    "around another, whole": (SamOfSGD, WHOLE, ["SamOfSGD", r"without zero \(stage 0\)"]),
    "not measured": (partial(Curious, secret="known"), {}, ["Curious", r"partition='even'", r"partition='whole'"]),
    "LBFGS, whole": (closed_over, WHOLE, ["LBFGS"]),
}


def stepped(rank: int, world: int, optim: Any, options: dict[str, Any]) -> None:
    model = sharded(**options)
    optimizer = optim(model.parameters())
    before = model.state_dict()
    backward(model, rank)
    try:
        optimizer.step()
    except RuntimeError:
        after = model.state_dict()
        kept = all(torch.equal(value, before[name]) for name, value in after.items())
        assert kept or isinstance(optimizer, Sam), "stepped all the same"
        raise


@pytest.mark.parametrize("case", REFUSED)
def test_optimizers_that_would_step_wrongly_are_refused_before_they_do(case):
    optim, options, words = REFUSED[case]
    ranks.expect_error(stepped, 2, RuntimeError, *words, args=(optim, options), timeout=15)


@ranks.raises(2, ValueError, *COUPLES, timeout=15)
def test_those_that_couple_parameters_are_refused_at_setup(rank, world):
    zero.setup(built(matrices), Noisy, stage=3)


@ranks.on(2)
def test_where_nothing_is_sharded_or_the_user_says_what_it_is_they_step(rank, world):
    stepped(rank, world, SamOfSGD, {"sharding_strategy": "NO_SHARD"})
    stepped(rank, world, partial(Curious, secret="known"), {"partition": "even"})


@pytest.mark.slow
@pytest.mark.parametrize(("optim", "cut"), [(TrainedLion, True), (Lamb, False)])
@ranks.on(2)
def test_others_than_torchs_train_as_they_are_found_to_be(rank, world, optim, cut):
    sizes = {0, *(param.numel() for param in matrices().parameters())}
    for build in [partial(zero.setup, stage=3), *(["3"] if cut else [])]:
        both = SideBySide(built(matrices), build, optim)
        assert cut == any(plain(param).numel() not in sizes for param in both.model.parameters())
        for step in range(2):
            both.step(lambda model: odd_loss(model, rank, step))  # noqa: B023


@ranks.on(2)
def test_what_is_not_cut_is_stepped_and_so_is_what_has_no_gradients(rank, world):
    """An even cut that happens to fall between parameters is none."""
    model = zero.FSDP(nn.Linear(4, 4, bias=False))
    assert {plain(param).numel() for param in model.parameters()} <= {0, 16}
    model(torch.ones(2, 4)).sum().backward()
    Muon(model.parameters()).step()
    Muon(sharded().parameters()).step()


@ranks.raises(2, RuntimeError, "'exp_avg' of '.*weight'", "full parameter", "wrap before the first step", timeout=15)
def test_state_of_whole_parameters_that_is_loaded_is_refused_with_the_remedy(rank, world):
    plain = built(matrices)
    saved = Adam(plain.parameters())
    backward(plain, rank)
    saved.step()
    model = sharded()
    optimizer = Adam(model.parameters())
    optimizer.load_state_dict(saved.state_dict())
    backward(model, rank)
    optimizer.step()


@ranks.on(2)
def test_a_step_inside_summon_full_params_is_refused_and_works_outside(rank, world):
    both = SideBySide(built(matrices), "3")
    both.backward(lambda model: odd_loss(model, rank, 0))
    unsharded = pytest.raises(RuntimeError, match=r"weight' is unsharded.*summon_full_params")
    with both.model.summon_full_params(), unsharded:
        both.optimizer.step()
    both.update()
    both.step(lambda model: odd_loss(model, rank, 1))


@ranks.on(2)
def test_a_step_inside_backward_is_refused(rank, world):
    """From a hook in the last of backward, when gradients of the root are there."""
    model, told = sharded(), list[str]()
    optimizer = sgd(model.parameters())

    def step(_: Tensor) -> None:
        told.append(ranks.refusal(optimizer.step))

    model.module[0].register_forward_hook(lambda _, __, output: output.register_hook(step) and None)
    backward(model, rank)
    optimizer.step()
    assert len(told) == 1
    assert told[0].startswith("RuntimeError") and "backward is not complete" in told[0]


@ranks.on(2)
def test_other_models_are_not_looked_at(rank, world):
    plain, model = built(matrices), sharded()
    one, other = sgd(plain.parameters()), sgd(model.parameters())
    together = sgd([*plain.parameters(), *model.parameters()])
    backward(plain, rank)
    with model.no_sync():
        backward(model, rank)
    one.step()
    Muon(plain.parameters()).step()
    for optimizer in (other, together):
        with pytest.raises(RuntimeError, match="no_sync"):
            optimizer.step()
    model.zero_grad()
    together.step()
