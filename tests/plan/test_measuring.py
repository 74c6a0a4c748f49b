"""A model that is run without values, for its activations: it stays what it was, and what cannot be run says why."""

from __future__ import annotations

from threading import Lock
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import zero
from placements import Block, Model


@pytest.mark.slow
def test_a_model_that_was_measured_is_left_as_it_was():
    model = Model(24, 2)
    zero.plan(model, world_size=2, auto_wrap_policy=ModuleWrapPolicy({Block}), batch=[torch.zeros(1, 2).long()])
    with pytest.raises(IndexError):
        zero.plan(model, world_size=2, auto_wrap_policy=ModuleWrapPolicy({Block}), batch=[torch.zeros(()).long()])
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert all(param.grad is None and not param._post_accumulate_grad_hooks for param in model.parameters())


def test_nothing_that_is_planned_counts_as_sent():
    before = zero.traffic()
    assert zero.plan(Model(), world_size=2, batch=[torch.zeros(1, 2).long()], stages=[3]).cost(3).sent
    assert zero.traffic() == before


def test_parameters_that_are_not_used_are_known_not_to_be():
    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    plan = zero.plan(Halved(), world_size=1, batch=[torch.ones(4, 8)])
    assert [cost.gradients for cost in plan.costs[:2]] == [72 * 4] * 2
    together = 2 * 72 * 4  # zeros lie in one tensor with what is used
    assert [cost.gradients for cost in plan.costs[2:]] == [together] * 3


def test_a_model_that_is_frozen_has_a_forward_only():
    model = Model(24, 2).requires_grad_(False)
    plan = zero.plan(model, world_size=2, batch=[torch.zeros(4, 32).long()])
    assert [cost.gradients for cost in plan.costs] == [0] * 5
    assert plan.cost(3).transient > sum(param.nbytes for param in model.blocks[0].parameters())


class Caching(nn.Module):
    """Keeps what it computes in every way that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table: Tensor | None = None
        self.by_length: dict[int, Tensor] = {}
        self.nested: dict[str, list[Tensor]] = {"": []}
        self.pair: tuple[list[Tensor], int] = ([], 0)
        self.apart = SimpleNamespace(seen=None, calls=0)
        self.itself = [self]

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(4.0, device=x.device)
            self.by_length[len(x)] = self.table
            self.nested[""].append(self.table)
            self.pair[0].append(self.table)
            self.apart.seen = self.table
            self.linear.late = self.table
            self.register_buffer("more", self.table)
        self.apart.calls += 1
        return self.linear(x) * self.table * self.by_length[len(x)] * self.nested[""][0] * self.pair[0][0]


@pytest.mark.parametrize("times", [0, 1])
def test_what_a_forward_keeps_is_real(times):
    """Also where it has kept something before that is real."""
    model, x = Caching(), torch.ones(2, 4)
    for _ in range(times):
        model(x)
    table = model.table
    zero.plan(model, world_size=2, batch=[x], stages=[1, 3])
    assert (model.table is table, model.apart.calls) == (True, times)
    assert (len(model.by_length), len(model.nested[""]), len(model.pair[0]), len([*model.buffers()])) == (times,) * 4
    assert model.apart.seen is table and hasattr(model.linear, "late") == bool(times)
    model(x).sum().backward()
    assert type(model.linear.weight.grad) is Tensor
    assert model.linear.weight.grad.isfinite().all()


def test_what_a_forward_kept_is_gone_where_it_failed():
    class Failing(Caching):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError(super().forward(x).shape)

    model = Failing()
    with pytest.raises(KeyError):
        zero.plan(model, world_size=2, batch=[torch.ones(2, 4)])
    assert model.table is None and model.by_length == {}


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


class ComparesValues(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if torch.equal(x, x) else -x)


class MaskedByValue(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[x > 0]


class ByKeyword(Linear):
    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return super().forward(x) * scale


class WithPlainTensor(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.frequencies


class Wrong(Linear):
    """Whose error is its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (NeedsValues, RuntimeError, "its forward needs values"),
        (ComparesValues, RuntimeError, "its forward needs values"),
        (MaskedByValue, RuntimeError, r"needs values, .*\(aten.*Plan without a batch"),
        (ByKeyword, ValueError, r"ByKeyword.forward .* arguments: 1.*'scale'"),
        (lambda: nn.Sequential(WithPlainTensor()), RuntimeError, r"0\.frequencies .*register_buffer"),
        (Wrong, TypeError, "takes 2 positional arguments"),
    ],
)
def test_what_cannot_be_run_says_what_to_do(make, error, message):
    with torch.device("meta"):
        model = make()
    with pytest.raises(error, match=message):
        zero.plan(model, world_size=2, batch=[torch.ones(4, 4)], stages=[0, 3])
