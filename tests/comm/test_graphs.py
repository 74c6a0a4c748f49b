"""A whole step as one CUDA graph, on a simulated GPU by the rules of recording. Its numbers are in tests/parity."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW

import zero
from ranks import refusal
from simulated.scenarios import HALF, OFFLOAD, WIDTH, built, net
from simulated.world import Simulated, simulated
from zero.comm import Comm
from zero.fsdp.fsdp import running_model
from zero.graphs import COMPARED

STAGES: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "1 in 16 bits": (1, {"precision": "bf16"}),
    "2": (2, {"reduce_buffer_size": 200}),
    "2 whole": (2, {"partition": "whole"}),
    "2 in 16 bits": (2, {"precision": "bf16"}),
    "2 sent in 16 bits": (2, {"precision": zero.MixedPrecision(reduce_dtype=torch.bfloat16)}),
    "3": (3, {}),
    "3 kept": (3, {"reshard_after_forward": False}),
    "3 hybrid": (3, {"sharding_strategy": "HYBRID_SHARD"}),
    "3 in 16 bits": (3, {"precision": HALF}),
    "3 whole": (3, {"partition": "whole"}),
    "3 memory first": (3, {"prefetch": 1}),
}


class Loop:
    """optimizer, model: of a stage. step: may be put into a graph. steps: how often the host has run it."""

    def __init__(self, there: Simulated, stage: str, **more: Any) -> None:
        number, options = STAGES[stage]
        self.dtype = torch.bfloat16 if options.get("precision") == "bf16" else torch.float32
        self.model, self.optimizer = built(there, number, net().to(self.dtype), **options, **more)
        self.steps, self.there = 0, there

    def step(self, inputs: Tensor) -> Tensor:
        self.steps += 1
        loss = self.model(inputs).sum()
        loss.backward()
        clip = self.optimizer.clip_grad_norm if isinstance(self.optimizer, zero.OSS) else self.model.clip_grad_norm_
        clip(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def graphed(self) -> Callable[..., Tensor]:
        with mock.patch("zero.graphs.WARM_UP", 3):
            return zero.graphed(self.step, self.model, self.optimizer)

    def inputs(self) -> Tensor:
        return torch.ones(2, WIDTH, dtype=self.dtype)


def trained(loop: Loop, steps: int, step: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    step = step or loop.graphed()
    for _ in range(steps):
        step(loop.inputs())
    return step


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_at_any_stage_keeps_the_rules_of_recording(stage):
    with simulated() as there:
        loop = Loop(there, stage)
        trained(loop, 6)
        assert loop.steps == 4, "three by the host, and the one that is recorded"


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_offloaded_parameters_are_refused(stage):
    with simulated() as there:
        loop = Loop(there, stage, offload=OFFLOAD)
        assert "ValueError: zero.graphed was given parameters that are offloaded" in refusal(loop.graphed)


def reading(loop: Loop, inputs: Tensor) -> Tensor:
    loss = Loop.step(loop, inputs)
    loss.item()
    return loss


def keeping(loop: Loop, inputs: Tensor) -> Tensor:
    """Not before it is recorded."""
    if loop.steps < 3:
        return Loop.step(loop, inputs)
    loss = loop.model(inputs).sum()
    loss.backward()
    return loss


UNFIT = {reading: "could not be recorded.*loss scaling.*NoGraph", keeping: "end with optimizer.zero_grad"}


@pytest.mark.parametrize("step", UNFIT, ids=lambda step: step.__name__)
def test_what_cannot_be_replayed_is_refused_when_it_is_recorded(step):
    with simulated() as there:
        loop = Loop(there, "3")
        loop.step = partial(step, loop)  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match=UNFIT[step]):
            trained(loop, 4)


def test_parts_of_a_step_are_not_recorded():
    with simulated() as there:
        loop = Loop(there, "3")
        there.device.recording = True
        assert "zero.graphed(step, model, optimizer)" in refusal(lambda: loop.model(loop.inputs()))


def loaded(loop: Loop) -> None:
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())


CHANGES: dict[str, Callable[[Loop], object]] = {
    "the optimizer's state": loaded,
    "lr of group 0": lambda loop: loop.optimizer.param_groups[0].update(lr=0.5),
    "model.training": lambda loop: loop.model.blocks[1].eval(),
    "model.no_sync()": lambda loop: setattr(loop.model, "require_backward_grad_sync", False),
    "requires_grad of the parameters of group 0": lambda loop: loop.model.requires_grad_(False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_replay_would_not_see_is_refused(name):
    with simulated() as there:
        loop = Loop(there, "2")
        step = trained(loop, 5)
        CHANGES[name](loop)
        assert f"{name} has changed since" in refusal(lambda: step(loop.inputs()))


def test_other_shapes_are_refused_and_a_lost_rank_ends_the_replays():
    with simulated() as there:
        loop = Loop(there, "3")
        step = trained(loop, 5)
        assert "called with ['torch.float32 [3, 8]']" in refusal(lambda: step(torch.ones(3, WIDTH)))
        assert "called with" in refusal(lambda: step(loop.inputs())), "others may wait for it on the device"
    with simulated() as there:
        loop = Loop(there, "3")
        step = trained(loop, 5)
        running_model(loop.model).comm.log.failure.mark_broken("rank 3 is gone")
        assert "rank 3 is gone" in refusal(lambda: step(loop.inputs()))


def test_a_nest_of_inputs_is_copied_and_one_of_another_form_refused():
    with simulated() as there:
        loop = Loop(there, "3")
        own = loop.step
        loop.step = lambda batch, *, weight: own(batch["x"] * weight)  # type: ignore[method-assign]
        step = loop.graphed()
        for _ in range(5):
            step({"x": loop.inputs()}, weight=2.0)
        assert "called with" in refusal(lambda: step([loop.inputs()], weight=2.0))


def test_what_a_forward_without_backward_has_left_is_gathered_again():
    with simulated() as there:
        loop = Loop(there, "3")
        step = trained(loop, 5)
        loop.model(loop.inputs())
        assert running_model(loop.model).units[0].unsharded
        step(loop.inputs())
        assert not running_model(loop.model).units[0].unsharded


def test_replays_are_counted_and_compared():
    with simulated() as there:
        loop = Loop(there, "3")
        step = trained(loop, 4)
        log = running_model(loop.model).comm.log
        begun = log.history[0]
        with mock.patch.object(Comm, "agree") as agree:
            agree.return_value = 0
            trained(loop, COMPARED - 2, step)
            assert not agree.called and log.history[0] == begun + COMPARED - 2, "who stands is seen"
            trained(loop, 1, step)
            assert agree.called


class Counting(SGD):
    """Keeps the number of its steps on the host."""

    def step(self, closure: Any = None) -> Any:
        for param in (param for group in self.param_groups for param in group["params"]):
            self.state[param]["steps"] = self.state[param].get("steps", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("stage", ["2", "3"])
def test_an_optimizer_that_counts_on_the_host_is_refused(stage):
    with simulated() as there:
        loop = Loop(there, stage, optim=partial(Counting, lr=0.1, foreach=True), partition="even")
        assert "counts its steps, or keeps other state, on the host" in refusal(lambda: trained(loop, 4))


def test_a_rate_on_the_cpu_is_refused():
    with simulated() as there:
        rate = torch.tensor(0.1, device="cpu")
        loop = Loop(there, "2", optim=partial(SGD, lr=rate, foreach=True))
        assert "whose lr is a tensor on the cpu" in refusal(loop.graphed)


def test_an_optimizer_that_reads_numbers_is_refused():
    with simulated() as there:
        loop = Loop(there, "2", optim=partial(AdamW, lr=0.1, foreach=True))
        assert "capturable=True" in refusal(loop.graphed)
