"""What torch.compile may be called with: a unit in one graph, not several; CUDA graphs only where nothing moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import BLOCKS, WIDTH, Net
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import ranks
import zero
from sidebyside import data

# Raised by Dynamo itself as it looks at the tensors that a module is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

Build = Callable[[Net], nn.Module]
"""Of a model: what to call."""


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return (model(data(5, WIDTH, rank=rank, step=step)) - 1).square().mean()


def in_one_graph(rank: int, world: int, build: Build) -> None:
    torch._dynamo.reset()
    model = build(Net())
    loss(model, rank, 0).backward()


def around_in_one_graph(model: Net) -> nn.Module:
    return torch.compile(zero.FSDP(model), backend="eager", fullgraph=True)


def inside_in_one_graph(model: Net) -> nn.Module:
    return zero.FSDP(torch.compile(model, backend="eager", fullgraph=True))


def inside_in_one_graph_later(model: Net) -> nn.Module:
    sharded = zero.FSDP(model)
    model.compile(backend="eager", fullgraph=True)
    return sharded


ONE_GRAPH: dict[Build, tuple[type[Exception], list[str]]] = {
    around_in_one_graph: (RuntimeError, []),
    inside_in_one_graph: (ValueError, ["Net '' was compiled with fullgraph=True, and units are inside it"]),
    inside_in_one_graph_later: (RuntimeError, ["Net '' was compiled with fullgraph=True, and units are inside it"]),
}


@pytest.mark.parametrize("build", ONE_GRAPH, ids=lambda build: build.__name__)
def test_several_units_in_one_graph_are_refused_on_every_rank_with_the_remedy(build):
    error, words = ONE_GRAPH[build]
    words = [*words, "FSDP gathers and releases parameters between its units", r"unit\.compile\(fullgraph=True\)"]
    ranks.expect_error(in_one_graph, 2, error, *words, args=(build,))


@ranks.on(2)
def test_each_unit_may_be_one_graph(rank, world):
    """Compiled before wrapping, after, or once it has trained; in place or replaced."""
    found = []
    for when, in_place in product(["before", "after", "trained"], [True, False]):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        model = Net()
        assert len(model.blocks) == BLOCKS
        sharded = None if when == "before" else zero.FSDP(model)
        if sharded is not None and when == "trained":
            loss(sharded, rank, 0).backward()
        for number, block in enumerate(model.blocks):
            if in_place:
                block.compile(backend=counter, fullgraph=True)
            else:
                model.blocks[number] = torch.compile(block, backend=counter, fullgraph=True)
        sharded = sharded or zero.FSDP(model)
        found.append([loss(sharded, rank, step).item() for step in range(2)])
        assert counter.frame_count == 1
    assert found == [found[0]] * 6


GRAPHS = {"mode": "reduce-overhead"}


def graphs_of_a_unit(model: Net) -> nn.Module:
    model.blocks[1] = torch.compile(model.blocks[1], **GRAPHS)
    return zero.FSDP(model)


def graphs_of_a_unit_in_place(model: Net) -> nn.Module:
    model.blocks[1].compile(options={"triton.cudagraphs": True})
    return zero.FSDP(model)


def graphs_of_a_unit_later(model: Net) -> nn.Module:
    sharded = zero.FSDP(model)
    model.blocks[1].compile(mode="max-autotune")
    return sharded


def graphs_of_all(model: Net) -> nn.Module:
    return torch.compile(zero.FSDP(model), backend="cudagraphs")


def graphs_of_a_function(model: Net) -> Callable[[Tensor], Tensor]:
    return torch.compile(zero.FSDP(model).forward, **GRAPHS)


of_inductor = pytest.mark.filterwarnings("ignore")  # while it is imported
BY_GRAPHS: dict[Callable[[Net], Any], tuple[str, str]] = {
    graphs_of_a_unit: ("ValueError", "Block 'blocks.1' was compiled to run as CUDA graphs"),
    graphs_of_a_unit_in_place: ("ValueError", "Block 'blocks.1' was compiled to run as CUDA graphs"),
    graphs_of_a_unit_later: ("RuntimeError", "Block 'blocks.1' was compiled to run as CUDA graphs"),
    graphs_of_all: ("RuntimeError", "the code that calls the FSDP was compiled to run as CUDA graphs"),
    graphs_of_a_function: ("RuntimeError", "the code that calls the FSDP was compiled to run as CUDA graphs"),
}


@contextmanager
def as_on_gpus(*, capturing: bool = False) -> Iterator[None]:
    """Work of a CPU is taken for what CUDA graphs record."""
    with (
        mock.patch("zero.features.compile.RECORDING", ("cpu",)),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=capturing),
    ):
        yield


def refused_as_on_gpus(rank: int, world: int, build: Callable[[Net], Any]) -> str:
    """Nothing is compiled."""
    torch._dynamo.reset()
    with as_on_gpus(), torch.compiler.set_stance("force_eager"):
        return ranks.refusal(lambda: build(Net())(data(5, WIDTH, rank=rank)))


@of_inductor
@pytest.mark.parametrize("build", BY_GRAPHS, ids=lambda build: build.__name__)
def test_cuda_graphs_are_refused_on_every_rank_before_they_are_recorded(build):
    error, words = BY_GRAPHS[build]
    for told in ranks.run(refused_as_on_gpus, args=(build,)):
        assert told.startswith(error), told
        assert words in told
        assert "other memory each time (resize_)" in told
        assert "'max-autotune-no-cudagraphs' can be" in told


@of_inductor
def test_cuda_graphs_of_parameters_that_stay_in_their_place_are_not_refused():
    """In a single process nothing is freed."""
    assert ranks.run(refused_as_on_gpus, args=(graphs_of_a_unit_later,), bare=True) == [""]


@of_inductor
@ranks.on(2)
def test_nor_are_those_of_a_model_on_the_cpu_where_nothing_is_recorded(rank, world):
    graphs_of_a_unit(Net())
    graphs_of_a_unit_in_place(Net())


@ranks.on(2)
def test_a_forward_that_is_captured_is_refused_on_every_rank(rank, world):
    sharded = zero.FSDP(Net())
    with as_on_gpus():
        loss(sharded, rank, 0).backward()
    with as_on_gpus(capturing=True):
        told = ranks.refusal(lambda: loss(sharded, rank, 1))
    assert told.startswith("RuntimeError")
    assert "FSDP ran forward while torch.cuda.graph or make_graphed_callables records CUDA graphs" in told
