"""Parameters sharded within a node, what is stepped over all ranks: memory, bytes, checkpoints. Numbers are compared in
test_strategies.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD, Adam

import gpus
import ranks
import zero
from sidebyside import data
from zero.comm import Comm
from zero.comm.link import orders_groups
from zero.plan import Options, Sizes
from zero.plan.meter import Meter

WIDTH, LAYERS = 64, 8

two_by_two = pytest.mark.skipif(not orders_groups(), reason="this torch makes no group whose ranks are not sorted")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def two_levels(inner: nn.Module, **options: Any) -> zero.FSDP:
    return zero.FSDP(
        inner,
        device_mesh=init_device_mesh(gpus.DEVICE, (2, 2)),
        sharding_strategy="HYBRID_SHARD",
        optimizer_sharding="all",
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        **options,
    )


def backward(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    loss = model(data(3, WIDTH, rank=rank, step=step)).square().mean()
    loss.backward()
    return loss.detach()


@two_by_two
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@ranks.on(4, fresh=True)
def test_a_rank_keeps_its_node_shard_and_what_it_steps(rank, world, precision):
    """Of 2 x 2 ranks, before the step: parameters in the dtype that is computed with / 2, and 16 bytes / 4."""
    with Meter() as meter:
        model = two_levels(net(), mixed_precision=zero.MixedPrecision(param_dtype=precision))
        optimizer = Adam(model.parameters(), lr=1e-3)
        for step in range(2):
            backward(model, rank, step)
            optimizer.step()
        found = meter.live() / (LAYERS * WIDTH * WIDTH)
    assert found == pytest.approx((2 if precision else 4) / 2 + 16 / 4, rel=0.02)


def test_on_many_nodes_less_is_kept_than_by_a_hybrid_strategy():
    """S=8, W=64, mixed precision with Adam: 2 bytes a parameter / S and 16 / W, where 16 / S are kept otherwise."""
    precision = zero.MixedPrecision(param_dtype=torch.bfloat16)
    numel = 10**8
    costs = {
        sharding: zero.plan(
            Sizes.of_count(numel, 24, precision=precision),
            world_size=64,
            options=Options(precision=precision, replicas=8, optimizer_sharding=sharding, backend="nccl"),
            stages=[3],
        ).cost(3)
        for sharding in ("group", "all")
    }
    assert costs["group"].resident / numel == pytest.approx(16 / 8, rel=0.01)
    assert costs["all"].resident / numel == pytest.approx(2 / 8 + 16 / 64, rel=0.01)
    assert costs["all"].peak < costs["group"].peak


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Elements that this rank gives to the others, within its node and across nodes."""
    found: Counter[str] = Counter()
    gather, reduce = Comm.gather, Comm.reduce

    def where(comm: Comm) -> str:
        first, second, *_ = dist.get_process_group_ranks(comm.group)
        return "elsewhere" if comm.world != 2 else "within" if second == first + 1 else "across"

    def counting_gather(comm: Comm, full: Any, bounds: Any, *rest: Any, **how: Any) -> Any:
        found[f"gathered {where(comm)}"] += (bounds[comm.rank + 1] - bounds[comm.rank]) * (comm.world - 1)
        return gather(comm, full, bounds, *rest, **how)

    def counting_reduce(comm: Comm, messages: Any, **rest: Any) -> Any:
        for message, counts in messages:
            found[f"reduced {where(comm)}"] += len(message) - counts[comm.rank]
        return reduce(comm, messages, **rest)

    with mock.patch.object(Comm, "gather", counting_gather), mock.patch.object(Comm, "reduce", counting_reduce):
        yield found


