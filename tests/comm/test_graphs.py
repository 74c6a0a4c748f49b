"""A whole step as one CUDA graph, on a simulated GPU by the rules of recording. Its numbers are in tests/parity."""

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW

import zero
from matrix import WHOLE, only
from ranks import refusal
from simulated.device import Site
from simulated.memory import Race
from simulated.scenarios import HALF, OFFLOAD, RANK, SCENARIOS, WIDTH, WORLD, built, net, sgd, step, wrapped
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
        loop.step(torch.ones(3, WIDTH))
        step(loop.inputs())
        assert loop.steps == 5, "three by the host, one that is recorded, and one of another shape"
    with simulated() as there:
        loop = Loop(there, "3")
        step = trained(loop, 5)
        running_model(loop.model).comm.log.failure.mark_broken("rank 3 is gone")
        assert "rank 3 is gone" in refusal(lambda: step(loop.inputs()))


def test_a_step_that_is_interrupted_once_it_was_announced_is_told_to_ranks_that_replay():
    with simulated() as there:
        loop = Loop(there, "3")
        step = trained(loop, 5)
        with mock.patch.object(torch.Tensor, "copy_", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            step(loop.inputs())
        assert "has raised KeyboardInterrupt" in refusal(lambda: step(loop.inputs()))


def test_nothing_is_left_of_a_graph_that_was_dropped():
    with simulated() as there:
        loop = Loop(there, "2")
        hooks = loop.optimizer.optim._optimizer_load_state_dict_post_hooks
        before = len(hooks)
        trained(loop, 5)
        assert len(hooks) == before


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
    def step(self, closure: Any = None) -> Any:
        for param in (param for group in self.param_groups for param in group["params"]):
            self.state[param]["steps"] = self.state[param].get("steps", 0) + 1
        return super().step(closure)


REFUSED: dict[str, tuple[list[str], Callable[[], dict[str, Any]], str]] = {
    "offloaded parameters": (["1", "2", "3"], lambda: {"offload": OFFLOAD}, "was given parameters that are offloaded"),
    "counts on the host": (
        ["2", "3"],
        lambda: {"optim": partial(Counting, lr=0.1, foreach=True), "partition": "even"},
        "counts its steps, or keeps other state, on the host",
    ),
    "a rate on the CPU": (
        ["2"],
        lambda: {"optim": partial(SGD, lr=torch.tensor(0.1, device="cpu"), foreach=True)},
        "whose lr is a tensor on the cpu",
    ),
    "numbers that are read": (["2"], lambda: {"optim": partial(AdamW, lr=0.1, foreach=True)}, "capturable=True"),
}


@pytest.mark.parametrize(
    ("name", "stage"), [(name, stage) for name, (stages, *_) in REFUSED.items() for stage in stages]
)
def test_what_no_graph_can_have_is_refused(name, stage):
    with simulated() as there:
        _, how, words = REFUSED[name]
        loop = Loop(there, stage, **how())
        assert words in refusal(lambda: trained(loop, 4))


# Streams: every access to memory comes after what wrote it and before what frees it. Without any one of the waits in
# the code it would not.


def run(scenario: str, removed: Site | None = None, *, own_stream: bool = False) -> tuple[str, set[Site]]:
    """What goes wrong, in words: pytest would print tensors whose memory is freed. And where the package has waited."""
    with simulated(removed=removed, own_stream=own_stream) as there:
        told = ""
        try:
            SCENARIOS[scenario](there)
        except Race as race:
            told = f"{race}\n{''.join(traceback.format_tb(race.__traceback__)[-12:])}"
        except Exception:
            told = traceback.format_exc()
    return told if removed or there.device.waited else "nothing was beside anything", there.device.waited


FEW = {  # that have every wait between them, each where an access would come too soon without it
    "1 offloaded in 16 bits": False,
    "1 offloaded, with other strides": False,
    "2 offloaded, accumulated": False,
    "2 offloaded, written after the step": False,
    "3, no parameters in the root": True,
    "3 hybrid": True,
    "3 offloaded, evaluated": False,
}
"""Scenarios, and whether in a backend that has a stream of its own."""

ALONE = ["3", "3 kept", "3 hybrid", "3 in 16 bits", "3 accumulated", "3 written before backward"]
ALONE += ["3 offloaded, accumulated", "3 offloaded in 16 bits, one rank, clipped"]
ALONE += ["2 in 16 bits", "2 offloaded in 16 bits, one rank, accumulated", "1 with master weights"]
BY_GLOO = ["3", "3 hybrid", "3 in 16 bits", "3 full parameters", "3 offloaded", "2 in 16 bits"]
WITHIN = [(one, False) for one in (SCENARIOS if WHOLE else ALONE)]
WITHIN += [(one, True) for one in (BY_GLOO if WHOLE else ["3 offloaded", "2 in 16 bits"])]


@pytest.mark.matrix
@pytest.mark.parametrize(("scenario", "own_stream"), WITHIN)
def test_every_access_comes_after_what_wrote_and_before_what_frees(scenario, own_stream):
    """own_stream: so it does where a backend has a stream of its own."""
    assert run(scenario, own_stream=own_stream)[0] == ""


NEEDLESS = {("wait_for_copies", "synchronize")}
"""What has been waited for already in all scenarios: both functions are called by others, too."""


@only
@pytest.mark.timeout(600)
def test_without_any_one_wait_an_access_comes_too_soon():
    found = {}
    for scenario in SCENARIOS:
        told, found[scenario] = run(scenario)
        assert told == ""
    scenarios = sorted(found, key=lambda scenario: len(found[scenario]))
    needless = set()
    for site in sorted(set[Site]().union(*found.values())):
        runs = ((one, own) for own in (False, True) for one in scenarios if site in found[one])
        for scenario, own in runs:
            if "nothing says which comes first" in run(scenario, site, own_stream=own)[0]:
                scenarios.sort(key=lambda one: one != scenario)  # it is tried first for the next site
                break
        else:
            needless.add(tuple(call.function for call in site))
    assert needless == NEEDLESS


@pytest.fixture
def there() -> Any:
    with simulated() as one:
        yield one


def test_a_unit_that_runs_on_another_stream_than_the_model_is_refused(there):
    model, _ = wrapped(net(), there.comm(RANK, WORLD))
    block = model.blocks[1]
    forward = block.forward
    model(torch.ones(2, WIDTH))

    def elsewhere(x: Tensor) -> Tensor:
        with there.device.stream(there.device.Stream()):
            return model.blocks[2](x)

    block.forward = elsewhere
    with pytest.raises(RuntimeError, match=r"'blocks.2' .* on another stream .*on one stream"):
        model(torch.ones(2, WIDTH))
    block.forward = forward


@pytest.mark.parametrize("stage", STAGES)
def test_memory_of_the_stream_that_a_model_was_built_on_is_not_given_back_before_it_was_used(there, stage):
    loop = Loop(there, stage)
    other = there.device.Stream()
    other.wait_stream(there.device.current_stream())
    with there.device.stream(other):
        loop.step(loop.inputs())
    torch.zeros(100)  # on the stream of the building, which goes on by itself


def test_gradients_that_arrive_on_another_stream_are_refused(there):
    module = net()
    optimizer = zero.OSS(module.parameters(), sgd, there.comm(RANK, WORLD))
    model = zero.ShardedDDP(module, optimizer)
    loss = model(torch.ones(2, WIDTH)).sum()
    another = there.device.stream(there.device.Stream())
    module.blocks[1].down.bias.register_post_accumulate_grad_hook(lambda _: another.__enter__())
    with pytest.raises(RuntimeError, match=r"gradient of .* another stream"):
        loss.backward()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_is_not_recorded_into_a_graph(there, stage):
    comm = there.comm(RANK, WORLD)
    module = net()
    model, optimizer = wrapped(module, comm) if stage == 3 else (module, zero.OSS(module.parameters(), sgd, comm))
    there.device.recording = True
    with pytest.raises(RuntimeError, match="CUDA graph"):
        step(model, optimizer)
