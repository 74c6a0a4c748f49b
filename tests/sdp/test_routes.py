"""What each rank gets of a bucket's gradients: the same as the layout's spans say, and worked out only when sent."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import ranks
import zero
from zero.sdp.routes import Routes
from zero.shards import layout
from zero.shards.layout import Layout

SIZES = {
    "mixed": [40, 0, 3, 128, 1, 1, 0, 77, 256, 5, 0],
    "one": [1000],
    "none": [0],
    "small": [1, 2, 3],
}
CUTS = {
    "even": lambda sizes, world: layout.even(sizes, world, align=16),
    "blocks": lambda sizes, world: layout.even(sizes, world, align=16, granularity=64),
    "whole": lambda sizes, world: layout.whole(
        sizes, [index * world // len(sizes) for index in range(len(sizes))], world, align=16
    ),
}


@pytest.mark.parametrize("world", [1, 2, 3, 8, 50])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("sizes", SIZES)
def test_they_are_the_spans_of_every_rank(sizes, cut, world):
    geometry = CUTS[cut](SIZES[sizes], world)
    trained = [index for index in range(len(SIZES[sizes])) if index % 4 != 3 or sizes == "small"]
    alone = [index for index in trained if SIZES[sizes][index] > 100]
    routes = Routes(geometry, trained, alone)
    shares, counts, to_ranks = [], [], {index: [] for index in alone}
    for rank in range(world):
        spans = [span for span in geometry.spans(rank) if span.index in trained]
        together = [span for span in spans if span.index not in alone]
        shares += [(span.index, span.start, span.stop) for span in together]
        counts.append(sum(span.numel for span in together))
        for index in alone:
            to_ranks[index].append(sum(span.numel for span in spans if span.index == index))
    assert routes.together.shares == shares
    assert routes.together.counts == counts
    assert routes.counts == to_ranks


def _in_a_large_world(rank, world):
    """How often a rank's spans are asked for, in building and in a step, for how many buckets."""
    dist.init_process_group("fake", rank=3, world_size=4096, store=FakeStore())
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    with mock.patch.object(Layout, "spans", autospec=True, side_effect=Layout.spans) as asked:
        optimizer = zero.OSS(net.parameters(), torch.optim.SGD, lr=0.1)
        model = zero.ShardedDDP(net, optimizer, reduce_buffer_size=0)
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        return asked.call_count, len(optimizer.shard_groups)


def test_building_takes_no_time_for_other_ranks():
    [(asked, buckets)] = ranks.run(_in_a_large_world, bare=True, fresh=True)
    assert buckets == 12
    assert asked <= 3 * buckets
