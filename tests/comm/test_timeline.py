"""What the computing of a settled step waits for, on a simulated GPU: a product takes a second, a transfer 1.5.

A forward of a block is two products, its backward four, so that any one transfer can hide behind a block.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD

import zero
from inner import set_bucket_size
from simulated.device import Stall
from simulated.network import Network
from simulated.scenarios import HALF, built
from simulated.world import Simulated, simulated
from zero.fsdp.fsdp import running_model
from zoo import Block, Stack

WIDTH, BLOCKS, RANK, WORLD = 16, 4, 1, 4


block = partial(Block, WIDTH, 2 * WIDTH)


class WithRoot(Stack):
    """The root unit has parameters, too, with which as much is computed before the first block as in one."""

    def __init__(self) -> None:
        super().__init__(block, WIDTH, WIDTH, blocks=BLOCKS)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(self.first(x))


def blocks() -> nn.Module:
    return nn.Sequential(*(block() for _ in range(BLOCKS)))


def seconds(operator: Any, args: Sequence[Any]) -> float:
    return float(operator.name().startswith(("aten::addmm", "aten::mm")))


def transfer(kind: str, nbytes: int) -> float:
    return 1.5 if nbytes > 64 else 0.0


def stalls_of_a_step(there: Simulated, model: nn.Module, optimizer: Any, steps: int = 3) -> list[Stall]:
    """In the last of these."""
    for _ in range(steps):
        there.device.stalls.clear()
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
    return list(there.device.stalls)


def stage_3(net: nn.Module, seconds_of: Any = transfer, **options: Any) -> list[Stall]:
    with simulated(compute=seconds, transfer=seconds_of) as there:
        groups: Any = there.comm(RANK, WORLD)
        if options.get("sharding_strategy") == "HYBRID_SHARD":
            groups = (groups, there.comm(0, 2))
        model = zero.FSDP(net, process_group=groups, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
        return stalls_of_a_step(there, model, SGD(model.parameters(), 1e-3, foreach=True))


def waits(stalls: Sequence[Stall]) -> list[str]:
    return [stall.what.split()[0] for stall in stalls]


HIDDEN: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "a chain of blocks": (blocks, {}, ["gather", "reduce"]),
    "in 16 bits": (blocks, {"precision": zero.MixedPrecision(torch.bfloat16)}, ["gather", "reduce"]),
    "parameters in the root": (WithRoot, {}, ["gather", "reduce"]),
    "kept parameters": (blocks, {"reshard_after_forward": False}, ["gather", "reduce"]),
    "averages over replicas": (blocks, {"sharding_strategy": "HYBRID_SHARD"}, ["gather", "reduce", "all-reduce"]),
}


@pytest.mark.parametrize("case", HIDDEN)
def test_only_the_first_gather_and_the_last_reduction_are_waited_for_at_stage_3(case):
    net, options, expected = HIDDEN[case]
    assert waits(stage_3(net(), **options)) == expected


def test_averages_over_replicas_hold_up_no_reduction():
    """One of each takes longer than a backward of a block, neither does alone."""
    full = 4 * sum(param.numel() for param in block().parameters())
    stalls = stage_3(blocks(), lambda _, nbytes: 1.5 if nbytes > full / 2 else 3.0, sharding_strategy="HYBRID_SHARD")
    assert waits(stalls) == ["gather", "reduce", "all-reduce"], "at the end alone"


@pytest.mark.slow
def test_kept_parameters_expose_no_more_than_resharding():
    """In mixed precision, by links that take longer than the computing."""
    half = zero.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
    exposed = []
    for resharded in (False, True):
        how = {"precision": half, "reshard_after_forward": resharded}
        stalls = stage_3(WithRoot(), lambda _, nbytes: nbytes / 512, **how)
        exposed.append(sum(stall.seconds for stall in stalls))
    assert 0 < exposed[0] <= exposed[1]


def test_without_prefetch_every_transfer_is_waited_for():
    assert waits(stage_3(blocks(), prefetch=1)).count("gather") == 2 * BLOCKS


def test_the_last_reduction_and_the_gathers_of_the_optimizer_are_waited_for_at_stage_2():
    with simulated(compute=seconds, transfer=transfer) as there:
        net = blocks()
        optimizer = zero.OSS(net.parameters(), SGD, there.comm(RANK, WORLD), lr=1e-3, foreach=True)
        model = zero.ShardedDDP(net, optimizer, reduce_buffer_size=sum(p.numel() for p in net[0].parameters()))
        stalls = stalls_of_a_step(there, model, optimizer)
    assert waits(stalls) == ["reduce", *["gather"] * BLOCKS]


@pytest.mark.parametrize("unused", [False, True])
def test_a_bucket_that_a_rank_cannot_complete_holds_up_no_other_at_stage_2(unused):
    """From the third step on, as an expert that gets no tokens any more. Its own reduction alone is waited for, too."""

    class WithExpert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.expert = blocks(), block()
            self.asks = True

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks(x)
            return self.expert(x) if self.asks else x

    with simulated(compute=seconds, transfer=transfer) as there:
        net = WithExpert()
        optimizer = zero.OSS(net.parameters(), SGD, there.comm(RANK, WORLD), lr=1e-3, foreach=True)
        model = zero.ShardedDDP(net, optimizer, reduce_buffer_size=sum(p.numel() for p in net.expert.parameters()))
        stalls_of_a_step(there, model, optimizer, steps=2)
        net.asks = not unused
        stalls = stalls_of_a_step(there, model, optimizer, steps=2)
    assert waits(stalls).count("reduce") == 1 + unused


def test_nearly_equal_shares_of_whole_parameters_are_gathered_and_reduced_at_once():
    layers = [nn.Linear(WIDTH, WIDTH, bias=number == 0) for number in range(8)]
    with simulated() as there:
        model = zero.FSDP(nn.Sequential(*layers), process_group=there.comm(RANK, WORLD), partition="whole")
        model(torch.ones(2, WIDTH)).sum().backward()
        launched = there.launched()
    assert len({segment.numel() for segment in model.parameters()}) > 1
    assert launched == ["broadcast", "gather", "reduce"], "the first is that of all weights"


@pytest.mark.parametrize("to", [0, 1, None])
def test_what_is_built_trained_and_saved_goes_by_rings(to):
    """Messages between two ranks alone would have NCCL connect these, in memory that is not torch's."""
    with simulated() as there:
        model = zero.FSDP(blocks(), process_group=there.comm(RANK, WORLD))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        zero.full_state_dict(model, to=to)
        assert {*there.launched()} <= {"broadcast", "gather", "reduce", "all-reduce"}


