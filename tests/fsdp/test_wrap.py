"""Which modules become units and which parameters each unit has: by FSDP of one process, without a group."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

import zero
from inner import unit_modules, unit_names, unit_params
from zoo import GPT, Attention, DecoderBlock, OddMLP

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def names(root: nn.Module, policy: object, **options: object) -> list[str]:
    model = zero.FSDP(root, auto_wrap_policy=policy, **options)
    found = unit_names(model)
    assert all(root.get_submodule(name) is module for name, module in zip(found, unit_modules(model), strict=True))
    return found


@pytest.mark.parametrize(
    "policy",
    [
        None,
        ModuleWrapPolicy({DecoderBlock}),
        CustomPolicy(lambda module: isinstance(module, DecoderBlock)),
        partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, DecoderBlock)),
        partial(transformer_auto_wrap_policy, transformer_layer_cls={DecoderBlock}),
        lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, DecoderBlock),
    ],
    ids=["none", "by class", "custom", "lambda", "transformer", "function"],
)
def test_every_kind_of_policy_makes_the_blocks_units(policy):
    assert names(GPT(), policy) == ["", *BLOCKS]


def test_units_within_units_come_from_the_outside_in():
    inner = [name for block in BLOCKS for name in (block, f"{block}.attention")]
    assert names(GPT(), ModuleWrapPolicy({DecoderBlock, Attention})) == ["", *inner]


def test_without_a_policy_blocks_that_a_list_repeats_are_units():
    net = nn.Module()
    net.repeated = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(2)])
    net.once = nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])
    net.leaves = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    net.empty = nn.ModuleList([nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())])
    net.mixed = nn.ModuleList([DecoderBlock(2, 1), nn.Sequential(nn.Linear(2, 2)), DecoderBlock(2, 1)])
    assert names(net, None) == ["", "repeated.0", "repeated.1", "mixed.0", "mixed.2"]


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2))


LAYERS = {
    "lists": lambda: nn.ModuleList([nn.Linear(2, 2), block()]),
    "lists of lists": lambda: nn.ModuleList([nn.Identity(), nn.ModuleList([None, block()])]),
    "lists with parameters": lambda: nn.ModuleList([nn.ParameterList([torch.ones(2)]), block()]),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_lists_in_a_list_stand_for_what_they_hold(layer):
    net = nn.Module()
    net.layers = nn.ModuleList(layer() for _ in range(3))
    blocks = [name for name, module in net.named_modules() if type(module) is nn.Sequential]
    assert len(blocks) == 3
    assert names(net, None) == ["", *blocks]


class Stack(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({Stack})])
def test_a_list_with_a_forward_of_its_own_is_a_module_like_others(policy):
    net = nn.Module()
    net.stacks = nn.ModuleList(Stack([nn.Linear(2, 2)]) for _ in range(2))
    assert names(net, policy) == ["", "stacks.0", "stacks.1"]


def test_a_model_without_blocks_is_one_unit():
    assert names(nn.Linear(2, 2), None) == [""]
    assert names(nn.Linear(2, 2), ModuleWrapPolicy({nn.Linear})) == [""]
    assert names(GPT(), ModuleWrapPolicy({nn.Conv2d})) == [""]


def test_as_one_unit_leaves_no_units_inside():
    policy = ModuleWrapPolicy({DecoderBlock, Attention, nn.LayerNorm})
    assert names(GPT(), policy, as_one_unit=[DecoderBlock]) == ["", *BLOCKS, "norm"]
    net = GPT()
    found = names(net, policy, as_one_unit=[net.blocks[1]])
    assert "blocks.1.attention" not in found and "blocks.0.attention" in found


def test_a_list_has_no_forward_to_be_gathered_for():
    with pytest.raises(ValueError, match="'blocks' is a ModuleList, which has no forward"):
        zero.FSDP(GPT(), auto_wrap_policy=ModuleWrapPolicy({nn.ModuleList}))


def owned(root: nn.Module, policy: object, **options: object) -> dict[str, list[str]]:
    return unit_params(zero.FSDP(root, auto_wrap_policy=policy, **options))


def test_every_parameter_belongs_to_the_innermost_unit_around_it():
    found = owned(GPT(), ModuleWrapPolicy({DecoderBlock, Attention}))
    assert found[""] == ["tokens.weight", "positions.weight", "norm.weight", "norm.bias"]
    assert found["blocks.1.attention"] == [
        f"blocks.1.attention.{name}" for name in ("mix.weight", "mix.bias", "out.weight", "out.bias")
    ]
    assert not any(".attention." in name for name in found["blocks.1"])
    listed = [name for unit in found.values() for name in unit]
    assert sorted(listed) == sorted(name for name, _ in GPT().named_parameters())


def test_tied_weights_belong_to_the_innermost_unit_around_all_their_places():
    found = owned(OddMLP(), None)
    assert "layers.0.linear.weight" in found[""]
    assert not any("linear.weight" in name for unit in ("layers.0", "layers.2") for name in found[unit])
    assert "layers.1.linear.weight" in found["layers.1"]


def test_ignored_parameters_belong_to_no_unit():
    net = GPT()
    ignored = {net.blocks[1].attention.mix.weight, net.norm.bias}
    found = owned(net, ModuleWrapPolicy({DecoderBlock}), ignored_parameters=ignored)
    listed = {name for unit in found.values() for name in unit}
    assert {name for name, _ in net.named_parameters()} - listed == {"blocks.1.attention.mix.weight", "norm.bias"}
