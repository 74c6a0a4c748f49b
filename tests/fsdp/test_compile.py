"""torch.compile of blocks, or of a whole model around FSDP or inside it, trains as the same without it.

Hooks that gather and release must stay out of what is compiled: neither traced, nor between its pieces, nor a reason to
compile the same block again for each place that it has. Graphs of a whole model break between units, and nowhere else.
The first forward runs uncompiled, to find what modules read of other units. `make matrix` runs all cases.
"""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import WIDTH, Net, loss, plain_names
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.functional import linear
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import matrix
import ranks
import zero
from assertions import plain, same
from matrix import WHOLE
from runs import take_step
from zoo import OPTIMIZERS, data

pytestmark = [
    pytest.mark.matrix,
    # Raised by Dynamo itself as it looks at the tensors that a module is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def in_place(blocks: nn.ModuleList, backend: Any) -> None:
    for block in blocks:
        block.compile(backend=backend)


def replaced(blocks: nn.ModuleList, backend: Any) -> None:
    for number, block in enumerate(blocks):
        blocks[number] = torch.compile(block, backend=backend)


def trained(rank: int, stage: int, compiled: Callable[..., None], backend: str, *, after: bool) -> Any:
    """Losses, weights, and how many graphs were compiled after each step. after: wrapping."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    model = Net()
    if not after:
        compiled(model.blocks, counter)
    wrapped = zero.FSDP(model) if stage == 3 else DistributedDataParallel(model)
    if after:
        compiled(model.blocks, counter)
    optimizer = OPTIMIZERS["adamw"](wrapped.parameters())
    losses, graphs = [], []
    for step in range(2):
        losses.append(take_step(optimizer, loss(wrapped, rank, step)))
        graphs.append(counter.frame_count)
    return losses, plain_names(zero.full_state_dict(wrapped, to=None)), graphs


def as_ddp(rank: int, world: int, compiled: Callable[..., None], backend: str, after: bool) -> None:
    expected, found = (trained(rank, stage, compiled, backend, after=after) for stage in (0, 3))
    assert expected[2] == [1, 1], "graphs"
    same(found, expected)


ALONE = [(replaced, "aot_eager", False), *([(in_place, "eager", True), (in_place, "eager", False)] if WHOLE else [])]


@pytest.mark.slow
@pytest.mark.parametrize(("compiled", "backend", "after"), ALONE)
def test_compiled_blocks_train_as_under_ddp_and_are_compiled_once(compiled, backend, after):
    ranks.run(as_ddp, args=(compiled, backend, after))


@matrix.only
@pytest.mark.filterwarnings("ignore")  # inductor, while it is imported and compiles
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_blocks_compiled_to_machine_code_train_as_under_ddp():
    ranks.run(as_ddp, args=(in_place, "inductor", False), timeout=100)


Build = Callable[[nn.Module, Any, dict[str, Any]], tuple[zero.FSDP, nn.Module]]
"""Of a model, a backend (or None) and options: what is sharded, and what to call."""


def uncompiled(model: nn.Module, backend: Any, options: dict[str, Any]) -> tuple[zero.FSDP, nn.Module]:
    sharded = zero.FSDP(model, **options)
    return sharded, sharded


def around(model: nn.Module, backend: Any, options: dict[str, Any]) -> tuple[zero.FSDP, nn.Module]:
    sharded = zero.FSDP(model, **options)
    return sharded, torch.compile(sharded, backend=backend)


def inside(model: nn.Module, backend: Any, options: dict[str, Any]) -> tuple[zero.FSDP, nn.Module]:
    return uncompiled(torch.compile(model, backend=backend), None, options)


class Run:
    """A training of two steps, with an evaluation before gradients are cleared, and its graphs after each step."""

    def __init__(self, rank: int, build: Build, make: Callable[[], nn.Module], backend: str, options: dict[str, Any]):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        sharded, model = build(make(), counter, options)
        optimizer = OPTIMIZERS["adamw"](sharded.parameters())
        self.numbers: list[float] = []
        self.graphs: list[int] = []
        for step in range(2):
            optimizer.zero_grad()
            with model.no_sync():
                loss(model, rank, 10 + step).backward()
            trained = loss(model, rank, step)
            trained.backward()
            self.numbers += [trained.item(), sharded.clip_grad_norm_(0.5).item()]
            optimizer.step()
            self.graphs.append(counter.frame_count)
        before = [param.grad for param in sharded.parameters()]
        model.eval()
        with torch.no_grad():
            self.numbers.append(loss(model, rank, 20).item())
        assert all(param.grad is one for param, one in zip(sharded.parameters(), before, strict=True))
        self.weights = plain_names(zero.full_state_dict(sharded, to=None))


class Reading(nn.Module):
    """Multiplies by the weight of another unit, whose own forward comes before or after."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = linear(x, self.other.weight)
        x = torch.tanh(self.other(self.one(x)))
        return linear(x, self.one.weight.t())


class Checkpointing(Net):
    """The blocks are computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return 2 * self.last(torch.tanh(x))


ALL_WHOLE = {"partition": "whole", "prefetch": 3}
IN_16_BITS = {"precision": zero.MixedPrecision(param_dtype=torch.bfloat16, keep_fp32=(nn.LayerNorm,))}
OF_LINEARS = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}
CASES: dict[str, tuple[Build, Callable[[], nn.Module], str, dict[str, Any], int | None]] = {
    "modules that read other units": (inside, Reading, "eager", ALL_WHOLE | OF_LINEARS, None)
}
if WHOLE:
    # Before and after the loop of units, and one for all of them: torch 2.11 does not compile what surrounds a loop.
    CASES["a model around"] = (around, Net, "eager", {}, 3 if torch.__version__ >= "2.13" else 1)
    CASES["a model inside, whole parameters in 16 bits"] = (inside, Net, "aot_eager", ALL_WHOLE | IN_16_BITS, None)
    CASES["activation checkpointing"] = (inside, Checkpointing, "aot_eager", {}, None)
    CASES["inside"] = (inside, Net, "aot_eager", {}, None)
    CASES["around, kept"] = (around, Net, "aot_eager", {"reshard_after_forward": False}, None)


def as_uncompiled(rank: int, world: int, case: str) -> None:
    build, make, backend, options, graphs = CASES[case]
    torch.manual_seed(0)
    expected = Run(rank, uncompiled, make, backend, options)
    torch.manual_seed(0)
    found = Run(rank, build, make, backend, options)
    same((found.numbers, found.weights), (expected.numbers, expected.weights))
    assert found.graphs == [graphs or found.graphs[0]] * 2
    assert found.graphs[0] > 0 == expected.graphs[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_compiled_models_train_as_uncompiled(case):
    ranks.run(as_uncompiled, args=(case,), fresh="around" in case)  # runs before would make it more graphs


@matrix.only
@ranks.on(2)
def test_other_methods_and_summoned_parameters_are_compiled_too(rank, world):
    torch._dynamo.reset()
    counter, x = CompileCounterWithBackend("eager"), data(5, WIDTH, rank=rank)
    model = Net()
    expected, encoded = model(x), model.encode(x)
    sharded, called = around(model, counter, {})
    called(x).sum().backward()
    assert counter.frame_count == 0
    assert torch.equal(sharded.module.encode(x), encoded)
    called.eval()
    with sharded.summon_full_params(writeback=False), torch.no_grad():
        assert torch.equal(called(x), expected)
    assert counter.frame_count > 0
    assert torch.equal(torch.compile(sharded.module.encode, backend="eager")(x), encoded)


def compiled_late(rank: int) -> tuple[list[Tensor], int]:
    """Gradients of blocks that are compiled, and compiled anew, when there are gradients already. And the graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    model = Net()
    in_place(model.blocks, counter)
    sharded = zero.FSDP(model, **ALL_WHOLE)
    with torch.compiler.set_stance("force_eager"):
        loss(sharded, rank, 0).backward()
    for step in (1, 2):
        loss(sharded, rank, step).backward()
        torch.compiler.reset()
    gradients = [plain(param.grad) for param in sharded.parameters() if param.grad is not None]
    return gradients, counter.frame_count


@pytest.mark.slow
@ranks.on(2)
def test_compiling_leaves_gradients_that_are_there_alone(rank, world):
    with torch.compiler.set_stance("force_eager"):
        expected, _ = compiled_late(rank)
    same(compiled_late(rank), (expected, 2))
