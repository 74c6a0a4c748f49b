"""What each rank gets of a bucket's gradients is worked out only when they are sent."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import ranks
import zero
from zero.shards.layout import Layout


def _in_a_large_world(rank, world):
    """How often a rank's spans are asked for, in building and in a step, for how many buckets."""
    dist.init_process_group("fake", rank=3, world_size=4096, store=FakeStore())
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    with mock.patch.object(Layout, "spans", autospec=True, side_effect=Layout.spans) as asked:
        optimizer = zero.OSS(net.parameters(), torch.optim.SGD, lr=0.1)
        model = zero.ShardedDDP(net, optimizer, reduce_buffer_size=0)
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        return asked.call_count, len(optimizer.shards.shard_groups)


def test_building_takes_no_time_for_other_ranks():
    [(asked, buckets)] = ranks.run(_in_a_large_world, bare=True, fresh=True)
    assert buckets == 12
    assert asked <= 3 * buckets
