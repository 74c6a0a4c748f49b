"""A model trained by `zero` beside a copy that a few lines of torch train the same way: the reference of most tests.

The copy is full on every rank. After its backward each gradient is averaged over the ranks by an all-reduce; one that
no rank has stays None. On two ranks the numbers of both are the same bit for bit.
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import gpus
import zero
from assertions import close
from zoo import Batch, Case, OddNet, built, loss_on, odd_loss

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
        found, expected = zero.full_state_dict(self.model, to=None), self.plain.state_dict()
        assert list(found) == list(expected)
        different = [name for name in expected if not close(found[name], expected[name], self.tolerance)]
        assert not different, f"other weights than the reference: {different}"


def side_by_side(model: nn.Module, options: dict[str, Any], optim: Any = sgd, *, tolerance: float = 0.0) -> SideBySide:
    """At stage 3, with options of FSDP."""
    return SideBySide(model, partial(stage_3, **options), optim, tolerance=tolerance)


def steps(both: SideBySide, rank: int, count: int = 3) -> None:
    """On Stack's batches."""
    for step in range(count):
        both.step(loss_on(rank, step))


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


def ddp_sends_buffers(before_forward: bool) -> dict[str, bool]:
    """DistributedDataParallel's option for it, which has another name in torch 2.11."""
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if renamed else "broadcast_buffers": before_forward}


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
        loss = odd_loss(model, rank, step)
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
    make: Callable[[], nn.Module] = OddNet,
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


def norm_of_gradients(of: nn.Module | Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """By torch's own function, as a script asks for it."""
    params = of.parameters() if isinstance(of, nn.Module) else of
    return torch.nn.utils.get_total_norm([param.grad for param in params if param.grad is not None], norm_type)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters, under the names that they have in the inner module."""
    return {name: param.detach().clone() for name, param in model.module.named_parameters()}


def own_elements(optimizer: zero.OSS, param: nn.Parameter) -> Tensor:
    """True at the elements of a parameter that this rank owns, in the parameter's shape."""
    for flat in optimizer.shards.shard_groups:
        for index, each in enumerate(flat.params):
            if each is param:
                mask = torch.zeros_like(param, dtype=torch.bool)
                span = flat.shapes.spans.get(index)
                if span is not None:
                    flat.shapes.in_memory_order(index, mask)[span.start : span.stop] = True
                return mask
    raise KeyError("the optimizer does not have this parameter")


@dataclass(frozen=True)
class Record:
    """What a training came to on one rank. `weights` has parameters and buffers, whole, under the model's own names."""

    losses: list[float]
    weights: dict[str, Tensor]


def train_case(
    model: nn.Module, optimizer: Optimizer, case: Case, rank: int, *, steps: int = 3, micro: int = 1, sync: bool = True
) -> list[float]:
    """The losses of `steps` steps, each on `micro` batches; without `sync`, all but the last under no_sync."""
    losses = []
    for step in range(steps):
        batches = [case.batch(rank, step * micro + number) for number in range(micro)]
        losses += train_step(model, optimizer, batches, sync=sync)
    return losses


def train_step(model: nn.Module, optimizer: Optimizer, batches: list[Batch], *, sync: bool = True) -> list[float]:
    losses = []
    optimizer.zero_grad()
    for number, batch in enumerate(batches, start=1):
        held_back = not sync and number < len(batches) and hasattr(model, "no_sync")
        context: AbstractContextManager[Any] = model.no_sync() if held_back else nullcontext()
        with context:
            loss = case_loss(model, batch)
            loss.backward()
        losses.append(loss.item())
    optimizer.step()
    return losses


def take_step(optimizer: Optimizer, loss: Tensor) -> float:
    """Down one loss, by its gradients alone. The loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def case_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(*batch.inputs)
    return F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten())


def reference(rank: int, case: Case, optim: Callable[..., Optimizer], **how: Any) -> Record:
    """The same training by torch alone: with DistributedDataParallel, or a plain loop without a process group."""
    model = case.model()
    wrapped = DistributedDataParallel(model, **case.ddp) if torch.distributed.is_initialized() else model
    losses = train_case(wrapped, optim(model.parameters()), case, rank, **how)
    return Record(losses, {name: value.detach().clone() for name, value in model.state_dict().items()})
