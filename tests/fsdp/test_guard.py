"""What may be done with parameters that lie in shards. Refused on every rank: an optimizer that would be wrong,
parameters that were given other data, replaced or added after wrapping, and DistributedDataParallel around or in it."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel as ddp
from torch.optim import LBFGS, SGD, Adafactor, Adam, Muon, Optimizer

import ranks
import zero
from assertions import plain, same
from optimizers import Clipping, Curious, Estimating, Lamb, Noisy, Sam, TrainedLion
from runs import SideBySide, side_by_side, take_step
from zero import FSDP
from zoo import WIDTH, Stack, built, loss_on, matrices, odd_loss

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


MOVED = [r"'(first|last)\.\w+' was moved, cast or given other data", r"p\.data\.copy_", "before wrapping"]
Net = partial(Stack, classes=WIDTH, blocks=0)


def exchange(model: FSDP) -> None:
    for param in model.parameters():
        param.data = 0.5 * param.data


REBINDS: dict[str, Callable[[FSDP], object]] = {
    "exchanged": exchange,
    "cast": FSDP.bfloat16,
    "a bias, of which the last rank has all": lambda m: setattr(m.last.bias, "data", 0.5 * m.last.bias.data),
    "exchanged on one rank": lambda model: exchange(model) if torch.distributed.get_rank() else None,
}
USES: dict[str, Callable[[FSDP, int], object]] = {
    "evaluates": lambda model, rank: torch.no_grad()(loss_on(rank, 0))(model),
    "gives its weights": lambda model, rank: model.state_dict(),
    "is summoned": lambda model, rank: model.summon_full_params().__enter__(),
    "is stepped": lambda model, rank: SGD(model.parameters(), 0.1).step(),
}


def rebound(rank: int, world: int, rebind: str, use: str) -> None:
    model = zero.FSDP(Net())
    loss_on(rank, 0)(model).backward()
    REBINDS[rebind](model)
    USES[use](model, rank)


@pytest.mark.parametrize(
    ("rebind", "use"), [*(("exchanged", use) for use in USES if use != "is stepped"), ("cast", "evaluates")]
)
def test_other_data_is_refused_where_it_would_be_lost(rebind, use):
    ranks.expect_error(rebound, 2, RuntimeError, *MOVED, args=(rebind, use), timeout=15)


@pytest.mark.parametrize(
    ("use", "words"), [("is stepped", "rank 1 has raised"), ("evaluates", "rank 1 has raised.*out of step")]
)
def test_ranks_that_go_on_are_told_why_another_does_not(use, words):
    args = ("a bias, of which the last rank has all", use)
    told = ranks.expect_error(rebound, 2, RuntimeError, "given other data", args=args, timeout=15)
    assert re.search(words, told[0])
    assert "'last.bias'" in told[1] and not re.search(words, told[1])


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"sharding_strategy": "NO_SHARD"}], ids=str)
@ranks.on(2)
def test_what_is_written_in_place_counts(rank, world, options):
    """The remedy of the error, and data that comes back, with training in between."""
    both = side_by_side(Net(), options)
    for step in range(2):
        both.step(loss_on(rank, step))
        for model in (both.model, both.plain):
            for param in model.parameters():
                before = param.data
                param.data = torch.zeros_like(before)
                param.data = before
                param.data.copy_(0.5 * param.data)
                with torch.no_grad():
                    param.copy_(0.5 * param)


@pytest.mark.parametrize("rebind", ["exchanged", "cast", "exchanged on one rank"])
@ranks.raises(2, RuntimeError, *MOVED, timeout=15)
def test_other_data_for_whole_parameters_is_refused_and_nothing_of_it_stays(rank, world, rebind):
    model = zero.FSDP(Net())
    before = model.state_dict()
    with pytest.raises(RuntimeError, match="given other data") as error, model.summon_full_params():
        REBINDS[rebind](model)
    same({**model.state_dict()}, {**before})
    loss_on(rank, 0)(model).backward()  # it can go on
    USES["is stepped"](model, rank)
    raise error.value


def stepped_after(rank: int, world: int, change: Callable[[Stack], object]) -> None:
    net = Net()
    model = zero.FSDP(net)
    change(net)
    optimizer = SGD(model.parameters(), 0.1)
    loss_on(rank, 0)(model).backward()
    optimizer.step()


def other_layer(net: Stack) -> None:
    net.last = nn.Linear(WIDTH, 2)


def other_weight(net: Stack) -> None:
    net.last.weight = nn.Parameter(torch.ones(2, WIDTH))
    net.last.bias = None


def added(net: Stack) -> None:
    net.last = nn.Sequential(net.last, nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("change", [other_layer, other_weight, added])
def test_what_came_after_wrapping_is_refused_at_the_step(change):
    words = [r"'last\.(1\.)?weight' is in no unit of FSDP: it was replaced .* or added since", "does not average"]
    ranks.expect_error(stepped_after, 2, RuntimeError, *words, args=(change,), timeout=15)


@ranks.on(2)
def test_what_is_frozen_or_ignored_may_change(rank, world):
    stepped_after(rank, world, lambda net: setattr(net, "last", nn.Linear(WIDTH, 2).requires_grad_(False)))
    net = Net()
    net.first = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    model = zero.FSDP(net, ignored_modules=[net.first])
    net.first[0] = nn.Linear(WIDTH, WIDTH)
    loss_on(rank, 0)(model).backward()
    SGD(model.parameters(), 0.1).step()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 7))


def sharded_ddp(module):
    return zero.ShardedDDP(module, zero.OSS(module.parameters(), SGD, lr=0.1))


def within(module):
    return nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"trunk": module}))


def fsdp_of(module):
    return zero.FSDP(module, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


WITHIN = "'1.trunk.module.0.weight'", "DistributedDataParallel"
INSIDE = "'0' is a DistributedDataParallel", r"\.module"
BESIDE_DDP = {
    "around the module in FSDP": (lambda: ddp(zero.FSDP(net()).module), "'0.weight'", WITHIN[1], "FSDP"),
    "around a module that contains FSDP": (lambda: ddp(within(zero.FSDP(net()))), *WITHIN, "FSDP"),
    "around a module that contains ShardedDDP": (lambda: ddp(within(sharded_ddp(net()))), *WITHIN, "ShardedDDP"),
    "inside FSDP": (lambda: fsdp_of(nn.Sequential(ddp(net()))), *INSIDE),
    "inside ShardedDDP": (lambda: sharded_ddp(nn.Sequential(ddp(net()))), *INSIDE),
}


def refused_beside_ddp(rank, world, case):
    try:
        BESIDE_DDP[case][0]()
    finally:
        ddp(net())(torch.ones(2, 8)).sum().backward()  # nothing was sent that another would take for its own


@pytest.mark.parametrize("case", BESIDE_DDP)
def test_ddp_around_what_averages_its_own_gradients_or_inside_of_it_is_refused(case):
    error = ValueError if case.startswith("inside") else RuntimeError
    ranks.expect_error(refused_beside_ddp, 2, error, *BESIDE_DDP[case][1:], args=(case,))


@ranks.raises(2, RuntimeError, "was put into torch's Join", r"in zero\.join\(batches, ddp\)", "wrap the module again")
def test_ddp_in_torchs_join_is_refused_on_every_rank(rank, world):
    model = ddp(net())
    optimizer = zero.OSS(model.parameters(), SGD, lr=0.1)
    with model.join():
        take_step(optimizer, model(torch.ones(2, 8)).sum())
