"""A model that is run without values, for its activations: it stays what it was, and what cannot be run says why."""

from functools import partial
from threading import Lock
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Adam

import matrix
import zero
from placements import MODELS, Block, Model
from simulated.world import simulated

MIXED = zero.MixedPrecision(param_dtype=torch.bfloat16)


@pytest.mark.slow
def test_a_model_that_was_measured_is_left_as_it_was_and_nothing_counts_as_sent():
    model, before = Model(24, 1), zero.traffic()
    assert zero.plan(model, world_size=2, batch=[torch.zeros(1, 2).long()], stages=[3]).cost(3).sent
    with pytest.raises(IndexError):
        zero.plan(model, world_size=2, batch=[torch.zeros(()).long()], stages=[3])
    assert zero.traffic() == before
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert all(param.grad is None and not param._post_accumulate_grad_hooks for param in model.parameters())


def test_a_model_that_is_frozen_has_a_forward_only():
    model = Model(24, 1).requires_grad_(False)
    plan = zero.plan(model, world_size=2, batch=[torch.zeros(4, 32).long()], stages=[0, 3])
    assert [cost.gradients for cost in plan.costs] == [0] * 2
    assert plan.cost(3).transient > sum(param.nbytes for param in model.blocks[0].parameters())


class Caching(nn.Module):
    """Keeps what it computes in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table: Tensor | None = None
        self.by_length: dict[int, list[Tensor]] = {}
        self.apart = SimpleNamespace(seen=None, calls=0)
        self.itself = [self]

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(4.0, device=x.device)
            self.by_length[len(x)] = [self.table]
            self.apart.seen = self.table
            self.register_buffer("more", self.table)
        self.apart.calls += 1
        return self.linear(x) * self.table * self.by_length[len(x)][0]


@pytest.mark.parametrize("times", [0, 1])
def test_what_a_forward_keeps_is_real(times):
    """Also where it has kept something before that is real."""
    model, x = Caching(), torch.ones(2, 4)
    for _ in range(times):
        model(x)
    table = model.table
    zero.plan(model, world_size=2, batch=[x], stages=[3])
    assert (model.table is table, model.apart.calls) == (True, times)
    assert (len(model.by_length), len([*model.buffers()])) == (times, times) and model.apart.seen is table
    model(x).sum().backward()
    assert type(model.linear.weight.grad) is Tensor
    assert model.linear.weight.grad.isfinite().all()


def test_a_model_that_cannot_be_copied_says_so():
    model = nn.Linear(4, 4)
    model.lock = Lock()
    with pytest.raises(ValueError, match=r"the Linear cannot be copied \(.*lock.*\).*Plan it before"):
        zero.plan(model, world_size=2)


class Linear(nn.Linear):
    """Of four features, and with a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.frequencies = torch.arange(4.0)


class NeedsValues(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.sum().item()


class MaskedByValue(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[x > 0]


class ByKeyword(Linear):
    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return super().forward(x) * scale


class WithPlainTensor(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.frequencies


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (NeedsValues, RuntimeError, "its forward needs values"),
        (MaskedByValue, RuntimeError, r"needs values, .*\(aten.*Plan without a batch"),
        (ByKeyword, ValueError, r"ByKeyword.forward .* arguments: 1.*'scale'"),
        (lambda: nn.Sequential(WithPlainTensor()), RuntimeError, r"0\.frequencies .*register_buffer"),
    ],
)
def test_what_cannot_be_run_says_what_to_do(make, error, message):
    with torch.device("meta"):
        model = make()
    with pytest.raises(error, match=message):
        zero.plan(model, world_size=2, batch=[torch.ones(4, 4)], stages=[0, 3])


ALL = [(kind, precision) for kind in MODELS.values() for precision in (None, MIXED)]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "precision"), ALL if matrix.WHOLE else [(MODELS["Tied"], MIXED)])
def test_operators_that_take_less_time_count_what_torchs_own_do(kind, precision):
    batch = (torch.zeros((2, 192) if issubclass(kind, MODELS["Equal"]) else (4, 32), dtype=torch.int64),)
    how = {"world_size": [1, 4], "precision": precision, "batch": batch}
    found = zero.plan(kind(), **how)
    with mock.patch("zero._torch.tensors._WithoutValues", FakeTensorMode):
        assert zero.plan(kind(), **how) == found


# What is planned with offload is what is: against steps on the simulated GPU.


BATCH = (torch.zeros(4, 32, dtype=torch.int64),)
POLICY = ModuleWrapPolicy({Block})
adam = partial(Adam, foreach=True)


def measured(stage: str, world: int, offload: Any, precision: zero.MixedPrecision) -> tuple[int, int]:
    """Bytes on the device at the peak of a settled step, and in the CPU's memory between its backward and its step."""
    with simulated() as there:
        how: dict[str, Any] = {"auto_wrap_policy": POLICY, "precision": precision, "offload": offload}
        model = zero.FSDP(Model(layers=2), there.comm(0, world), reshard_after_forward=stage == "3", **how)
        optimizer = adam(model.parameters())
        for _ in range(3):
            there.memory.reset_peaks()
            model(*BATCH).backward()
            held = there.memory.on_cpu()
            optimizer.step()
            optimizer.zero_grad()
        return there.memory.peaks()[0], held


PLANNED = [
    (stage, world, zero.CPUOffload(ratio=ratio), zero.MixedPrecision(param_dtype=dtype))
    for stage in ("3", "3 kept")
    for world in (1, 2)
    for ratio in (1.0, 0.5)
    for dtype in (None, torch.bfloat16)
]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("stage", "world", "offload", "precision"),
    PLANNED if matrix.WHOLE else [PLANNED[number] for number in (6, 9)],
    ids=str,
)
def test_offload_at_stage_3_is_planned_within_one_percent(stage, world, offload, precision):
    how = {"optimizer": adam, "auto_wrap_policy": POLICY, "batch": BATCH, "offload": offload, "precision": precision}
    cost = zero.plan(Model(layers=2), world_size=world, stages=[stage], **how).cost(stage)
    peak, held = measured(stage, world, offload, precision)
    assert cost.peak == pytest.approx(peak, rel=0.01)
    assert cost.host == pytest.approx(held, rel=0.01)
