"""The benchmarks measure what they say: bytes on the wires, of each stage and contestant."""

import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import ranks
from processes import ROOT

BENCHMARKS = str(ROOT / "benchmarks")
HOSTS, GPUS = 2, 4


def wires(rank: int, world: int) -> tuple[int, dict[str, float]]:
    """Parameters of a model, and ms that the wires of a rank of two hosts take in a step of each contestant."""
    sys.path.insert(0, BENCHMARKS)
    from contestants import How
    from fake import Wiring
    from launch import Rank
    from models import gpt
    from wires import measure

    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    task, how = gpt(1, 32, 512, tokens=128), How(dtype=torch.bfloat16)
    here, wiring = Rank(2, 4, torch.device("cpu")), Wiring(bandwidth=0.1, gpus_a_host=2, nics=1)
    found = {name: measure(name, task, how, wiring, 1, here)["wire ms"] for name in ("alone", *SENT)}
    return sum(param.numel() for param in task.build("meta").parameters()), found


SENT = {"zero1": 4 + 2 + 2, "zero2": 4 + 2, "zero3kept": 4 + 2, "fsdp2": 4 + 2 * 2}
"""Bytes an element that each link carries: gradients in float32, their averages at stage 1 and parameters in 16
bits, once, or before forward and backward."""


def test_wires_take_as_long_as_their_bytes_at_the_bandwidth():
    [(numel, took)] = ranks.run(wires, 1, bare=True, fresh=True)
    assert took.pop("alone") == 0
    bytes_an_element = {name: ms / 1000 * 0.1e9 / (numel * 3 / 4) for name, ms in took.items()}
    assert bytes_an_element == pytest.approx(SENT, rel=0.05)


def simulate(rank: int, world: int) -> tuple[int, dict[str, tuple[float, float, dict[str, int]]]]:
    """Elements of a model of one block; of each contestant the seconds of a step, with wires and without, and its bytes
    by kind."""
    sys.path.insert(0, BENCHMARKS)
    import simulate

    dist.init_process_group("fake", rank=1, world_size=HOSTS * GPUS, store=FakeStore())
    case = simulate.Case(simulate.Network(HOSTS, GPUS, 1, simulate.NIC, simulate.LINK), 2048, torch.bfloat16)
    found = {}
    with mock.patch.object(simulate, "LAYERS", 1):
        for name in simulate.NAMES:
            (seconds, sent), (alone, _) = (simulate.step_of(name, case, wires=wires) for wires in (True, False))
            found[name] = seconds, alone, dict(sent)
    model = simulate.GPT(1, simulate.WIDTH // simulate.SCALE, simulate.WORDS // simulate.SCALE, tied=False)
    return sum(param.numel() for param in model.parameters()) * simulate.SCALE**2, found


def test_zero_and_fsdp2_send_gradients_by_the_ring_of_float32():
    [(numel, found)] = ranks.run(simulate, 1, bare=True, fresh=True)
    assert [*found] == ["zero2", "zero3", "fsdp2"]
    for seconds, alone, sent in found.values():
        assert {*sent} == {"gather", "reduce"} and 0 < alone < seconds
        assert sent["reduce"] == pytest.approx(4 * numel * 7 // 8, rel=0.01)


def weigh(rank: int, world: int) -> dict[str, tuple[int, int, int, int]]:
    """Of each stage what is resident, the peak, collectives, and bytes sent."""
    sys.path.insert(0, BENCHMARKS)
    import loop
    from contestants import How
    from launch import Rank
    from models import gpt

    found = {}
    for name in ("ddp", "zero1", "zero2", "zero3"):
        weight = loop.weigh(name, gpt(2, 64), How(), Rank(rank, world, torch.device("cpu")))
        resident = weight.parameters + weight.gradients + weight.optimizer
        found[name] = resident, weight.tensors, weight.calls, weight.sent
    return found


def test_each_stage_holds_less_and_its_bytes_are_counted():
    [found, _] = ranks.run(weigh, 2, fresh=True)
    resident, peaks, calls, sent = zip(*found.values(), strict=True)
    assert [*resident] == sorted(resident, reverse=True) and [*peaks] == sorted(peaks, reverse=True)
    assert min(calls) >= 1 and sent[0] == pytest.approx(resident[0] / 4, rel=0.01)
    assert sent[2] == pytest.approx(sent[0], rel=0.05) and sent[3] > sent[2]
