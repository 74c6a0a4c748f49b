"""What crosses the network between hosts in a settled step, by kind of transfer: never more than float32's ring sends,
and no all-to-all but where the user asked for 16 bits on the wire."""

from collections import Counter
from functools import cache, partial
from typing import Any

import pytest
import torch

import zero
from simulated.network import Network, Wire
from simulated.scenarios import HALF, built
from simulated.world import simulated
from zoo import Block, Stack

GB = 1e9
WIDTH, HOSTS, GPUS, BF16 = 128, 2, 8, torch.bfloat16
PADDING = 0.01
CLUSTER = Network(HOSTS, GPUS, 1, 1.0, 1.0)
NETWORKS = {one.ranks: one for one in (CLUSTER, CLUSTER.within_host(), CLUSTER.across_hosts())}
"""By the ranks of a group: of all, of one host, of one rank a host."""
net = partial(Stack, partial(Block, WIDTH, 2 * WIDTH), WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("kind", "nics", "ms"),
    [("reduce", 8, 11.4), ("reduce", 1, 91), ("all-reduce", 8, 22.8), ("broadcast", 1, 92.4)]
    + [("all-to-all", 8, 81), ("all-to-all", 1, 647)],
)
def test_what_a_billion_gradients_in_float32_take_among_8_hosts_of_8(kind, nics, ms):
    there = Network(8, 8, nics, 45 * GB, 400 * GB)
    assert 1000 * there.seconds(kind, 4 * 1.04 * GB) == pytest.approx(ms, rel=0.01)


def test_within_a_host_all_goes_by_links_and_across_hosts_groups_share_its_nics():
    there = Network(8, 8, 4, 45 * GB, 400 * GB)
    assert there.within_host().nic_bytes("all-to-all", 8) == 0
    for kind in ("gather", "reduce", "all-to-all"):
        assert there.within_host().seconds(kind, 8 * GB) == 7 / 400
        assert there.across_hosts().seconds(kind, 8 * GB) == 7 / 45 * 8 / 4


def test_a_wire_sends_what_comes_later_in_the_time_that_is_left():
    wire = Wire()
    assert [wire.send(*one) for one in [(0, 2), (3, 2), (1, 2), (2, 0), (9, 1), (4, 4)]] == [2, 5, 6, 2, 10, 11]


def sent(stage: int, dtype: torch.dtype = torch.float32, **how: Any) -> Counter[str]:
    """Bytes by kind that cross a NIC of one host in the last of five steps."""
    with simulated() as there:
        model, optimizer = built(there, stage, net().to(dtype), **{"world": CLUSTER.ranks, **how})
        for _ in range(5):
            there.device.transfers.clear()
            optimizer.zero_grad()
            model(torch.ones(2, WIDTH, dtype=dtype)).sum().backward()
            optimizer.step()
        found: Counter[str] = Counter()
        for kind, nbytes, _, _, world in there.device.transfers:
            found[kind] += round(NETWORKS[world].nic_bytes(kind, nbytes))
        return found


@cache
def ring(stage: int) -> Counter[str]:
    """What float32 sends."""
    return sent(stage)


@pytest.mark.parametrize("stage", [2, 3])
def test_in_float32_each_gradient_goes_around_once_and_each_parameter_before_it_is_used(stage):
    """At stage 3 the last block and the root unit stay unsharded from forward to backward."""
    found, model = ring(stage), net()
    numels = [sum(param.numel() for param in part.parameters()) for part in (model, model.blocks[:-1])]
    around, again = (4 * numel * (CLUSTER.ranks - 1) / CLUSTER.ranks for numel in numels)
    assert {*found} == {"gather", "reduce"}
    assert found["reduce"] == pytest.approx(around, rel=PADDING)
    assert found["gather"] == pytest.approx(around + again * (stage == 3), rel=PADDING)


HYBRID = {"sharding_strategy": "HYBRID_SHARD", "world": GPUS}
WHOLE = {"partition": "whole"}
SENDING: dict[str, dict[str, Any]] = {
    "2 in 16 bits": {"stage": 2, "dtype": BF16},
    "2 with master weights": {"stage": 2, "dtype": BF16, "precision": "bf16"},
    "3 computed in 16 bits": {"stage": 3, "precision": HALF},
    "3 in 16 bits": {"stage": 3, "dtype": BF16},
    "3 kept": {"stage": 3, "reshard_after_forward": False},
    "3 hybrid": {"stage": 3, **HYBRID},
    "3 hybrid in 16 bits": {"stage": 3, **HYBRID, "precision": HALF},
    "2 whole": {"stage": 2, **WHOLE},
    "2 whole in 16 bits": {"stage": 2, "dtype": BF16, **WHOLE},
    "3 whole": {"stage": 3, **WHOLE},
    "3 whole in 16 bits": {"stage": 3, "precision": HALF, **WHOLE},
}
"""What the user may ask for without a word on how gradients are sent."""


def more_than_the_ring(stage: int, **how: Any) -> dict[str, int]:
    """Bytes for gradients, and for all, beyond float32's ring and its padding. Of a hybrid group only averages over
    replicas leave a host. A broadcast has S bytes where a ring has S (W - 1) / W."""
    found, expected = sent(stage, **how), ring(stage)
    of_gradients = found["reduce"] + found["all-to-all"]
    more = {"gradients": of_gradients - expected["reduce"], "all": found.total() - expected.total()}
    more["all"] -= found["broadcast"] / CLUSTER.ranks
    return {what: nbytes for what, nbytes in more.items() if nbytes > PADDING * expected.total()}


@pytest.mark.parametrize("case", SENDING)
def test_no_more_bytes_cross_the_network_than_by_the_ring_of_float32(case):
    assert more_than_the_ring(**SENDING[case]) == {}


ASKED: dict[str, dict[str, Any]] = {
    "at stage 2": {"stage": 2, "precision": zero.MixedPrecision(reduce_dtype=BF16)},
    "at stage 3": {"stage": 3, "precision": zero.MixedPrecision(BF16, reduce_dtype=BF16)},
}


@pytest.mark.parametrize("case", ASKED)
def test_an_all_to_all_is_what_the_user_asks_for_by_16_bits_on_the_wire(case):
    """Of one half of float32's bytes, which each of a host's ranks sends to those of the other host by itself."""
    stage = ASKED[case]["stage"]
    found, around = sent(**ASKED[case]), ring(stage)["reduce"] * CLUSTER.ranks / (CLUSTER.ranks - 1)
    assert found["reduce"] == 0
    assert found["all-to-all"] == pytest.approx(GPUS * around / 2 * (HOSTS - 1) / HOSTS)
