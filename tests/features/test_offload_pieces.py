"""Steps of offloaded shards piece by piece are those of whole tensors, bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import zero
from simulated.scenarios import RANK, WORLD
from simulated.world import simulated
from zero.features.offload import pieces
from zero.features.offload.pieces import Piece
from zero.measure.kinds import ELEMENTWISE
from zero.oss.optimizer import set_bucket_size
from zero.shards import masters

PIECE = 128
OPTIMIZERS: dict[str, Any] = {
    **{optim.__name__: partial(optim, lr=0.01) for optim in sorted(ELEMENTWISE, key=lambda one: one.__name__)},
    "momentum": partial(SGD, lr=0.01, momentum=0.9, nesterov=True),
    "amsgrad": partial(Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "fused": partial(Adam, lr=0.01, fused=True),
    "foreach": partial(Adam, lr=0.01, foreach=True),
}


@pytest.fixture(autouse=True)
def _small_pieces():
    with mock.patch.multiple(pieces, _OF_A_THREAD=PIECE, _LEAST=PIECE):
        yield


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    """Some are longer than a piece and not a multiple of one, others fit into one together; of one the elements lie in
    another order than those of its gradients."""
    torch.manual_seed(0)
    values = [torch.randn(40, 50), torch.randn(7), torch.randn(()), torch.randn(8, 4, 3, 3), torch.randn(13)]
    values[3] = values[3].to(memory_format=torch.channels_last)
    return [nn.Parameter(one.to(dtype)) for one in [*values, torch.randn(2 * PIECE)]]


def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2], "lr": 0.05}, {"params": params[2:]}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optim", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_each_optimizer_steps_pieces_as_it_steps_all(optim, dtype):
    params, whole = parameters(dtype), parameters(dtype)
    stepped = [nn.Parameter(param.float()) for param in whole]
    ours, plain = zero.OSS(groups(params), optim, offload=zero.CPUOffload()), optim(groups(stepped))
    for step in range(4):
        for number, (param, master) in enumerate(zip(params, stepped, strict=True)):
            if number == 4 or number == 1 + step:  # one never has gradients, and one not in this step
                param.grad = master.grad = None
            else:
                param.grad = torch.randn(param.shape, dtype=dtype)
                master.grad = torch.empty_like(master).copy_(param.grad)  # torch's fused kernels need one order
        for one in (ours, plain):
            one.param_groups[0]["lr"] = 0.05 / (1 + step)
            one.step()
        for param, master in zip(params, stepped, strict=True):
            assert torch.equal(param, master.to(dtype))
    states = [plain.state[master] for master in stepped], [ours.optim.state[ours.part(param)] for param in params]
    for expected, found in zip(*states, strict=True):
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=0)


def test_a_step_that_a_scaler_skips_leaves_each_piece_as_it_was():
    params = parameters(torch.bfloat16)
    optimizer = zero.OSS(params, partial(Adam, fused=True), offload=zero.CPUOffload())
    for found_inf in (0.0, 1.0, 0.0):
        before = [param.detach().clone() for param in params]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.optim.grad_scale, optimizer.optim.found_inf = torch.tensor(1.0), torch.tensor(found_inf)
        optimizer.step()
        assert all(torch.equal(*pair) for pair in zip(before, params, strict=True)) == bool(found_inf)
    counts = [state["step"].item() for state in optimizer.optim.state.values()]
    assert counts == [2] * len(params)


def test_each_part_is_sent_once_it_has_been_stepped():
    sent: list[tuple[int, int]] = []
    write_part = masters.write_part

    def noted(group: Any, part: slice) -> None:
        sent.append((part.start, part.stop))
        write_part(group, part)

    params = parameters(torch.bfloat16)
    optimizer = zero.OSS(params, SGD, lr=0.1, momentum=0.9, offload=zero.CPUOffload())
    with mock.patch.object(masters, "write_part", noted):
        for _ in range(2):
            sent.clear()
            for param in params[1:]:  # of the first, nothing is stepped
                param.grad = torch.ones_like(param)
            optimizer.step()
    [group] = optimizer.shards.shard_groups
    ends = [end for _, end in sent]
    assert [begin for begin, _ in sent] == [0, *ends[:-1]]
    assert ends[-1] == len(group.stepped)
    assert len(sent) > 3


def test_gradients_of_16_bits_are_not_widened_all_at_once():
    """Of an element that a rank owns, the CPU holds 14 bytes in a step at stage 1: 4 of what is stepped, 8 of Adam's
    state, 2 of the gradient; and a piece in float32. The first step, which creates the state, widens a parameter, and
    leaves two buffers in which it was rounded."""
    side = 128
    numel = side * side
    module = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(4))).to(torch.bfloat16)
    held: list[int] = []
    steps = Piece.keep

    def noted(*args: Any) -> None:
        held.append(there.memory.on_cpu())
        steps(*args)

    with simulated() as there, mock.patch.object(Piece, "keep", noted):
        comm = there.comm(RANK, WORLD)
        optimizer = zero.OSS(module.parameters(), partial(Adam, foreach=True), comm, offload=zero.CPUOffload())
        set_bucket_size(optimizer, numel)
        for _ in range(2):
            held.clear()
            module(torch.ones(2, side, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    owned, few = numel // WORLD, 4096
    expected = 4 * 14 * owned + 4 * PIECE + 2 * 2 * owned
    assert expected <= max(held) < expected + few


def test_a_gradient_that_waits_to_be_widened_is_widened_for_other_optimizers():
    """Those that do not treat each element by itself step whole shards."""
    trained: list[list[Tensor]] = []
    for offload in (None, zero.CPUOffload()):
        params = parameters(torch.bfloat16)[:2]
        optimizer = zero.OSS(params, torch.optim.Adafactor, master_dtype=torch.float32, offload=offload)
        for _ in range(3):
            for param in params:
                param.grad = torch.linspace(-1, 1, param.numel()).view(param.shape).to(param)
            optimizer.step()
        trained.append(params)
    assert all(torch.equal(*pair) for pair in zip(*trained, strict=True))
    assert all(param.isfinite().all() for param in trained[0])
