"""torchao: linear layers that compute in float8, and optimizers whose state has 8 and 4 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

import ranks
import zero
from reference import at_stage, same, train

pytest.importorskip("torchao")

OPTIMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD momentum": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (Adam, {"lr": 0.01}),
}


def net(recipe: str | None = None, **options: Any) -> nn.Module:
    """recipe: of layers in float8, computed as on a GPU that has it."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(24, 128), nn.Tanh(), nn.Linear(128, 96), nn.Tanh(), nn.Linear(96, 16))
    if recipe is None:
        return model
    config = Float8LinearConfig(emulate=True, **options)
    if recipe != "tensorwise":
        config = Float8LinearConfig.from_recipe_name(recipe)
        object.__setattr__(config, "emulate", True)
    return convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "4")


def wrapped(stage: int, model: nn.Module, optim: Any, options: dict[str, Any], **how: Any) -> tuple[nn.Module, Any]:
    if stage < 3:
        return at_stage(stage, model, optim, **options)
    model = zero.FSDP(model, **how)
    return model, optim(model.parameters(), **options)


@pytest.mark.parametrize("optim", OPTIMS)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@ranks.on(2)
def test_layers_in_float8_train_to_the_numbers_of_ddp(rank, world, recipe, optim):
    found = []
    for stage in range(4):
        model, optimizer = wrapped(stage, net(recipe), *OPTIMS[optim])
        found.append((train(model, optimizer, rank), zero.full_state_dict(model)))
    for one in found[1:]:
        same(one, found[0])
    float32 = wrapped(0, net(), *OPTIMS[optim])
    assert found[0][0] != train(*float32, rank), "computed in float8"


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.raises(2, ValueError, "is a WeightWithDynamicFloat8CastTensor, which wraps", "_float8_all_gather=False")
def test_weights_that_torchao_wraps_for_fsdp2_are_refused_with_the_remedy(rank, world, stage):
    wrapped(stage, net("tensorwise", enable_fsdp_float8_all_gather=True), AdamW, {})


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@ranks.on(2)
def test_optimizers_of_few_bits_train_to_the_numbers_of_ddp_and_are_planned(rank, world, name):
    import torchao.optim

    optim, found = getattr(torchao.optim, name), []
    with torch.compiler.set_stance("force_eager"):
        for stage in range(4):
            model, optimizer = wrapped(stage, net(), optim, {}, partition="whole")
            found.append((train(model, optimizer, rank), zero.full_state_dict(model)))
            if stage:
                planned = zero.plan(net(), world_size=2, optimizer=optim, stages=[str(stage)]).cost(str(stage), 2)
                assert rank or zero.report(model, optimizer).optimizer == pytest.approx(planned.optimizer, rel=0.01)
    for one in found[1:]:
        same(one, found[0])