def seconds_down(there: Simulated, operator: Any, args: Sequence[Any]) -> float:
    if not operator.name().startswith("aten::copy_") or args[0].numel() == 1:
        return 0.0
    return float([there.memory.is_in_host_memory(tensor) for tensor in args[:2]] == [True, False])


def test_offloaded_buckets_are_stepped_in_the_order_in_which_their_gradients_arrive():
    """A copy of a bucket's gradients takes a second, and the CPU another to step it: the copies hide at stage 1. At the
    others they do so behind the backward."""

    def seconds(operator: Any, args: Sequence[Any]) -> float:
        momentum = operator.name().startswith("aten::_foreach_mul_")  # once a bucket
        return float(momentum) or seconds_down(there, operator, args)

    with simulated(compute=seconds) as there:
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))
        momentum = partial(SGD, lr=1e-3, momentum=0.9, foreach=True)
        optimizer = zero.OSS(net.parameters(), momentum, there.comm(RANK, WORLD), offload=zero.CPUOffload())
        set_bucket_size(optimizer, WIDTH * WIDTH)
        for _ in range(2):  # the first creates the momentum
            begin = there.device.host.time
            stalls_of_a_step(there, net, optimizer, steps=1)
    assert there.device.host.time - begin == BLOCKS + 1


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_the_host_waits_for_no_offloaded_gradient_within_a_backward(stage):
    """Also where it is to add it to those of the backward before."""
    with simulated(compute=lambda *of: seconds(*of) + seconds_down(there, *of), transfer=transfer) as there:
        model, optimizer = built(there, stage, blocks(), offload=zero.CPUOffload())
        if stage == 2:
            set_bucket_size(optimizer, WIDTH * WIDTH)
        for _ in range(3):
            loss = model(torch.ones(2, WIDTH)).sum()
            there.device.stalls.clear()
            loss.backward()
        assert "host" not in waits(there.device.stalls)


