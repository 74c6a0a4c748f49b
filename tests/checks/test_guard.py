"""What optimizers may do with parameters that lie in shards: what would be wrong is refused, on every rank."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, Adam, Muon, Optimizer

import ranks
import zero
from optimizers import Clipping, Curious, Estimating, Lamb, Noisy, Sam, TrainedLion
from runs import SideBySide, sgd
from zero.checks import guard
from zoo import data

WIDTH = 9


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.middle(self.up(x))))


class Net(nn.Module):
    """Of matrices alone, which is all that Muon takes; for two ranks each unit is cut inside one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.second = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.third = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.third(self.second(self.first(x)))
        for block in self.blocks:
            x = block(x)
        return x


def loss_on(rank: int, step: int = 0) -> Any:
    return lambda model: model(data(4, WIDTH, rank=rank, step=step)).square().mean()


def backward(model: nn.Module, rank: int, step: int = 0) -> None:
    loss_on(rank, step)(model).backward()


# ------------------------------------------------------------------------------------ optimizers for full parameters


def stepped(rank: int, world: int, optim: Any, options: dict[str, Any]) -> None:
    model = zero.FSDP(Net(), **options)
    optimizer = optim(model.parameters())
    before = model.state_dict()
    backward(model, rank)
    try:
        optimizer.step()
    except RuntimeError:
        after = model.state_dict()
        assert all(torch.equal(value, before[name]) for name, value in after.items()), "stepped all the same"
        raise


class OwnMuon(Muon):
    """A class derived from one that needs whole parameters."""


NEED_WHOLE = [
    Muon,
    partial(Adafactor, lr=0.1),
    OwnMuon,
    Lamb,
]


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
@pytest.mark.parametrize("optim", NEED_WHOLE, ids=lambda optim: getattr(optim, "func", optim).__name__)
def test_optimizers_that_need_whole_parameters_are_refused_where_they_are_cut(optim, options):
    words = [r"needs each parameter whole, but '.*weight' is cut between ranks", r"FSDP\(partition='whole'\)"]
    ranks.expect_error(stepped, 2, RuntimeError, *words, args=(optim, options), timeout=15)


def sam(rank: int, world: int, options: dict[str, Any]) -> None:
    """Ascends by the norm of this rank's shard alone; the first that torch tells of is the step of the SGD inside."""
    model = zero.FSDP(Net(), **options)
    optimizer = Sam(model.parameters(), SGD, lr=0.1, momentum=0.9)
    backward(model, rank)
    optimizer.first_step()
    backward(model, rank)
    optimizer.second_step()


@pytest.mark.parametrize("options", [{}, {"partition": "whole"}], ids=str)
def test_an_optimizer_around_another_that_couples_parameters_is_refused(options):
    words = [r"Sam \(optimizers\) computes a step of one parameter from others", r"without zero \(stage 0\)"]
    ranks.expect_error(sam, 2, RuntimeError, *words, args=(options,), timeout=15)
    ranks.run(sam, args=({"sharding_strategy": "NO_SHARD"},))


COUPLED = [Clipping, Noisy, partial(Estimating, patience=-1)]


@pytest.mark.parametrize("optim", COUPLED, ids=lambda optim: getattr(optim, "func", optim).__name__)
def test_optimizers_that_couple_parameters_are_refused_whatever_the_partition(optim):
    ranks.expect_error(stepped, 2, RuntimeError, "cannot be sharded", args=(optim, {"partition": "whole"}), timeout=15)
    at_setup = partial(optim.func, **optim.keywords) if isinstance(optim, partial) else optim
    ranks.expect_error(set_up, 2, ValueError, "cannot be sharded", args=(at_setup,), timeout=15)


def set_up(rank: int, world: int, optim: Any) -> None:
    zero.setup(Net(), optim, stage=3)


def unknown(rank: int, world: int, options: dict[str, Any]) -> None:
    stepped(rank, world, partial(Curious, secret="known"), options)


def test_what_cannot_be_measured_is_refused_unless_the_user_says_what_it_is():
    words = [r"Curious \(optimizers\) .* could not be measured", r"FSDP\(partition='even'\)", r"partition='whole'\)"]
    ranks.expect_error(unknown, 2, RuntimeError, *words, args=({},), timeout=15)
    ranks.run(unknown, args=({"partition": "even"},))


@pytest.mark.parametrize(("optim", "cut"), [(TrainedLion, True), (Lamb, False)])
@ranks.on(2)
def test_others_than_torchs_train_as_they_are_found_to_be(rank, world, optim, cut):
    for build in [partial(zero.setup, stage=3), *(["3"] if cut else [])]:
        both = SideBySide(Net(), build, optim)
        assert cut == any(param.numel() % WIDTH for param in both.model.parameters())
        for step in range(3):
            both.step(loss_on(rank, step))


@ranks.raises(
    2, RuntimeError, r"Estimating wrote other numbers into param_groups\[0\]", "cannot be sharded", timeout=15
)
def test_numbers_that_come_to_differ_between_ranks_are_refused_on_every_rank(rank, world):
    """Numbers that begin to differ in a later step than was looked at."""
    model = zero.FSDP(Net())
    optimizer = Estimating(model.parameters(), patience=7)
    for step in range(9):
        backward(model, rank, step)
        optimizer.step()
    pytest.fail("stepped all the same")


