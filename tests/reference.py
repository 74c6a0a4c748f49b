"""What the tests of stages 1 and 2 share: models, stage 0, which is torch alone, to compare with, and comparisons."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

import gpus
import zero
from ranks import refusal as refusal

FEATURES = 24

MOMENTUM = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
ELEMENTWISE: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "SGD": (SGD, {"lr": 0.1}),
    "SGD momentum": (SGD, MOMENTUM),
    "SGD nesterov": (SGD, {**MOMENTUM, "nesterov": True}),
    "Adam": (Adam, {"lr": 0.01}),
    "Adam maximize": (Adam, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    "AdamW amsgrad": (AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1, "t0": 2}),
    "Adadelta": (torch.optim.Adadelta, {"weight_decay": 0.1}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
}
"""All of torch's that treat each element by itself, with options; on the CPU they step one parameter after another."""


class Net(nn.Module):
    """What cuts treat differently: matrices, vectors, a scalar, no elements, transposed, frozen and tied weights."""

    def __init__(self, nothing: tuple[int, ...] = (3, 0)) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 37)
        self.norm = nn.LayerNorm(37)
        self.conv = nn.Conv1d(1, 3, 5, padding=2)
        self.middle = nn.Linear(37, 37, bias=False)
        self.tied = nn.Linear(37, 37)
        self.tied.weight = self.middle.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.zeros(nothing))
        self.transposed = nn.Parameter(torch.randn(37, 5).t() / 6)
        self.frozen = nn.Parameter(torch.randn(37), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.first(inputs)) + self.frozen)
        hidden = hidden + self.conv(hidden.unsqueeze(1)).sum(1)
        hidden = self.tied(torch.relu(self.middle(hidden))) * self.scale
        return hidden @ self.transposed.t() + self.nothing.sum()


def filled() -> Net:
    """For optimizers that divide by the number of a parameter's elements."""
    return Net(nothing=(3, 1))


def matrices() -> nn.Sequential:
    """Matrices only, which is all that Muon takes."""
    return nn.Sequential(
        nn.Linear(FEATURES, 40, bias=False), nn.Tanh(), nn.Linear(40, 24, bias=False), nn.Linear(24, 5, bias=False)
    )


def built(make: Callable[[], nn.Module] = Net) -> nn.Module:
    """The same model whenever it is called, on whatever rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return make()


def batch(rank: int, step: int) -> Tensor:
    """Different on every rank and in every step."""
    generator = gpus.generator(1000 * rank + step)
    return torch.randn(6, FEATURES, generator=generator)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(batch(rank, step)).square().mean()


def train(
    model: nn.Module,
    optimizer: Optimizer,
    rank: int,
    steps: Iterable[int] = range(5),
    *,
    after: Callable[[Optimizer, int], Any] | None = None,
    set_to_none: bool = True,
) -> list[float]:
    """The losses. `after` is called with the optimizer and the step's number once each step is done."""
    losses = []
    for step in steps:
        optimizer.zero_grad(set_to_none)
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if after is not None:
            after(optimizer, step)
    return losses


def distributed(model: nn.Module, group: Any = None) -> nn.Module:
    """In DistributedDataParallel, or as it is where there is no process group."""
    if not torch.distributed.is_initialized():
        return model
    return DistributedDataParallel(model, process_group=group)


def pair(
    optim: Callable[..., Optimizer],
    partition: Any = "auto",
    make: Callable[[], nn.Module] = Net,
    group: Any = None,
    *,
    params: Callable[[nn.Module], Any] = nn.Module.parameters,
    **options: Any,
) -> tuple[tuple[nn.Module, Optimizer], tuple[nn.Module, zero.OSS]]:
    """A model with the plain optimizer, and the same with OSS. params: what of the model the optimizers are given."""
    model, sharded_model = (distributed(built(make), group) for _ in range(2))
    plain = optim(params(model), **copy.deepcopy(options))
    sharded = zero.OSS(params(sharded_model), optim, group, partition=partition, **copy.deepcopy(options))
    return (model, plain), (sharded_model, sharded)


