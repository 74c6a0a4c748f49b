"""torch.compile of blocks, or of a whole model around FSDP or inside it, trains as the same without it.

Hooks that gather and release must stay out of what is compiled: neither traced, nor between its pieces, nor a reason to
compile the same block again for each place that it has. Graphs of a whole model break between units, and nowhere else.
The first forward runs uncompiled, to find what modules read of other units. `make matrix` runs all cases.
"""

import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
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
from runs import SideBySide, stage_3, steps, take_step
from simulated.world import simulated
from zoo import OPTIMIZERS, WIDTH, Block, Gained, Stack, batch, loss_on

pytestmark = [
    pytest.mark.slow,
    pytest.mark.matrix,
    pytest.mark.filterwarnings(
        # Raised by Dynamo itself as it looks at the tensors that a module is given.
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
        "ignore:Dynamo does not know",
        "ignore:.*is deprecated:DeprecationWarning",
        "ignore::torch.jit.TracerWarning",
    ),
]


class Net(Stack):
    def __init__(self) -> None:
        super().__init__(Gained, classes=WIDTH, blocks=2)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x, shift=0.5)

    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.first(x))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): value for name, value in zero.full_state_dict(model, to=None).items()}


# ------------------------------------------------------------------------------------------------------------- blocks


def in_place(blocks: nn.ModuleList, **how: Any) -> None:
    for block in blocks:
        block.compile(**how)


def replaced(blocks: nn.ModuleList, **how: Any) -> None:
    for number, block in enumerate(blocks):
        blocks[number] = torch.compile(block, **how)


