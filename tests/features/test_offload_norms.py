"""The norm of offloaded gradients is computed on the device before they leave it, and holds until somebody writes."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zero
from simulated.scenarios import RANK, WORLD, net, ones, sgd, wrapped
from simulated.world import Simulated, simulated
from zero.features.offload import norms
from zero.shards import norm as norm_of_all


def built(there: Simulated, stage: int, world: int, dtype: torch.dtype) -> tuple[Any, Any, list[nn.Parameter]]:
    """The model, its optimizer, and what is stepped."""
    torch.manual_seed(0)
    module, comm = net().to(dtype), there.comm(min(RANK, world - 1), world)
    if stage == 3:
        model, optimizer = wrapped(module, comm, offload=zero.CPUOffload())
        return model, optimizer, [param for param in model.parameters() if param.numel()]
    oss = zero.OSS(module.parameters(), sgd, comm, offload=zero.CPUOffload())
    return zero.ShardedDDP(module, oss), oss, [*oss.shards.values()]


def in_numbers(params: list[nn.Parameter]) -> Tensor:
    found = [param.grad.detach().double().flatten() for param in params if param.grad is not None]
    return torch.cat(found)


def nothing(gradients: list[Tensor]) -> None:
    pass


def scaled(gradients: list[Tensor]) -> None:
    for gradient in gradients:
        gradient.mul_(3)


def scaled_unnoticed(gradients: list[Tensor]) -> None:
    """torch counts no write into `.data`."""
    for gradient in gradients:
        gradient.data.mul_(3)


def one_element(gradients: list[Tensor]) -> None:
    gradients[0].view(-1)[-1] = 7


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("written", "backwards", "reads"),
    [(nothing, 1, False), (scaled, 1, True), (scaled_unnoticed, 1, True), (one_element, 1, True), (nothing, 2, True)],
    ids=["untouched", "scaled", "scaled by .data", "one element", "accumulated"],
)
def test_gradients_are_read_on_the_cpu_only_if_somebody_wrote_into_them(stage, written, backwards, reads):
    with simulated() as there:
        model, optimizer, params = built(there, stage, 1, torch.float32)
        clipped = model if stage == 3 else optimizer
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(backwards):
                model(ones(model)).sum().backward()
            written([param.grad for param in params])
            with mock.patch.object(norm_of_all, "norms_of", wraps=norm_of_all.norms_of) as read:
                found = clipped.grad_norm()
            assert read.called == reads
            assert found.item() == pytest.approx(in_numbers(params).norm().item(), rel=1e-6)
            optimizer.step()


@pytest.mark.parametrize(("norm_type", "reads"), [(2.0, False), (1.0, True), (math.inf, True)])
def test_other_norms_are_computed_from_the_gradients(norm_type, reads):
    with simulated() as there:
        model, _, params = built(there, 3, 1, torch.float32)
        model(ones(model)).sum().backward()
        with mock.patch.object(norm_of_all, "norms_of", wraps=norm_of_all.norms_of) as read:
            found = model.grad_norm(norm_type)
        assert read.called == reads
        assert found.item() == pytest.approx(in_numbers(params).norm(norm_type).item(), rel=1e-6)


@pytest.mark.parametrize("world", [1, WORLD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_known_is_what_would_be_computed(world, dtype):
    with simulated() as there:
        model, _, params = built(there, 2, world, dtype)
        model(ones(model)).sum().backward()
        gradients = [param.grad for param in params if param.grad is not None and param.numel()]
        known = norms.known(gradients, 2.0)
        assert [*known] == [*range(len(gradients))]
        for position, gradient in enumerate(gradients):
            assert known[position].item() == pytest.approx(gradient.norm().item(), rel=1e-6)
