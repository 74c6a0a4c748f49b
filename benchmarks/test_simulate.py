"""Steps on a network that is not there, of one block."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import ranks

HOSTS, GPUS = 2, 4


def simulate(rank: int, world: int) -> dict[str, tuple[float, float, dict[str, int]]]:
    """Of each contestant the seconds of a step, with wires and without, and its bytes; and those of the ring."""
    sys.path.insert(0, str(Path(__file__).parent))
    import simulate
    from simulated.network import Network

    dist.init_process_group("fake", rank=1, world_size=HOSTS * GPUS, store=FakeStore())
    case = simulate.Case(Network(HOSTS, GPUS, 1, simulate.NIC, simulate.LINK), 2048, torch.bfloat16)
    found = {}
    with mock.patch.object(simulate, "LAYERS", 1):
        for title in simulate.CONTESTANTS:
            (seconds, sent), (alone, _) = (simulate.step_of(title, case, wires=wires) for wires in (True, False))
            found[title] = seconds, alone, dict(sent)
    model = simulate.GPT(1, simulate.WIDTH // simulate.SCALE, tokens=simulate.WORDS // simulate.SCALE, tied=False)
    numel = sum(param.numel() for param in model.parameters()) * simulate.SCALE**2
    return {**found, "the ring": (0.0, 0.0, {"reduce": 4 * numel * 7 // 8})}


def test_zero_and_fsdp2_send_gradients_by_the_ring_of_float32():
    [found] = ranks.run(simulate, 1, bare=True, fresh=True)
    _, _, ring = found.pop("the ring")
    assert [*found] == ["zero stage 2", "zero stage 3", "FSDP2"]
    for seconds, alone, sent in found.values():
        assert {*sent} == {"gather", "reduce"} and 0 < alone < seconds
        assert sent["reduce"] == pytest.approx(ring["reduce"], rel=0.01)
