"""A model trained by `zero` beside a copy that a few lines of torch train the same way: the reference of most tests.

The copy is full on every rank. After its backward each gradient is averaged over the ranks by an all-reduce; one that
no rank has stays None. On two ranks the numbers of both are the same bit for bit.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import gpus
import zero

Loss = Callable[[nn.Module], Tensor]

sgd = partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.1)


def stage_1(model: nn.Module, optim: Any, **options: Any) -> tuple[nn.Module, Optimizer]:
    return model, zero.OSS(model.parameters(), optim, **options)


def stage_2(model: nn.Module, optim: Any, bucket: int | None = None, **options: Any) -> tuple[nn.Module, Optimizer]:
    """bucket: elements of a bucket at most, instead of what ShardedDDP would choose; 0 reduces each parameter alone."""
    optimizer = zero.OSS(model.parameters(), optim, **options)
    return zero.ShardedDDP(model, optimizer, reduce_buffer_size=bucket), optimizer


def stage_3(model: nn.Module, optim: Any, **options: Any) -> tuple[nn.Module, Optimizer]:
    wrapped = zero.FSDP(model, **options)
    return wrapped, optim(wrapped.parameters())


def on_mesh(world: int, options: dict[str, Any]) -> dict[str, Any]:
    """FSDP's options; "replicas" among them stands for a mesh of so many copies of the model. Collective then."""
    if "replicas" not in options:
        return options
    replicas = options["replicas"]
    mesh = init_device_mesh(gpus.DEVICE, (replicas, world // replicas))
    told = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": mesh}
    return told | {name: value for name, value in options.items() if name != "replicas"}


STAGES: dict[str, Callable[..., tuple[nn.Module, Optimizer]]] = {
    "2": stage_2,
    "2 in small buckets": partial(stage_2, bucket=50),
    "3": stage_3,
    "3 whole": partial(stage_3, partition="whole"),
    "3 kept": partial(stage_3, reshard_after_forward=False),
}


class SideBySide:
    """Trains `model` at a stage, and a copy of it as the reference.

    stage: a key of STAGES, or a function of model and optimizer class that returns what `zero` made of them.
    tolerance: how far weights may be off, relative to each tensor's largest; where rounding differs for a reason.

    averages: the reference's gradients, averaged over the ranks, by parameter of `plain`.
    """

    def __init__(
        self, model: nn.Module, stage: str | Callable[..., Any] = "3", optim: Any = sgd, *, tolerance: float = 0.0
    ) -> None:
        self.tolerance = tolerance
        self.plain = copy.deepcopy(model)
        self.plain_optimizer: Optimizer = optim(self.plain.parameters())
        build = STAGES[stage] if isinstance(stage, str) else stage
        self.model, self.optimizer = build(model, optim)
        self._local: dict[nn.Parameter, Tensor] = {}  # the reference's gradients of backwards under no_sync
        self.averages: dict[nn.Parameter, Tensor] = {}

    def each(self) -> tuple[nn.Module, nn.Module]:
        """The user's module at the stage, and the reference, to be changed alike."""
        return self.model.module, self.plain

    def step(self, *losses: Loss, unsent: int = 0) -> None:
        """One step on a backward of each loss, the first `unsent` under no_sync, with all weights compared after it."""
        self.zero_grad()
        for number, loss in enumerate(losses):
            self.backward(loss, sync=number >= unsent)
        self.update()

    def zero_grad(self, zero: Callable[[], None] | None = None, *, set_to_none: bool = True) -> None:
        """By the optimizer, or by whatever else is given."""
        (zero or self.optimizer.zero_grad)(set_to_none=set_to_none)
        self._local.clear()
        self.averages = {} if set_to_none else {param: old * 0 for param, old in self.averages.items()}

    def backward(self, loss: Loss, *, sync: bool = True, retain_graph: bool = False) -> None:
        with nullcontext() if sync else self.model.no_sync():
            found = loss(self.model)
            found.backward(retain_graph=retain_graph)
        self.plain_optimizer.zero_grad()
        expected = loss(self.plain)
        expected.backward(retain_graph=retain_graph)
        assert math.isfinite(expected.item())
        assert abs(found.item() - expected.item()) <= self.tolerance * abs(expected.item()), "losses"
        for param in self.plain.parameters():
            add(self._local, param, param.grad)
        if sync:
            for param, average in averages_over_ranks(self.plain, self._local).items():
                add(self.averages, param, average)
            self._local.clear()

    def update(self) -> None:
        """The optimizers' steps, with all weights compared after them."""
        assert not self._local, "the last backward was under no_sync"
        self.give_averages()
        self.optimizer.step()
        self.plain_optimizer.step()
        self.compare()

    def give_averages(self) -> None:
        """Has the reference's parameters hold the gradients that they are stepped by."""
        for param in self.plain.parameters():
            param.grad = self.averages.get(param)

    def compare(self) -> None:
        found, expected = zero.full_state_dict(self.model), self.plain.state_dict()
        assert list(found) == list(expected)
        different = [name for name in expected if not close(found[name], expected[name], self.tolerance)]
        assert not different, f"other weights than the reference: {different}"


def side_by_side(model: nn.Module, options: dict[str, Any], optim: Any = sgd, *, tolerance: float = 0.0) -> SideBySide:
    """At stage 3, with options of FSDP."""
    return SideBySide(model, partial(stage_3, **options), optim, tolerance=tolerance)


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """The same bits, or within `tolerance` of the largest value. Devices may differ."""
    found = found.to(expected.device)
    if torch.equal(found, expected):
        return True
    return found.shape == expected.shape and bool((found - expected).abs().max() <= tolerance * expected.abs().max())


def add(sums: dict[nn.Parameter, Tensor], param: nn.Parameter, gradient: Tensor | None) -> None:
    if gradient is not None:
        sums[param] = sums[param] + gradient if param in sums else gradient


def averages_over_ranks(model: nn.Module, gradients: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
    """By parameter of `model`. A rank without a gradient counts as zero; what no rank has a gradient of is left out."""
    if not dist.is_initialized():
        return dict(gradients)
    params = [*model.parameters()]
    used = torch.tensor([param in gradients for param in params], dtype=torch.float32)
    dist.all_reduce(used)
    params = [param for param, ranks in zip(params, used.tolist(), strict=True) if ranks]
    averages = {}
    for dtype in dict.fromkeys(param.dtype for param in params):  # together: every all-reduce costs as much again
        alike = [param for param in params if param.dtype == dtype]
        total = torch.cat([gradients.get(param, torch.zeros_like(param)).flatten() for param in alike])
        dist.all_reduce(total)
        sums = (total / dist.get_world_size()).split([param.numel() for param in alike])
        for param, one in zip(alike, sums, strict=True):  # in memory and strides of its own, as optimizers find it
            averages[param] = torch.empty_like(gradients.get(param, param.detach())).copy_(one.view(param.shape))
    return averages


def average_gradients(model: nn.Module) -> None:
    """Over the ranks."""
    gradients = {param: param.grad for param in model.parameters() if param.grad is not None}
    for param, average in averages_over_ranks(model, gradients).items():
        param.grad = average


def data(*shape: int, rank: int, step: int = 0, seed: int = 0) -> Tensor:
    """Normal numbers, others on each rank and at each step."""
    generator = gpus.generator(10_000 * seed + 100 * rank + step)
    return torch.randn(*shape, generator=generator)


def ddp_sends_buffers(before_forward: bool) -> dict[str, bool]:
    """DistributedDataParallel's option for it, which has another name in torch 2.11."""
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if renamed else "broadcast_buffers": before_forward}
