"""What scripts ask of a model at any stage: full weights on one rank, clipping, the plain module."""

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as recomputed_in_backward
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam

import matrix
import ranks
import zero
from assertions import same
from runs import norm_of_gradients, take_step
from zoo import TiedBlocks, data

STAGES = [0, 1, 2, 3]


def net() -> nn.Module:
    torch.manual_seed(0)
    return TiedBlocks(6)


def at_stage(stage: int, model: nn.Module) -> tuple[nn.Module, Any]:
    return zero.setup(model, Adam, stage=stage, lr=0.01)


def step(model: nn.Module, optimizer: Any, rank: int, number: int = 0) -> float:
    return take_step(optimizer, model(data(8, 6, rank=rank, step=number)).square().mean())


@pytest.mark.parametrize("stage", [0, 2, 3])
@ranks.on(2)
def test_one_rank_gets_the_weights_that_every_rank_would(rank, world, stage):
    model, optimizer = at_stage(stage, net())
    step(model, optimizer, rank)
    everywhere = zero.full_state_dict(model, to=None)
    on_cpu = zero.full_state_dict(model, to=1, device="cpu")
    inside = zero.full_state_dict(model.module.blocks[1], to=0)
    assert list(on_cpu) == (list(everywhere) if rank == 1 else [])
    assert list(inside) == ([*net().blocks[1].state_dict()] if rank == 0 else [])
    for name, value in everywhere.items():
        assert value.untyped_storage().nbytes() == value.nbytes
        assert rank == 0 or torch.equal(on_cpu[name], value)
    given = on_cpu or everywhere
    assert given["head.weight"] is given["blocks.0.0.weight"]
    net().load_state_dict(everywhere)
    assert not any(value.requires_grad for value in everywhere.values())


def whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def by_block(wrap: Callable[[nn.Module], nn.Module], model: Any) -> nn.Module:
    """The first block's weight is the head's."""
    for number, block in enumerate(model.blocks):
        model.blocks[number] = wrap(block)
    return model


def recomputed(model: nn.Module) -> nn.Module:
    """In a wrapper whose hooks take its own name off those of the state_dict()."""
    return recomputed_in_backward(whole(model))


COMPILED = {
    "around": (None, whole),
    "inside": (whole, None),
    "blocks": (partial(by_block, whole), None),
    "blocks, recomputed": (partial(by_block, recomputed_in_backward), None),
    "blocks, compiled and recomputed": (partial(by_block, recomputed), None),
    "inside, recomputed": (recomputed, None),
    "around, recomputed": (None, recomputed),
    "around, recomputed and compiled": (None, lambda model: whole(recomputed_in_backward(model))),
}
"""The module, and then its wrapper."""


@pytest.mark.slow
@matrix.combined("compiled, stage", COMPILED, [0, 2, 3])
@ranks.on(2)
def test_names_are_the_modules_own_whatever_is_compiled(rank, world, stage, compiled):
    inside, around = COMPILED[compiled]
    expected, expected_optimizer = at_stage(stage, net())
    model, optimizer = at_stage(stage, inside(net()) if inside else net())
    step(expected, expected_optimizer, rank)
    step(model, optimizer, rank)
    model = around(model) if around else model
    weights = zero.full_state_dict(expected, to=None)
    for to in (0, None):
        found = zero.full_state_dict(model, to=to)
        assert list(found) == (list(net().state_dict()) if to in (rank, None) else [])
    once = dict(net().named_parameters()) if "recomputed" in compiled else weights  # but for running averages
    assert all(torch.equal(found[name], weights[name]) for name in once)
    assert found["head.weight"] is found["blocks.0.0.weight"]
    net().load_state_dict(found)
    given = {name: 2 * value if value.is_floating_point() else value for name, value in found.items()}
    for one in (given, iter(found.items())):
        missing, unexpected = zero.load_full_state_dict(model, one)
        assert not missing and not unexpected
        loaded, expected = zero.full_state_dict(model, to=None), given if one is given else found
        assert all(torch.equal(value, expected[name]) for name, value in loaded.items())
    assert {name.partition("/")[0] for name, _ in zero.full_tensors(model, optimizer, to=None)} <= found.keys()
    if stage > 1 and not around:
        for given in (weights, {name: 2 * value for name, value in model.state_dict().items()}):
            model.load_state_dict(given)
            loaded = zero.full_state_dict(model, to=None)
            assert all(torch.equal(one, other) for one, other in zip(loaded.values(), given.values(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(1, 3), (2, 1), (3, 2)])
@ranks.on(2)
def test_the_plain_module_comes_back_and_can_be_wrapped_again(rank, world, first, second):
    results = []
    for stages in ((0, 0), (first, second)):
        plain = net()
        before = [*plain.parameters()]
        model, optimizer = at_stage(stages[0], plain)
        step(model, optimizer, rank)
        weights = zero.full_state_dict(model, to=None)
        wrapper = model  # which somebody may hold on to
        model = zero.unwrap(wrapper)
        assert model is plain
        assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
        assert model.state_dict().keys() == weights.keys()
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        model(data(8, 6, rank=rank)).sum().backward()
        assert all(param.grad is not None for param in model.parameters() if param.requires_grad)
        model.zero_grad()
        model, optimizer = at_stage(stages[1], model)
        losses = [step(model, optimizer, rank, number) for number in (1, 2)]
        results.append((losses, zero.full_state_dict(model, to=None)))
    (losses, weights), (found, other) = results
    assert found == losses
    assert all(torch.equal(other[name], weights[name]) for name in weights)


@ranks.on(2)
def test_nothing_is_left_on_the_module(rank, world):
    """Also not where it was compiled or held by another."""
    plain = net()
    expected = [copy.deepcopy(plain)(data(8, 6, rank=0)), plain.blocks[0][1].running_mean.dtype]
    precision = zero.MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
    holder = nn.ModuleDict({"net": torch.compile(zero.FSDP(plain, precision=precision), backend="eager")})
    assert zero.unwrap(holder) is holder
    assert holder["net"] is plain
    assert torch.equal(plain(data(8, 6, rank=0)), expected[0])
    assert plain.blocks[0][1].running_mean.dtype == expected[1]
    for module in plain.modules():
        hooks = [value for name, value in vars(module).items() if name.endswith("_hooks") and value]
        assert not hooks


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(2, timeout=10)
def test_what_is_left_of_a_wrapper_is_refused_and_nothing_is_unwrapped_within_a_step(rank, world, stage):
    model, optimizer = at_stage(stage, net())
    step(model, optimizer, rank)
    if stage == 3:
        with model.summon_full_params():
            told = ranks.refusal(lambda: zero.unwrap(model))
        assert "zero.unwrap()" in told and "between steps" in told
    zero.unwrap(model)
    uses = [lambda: model(data(8, 6, rank=0)), optimizer.step]
    if stage == 3:  # the OSS has its state still
        uses += [optimizer.state_dict, lambda: zero.full_optimizer_state_dict(model.module, optimizer)]
    for use in uses:
        assert "was unwrapped by zero.unwrap()" in ranks.refusal(use)


@ranks.on(bare=True)
def test_one_process_without_a_group_does_the_same(rank, world):
    model = zero.FSDP(net())
    for one in (model, zero.unwrap(model)):
        assert list(zero.full_state_dict(one, to=0)) == list(net().state_dict())
        assert sum(param.numel() for param in one.parameters()) == sum(param.numel() for param in net().parameters())


WRONG_CALLS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "no_sync of a list": (lambda m, o: zero.no_sync([m]), "a list .* in one module"),
    "unwrapping a list": (lambda m, o: zero.unwrap([m]), "a list .* in one module"),
    "weights of a list": (lambda m, o: zero.full_state_dict([m]), "a list .* in one module"),
    "weights of an optimizer": (lambda m, o: zero.full_state_dict(o), "stands where the model belongs"),
    "loading in another order": (lambda m, o: zero.load_full_state_dict({}, m), "a dict stands where the model"),
    "streaming a list": (lambda m, o: zero.full_tensors([m, m]), "a list stands where the model belongs"),
    "loading state in another order": (lambda m, o: zero.load_full_optimizer_state_dict(o, m, {}), "stands where the"),
    "state of no optimizer": (lambda m, o: zero.full_optimizer_state_dict(m, m), "where an optimizer belongs"),
    "joining in another order": (lambda m, o: next(zero.join(m, [])), "a list stands where the model belongs"),
}