def closed_over(params: Any) -> Optimizer:
    """LBFGS, to be stepped like others."""
    optimizer = LBFGS(params)
    optimizer.step = partial(optimizer.step, lambda: torch.zeros(()))  # type: ignore[method-assign]
    return optimizer


@pytest.mark.parametrize("partition", ["even", "whole"])
def test_what_needs_all_parameters_at_once_is_refused(partition):
    ranks.expect_error(stepped, 2, RuntimeError, "LBFGS", args=(closed_over, {"partition": partition}), timeout=15)


@pytest.mark.parametrize(("optim", "words"), [(Muon, "cut between ranks"), (Adam, "shape of the full parameter")])
@ranks.raises(3, RuntimeError, timeout=15)
def test_refusals_are_on_every_rank_whatever_it_has_itself(rank, world, optim, words):
    """Of three ranks two share a parameter, and the last has one to itself."""
    net = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 16, bias=False))
    before = Adam(net.parameters())
    if optim is Adam:
        net(torch.ones(1, 32)).sum().backward()
        before.step()
        before.zero_grad()
    model = zero.FSDP(net)
    assert [param.numel() for param in model.parameters()] == [[512, 0], [512, 0], [0, 512]][rank]
    model(torch.ones(1, 32)).sum().backward()
    (before if optim is Adam else optim(model.parameters())).step()


@ranks.on(2)
def test_what_is_not_cut_is_stepped(rank, world):
    """An even cut that happens to fall between parameters is none."""
    model = zero.FSDP(nn.Linear(4, 4, bias=False))
    assert {param.numel() for param in model.parameters()} <= {0, 16}
    optimizer = Muon(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


# ----------------------------------------------------------------------------------------------- state of other shapes


def state_from_before(rank: int, world: int) -> None:
    """Steps before and after wrapping."""
    net = Net()
    optimizer = Adam(net.parameters())
    backward(net, rank)
    optimizer.step()
    optimizer.zero_grad()
    model = zero.FSDP(net)
    backward(model, rank)
    optimizer.step()


def state_loaded_whole(rank: int, world: int) -> None:
    plain = Net()
    saved = Adam(plain.parameters())
    backward(plain, rank)
    saved.step()
    model = zero.FSDP(Net())
    optimizer = Adam(model.parameters())
    optimizer.load_state_dict(saved.state_dict())
    backward(model, rank)
    optimizer.step()


@pytest.mark.parametrize("function", [state_from_before, state_loaded_whole])
def test_state_of_whole_parameters_is_refused_with_the_remedy(function):
    words = ["the state 'exp_avg' of '.*weight' has the shape of the full parameter", "wrap before the first step"]
    ranks.expect_error(function, 2, RuntimeError, *words, timeout=15)


# ---------------------------------------------------------------------------------------- steps at the wrong moment


@ranks.on(2)
def test_a_step_inside_summon_full_params_is_refused_and_works_outside(rank, world):
    both = SideBySide(Net(), "3")
    both.backward(loss_on(rank))
    with (
        both.model.summon_full_params(),
        pytest.raises(RuntimeError, match=r"weight' is unsharded.*summon_full_params"),
    ):
        both.optimizer.step()
    both.update()
    both.step(loss_on(rank, 1))


@ranks.on(2)
def test_a_step_inside_backward_is_refused(rank, world):
    """From a hook in the last of backward, when gradients of the root are there."""
    net = Net()
    told: list[str] = []
    model = zero.FSDP(net)
    optimizer = SGD(model.parameters(), 0.1)

    def step(_: Tensor) -> None:
        try:
            optimizer.step()
        except RuntimeError as error:
            told.append(str(error))

    net.first.register_forward_hook(lambda _, __, output: output.register_hook(step) and None)
    backward(model, rank)
    optimizer.step()
    assert len(told) == 1
    assert "weight' is unsharded" in told[0] and "backward is not complete" in told[0]


@ranks.on(2)
def test_other_models_are_not_looked_at(rank, world):
    plain, model = Net(), zero.FSDP(Net())
    one, other = SGD(plain.parameters(), 0.1), SGD(model.parameters(), 0.1)
    backward(plain, rank)
    with model.no_sync():
        backward(model, rank)
    one.step()
    Muon(plain.parameters()).step()
    with pytest.raises(RuntimeError, match="no_sync"):
        other.step()
    together = SGD([*plain.parameters(), *model.parameters()], 0.1)
    with pytest.raises(RuntimeError, match="no_sync"):
        together.step()
    model.zero_grad()
    together.step()


@ranks.on(2)
def test_a_guard_goes_with_its_model(rank, world):
    before = len(guard._alive())
    model: Callable[..., Tensor] | None = zero.FSDP(Net())
    assert len(guard._alive()) == before + 1
    del model
    gc.collect()
    assert len(guard._alive()) == before


@ranks.on(2)
def test_a_step_without_gradients_is_no_matter(rank, world):
    model = zero.FSDP(Net())
    optimizer = Muon(model.parameters())
    optimizer.step()
    LBFGS(model.parameters())
    both = SideBySide(Net(), "3", sgd)
    both.step(loss_on(rank))