def trained(rank: int, stage: int, compiled: Callable[..., None], backend: str, *, after: bool) -> Any:
    """Losses, weights, and how many graphs were compiled after each step. after: wrapping."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    model = Net()
    if not after:
        compiled(model.blocks, backend=counter)
    wrapped = zero.FSDP(model) if stage == 3 else DistributedDataParallel(model)
    if after:
        compiled(model.blocks, backend=counter)
    optimizer = OPTIMIZERS["adamw"](wrapped.parameters())
    losses, graphs = [], []
    for step in range(2):
        losses.append(take_step(optimizer, loss_on(rank, step)(wrapped)))
        graphs.append(counter.frame_count)
    loss_on(rank, 2)(wrapped).backward()
    with torch.no_grad():  # compiles anew, when there are gradients
        losses.append(loss_on(rank, 3)(wrapped.eval()))
    return losses, weights_of(wrapped), graphs


def as_ddp(rank: int, world: int, compiled: Callable[..., None], backend: str, after: bool) -> None:
    expected, found = (trained(rank, stage, compiled, backend, after=after) for stage in (0, 3))
    assert expected[2] == [1, 1], "graphs"
    same(found, expected)


ALONE = [(replaced, "aot_eager", False), *([(in_place, "eager", True), (in_place, "eager", False)] if WHOLE else [])]


@pytest.mark.parametrize(("compiled", "backend", "after"), ALONE)
def test_compiled_blocks_train_as_under_ddp_and_are_compiled_once(compiled, backend, after):
    ranks.run(as_ddp, args=(compiled, backend, after))


@matrix.only
@pytest.mark.filterwarnings("ignore")  # inductor, while it is imported and compiles
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_blocks_compiled_to_machine_code_train_as_under_ddp():
    ranks.run(as_ddp, args=(in_place, "inductor", False), timeout=100)


@pytest.mark.parametrize(("compiled", "after"), [(replaced, True), (in_place, False)])
@ranks.on(2)
def test_each_unit_may_be_one_graph(rank, world, compiled, after):
    """Compiled after wrapping and a step, or before wrapping."""
    expected = [loss_on(rank, step)(zero.FSDP(Net())).item() for step in range(2)]
    torch._dynamo.reset()
    counter, model = CompileCounterWithBackend("eager"), Net()
    sharded = zero.FSDP(model) if after else None
    if sharded is not None:
        loss_on(rank, 0)(sharded).backward()
    compiled(model.blocks, backend=counter, fullgraph=True)
    sharded = sharded or zero.FSDP(model)
    assert [loss_on(rank, step)(sharded).item() for step in range(2)] == expected
    assert counter.frame_count == 1


ALL_WHOLE = {"partition": "whole", "prefetch": 3}


def compiled_late(rank: int) -> tuple[list[Tensor], int]:
    """Gradients of blocks that are compiled, and compiled anew, when there are gradients already. And the graphs."""
    torch._dynamo.reset()
    counter, model = CompileCounterWithBackend("eager"), Net()
    in_place(model.blocks, backend=counter)
    sharded = zero.FSDP(model, **ALL_WHOLE)
    with torch.compiler.set_stance("force_eager"):
        loss_on(rank, 0)(sharded).backward()
    for step in (1, 2):
        loss_on(rank, step)(sharded).backward()
        torch.compiler.reset()
    gradients = [plain(param.grad) for param in sharded.parameters() if param.grad is not None]
    return gradients, counter.frame_count


@ranks.on(2)
def test_compiling_leaves_gradients_that_are_there_alone(rank, world):
    with torch.compiler.set_stance("force_eager"):
        expected, _ = compiled_late(rank)
    same(compiled_late(rank), (expected, 2))


# ------------------------------------------------------------------------------------------------------- whole models

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
        torch.manual_seed(0)
        counter = CompileCounterWithBackend(backend)
        sharded, model = build(make(), counter, options)
        optimizer = OPTIMIZERS["adamw"](sharded.parameters())
        self.numbers: list[float] = []
        self.graphs: list[int] = []
        for step in range(2):
            optimizer.zero_grad()
            with model.no_sync():
                loss_on(rank, 10 + step)(model).backward()
            loss = loss_on(rank, step)(model)
            loss.backward()
            self.numbers += [loss.item(), sharded.clip_grad_norm_(0.5).item()]
            optimizer.step()
            self.graphs.append(counter.frame_count)
        before = [param.grad for param in sharded.parameters()]
        model.eval()
        with torch.no_grad():
            self.numbers.append(loss_on(rank, 20)(model).item())
        assert all(param.grad is one for param, one in zip(sharded.parameters(), before, strict=True))
        self.weights = weights_of(sharded)


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = linear(x, self.other.weight)
        x = torch.tanh(self.other(self.one(x)))
        return linear(x, self.one.weight.t())


class Checkpointing(Net):
    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)


OF_LINEARS = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}
IN_16_BITS = {"precision": zero.MixedPrecision(param_dtype=torch.bfloat16, keep_fp32=(nn.LayerNorm,))}
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
    expected, found = (Run(rank, each, make, backend, options) for each in (uncompiled, build))
    same((found.numbers, found.weights), (expected.numbers, expected.weights))
    assert found.graphs == [graphs or found.graphs[0]] * 2
    assert found.graphs[0] > 0 == expected.graphs[0]


@pytest.mark.parametrize("case", CASES)
def test_compiled_models_train_as_uncompiled(case):
    ranks.run(as_uncompiled, args=(case,), fresh="around" in case)  # runs before would make it more graphs


@matrix.only
@ranks.on(2)
def test_other_methods_and_summoned_parameters_are_compiled_too(rank, world):
    torch._dynamo.reset()
    counter, x = CompileCounterWithBackend("eager"), batch(rank, 0)
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


@pytest.mark.parametrize("unsent", [0, 1])
@ranks.on(2, timeout=60)
def test_a_compiled_model_trains_where_gradients_are_there_in_a_forward(rank, world, unsent):
    """Six units: where whoever asks for shapes counts as a reader, ranks would unshard units in orders of their own."""
    torch._dynamo.reset()
    both = SideBySide(Stack(blocks=6), partial(stage_3, auto_wrap_policy=ModuleWrapPolicy({Block})))
    compiled = torch.compile(both.model, backend="eager")

    def loss(model: nn.Module, step: int) -> Tensor:
        return loss_on(rank, step)(compiled if model is both.model else model)

    for step in range(3):
        both.step(*(partial(loss, step=2 * step + half) for half in range(2)), unsent=unsent)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2, timeout=60)
def test_the_step_of_an_optimizer_may_be_compiled(rank, world, stage):
    torch._dynamo.reset()
    both = SideBySide(Stack(), partial(zero.setup, stage=stage))
    both.optimizer.step = torch.compile(both.optimizer.step, backend="eager")
    steps(both, rank)


# ----------------------------------------------------------------------------------------------------------- refusals


def in_one_graph(rank: int, world: int, where: str) -> None:
    torch._dynamo.reset()
    model: Any = Net()
    one_graph = partial(torch.compile, backend="eager", fullgraph=True)
    sharded = zero.FSDP(one_graph(model) if where == "inside" else model)
    if where == "inside later":
        model.compile(backend="eager", fullgraph=True)
    loss_on(rank, 0)(one_graph(sharded) if where == "around" else sharded).backward()


@pytest.mark.parametrize("where", ["around", "inside", "inside later"])
def test_several_units_in_one_graph_are_refused_on_every_rank_with_the_remedy(where):
    error = ValueError if where == "inside" else RuntimeError
    words = [] if where == "around" else [r"Net '' .*fullgraph=True"]
    ranks.expect_error(in_one_graph, 2, error, *words, r"unit\.compile\(fullgraph=True\)", args=(where,))


def graphs_of_a_unit(model: Net, comm: Any) -> nn.Module:
    model.blocks[1] = torch.compile(model.blocks[1], mode="reduce-overhead")
    return zero.FSDP(model, comm)


def graphs_of_a_unit_later(model: Net, comm: Any) -> nn.Module:
    sharded = zero.FSDP(model, comm)
    model.blocks[1].compile(options={"triton.cudagraphs": True})
    return sharded


def graphs_of_a_function(model: Net, comm: Any) -> Callable[[Tensor], Tensor]:
    return torch.compile(zero.FSDP(model, comm).forward, mode="reduce-overhead")


BY_GRAPHS: dict[Callable[..., Any], tuple[str, str]] = {
    graphs_of_a_unit: ("ValueError", "Gained 'blocks.1'"),
    graphs_of_a_unit_later: ("RuntimeError", "Gained 'blocks.1'"),
    graphs_of_a_function: ("RuntimeError", "the FSDP"),
}


def refused_on_a_gpu(build: Callable[..., Any], world: int) -> str:
    """Nothing is compiled."""
    torch._dynamo.reset()
    with simulated() as there, torch.compiler.set_stance("force_eager"):
        return ranks.refusal(lambda: build(Net(), there.comm(0, world))(torch.ones(5, WIDTH)))


@pytest.mark.filterwarnings("ignore")  # inductor, while it is imported
@pytest.mark.parametrize("build", BY_GRAPHS, ids=lambda build: build.__name__)
def test_cuda_graphs_are_refused_before_they_are_recorded(build):
    told = refused_on_a_gpu(build, 2)
    for words in (*BY_GRAPHS[build], "CUDA graphs", "'max-autotune-no-cudagraphs'"):
        assert words in told, told


@pytest.mark.filterwarnings("ignore")
@ranks.on(2)
def test_cuda_graphs_are_not_refused_where_nothing_moves_or_is_recorded(rank, world):
    """In a single process nothing is freed; on the CPU nothing is recorded."""
    assert refused_on_a_gpu(graphs_of_a_unit_later, 1) == ""
    graphs_of_a_unit(Net(), None)


@pytest.mark.parametrize("stage", [2, 3])
@ranks.raises(2, RuntimeError, "TorchScript cannot run")
def test_scripts_and_traces_are_refused(rank, world, stage):
    model = zero.setup(Stack(), torch.optim.SGD, stage=stage, lr=0.1)[0]
    if stage == 3:
        assert "TorchScript cannot run" in ranks.refusal(lambda: torch.jit.trace(model, torch.ones(2, WIDTH)))
    torch.jit.script(model)
