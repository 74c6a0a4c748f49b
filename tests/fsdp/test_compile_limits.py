"""What torch.compile may be called with: a unit in one graph, not several; CUDA graphs only where nothing moves."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from compiling import WIDTH, Net, loss
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import ranks
import zero
from simulated.world import simulated

# Raised by Dynamo itself as it looks at the tensors that a module is given.
ON_GRAD = "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(ON_GRAD)]


def in_one_graph(rank: int, world: int, where: str) -> None:
    torch._dynamo.reset()
    model: Any = Net()
    one_graph = partial(torch.compile, backend="eager", fullgraph=True)
    sharded = zero.FSDP(one_graph(model) if where == "inside" else model)
    if where == "inside later":
        model.compile(backend="eager", fullgraph=True)
    loss(one_graph(sharded) if where == "around" else sharded, rank, 0).backward()


@pytest.mark.parametrize("where", ["around", "inside", "inside later"])
def test_several_units_in_one_graph_are_refused_on_every_rank_with_the_remedy(where):
    error = ValueError if where == "inside" else RuntimeError
    words = [] if where == "around" else [r"Net '' .*fullgraph=True"]
    ranks.expect_error(in_one_graph, 2, error, *words, r"unit\.compile\(fullgraph=True\)", args=(where,))


@pytest.mark.parametrize(("trained", "in_place"), [(True, False), (False, True)])
@ranks.on(2)
def test_each_unit_may_be_one_graph(rank, world, trained, in_place):
    """Compiled after wrapping and a step, or before wrapping."""
    expected = [loss(zero.FSDP(Net()), rank, step).item() for step in range(2)]
    torch._dynamo.reset()
    counter, model = CompileCounterWithBackend("eager"), Net()
    sharded = zero.FSDP(model) if trained else None
    if sharded is not None:
        loss(sharded, rank, 0).backward()
    for number, block in enumerate(model.blocks):
        if in_place:
            block.compile(backend=counter, fullgraph=True)
        else:
            model.blocks[number] = torch.compile(block, backend=counter, fullgraph=True)
    sharded = sharded or zero.FSDP(model)
    assert [loss(sharded, rank, step).item() for step in range(2)] == expected
    assert counter.frame_count == 1


def graphs_of_a_unit(model: Net, comm: Any) -> nn.Module:
    model.blocks[1] = torch.compile(model.blocks[1], mode="reduce-overhead")
    return zero.FSDP(model, comm)


def graphs_of_a_unit_later(model: Net, comm: Any) -> nn.Module:
    sharded = zero.FSDP(model, comm)
    model.blocks[1].compile(options={"triton.cudagraphs": True})
    return sharded


def graphs_of_a_function(model: Net, comm: Any) -> Callable[[Tensor], Tensor]:
    return torch.compile(zero.FSDP(model, comm).forward, mode="reduce-overhead")


of_inductor = pytest.mark.filterwarnings("ignore")  # while it is imported
BY_GRAPHS: dict[Callable[..., Any], tuple[str, str]] = {
    graphs_of_a_unit: ("ValueError", "Block 'blocks.1'"),
    graphs_of_a_unit_later: ("RuntimeError", "Block 'blocks.1'"),
    graphs_of_a_function: ("RuntimeError", "the FSDP"),
}


def refused_on_a_gpu(build: Callable[..., Any], world: int) -> str:
    """Nothing is compiled."""
    torch._dynamo.reset()
    with simulated() as there, torch.compiler.set_stance("force_eager"):
        return ranks.refusal(lambda: build(Net(), there.comm(0, world))(torch.ones(5, WIDTH)))


@of_inductor
@pytest.mark.parametrize("build", BY_GRAPHS, ids=lambda build: build.__name__)
def test_cuda_graphs_are_refused_before_they_are_recorded(build):
    told = refused_on_a_gpu(build, 2)
    for words in (*BY_GRAPHS[build], "CUDA graphs", "'max-autotune-no-cudagraphs'"):
        assert words in told, told


@of_inductor
def test_cuda_graphs_of_parameters_that_stay_in_their_place_are_not_refused():
    """In a single process nothing is freed."""
    assert refused_on_a_gpu(graphs_of_a_unit_later, 1) == ""


@of_inductor
@ranks.on(2)
def test_nor_are_those_of_a_model_on_the_cpu_where_nothing_is_recorded(rank, world):
    graphs_of_a_unit(Net(), None)
