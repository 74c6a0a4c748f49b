"""Which blocks become units without a policy, in lists and in nn.Sequential. No rank is started."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from models import Block, FeedForward
from zero.fsdp.units import unit_modules


def units(root: nn.Module) -> list[str]:
    return [*unit_modules(root, None)]


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def conv(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(width, width, 3), nn.BatchNorm2d(width), nn.ReLU())


class Bottleneck(nn.Module):
    """Like MobileNet's and EfficientNet's blocks: layers that repeat inside a block that repeats."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(width), conv(width))


class Stage(nn.Module):
    """As timm builds ConvNeXt and Swin: blocks in a stage, stages in an nn.Sequential."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.shrink = nn.Linear(width, width)
        self.blocks = nn.Sequential(*(FeedForward(width, 4 * width) for _ in range(depth)))


class ViT(nn.Module):
    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.patches = nn.Linear(width, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 5)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(4)
        self.layer1 = nn.Sequential(*(Bottleneck() for _ in range(3)))
        self.layer2 = nn.Sequential(*(Bottleneck() for _ in range(2)))


def test_blocks_in_a_sequential_are_units_as_those_in_a_list():
    assert units(ViT()) == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert units(nn.Sequential(nn.Linear(8, 8), *(Block(8) for _ in range(2)))) == ["", "1", "2"]


def test_each_stage_of_blocks_is_divided_and_the_layers_in_a_block_are_not():
    assert units(ResNet()) == ["", *(f"layer1.{n}" for n in range(3)), *(f"layer2.{n}" for n in range(2))]


def test_a_block_that_is_not_repeated_is_no_unit():
    assert units(nn.Sequential(Block(8), nn.Linear(8, 8), Bottleneck())) == ["", "2.body.0", "2.body.1"]


def test_sequences_in_a_sequence_are_divided_down_to_what_repeats():
    stages = nn.Sequential(
        nn.Sequential(Block(8)),
        nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)),
        nn.Sequential(Block(8), Block(8)),
        nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)),
    )
    assert units(stages) == ["", "0", "1", "2.0", "2.1", "3"]
    assert units(nn.Sequential(conv(4), conv(4))) == ["", "0", "1"]


def test_sequences_in_one_another_take_no_time():
    nested: nn.Module = nn.Sequential(Block(8), Block(8))
    for _ in range(60):
        nested = nn.Sequential(nested)
    assert len(units(nested)) == 3


def test_a_stage_that_holds_much_of_a_large_model_is_divided_into_its_blocks():
    large = on_meta(lambda: nn.Sequential(Stage(64, 2), Stage(256, 9), Stage(512, 2)))
    assert units(large) == ["", "0", "1", *(f"1.blocks.{n}" for n in range(9)), "2", "2.blocks.0", "2.blocks.1"]
    small = nn.Sequential(Stage(8, 2), Stage(8, 9))
    assert units(small) == ["", "0", "1"]


def test_large_layers_of_a_sequential_are_units_and_small_ones_are_not():
    def mlp(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width))

    assert units(mlp(64)) == [""]
    assert units(on_meta(lambda: mlp(256))) == ["", "0", "2"]  # of 1 MiB and more
    blocks = on_meta(lambda: nn.Sequential(*(Block(256) for _ in range(2))))
    assert units(blocks) == ["", "0", "1"]  # each has such an MLP


def test_modules_without_parameters_and_single_modules_are_no_units():
    assert units(nn.Sequential(nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU()), nn.Linear(2, 2))) == [""]


def test_a_block_in_several_places_is_one_unit():
    shared = Block(8)
    assert units(nn.Sequential(shared, shared)) == ["", "0"]
