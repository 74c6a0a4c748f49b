"""Steps of offloaded shards piece by piece are those of whole tensors, bit for bit."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam

import gpus
import matrix
import zero
from inner import set_bucket_size
from optimizers import ELEMENTWISE
from simulated.scenarios import WORLD, built
from simulated.scenarios import step as take_step
from simulated.world import simulated, small_pieces

pytestmark = gpus.cpu_only("the GPU is a simulated one")

PIECE = 128
OPTIMIZERS: dict[str, Any] = {
    **{name: partial(optim, **options) for name, (optim, options) in ELEMENTWISE.items()},
    "fused": partial(Adam, lr=0.01, fused=True),
    "foreach": partial(Adam, lr=0.01, foreach=True),
}


@pytest.fixture(autouse=True)
def _small_pieces():
    with small_pieces(PIECE):
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


@matrix.combined("name, dtype", OPTIMIZERS, [torch.float32, torch.bfloat16])
def test_each_optimizer_steps_pieces_as_it_steps_all(name, dtype):
    optim = OPTIMIZERS[name]
    params, whole = parameters(dtype), parameters(dtype)
    stepped = [nn.Parameter(param.float()) for param in whole]
    ours, plain = zero.OSS(groups(params), optim, offload=zero.CPUOffload()), optim(groups(stepped))
    for step in range(3):
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


@pytest.mark.slow
def test_a_step_of_16_bits_takes_what_is_stepped_its_state_and_its_gradient():
    """Of an element that a rank owns, the CPU holds 16 bytes in a step at stage 1: 4 of what is stepped, 8 of Adam's
    state, 4 of the gradient."""
    side = 128
    module = nn.Sequential(*(nn.Linear(side if number else 8, side, bias=False) for number in range(4)))
    with simulated() as there:
        how: Any = {"optim": partial(Adam, foreach=True), "offload": zero.CPUOffload()}
        model, optimizer = built(there, 1, module.to(torch.bfloat16), **how)
        set_bucket_size(optimizer, side * side)
        for _ in range(2):
            there.memory.reset_peaks()
            take_step(model, optimizer)
            optimizer.zero_grad()
        held = there.memory.peaks()[1]
    owned = sum(param.numel() for param in module.parameters()) // WORLD
    expected, few = 16 * owned, 4096
    assert expected <= held < expected + few
