"""Which modules become units and which parameters each unit has: by FSDP of one process, without a group."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

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
from simulated.world import simulated
from zoo import GPT, Attention, Block, DecoderBlock, OddMLP

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def holding(**modules: nn.Module) -> nn.Module:
    net = nn.Module()
    for name, module in modules.items():
        net.add_module(name, module)
    return net


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2))


def conv(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv2d(width, width, 3), nn.BatchNorm2d(width), nn.ReLU())


def decoders(count: int, width: int = 8) -> list[nn.Module]:
    return [DecoderBlock(width) for _ in range(count)]


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width))


def stage(width: int, depth: int) -> nn.Module:
    """As timm builds ConvNeXt and Swin: blocks in a stage, stages in an nn.Sequential."""
    blocks = nn.Sequential(*(Block(width, 4 * width) for _ in range(depth)))
    return holding(shrink=nn.Linear(width, width), blocks=blocks)


def resnet() -> nn.Module:
    """Like MobileNet and EfficientNet: layers that repeat inside a block that repeats."""
    blocks = nn.Sequential(*(holding(body=nn.Sequential(conv(), conv())) for _ in range(3)))
    return nn.Sequential(OrderedDict(stem=conv(), layers=blocks))


def lists() -> nn.Module:
    net = holding(once=nn.ModuleList([block()]), repeated=nn.ModuleList([block(), block()]))
    net.leaves = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    net.empty = nn.ModuleList([nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())])
    net.mixed = nn.ModuleList([DecoderBlock(2, 1), block(), DecoderBlock(2, 1)])
    return net


def layers(make: Callable[[], list[Any]]) -> nn.Module:
    return holding(layers=nn.ModuleList(nn.ModuleList(make()) for _ in range(3)))


class Stack(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


def stacks() -> nn.Module:
    return holding(stacks=nn.ModuleList(Stack([nn.Linear(2, 2)]) for _ in range(2)))


def in_a_dictionary() -> nn.Module:
    return holding(layers=nn.ModuleDict({"first": Block(8, 8), "second": Block(8, 8), "norm": nn.LayerNorm(8)}))


LARGE = ["", "0", "1", *(f"1.blocks.{n}" for n in range(9)), "2", "2.blocks.0", "2.blocks.1"]
SMALLER = ModuleWrapPolicy({DecoderBlock, Attention, nn.LayerNorm})
UNITS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], list[str]]] = {
    "a list of blocks": (GPT, {}, ["", *BLOCKS]),
    "blocks that a list repeats": (lists, {}, ["", "repeated.0", "repeated.1", "mixed.0", "mixed.2"]),
    "lists in a list": (
        lambda: layers(lambda: [nn.Linear(2, 2), block()]),
        {},
        ["", *(f"layers.{n}.1" for n in range(3))],
    ),
    "lists of lists": (
        lambda: layers(lambda: [nn.Identity(), nn.ModuleList([None, block()])]),
        {},
        ["", *(f"layers.{n}.1.1" for n in range(3))],
    ),
    "lists with parameters": (
        lambda: layers(lambda: [nn.ParameterList([torch.ones(2)]), block()]),
        {},
        ["", *(f"layers.{n}.1" for n in range(3))],
    ),
    "lists with a forward of their own": (stacks, {}, ["", "stacks.0", "stacks.1"]),
    "such lists by class": (stacks, {"auto_wrap_policy": ModuleWrapPolicy({Stack})}, ["", "stacks.0", "stacks.1"]),
    "no blocks": (lambda: nn.Linear(2, 2), {}, [""]),
    "the root's own class": (lambda: nn.Linear(2, 2), {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}, [""]),
    "a class that is not there": (GPT, {"auto_wrap_policy": ModuleWrapPolicy({nn.Conv2d})}, [""]),
    "units within units, from the outside in": (
        GPT,
        {"auto_wrap_policy": ModuleWrapPolicy({DecoderBlock, Attention})},
        ["", *(name for block in BLOCKS for name in (block, f"{block}.attention"))],
    ),
    "as one unit, by class": (GPT, {"auto_wrap_policy": SMALLER, "as_one_unit": [DecoderBlock]}, ["", *BLOCKS, "norm"]),
    "a sequence of blocks": (lambda: nn.Sequential(nn.Linear(8, 8), *decoders(2)), {}, ["", "1", "2"]),
    "blocks in a dictionary": (in_a_dictionary, {}, ["", "layers.first", "layers.second"]),
    "layers in a block are not divided": (resnet, {}, ["", *(f"layers.{n}" for n in range(3))]),
    "two sequences": (lambda: nn.Sequential(conv(), conv()), {}, ["", "0", "1"]),
    "a stage that holds much of a large model": (
        lambda: nn.Sequential(stage(64, 2), stage(256, 9), stage(512, 2)),
        {},
        LARGE,
    ),
    "stages of a small model": (lambda: nn.Sequential(stage(8, 2), stage(8, 9)), {}, ["", "0", "1"]),
    "small layers": (lambda: mlp(64), {}, [""]),
    "layers of 1 MiB and more": (lambda: mlp(256), {}, ["", "0", "2"]),
    "blocks with such layers": (lambda: nn.Sequential(*decoders(2, 256)), {}, ["", "0", "1"]),
    "a block in two places": (lambda: nn.Sequential(*decoders(1) * 2), {}, ["", "0"]),
}
POLICIES: dict[str, Any] = {
    "by class": ModuleWrapPolicy({DecoderBlock}),
    "custom": CustomPolicy(lambda module: isinstance(module, DecoderBlock)),
    "lambda": partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, DecoderBlock)),
    "transformer": partial(transformer_auto_wrap_policy, transformer_layer_cls={DecoderBlock}),
    "a function": lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, DecoderBlock),
}
UNITS |= {f"blocks {name}": (GPT, {"auto_wrap_policy": each}, ["", *BLOCKS]) for name, each in POLICIES.items()}


@pytest.mark.parametrize(("make", "options", "expected"), UNITS.values(), ids=UNITS)
def test_units_are_the_blocks_that_repeat_or_those_of_the_policy(make, options, expected):
    root = make()
    model = zero.FSDP(root, **options)
    assert unit_names(model) == expected
    assert [root.get_submodule(name) for name in expected] == unit_modules(model)


def words(tied: bool) -> nn.Module:
    """Both ends are larger than a block, and the norm is smaller."""
    net = nn.Sequential(nn.Embedding(2**15, 8), *decoders(2), nn.LayerNorm(8), nn.Linear(8, 2**15, bias=False))
    if tied:
        net[4].weight = net[0].weight
    return net


ENDS = {"least memory": ["", "0", "1", "2", "4"], "beside": ["", "0", "1", "2", "4"], "in turn": ["", "1", "2"]}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("tied", [False, True])
def test_large_layers_at_both_ends_are_units_where_transfers_overlap_or_memory_counts(how, tied):
    options = {"prefetch": 1} if how == "least memory" else {}
    with simulated() if how == "beside" else nullcontext() as there:
        model = zero.FSDP(words(tied), process_group=there.comm(1, 4) if there else None, **options)
        assert unit_names(model) == (ENDS["in turn"] if tied else ENDS[how])


def test_one_module_may_be_one_unit():
    net = GPT()
    found = unit_names(zero.FSDP(net, auto_wrap_policy=SMALLER, as_one_unit=[net.blocks[1]]))
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
