"""Which blocks become units without a policy in nn.Sequential; lists are in test_wrap.py. No rank is started."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext

import pytest
from torch import nn

import zero
from inner import unit_names
from simulated.world import simulated
from zoo import Block, DecoderBlock


def conv(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv2d(width, width, 3), nn.BatchNorm2d(width), nn.ReLU())


def decoders(count: int, width: int = 8) -> list[nn.Module]:
    return [DecoderBlock(width) for _ in range(count)]


class Bottleneck(nn.Module):
    """Like MobileNet's and EfficientNet's blocks: layers that repeat inside a block that repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(), conv())


class Stage(nn.Module):
    """As timm builds ConvNeXt and Swin: blocks in a stage, stages in an nn.Sequential."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.shrink = nn.Linear(width, width)
        self.blocks = nn.Sequential(*(Block(width, 4 * width) for _ in range(depth)))


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width))


def resnet() -> nn.Module:
    layers = {"stem": conv(), "layers": nn.Sequential(*(Bottleneck() for _ in range(3)))}
    return nn.Sequential(OrderedDict(layers))


LARGE = ["", "0", "1", *(f"1.blocks.{n}" for n in range(9)), "2", "2.blocks.0", "2.blocks.1"]


def in_a_dictionary() -> nn.Module:
    net = nn.Module()
    net.layers = nn.ModuleDict({"first": Block(8, 8), "second": Block(8, 8), "norm": nn.LayerNorm(8)})
    return net


UNITS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a sequence of blocks": (lambda: nn.Sequential(nn.Linear(8, 8), *decoders(2)), ["", "1", "2"]),
    "blocks in a dictionary": (in_a_dictionary, ["", "layers.first", "layers.second"]),
    "layers in a block are not divided": (resnet, ["", *(f"layers.{n}" for n in range(3))]),
    "two sequences": (lambda: nn.Sequential(conv(), conv()), ["", "0", "1"]),
    "a stage that holds much of a large model": (
        lambda: nn.Sequential(Stage(64, 2), Stage(256, 9), Stage(512, 2)),
        LARGE,
    ),
    "stages of a small model": (lambda: nn.Sequential(Stage(8, 2), Stage(8, 9)), ["", "0", "1"]),
    "small layers": (lambda: mlp(64), [""]),
    "layers of 1 MiB and more": (lambda: mlp(256), ["", "0", "2"]),
    "blocks with such layers": (lambda: nn.Sequential(*decoders(2, 256)), ["", "0", "1"]),
    "a block in two places": (lambda: nn.Sequential(*decoders(1) * 2), ["", "0"]),
}


@pytest.mark.parametrize("case", UNITS)
def test_units_are_the_blocks_that_repeat(case):
    make, expected = UNITS[case]
    assert unit_names(zero.FSDP(make())) == expected


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