@pytest.mark.parametrize("stage", [3, 2])
def test_between_two_reductions_the_wire_stands_still_while_one_message_is_packed(stage):
    """Where transfers take longer than the computing. A second message would be as large as a unit, so gradients are
    read and written once in between, and averages of this rank in their place: 1,000 bytes a second, where the wire
    sends 100. At stage 3 it also gathers in between."""
    bandwidth, net = 1000, blocks()
    how: dict[str, Any] = {"reduce_buffer_size": sum(p.numel() for p in net[0].parameters())} if stage == 2 else {}
    with simulated(bandwidth=bandwidth, transfer=lambda _, nbytes: nbytes / 100) as there:
        model, optimizer = built(there, stage, net, world=WORLD, **how)
        stalls_of_a_step(there, model, optimizer)
        reductions, gathers = (
            [one for one in there.device.transfers if one.kind == kind] for kind in ("reduce", "gather")
        )
    [nbytes] = {one.nbytes for one in reductions[-BLOCKS:]}
    between = [(before.end, after.begin) for before, after in pairwise(reductions[-BLOCKS:])]
    gathering = [sum(one.end - one.begin for one in gathers if begin <= one.begin < end) for begin, end in between]
    gaps = [end - begin - busy for (begin, end), busy in zip(between, gathering, strict=True)]
    packing = (2 * nbytes + 2 * nbytes / WORLD) / bandwidth
    if stage == 2:
        assert gaps == pytest.approx([packing] * (BLOCKS - 1), rel=0.01)
    else:
        assert max(gaps) <= 1.01 * packing and sum(gaps) <= 1.01 * packing, "but for one it gathers meanwhile"


def test_whole_shares_that_begin_behind_padding_are_packed():
    """Rank 0 owns nothing of a unit: the root's weight is its share of all."""
    with simulated() as there:
        net = nn.Sequential(nn.Linear(16 * WIDTH, WIDTH), *(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2)))
        for layer in net[1:]:
            layer.extend(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))
        units = ModuleWrapPolicy({nn.Sequential})
        model = zero.FSDP(net, process_group=there.comm(RANK, 8), partition="whole", auto_wrap_policy=units)
        groups = running_model(model).index.groups
        assert any(group.layout.offsets[0] for group in groups), "some unit begins behind padding"
        model(torch.ones(2, 16 * WIDTH)).sum().backward()


# What a settled step launches.


LAUNCHED = {
    (1, None): (2, {"all-reduce": 1, "gather": 1}),
    (2, None): (3, {"reduce": 1, "gather": 1}),
    (3, None): (23, {"reduce": 5, "gather": 8}),
    (1, "bf16"): (21, {"reduce": 1, "gather": 2}),
    (2, "bf16"): (8, {"reduce": 1, "gather": 1}),
    (3, "bf16"): (24, {"reduce": 5, "gather": 8}),
}
"""By stage and precision: kernels beside those of the model and its optimizer alone, and transfers. Whoever adds one
sees it here."""


@pytest.mark.parametrize(("stage", "precision"), LAUNCHED)
def test_a_settled_step_launches_so_many_kernels_and_transfers_and_compares_twice(stage, precision):
    def step(there: Simulated, model: nn.Module, optimizer: Any, dtype: torch.dtype = torch.float32) -> Counter[str]:
        there.device.launches.clear()
        there.device.transfers.clear()
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH, dtype=dtype)).sum().backward()
        optimizer.step()
        return there.device.launches.copy()

    optim = partial(SGD, lr=1e-3, momentum=0.9, foreach=True)
    with simulated() as there:
        dtype = torch.float32 if precision is None else torch.bfloat16
        alone = WithRoot().to(dtype)
        stepped, comm = optim(alone.parameters()), there.comm(RANK, 8)
        model, optimizer = zero.setup(WithRoot(), optim, stage=stage, process_group=comm, precision=precision)
        for _ in range(3):
            plain = step(there, alone, stepped, dtype)
            comm.link.hosts.compared = 0
            ours = step(there, model, optimizer)
        transfers, compared = Counter(there.launched()), comm.link.hosts.compared
    kernels, expected = LAUNCHED[stage, precision]
    assert (ours.total() - plain.total(), transfers, compared) == (kernels, Counter(expected), 2), ours - plain