@two_by_two
@ranks.on(4)
def test_across_nodes_each_rank_sends_its_shard_once_a_step_and_gradients_of_one_node_shard(rank, world):
    """Under accumulation, too: gradients stay within the node, here on their rank, until the last backward."""
    model = two_levels(net())
    optimizer = SGD(model.parameters(), lr=0.1)
    told = []
    for micro in (1, 3):
        for step in range(2):  # the second is as all that follow
            with counted() as found:
                for number in range(micro - 1):
                    with model.no_sync():
                        backward(model, rank, number)
                backward(model, rank, step)
                optimizer.step()
                optimizer.zero_grad()
        told.append(dict(found))
    numel = LAYERS * WIDTH * WIDTH
    single, accumulated = told
    across = {"gathered across": numel // 4, "reduced across": numel // 4}
    assert {name: count for name, count in single.items() if "across" in name} == across
    assert {name: count for name, count in accumulated.items() if "across" in name} == across
    assert single["gathered within"] == 2 * numel // 2
    assert single["reduced within"] == accumulated["reduced within"] == numel // 2
    assert accumulated["gathered within"] == 3 * single["gathered within"]


def in_8_bits(rank: int, world: int, quantised: bool) -> dict[str, torch.Tensor]:
    eight = zero.Int8() if quantised else None
    model = two_levels(net(), mixed_precision=zero.MixedPrecision(param_wire=eight, reduce_dtype=eight))
    optimizer = SGD(model.parameters(), lr=1.0)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()
    return {name: value.clone() for name, value in zero.full_state_dict(model).items()}


@two_by_two
def test_gradients_of_both_levels_and_parameters_across_nodes_travel_in_8_bits():
    exact, first, *others = [*ranks.run(in_8_bits, 4, args=(False,))[:1], *ranks.run(in_8_bits, 4, args=(True,))]
    moved = {name: (exact[name] - start).abs().max() for name, start in net().state_dict().items()}
    for name, value in first.items():
        assert all(torch.equal(value, other[name]) for other in others)
        off = (value - exact[name]).abs().max()
        assert 0 < off < 0.05 * moved[name]


@two_by_two
@ranks.on(4)
def test_what_is_written_into_shards_is_computed_with(rank, world):
    model = two_levels(net())
    with torch.no_grad():
        for param in model.parameters():
            param.data.fill_(0.5)
    out = model(torch.ones(1, WIDTH))
    assert torch.equal(out, torch.full((1, WIDTH), float((0.5 * WIDTH) ** LAYERS)))


def full_on(rank: int, world: int, to: int) -> tuple[bool, bool, bool]:
    """Where full weights and full state come to."""
    model = two_levels(net())
    expected = net().state_dict()
    optimizer = Adam(model.parameters(), lr=1e-3)
    weights = zero.full_state_dict(model, to=to)
    right = all(torch.equal(weights[name], expected[name]) for name in weights)
    backward(model, rank, 0)
    optimizer.step()
    state = model.optim_state_dict(optimizer, to=to)
    return bool(weights), right, state is not None


@two_by_two
@pytest.mark.parametrize("to", [0, 1, 2])
def test_full_weights_and_state_come_to_the_rank_that_asked(to):
    found = ranks.run(full_on, 4, args=(to,))
    assert found == [(rank == to, True, rank == to) for rank in range(4)]


@two_by_two
@ranks.on(4)
def test_checkpoints_go_to_other_stages_and_back(rank, world, tmp_path):
    """From two levels to one and to stage 2, and back."""
    inner = {name: net() for name in ("two levels", "one level", "stage 2")}
    one_level = zero.FSDP(inner["one level"], auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    sharded = zero.OSS(inner["stage 2"].parameters(), Adam, lr=1e-2)
    first = two_levels(inner["two levels"])
    pairs: dict[str, tuple[Any, Any]] = {
        "two levels": (first, Adam(first.parameters(), lr=1e-2)),
        "one level": (one_level, Adam(one_level.parameters(), lr=1e-2)),
        "stage 2": (zero.ShardedDDP(inner["stage 2"], sharded), sharded),
    }

    def step(name: str, number: int) -> torch.Tensor:
        model, optimizer = pairs[name]
        optimizer.zero_grad()
        loss = backward(model, rank, number)
        optimizer.step()
        return loss

    for source, target in [("two levels", "one level"), ("one level", "two levels"), ("two levels", "stage 2")]:
        for number in range(2):
            step(source, number)
        zero.checkpoint.save(tmp_path / source / target, *pairs[source])
        zero.checkpoint.load(tmp_path / source / target, *pairs[target])
        for number in range(2, 5):
            torch.testing.assert_close(step(source, number), step(target, number), rtol=1e-5, atol=0)


def clipped(rank: int, world: int) -> tuple[float, float]:
    """Each element counts once, though node shards repeat."""
    model = two_levels(net())
    backward(model, rank, 0)
    found = model.clip_grad_norm_(1e6).item()
    model.clip_grad_norm_(found / 10)
    return found, model.clip_grad_norm_(1e6).item()


@two_by_two
def test_norms_are_of_all_gradients_once():
    expected = net()
    for rank in range(4):
        backward(expected, rank, 0)
    gradients = [param.grad / 4 for param in expected.parameters()]
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
    for found, after in ranks.run(clipped, 4):
        assert found == pytest.approx(norm, rel=1e-5)
        assert after == pytest.approx(found / 10, rel=1e-2)


@ranks.on(4, timeout=20)
def test_what_has_no_two_levels_is_refused_on_every_rank(rank, world):
    grid = init_device_mesh(gpus.DEVICE, (2, 2))
    tries: list[dict[str, Any]] = [
        {"optimizer_sharding": "all"},
        {"optimizer_sharding": "all", "sharding_strategy": "NO_SHARD"},
        {"optimizer_sharding": "some", "sharding_strategy": "HYBRID_SHARD", "device_mesh": grid},
    ]
    told = [ranks.refusal(lambda: zero.FSDP(net(), **given)) for given in tries]  # noqa: B023
    assert all(text.startswith("ValueError") for text in told)
    assert "is for hybrid strategies, not for FULL_SHARD" in told[0]
    assert "not for NO_SHARD" in told[1]
    assert "optimizer_sharding='some' is unknown" in told[2]