class MyAdam(torch.optim.Adam):
    """A subclass may do anything with the tensors that it gets."""


def same(got: Any, expected: Any, where: str = "it") -> None:
    """Asserts that two nests of dicts, lists, tensors and values are equal: types, dtypes, shapes, and every bit.

    Tensors may be on different devices.
    """
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor), f"{where} is a {type(got).__name__}, not a tensor"
        assert got.dtype == expected.dtype, f"{where} is {got.dtype}, not {expected.dtype}"
        assert got.shape == expected.shape, f"{where} is {list(got.shape)}, not {list(expected.shape)}"
        got, expected = got.cpu(), expected.cpu()
        assert torch.equal(got, expected), f"{where} differs by at most {(got.float() - expected.float()).abs().max()}"
    elif isinstance(expected, dict):
        assert isinstance(got, dict), f"{where} is a {type(got).__name__}, not a dict"
        assert set(got) == set(expected), f"{where} has {sorted(map(str, got))}, not {sorted(map(str, expected))}"
        for key in expected:
            same(got[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert type(got) is type(expected), f"{where} is a {type(got).__name__}, not a {type(expected).__name__}"
        assert len(got) == len(expected), f"{where} has {len(got)} entries, not {len(expected)}"
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            same(one, other, f"{where}[{index}]")
    else:
        assert type(got) is type(expected), f"{where} is a {type(got).__name__}, not a {type(expected).__name__}"
        assert got == expected, f"{where} is {got}, not {expected}"


def same_where_the_cpu_steps(got: Any, expected: Any, where: str = "it") -> None:
    """As `same`; on GPUs within rounding, where the optimizer of one of the two steps on the CPU."""
    if gpus.ON:
        torch.testing.assert_close(
            got, expected, rtol=1e-4, atol=1e-5, check_device=False, msg=lambda told: f"{where}: {told}"
        )
    else:
        same(got, expected, where)


def same_weights(got: nn.Module, expected: nn.Module) -> None:
    for (name, one), (_, other) in zip(got.named_parameters(), expected.named_parameters(), strict=True):
        same(one.detach(), other.detach(), name)


def at_stage(
    stage: int,
    model: nn.Module,
    optim: Callable[..., Optimizer],
    group: Any = None,
    *,
    partition: str = "auto",
    **options: Any,
) -> tuple[nn.Module, Optimizer]:
    """`options` are OSS's and the optimizer's; at stage 0 they are the optimizer's alone, and nothing is cut."""
    if stage == 0:
        return DistributedDataParallel(model, process_group=group), optim(model.parameters(), **options)
    sharded = zero.OSS(model.parameters(), optim, group, partition=partition, **options)
    if stage == 1:
        return DistributedDataParallel(model, process_group=group), sharded
    return zero.ShardedDDP(model, sharded), sharded


def clip(model: nn.Module, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
    if isinstance(optimizer, zero.OSS):
        return optimizer.clip_grad_norm(max_norm, norm_type)
    some = [param for param in model.parameters() if param.numel()]  # torch refuses the largest of no elements
    return torch.nn.utils.clip_grad_norm_(some, max_norm, norm_type)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters, under the names that they have in the inner module."""
    return {name: param.detach().clone() for name, param in model.module.named_parameters()}


def own_elements(optimizer: zero.OSS, param: nn.Parameter) -> Tensor:
    """True at the elements of a parameter that this rank owns, in the parameter's shape."""
    for flat in optimizer.shard_groups:
        for index, each in enumerate(flat.params):
            if each is param:
                mask = torch.zeros_like(param, dtype=torch.bool)
                span = flat.spans.get(index)
                if span is not None:
                    flat.shapes.in_memory_order(index, mask)[span.start : span.stop] = True
                return mask
    raise KeyError("the optimizer does not have this parameter")