# What crosses the network between hosts in a settled step: never more than float32's ring sends, and no all-to-all.


GB = 1e9
WIDE, HOSTS, GPUS, BF16 = 128, 2, 8, torch.bfloat16
PADDING = 0.01
CLUSTER = Network(HOSTS, GPUS, 1, 1.0, 1.0)
NETWORKS = {one.ranks: one for one in (CLUSTER, CLUSTER.within_host(), CLUSTER.across_hosts())}
"""By the ranks of a group: of all, of one host, of one rank a host."""
net = partial(Stack, partial(Block, WIDE, 2 * WIDE), WIDE, WIDE)


def sent(stage: int, dtype: torch.dtype = torch.float32, **how: Any) -> Counter[str]:
    """Bytes by kind that cross a NIC of one host in the last of five steps."""
    with simulated() as there:
        model, optimizer = built(
            there, stage, net().to(dtype), **{"world": CLUSTER.ranks, "one_host": how.get("world") == GPUS, **how}
        )
        for _ in range(5):
            there.device.transfers.clear()
            optimizer.zero_grad()
            model(torch.ones(2, WIDE, dtype=dtype)).sum().backward()
            optimizer.step()
        found: Counter[str] = Counter()
        for kind, nbytes, _, _, world in there.device.transfers:
            found[kind] += round(NETWORKS[world].nic_bytes(kind, nbytes))
        return found


@cache
def ring(stage: int) -> Counter[str]:
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
    "2": {"stage": 2, "precision": zero.MixedPrecision(reduce_dtype=BF16)},
    "3": {"stage": 3, "precision": zero.MixedPrecision(BF16, reduce_dtype=BF16)},
    "2 whole": {"stage": 2, "precision": zero.MixedPrecision(reduce_dtype=BF16), **WHOLE},
    "3 hybrid": {"stage": 3, "precision": zero.MixedPrecision(BF16, reduce_dtype=BF16), **HYBRID},
}


@pytest.mark.parametrize("case", ASKED)
def test_bfloat16_on_the_wire_between_hosts_is_half_of_the_ring_of_float32(case):
    found, asked = sent(**ASKED[case]), ASKED[case]
    assert found["all-to-all"] == 0
    if "hybrid" in case:  # among the ranks of a host by an all-to-all: of what they have averaged, the rest
        wide = sent(**{**asked, "precision": zero.MixedPrecision(BF16, reduce_dtype=torch.float32)})
        assert found["all-reduce"] == pytest.approx(wide["all-reduce"] / 2)
    else:
        assert found["reduce"] == pytest.approx(ring(asked["stage"])["reduce"] / 2, rel=2 * PADDING)


@pytest.mark.parametrize("stage", [2, 3])
def test_float16_on_the_wire_between_hosts_is_the_ring_of_float32(stage):
    """Sums on their way would overflow."""
    found = sent(stage, precision=zero.MixedPrecision(reduce_dtype=torch.float16))
    assert (found["all-to-all"], found["reduce"]) == (0, ring(stage)["reduce"])


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_16_bits_on_the_wire_within_a_host_are_summed_in_float32(stage, dtype):
    """By an all-to-all: what NCCL's ring would have rounded on its way is not."""
    with simulated() as there:
        model, _ = built(there, stage, net(), precision=zero.MixedPrecision(reduce_dtype=dtype))
        model(torch.ones(2, WIDE)).sum().backward()
        kinds = {*there.launched()}
    assert "all-to-all" in kinds and "reduce" not in kinds
