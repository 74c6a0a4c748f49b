"""Parameters in flat buffers: they keep values, identity and shape; what is freed comes back as it was."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

import ranks
import zero
from inner import nbytes, shard_groups


class Odd(nn.Module):
    """Every way in which a parameter may lie in memory."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(3)
        draw = lambda *shape: torch.randn(shape).to(dtype)  # noqa: E731
        values = {
            "vector": draw(50),
            "scalar": draw(),
            "empty": draw(3, 0),
            "matrix": draw(17, 5),
            "transposed": draw(9, 11).t(),
            "permuted": draw(3, 4, 5).permute(2, 0, 1),
            "channels_last": draw(4, 3, 5, 5).contiguous(memory_format=torch.channels_last),
            "sliced": draw(20, 10)[::2, 3:7],
            "expanded": draw(6, 1).expand(6, 4),
            "last, empty": draw(0),
        }
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x):
        self.seen = {name: (param.detach().clone(), param.stride()) for name, param in self.named_parameters()}
        self.views = self.__dict__.get("views") or [param.detach().unsqueeze(0) for param in self.parameters()]
        for view, param in zip(
            self.views, self.parameters(), strict=True
        ):  # of the first forward, as autograd saves them
            assert torch.equal(view[0], param) and view.data_ptr() == param.data_ptr()
        return x * sum(param.abs().sum() for param in self.parameters())


def assert_as(seen, expected):
    """Values, and the strides of what fills its memory."""
    for name, param in expected.named_parameters():
        value, stride = seen[name]
        assert torch.equal(value, param), name
        if name not in ("sliced", "expanded"):
            assert stride == param.stride(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_binding_keeps_objects_values_shapes_and_dense_strides(dtype):
    model, before = Odd(dtype), Odd(dtype)
    model.vector.requires_grad_(False)
    params = [*model.parameters()]
    optimizer = zero.OSS(params, SGD, lr=0.1)
    assert_as({name: (param.detach(), param.stride()) for name, param in model.named_parameters()}, before)
    for one, other in zip(model.parameters(), params, strict=True):
        assert one is other and one.is_leaf and one.dtype == dtype
        assert one.requires_grad == (one is not model.vector)
    bound = [param for group in shard_groups(optimizer) for param in group.params]
    assert {*map(id, bound)} >= {id(param) for param in params if param.requires_grad}
    for group in shard_groups(optimizer):
        start = group.full.data_ptr()
        assert all((param.data_ptr() - start) % 64 == 0 for param in group.params if param.numel())


def test_parameters_lie_in_the_full_buffer_one_beside_another_and_padding_is_zero():
    model = Odd()
    [group] = shard_groups(zero.OSS(model.parameters(), SGD, lr=0.1))
    assert group.full.count_nonzero() == sum(param.numel() for param in model.parameters())
    with torch.no_grad():
        for number, param in enumerate(group.params):
            param.fill_(number + 1)
    for number, param in enumerate(group.params):
        assert (group.full == number + 1).sum() == param.numel()
    group.full.fill_(5)
    assert all((param == 5).all() for param in model.parameters())


def cycle(rank, world, partition, dtype):
    """Bytes of this rank's shards, and of the full parameters."""
    inner, before = Odd(dtype), Odd(dtype)
    del inner.expanded, before.expanded
    model = zero.FSDP(inner, partition=partition)
    groups = shard_groups(model)
    own, full = (sum(getattr(group, name).nbytes for group in groups) for name in ("shard", "full"))
    for _ in range(3):
        assert not any(group.full.untyped_storage().nbytes() for group in groups)
        assert nbytes(group.shard for group in groups) == own
        with torch.no_grad():
            model(torch.ones(1, dtype=dtype))
        assert_as(model.module.seen, before)
    return own, full


@pytest.mark.parametrize("partition", ["even", "whole"])
@pytest.mark.parametrize("world", [2, 3])
def test_what_is_freed_comes_back_bit_for_bit_in_the_same_storage(world, partition):
    for dtype in (torch.float32, torch.bfloat16):
        told = ranks.run(cycle, world, args=(partition, dtype))
        assert sum(own for own, _ in told) == told[0][1]
        assert partition == "whole" or len({own for own, _ in told}) == 1


def test_a_rank_alone_frees_nothing_and_copies_nothing():
    model = zero.FSDP(Odd())
    [group] = shard_groups(model)
    at = group.full.data_ptr()
    for _ in range(2):
        with torch.no_grad():
            model(torch.ones(1))
        assert group.full.data_ptr() == group.shard.data_ptr() == at
        assert all(at <= param.data_ptr() < at + group.full.nbytes for param in group.params if param.numel())
