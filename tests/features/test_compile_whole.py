"""torch.compile of a whole model, around FSDP or inside it: it computes what the same model computes uncompiled.

Graphs break between units, where parameters are gathered and released, and nowhere else; units of one kind are compiled
once. The first forward runs uncompiled, to find what modules read of other units. `make matrix` runs all cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import WIDTH, Block, Net, plain_names
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import ranks
import zero
from matrix import WHOLE
from models import OPTIMIZERS
from sidebyside import data

# Raised by Dynamo itself as it looks at the tensors that a module is given.
pytestmark = [
    pytest.mark.matrix,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

Build = Callable[[nn.Module, Any, dict[str, Any]], tuple[zero.FSDP, nn.Module]]
"""Of a model, a backend (or None) and options: what is sharded, and what to call."""


def uncompiled(model: nn.Module, backend: Any, options: dict[str, Any]) -> tuple[zero.FSDP, nn.Module]:
    sharded = zero.FSDP(model, **options)
    return sharded, sharded


def around(model: nn.Module, backend: Any, options: dict[str, Any]) -> tuple[zero.FSDP, nn.Module]:
    sharded = zero.FSDP(model, **options)
    return sharded, torch.compile(sharded, backend=backend)


def around_in_place(model: nn.Module, backend: Any, options: dict[str, Any]) -> tuple[zero.FSDP, nn.Module]:
    sharded = zero.FSDP(model, **options)
    sharded.compile(backend=backend)
    return sharded, sharded


def inside(model: nn.Module, backend: Any, options: dict[str, Any]) -> tuple[zero.FSDP, nn.Module]:
    return uncompiled(torch.compile(model, backend=backend), None, options)


def inside_in_place(model: nn.Module, backend: Any, options: dict[str, Any]) -> tuple[zero.FSDP, nn.Module]:
    model.compile(backend=backend)
    return uncompiled(model, None, options)


def inside_after_wrapping(model: nn.Module, backend: Any, options: dict[str, Any]) -> tuple[zero.FSDP, nn.Module]:
    sharded = zero.FSDP(model, **options)
    model.compile(backend=backend)
    return sharded, sharded


WAYS: list[Build] = [around, *([inside_after_wrapping, around_in_place, inside, inside_in_place] if WHOLE else [])]
each_way = pytest.mark.parametrize("build", WAYS, ids=lambda build: build.__name__)


def around_and_inside(first: Build) -> pytest.MarkDecorator:
    """The suite tries one of the two, for some cases this and for others that; `make matrix` tries both."""
    builds = [around, inside] if WHOLE else [first]
    return pytest.mark.parametrize("build", builds, ids=lambda build: build.__name__)


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return (model(data(5, WIDTH, rank=rank, step=step)) - 1).square().mean()


class Run:
    """A training of three steps, with an evaluation before gradients are cleared, and its graphs after each step."""

    def __init__(
        self, rank: int, build: Build, make: Callable[[], nn.Module], backend: str, optim: str, options: dict[str, Any]
    ) -> None:
        torch._dynamo.reset()
        self.counter = CompileCounterWithBackend(backend)
        self.sharded, model = build(make(), self.counter, options)
        optimizer = OPTIMIZERS[optim](self.sharded.parameters())
        self.numbers: list[float] = []
        self.graphs: list[int] = []
        for step in range(3):
            optimizer.zero_grad()
            with model.no_sync():
                loss(model, rank, 10 + step).backward()
            trained = loss(model, rank, step)
            trained.backward()
            self.numbers += [trained.item(), self.sharded.clip_grad_norm_(0.5).item()]
            optimizer.step()
            self.graphs.append(self.counter.frame_count)
        before = [param.grad for param in self.sharded.parameters()]
        model.eval()
        with torch.no_grad():
            self.numbers += [loss(model, rank, 20 + step).item() for step in range(3)]
        assert all(param.grad is one for param, one in zip(self.sharded.parameters(), before, strict=True))
        self.weights = plain_names(zero.full_state_dict(self.sharded))

    def assert_same(self, expected: Run, tolerance: float = 0.0) -> None:
        torch.testing.assert_close(self.numbers, expected.numbers, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(self.weights, expected.weights, rtol=tolerance, atol=tolerance)


OPTIONS: dict[str, dict[str, Any]] = {
    "kept": {"reshard_after_forward": False},
    "whole": {"partition": "whole", "prefetch": zero.SPEED_FIRST},
    "bfloat16": {"mixed_precision": zero.MixedPrecision(param_dtype=torch.bfloat16, keep_fp32=(nn.LayerNorm,))},
}
OPTIONS["whole, bfloat16"] = OPTIONS["whole"] | OPTIONS["bfloat16"]


def as_uncompiled(
    rank: int,
    world: int,
    build: Build,
    make: Callable[[], nn.Module] = Net,
    optim: str = "sgd",
    options: dict[str, Any] | None = None,
) -> list[int]:
    expected = Run(rank, uncompiled, make, "eager", optim, options or {})
    assert expected.graphs == [0] * 3
    found = Run(rank, build, make, "aot_eager", optim, options or {})
    found.assert_same(expected)
    return found.graphs


@each_way
def test_it_trains_as_uncompiled_in_one_graph_for_all_blocks(build):
    around_loops = int(torch.__version__ >= "2.13")  # torch 2.11 does not compile what surrounds a loop of units
    for graphs in ranks.run(as_uncompiled, args=(build,), fresh=True):  # runs before would make it more graphs
        before, blocks, after = around_loops, 1, around_loops
        assert graphs == [before + blocks + after] * 3


@pytest.mark.parametrize(
    ("build", "options"),
    [(inside, "whole"), (around, "bfloat16"), (around, "kept")] if WHOLE else [(inside, "whole, bfloat16")],
)
def test_it_trains_as_uncompiled_with_all_options(build, options):
    ranks.run(as_uncompiled, args=(build, Net, "adamw", OPTIONS[options]))


def of_one_unit() -> nn.Module:
    """Of a class of its own: torch 2.11 compiles those of torch.nn only together with what calls them."""
    torch.manual_seed(0)
    return Block()


@around_and_inside(inside)
def test_a_model_of_one_unit_is_one_graph(build):
    assert ranks.run(as_uncompiled, args=(build, of_one_unit)) == [[1] * 3] * 2


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


@pytest.mark.parametrize(("build", "options"), [(inside, OPTIONS["whole"]), *([(around, {})] if WHOLE else [])])
def test_modules_may_read_parameters_of_other_units(build, options):
    policy = ModuleWrapPolicy({nn.Linear})
    for graphs in ranks.run(as_uncompiled, args=(build, Reading, "sgd", {"auto_wrap_policy": policy, **options})):
        assert graphs[0] > 0


class Checkpointing(Net):
    """The blocks are computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return 2 * self.last(torch.tanh(x))


