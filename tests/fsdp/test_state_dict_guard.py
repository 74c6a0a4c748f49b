"""Modules inside an FSDP do not give this rank's shards away as if they were unsharded."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ranks
import zero
from assertions import same
from inner import unsharded
from zero.fsdp.full_weights import loading, naming
from zero.fsdp.model import models_of
from zoo import Stack, batch

GIVEN: dict[str, tuple[Callable[[Any], object], list[str]]] = {
    "state_dict": (lambda model: model.module.state_dict(), ["Linear 'first'", "zero.full_state_dict"]),
    "a block's state_dict": (lambda model: model.blocks[1].state_dict(), ["Linear 'up'", "summon_full_params"]),
    "a copy": (lambda model: copy.deepcopy(model.module), ["cannot be copied", "before wrapping"]),
    "a copy of a block within summon_full_params": (lambda model: copied_within(model), ["full_state_dict"]),
    "an average": (lambda model: AveragedModel(model.module), ["cannot be copied"]),
}


def copied_within(model: Any) -> None:
    with model.summon_full_params():
        copy.deepcopy(model.blocks[0])


def given_away(rank: int, world: int, what: str) -> None:
    model = zero.FSDP(Stack())
    model(batch(rank, 0)).sum()  # the root is unsharded now, but not for long
    GIVEN[what][0](model)


@pytest.mark.parametrize("what", GIVEN)
def test_what_would_be_taken_for_whole_is_refused(what):
    error = RuntimeError if "state_dict" in what else TypeError
    ranks.expect_error(given_away, 2, error, *GIVEN[what][1], args=(what,), timeout=15)


@pytest.mark.parametrize(("world", "options"), [(2, {}), (2, {"sharding_strategy": "NO_SHARD"}), (1, {})])
@ranks.on("world", timeout=15)
def test_what_is_whole_is_given(rank, world, options):
    plain = Stack()
    model = zero.FSDP(copy.deepcopy(plain), **options)
    if options or world == 1:
        found = model.module.state_dict()
    else:
        with model.summon_full_params():
            found = {name: value.clone() for name, value in model.module.state_dict().items()}
        assert [*model.module.state_dict(keep_vars=True).values()] == [*model.parameters()]
    same(dict(found), dict(plain.state_dict()))


@ranks.on(2, timeout=15)
def test_full_weights_of_a_module_inside_are_gathered(rank, world):
    plain = Stack()
    model = zero.FSDP(copy.deepcopy(plain))
    model(batch(rank, 0)).sum()
    for inner, expected in ((model.module, plain), (model.blocks[1], plain.blocks[1])):
        found = zero.full_state_dict(inner, to=None)
        same(dict(found), dict(expected.state_dict()))
    assert unsharded(model) == []


def without_bias(module: nn.Module, found: dict[str, Any], prefix: str, _: object) -> None:
    assert found[f"{prefix}up.weight"].shape == (module.up.out_features, module.up.in_features)
    del found[f"{prefix}up.bias"]


@ranks.on(2, timeout=15)
def test_hooks_on_state_dicts_of_modules_inside_see_full_parameters(rank, world):
    plain, seen = Stack(), dict[str, Any]()
    model = zero.FSDP(copy.deepcopy(plain))
    model.register_state_dict_post_hook(lambda module, found, *_: seen.update(found))
    model.blocks[1].register_state_dict_post_hook(without_bias)
    expected = dict(plain.state_dict())
    del expected["blocks.1.up.bias"]
    for found in (model.state_dict(), zero.full_state_dict(model, to=None)):
        same(dict(found), expected)
        same(seen, expected)


@ranks.on(2)
def test_names_and_shapes_are_given_and_no_values(rank, world):
    plain = Stack()
    model = zero.FSDP(copy.deepcopy(plain))
    for context in (naming, loading):
        with context([one for one, _ in models_of(model)]):
            for inner, expected in ((model.module, plain), (model.blocks[1], plain.blocks[1])):
                found = inner.state_dict()
                assert {name: one.shape for name, one in found.items()} == {
                    name: one.shape for name, one in expected.state_dict().items()
                }
            with pytest.raises(NotImplementedError, match="meta"):
                found["up.weight"].cpu()
    assert ranks.refusal(model.module.state_dict).startswith("RuntimeError")


@ranks.on(2)
def test_frozen_modules_that_load_by_themselves_stay_sharded_while_others_are_loaded(rank, world):
    plain = Stack()
    plain.first.requires_grad_(False).register_load_state_dict_pre_hook(lambda *_: None)
    model = zero.FSDP(plain)
    inner = [one for one, _ in models_of(model)]
    for frozen in (False, True):
        with loading(inner, frozen=frozen):
            assert [unit.summoned for one in inner for unit in one.units].count(True) == frozen


@ranks.on(2)
def test_full_weights_load_into_a_module_inside(rank, world):
    model = zero.FSDP(Stack())
    for step, context in enumerate((nullcontext, model.summon_full_params)):
        full = {name: value + 1 + step for name, value in zero.full_state_dict(model, to=None).items()}
        with context():
            model.module.load_state_dict(full)
        same({**zero.full_state_dict(model, to=None)}, full)
    full = {name: value + 1 for name, value in full.items() if name.startswith("blocks.1.")}
    model.module.blocks[1].load_state_dict({name.removeprefix("blocks.1."): value for name, value in full.items()})
    same({name: value for name, value in zero.full_state_dict(model, to=None).items() if name in full}, full)
