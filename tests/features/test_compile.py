"""torch.compile of the blocks inside: it computes what compiled blocks do under DistributedDataParallel, compiled once.

Hooks that gather and release must stay out of what is compiled: neither traced, nor between its pieces, nor a reason to
compile the same block again for each place that it has in the model.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from compiling import BLOCKS, WIDTH, Net, gpt2_trained, needs_gpt2, plain_names
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel

import matrix
import ranks
import zero
from models import OPTIMIZERS, take_step
from reference import same
from sidebyside import data

# Raised by Dynamo itself as it looks at the tensors that a block is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

Compile = Callable[[nn.ModuleList, Any], None]


def in_place(blocks: nn.ModuleList, backend: Any) -> None:
    for block in blocks:
        block.compile(backend=backend)


def replaced(blocks: nn.ModuleList, backend: Any) -> None:
    for number, block in enumerate(blocks):
        blocks[number] = torch.compile(block, backend=backend)


def trained(rank: int, *, stage: int, compiled: Compile, after: bool, backend: Any, optim: str, **options: Any) -> Any:
    """Losses, weights, and how many graphs were compiled after each step."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    model = Net()
    if not after:
        compiled(model.blocks, counter)
    wrapped = zero.FSDP(model, **options) if stage == 3 else DistributedDataParallel(model)
    if after:
        compiled(model.blocks, counter)
    optimizer = OPTIMIZERS[optim](wrapped.parameters())
    losses, graphs = [], []
    for step in range(4):
        losses.append(take_step(optimizer, (wrapped(data(5, WIDTH, rank=rank, step=step)) - 1).square().mean()))
        graphs.append(counter.frame_count)
    if stage == 3:
        assert len(wrapped._units) == 1 + BLOCKS
    return losses, plain_names(zero.full_state_dict(wrapped)), graphs


def as_ddp(
    rank: int, world: int, compiled: Compile, after: bool, backend: str, optim: str, *each: dict[str, Any]
) -> None:
    """each: options of FSDP."""
    how = {"compiled": compiled, "after": after, "backend": backend, "optim": optim}
    losses, weights, graphs = trained(rank, stage=0, **how)
    assert graphs == [1, 1, 1, 1]
    for options in each:
        found = trained(rank, stage=3, **how, **options)
        assert found[0] == losses
        assert list(found[1]) == list(weights)
        assert all(torch.equal(found[1][name], value) for name, value in weights.items())
        assert found[2] == graphs, "graphs compiled so far, after each step"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("compiled", "after"), [(in_place, True), (replaced, False), *([(in_place, False)] if matrix.WHOLE else [])]
)
def test_compiled_blocks_train_as_under_ddp_and_are_compiled_once(compiled, after):
    backend = "eager" if after and not matrix.WHOLE else "aot_eager"  # which takes longer
    ranks.run(as_ddp, args=(compiled, after, backend, "adamw", {}, {"reshard_after_forward": False}))


@pytest.mark.filterwarnings("ignore")  # inductor, while it is imported and compiles
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_blocks_compiled_to_machine_code_train_as_under_ddp():
    ranks.run(as_ddp, args=(in_place, False, "inductor", "sgd", {}), timeout=100)


@needs_gpt2
@ranks.on(2)
def test_compiled_blocks_of_gpt2_train_as_under_ddp(rank, world):
    def build(wrap: Any, model: Any, backend: Any) -> tuple[nn.Module, nn.Module]:
        in_place(model.transformer.h, backend)
        wrapped = wrap(model)
        return wrapped, wrapped

    trained = (gpt2_trained(rank, partial(build, wrap)) for wrap in (DistributedDataParallel, zero.FSDP))
    (expected, graphs), (found, own_graphs) = trained
    assert graphs == own_graphs == 1
    same(found, expected)