@around_and_inside(inside)
def test_activation_checkpointing_goes_together_with_it(build):
    ranks.run(as_uncompiled, args=(build, Checkpointing))


class Encoder(Net):
    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.first(x))


@around_and_inside(around)
@ranks.on(2)
def test_other_methods_find_parameters_whole(rank, world, build):
    torch._dynamo.reset()
    model = Encoder()
    x = data(5, WIDTH, rank=rank)
    expected = model.encode(x)
    sharded, called = build(model, "aot_eager", {})
    for _ in range(3):
        called(x)
        sharded.reshard()
        assert torch.equal(sharded.module.encode(x), expected)
    sharded.reshard()
    encode = torch.compile(sharded.module.encode, backend="aot_eager")
    assert torch.equal(encode(x), expected)


@around_and_inside(around)
@ranks.on(2)
def test_it_is_compiled_on_summoned_parameters_too(rank, world, build):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    x = data(5, WIDTH, rank=rank)
    expected = Net()(x)
    sharded, called = build(Net(), counter, {})
    called(x).sum().backward()
    assert counter.frame_count == 0
    called.eval()
    with sharded.summon_full_params(writeback=False), torch.no_grad():
        assert torch.equal(called(x), expected)
    assert counter.frame_count > 0


@ranks.on(2)
def test_a_compiled_fsdp_may_lie_in_another(rank, world):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    plain = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))
    sharded = zero.FSDP(nn.Sequential(torch.compile(zero.FSDP(plain[0]), backend=counter), plain[1]))
    twin = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))
    twin.load_state_dict(plain_names(zero.full_state_dict(sharded)))
    for step in range(3):
        x = data(5, WIDTH, rank=rank, step=step)
        assert torch.equal(sharded(x), twin(x))
    assert counter.frame_count == 1


def compiled_late(rank: int, world: int, options: dict[str, Any], reset: bool) -> tuple[list[float], int]:
    """Blocks that are compiled, or compiled anew, when there are gradients already. Also the number of graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = Net()
    for block in model.blocks:
        block.compile(backend=counter)
    sharded = zero.FSDP(model, **options)
    with torch.compiler.set_stance("force_eager"):
        loss(sharded, rank, 0).backward()
    for step in (1, 2):
        loss(sharded, rank, step).backward()
        if reset:
            torch.compiler.reset()
    gradients = [param.grad for param in sharded.parameters() if param.grad is not None]
    numbers = [gradient.double().sum().item() for gradient in gradients]
    sharded.eval()
    with torch.no_grad():
        numbers.append(loss(sharded, rank, 3).item())
    return numbers, counter.frame_count


def uncompiled_throughout(rank: int, world: int, options: dict[str, Any]) -> tuple[list[float], int]:
    with torch.compiler.set_stance("force_eager"):
        return compiled_late(rank, world, options, reset=False)


@pytest.mark.parametrize(
    ("options", "reset", "graphs"),
    [("kept", False, 2), ("whole", True, 3), *([("bfloat16", False, 2)] if WHOLE else [])],
)
def test_compiling_leaves_gradients_that_are_there_alone(options, reset, graphs):
    expected = ranks.run(uncompiled_throughout, args=(OPTIONS[options],))
    found = ranks.run(compiled_late, args=(OPTIONS[options], reset))
    assert found == [(numbers, graphs) for numbers, _ in expected]