@ranks.on(2)
def test_what_is_no_model_or_optimizer_is_told_the_call(rank, world):
    for stage in STAGES:
        model, optimizer = at_stage(stage, net())
        model(data(8, 6, rank=rank, step=0)).square().mean().backward()
        for name, (call, words) in WRONG_CALLS.items():
            told = ranks.refusal(lambda: call(model, optimizer))  # noqa: B023
            assert re.search(f"^TypeError: .*({words})", told), f"{name} at stage {stage}: {told}"
        optimizer.step()


def halves(stage: int) -> tuple[nn.Module, list[Any]]:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    return zero.setup(inner, [Adam(inner[k].parameters(), lr=0.01) for k in (0, 2)], stage=stage)


@ranks.on(2)
def test_each_of_two_optimizers_is_clipped_by_the_norm_of_its_own_gradients(rank, world):
    found = {}
    for stage in STAGES:
        model, optimizers = halves(stage)
        numbers = []
        for number in range(3):
            model.zero_grad()
            model(data(8, 6, rank=rank, step=number)).square().mean().backward()
            for optimizer, limit in zip(optimizers, (0.01, 10.0), strict=True):
                own = [param for group in optimizer.param_groups for param in group["params"]]
                numbers.append(clip_grad_norm_(own, limit).item())
                numbers.append(norm_of_gradients(own).item())
                optimizer.step()
        found[stage] = numbers, zero.full_state_dict(model, to=None)
    for stage in STAGES[1:]:
        assert found[stage][0] == pytest.approx(found[0][0], rel=1e-5), stage
        torch.testing.assert_close(found[stage][1], found[0][1], rtol=1e-5, atol=1e-6)


class Pair(nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        wrap = zero.FSDP if stage else nn.parallel.DistributedDataParallel
        self.one, self.other = wrap(nn.Linear(6, 6)), wrap(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x))


@ranks.on(2)
def test_one_optimizer_of_two_sharded_models_has_the_state_of_both_or_is_refused_by_name(rank, world):
    states = []
    for stage in (0, 3):
        pair = Pair(stage)
        optimizer = Adam(pair.parameters(), lr=0.01)
        take_step(optimizer, pair(data(8, 6, rank=rank, step=0)).square().mean())
        states.append(zero.full_optimizer_state_dict(pair, optimizer, to=None))
    same(states[1], states[0], "the state of both")
    take_step(optimizer, pair(data(8, 6, rank=rank, step=1)).square().mean())
    zero.load_full_optimizer_state_dict(pair, optimizer, states[0])
    same(zero.full_optimizer_state_dict(pair, optimizer, to=None), states[0], "the state that was loaded")
    for refused in (
        lambda: zero.full_optimizer_state_dict(pair.one, optimizer, to=None),
        lambda: zero.load_full_optimizer_state_dict(pair.other, optimizer, states[0]),
    ):
        told = ranks.refusal(refused)
        assert told.startswith("ValueError: the Adam also steps ") and "one optimizer for each model" in told
