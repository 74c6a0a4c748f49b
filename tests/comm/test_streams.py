"""Streams of a GPU, simulated: every access to memory comes after what wrote it and before what frees it, and without
any one of the waits in the code it would not."""

import traceback
from typing import Any

import pytest
import torch
from torch import Tensor

import zero
from matrix import WHOLE, only
from simulated.device import Site
from simulated.memory import Race
from simulated.scenarios import RANK, SCENARIOS, WIDTH, WORLD, net, sgd, step, wrapped
from simulated.world import simulated


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
