"""torch.compile around what happens between forwards: gradients that are there, steps; and TorchScript."""

from functools import partial

import pytest
import torch
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ranks
import zero
from runs import SideBySide, stage_3
from zoo import WIDTH, Block, Stack, batch, loss_on

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
        "ignore:Dynamo does not know",
        "ignore:.*is deprecated:DeprecationWarning",
        "ignore::torch.jit.TracerWarning",
    ),
]


def loss(rank, step, compiled, sharded, model):
    return (compiled if model is sharded else model)(batch(rank, step)).square().mean()


@pytest.mark.parametrize("unsent", [0, 1])
@ranks.on(2, timeout=60)
def test_a_compiled_model_trains_where_gradients_are_there_in_a_forward(rank, world, unsent):
    """Six units: where whoever asks for shapes counts as a reader, ranks would unshard units in orders of their own."""
    torch._dynamo.reset()
    both = SideBySide(Stack(blocks=6), partial(stage_3, auto_wrap_policy=ModuleWrapPolicy({Block})))
    compiled = torch.compile(both.model, backend="eager")
    for step in range(3):
        both.step(*(partial(loss, rank, 2 * step + half, compiled, both.model) for half in range(2)), unsent=unsent)


@ranks.on(2, timeout=60)
def test_the_step_of_an_optimizer_may_be_compiled(rank, world):
    torch._dynamo.reset()
    both = SideBySide(Stack(), "3")
    both.optimizer.step = torch.compile(both.optimizer.step, backend="eager")
    for step in range(3):
        both.step(loss_on(rank, step))


@pytest.mark.parametrize("stage", [2, 3])
@ranks.raises(2, RuntimeError, "TorchScript cannot run")
def test_scripts_are_refused(rank, world, stage):
    torch.jit.script(zero.setup(Stack(), torch.optim.SGD, stage=stage, lr=0.1)[0])


@ranks.raises(2, RuntimeError, "TorchScript cannot run")
def test_traces_of_stage_3_are_refused(rank, world):
    torch.jit.trace(zero.FSDP(Stack()), torch.ones(2, WIDTH))
