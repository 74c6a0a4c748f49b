"""What GPUs ask of the code, shown without one.

Gloo is taken here for a backend that sends beside the computing, as NCCL does: gathers go the same way then, and give
the same numbers. And a settled step asks no tensor for its values, and makes none of the host's: on a GPU the host
would wait there until all that it had launched was done.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import matrix
import ranks
import zero
from runs import SideBySide, sgd, stage_1, stage_2, stage_3
from transports import overlapping
from zoo import CASES, GPT

PACKAGE = Path(zero.__file__).parent
STAGES: dict[str, Callable[..., Any]] = {
    "2": stage_2,
    "3": stage_3,
    "3 whole": partial(stage_3, partition="whole"),
    "3 kept": partial(stage_3, reshard_after_forward=False),
    "3 speed first": partial(stage_3, prefetch=3),
}


def small_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(width=12, layers=2)


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(CASES["gpt"].batch(rank, step).inputs[0]).float().square().mean()


@matrix.combined("stage, optim", STAGES, [sgd, partial(AdamW, lr=1e-2)])
@ranks.on(2)
def test_transfers_beside_the_computing_give_the_same_numbers(rank, world, stage, optim):
    with overlapping():
        both = SideBySide(small_gpt(), STAGES[stage], optim)
        for step in range(3):
            both.step(lambda model: loss(model, rank, step))  # noqa: B023


ASKING = ["item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"]
ASKING += ["nonzero", "is_nonzero", "equal", "allclose", "masked_select"]
AMONG_HOSTS = ("transport.py", "comm.py", "scaling.py: compare")
"""Where ranks tell each other what they do, in tensors that are always on the CPU."""


@contextmanager
def noting_waits(waits: list[str]) -> Iterator[None]:
    """Notes what the package does that a GPU's host would wait in: file, function, and what it calls.

    Not for processes that go on: a tensor's class is not quite the same again.
    """

    def noting(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            code = sys._getframe(1).f_code
            place = f"{Path(code.co_filename).name}: {code.co_name}"
            by_mask = name != "__getitem__" or (isinstance(args[1], Tensor) and args[1].dtype == torch.bool)
            if by_mask and PACKAGE in Path(code.co_filename).parents and not place.startswith(AMONG_HOSTS):
                waits.append(f"{place}: {name}")
            return function(*args, **kwargs)

        return noted

    with ExitStack() as patches:
        for name in [*ASKING, "new_tensor", "__getitem__"]:
            patches.enter_context(mock.patch.object(Tensor, name, noting(getattr(Tensor, name), name)))
        for name in ["tensor", "as_tensor", "equal", "allclose"]:
            patches.enter_context(mock.patch.object(torch, name, noting(getattr(torch, name), name)))
        yield


FLOAT16 = {"precision": zero.MixedPrecision(torch.float16)}
SETTLED: list[tuple[str, dict[str, Any]]] = [
    ("1", {}),
    *product(["2"], [{"partition": "whole"}, {"precision": "bf16"}]),
    *product(["3", "3 speed first"], [{}, FLOAT16]),
    *product(["3 whole", "3 kept"], [FLOAT16]),
]


@pytest.mark.slow
@ranks.on(2, fresh=True)
def test_a_settled_step_waits_for_no_value(rank, world):
    for stage, options in SETTLED:
        waits: list[str] = []
        with overlapping():
            model, optimizer = {"1": stage_1, **STAGES}[stage](small_gpt(), partial(AdamW, lr=1e-2), **options)
            for step in range(3):
                with noting_waits(waits) if step == 2 else nullcontext():
                    optimizer.zero_grad()
                    loss(model, rank, step).backward()
                    if isinstance(optimizer, zero.OSS):
                        optimizer.clip_grad_norm(1.0)
                    else:
                        model.clip_grad_norm_(1.0)
                    optimizer.step()
        assert not waits, (stage, options)


class Elsewhere(nn.Parameter):
    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0")


@pytest.mark.parametrize(("stage", "trained"), [(2, True), (3, True), (2, False)])
@ranks.on(2, timeout=8)
def test_trained_parameters_on_two_devices_are_refused_on_every_rank_and_frozen_are_not(rank, world, stage, trained):
    """Backward has a thread for each device: ranks might come to their operations in different orders."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].bias.requires_grad_(trained)
    sharded = zero.OSS([param for param in model.parameters() if param.requires_grad], torch.optim.SGD, lr=0.1)
    if rank == 0:
        model[1].bias.__class__ = Elsewhere
    if stage == 2:
        told = ranks.refusal(lambda: zero.ShardedDDP(model, sharded, sync_module_states=False))
    else:
        told = ranks.refusal(lambda: zero.FSDP(model))
    assert ("'0.weight' is on cpu, but '1.bias' on cuda:0" in told) == trained, told
