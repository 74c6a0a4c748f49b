"""Trains a random case at its stage, beside a reference that torch alone trains: see runs.py."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adadelta, Adafactor, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

import zero
from fuzz.cases import Case, Node, Step
from fuzz.layers import NOW, Around, Checkpointed, Feed, Linear, Packed, Reentrant, Root, Sequence
from fuzz.loop import EVENTS, WRITES, ByHand
from optimizers import Lamb
from runs import SideBySide, ddp_sends_buffers, on_mesh
from zoo import data

# A large eps: else a gradient that is nothing but rounding moves a parameter as far as any other.
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "plain sgd": partial(SGD, lr=0.05),
    "nesterov": partial(SGD, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "fused sgd": partial(SGD, lr=0.05, weight_decay=0.1, fused=True),
    "adam": partial(Adam, lr=1e-2, eps=1e-2),
    "amsgrad": partial(Adam, lr=1e-2, eps=1e-2, amsgrad=True, maximize=True),
    "fused adam": partial(Adam, lr=1e-2, eps=1e-2, weight_decay=0.1, fused=True),
    "adamw": partial(AdamW, lr=1e-2, eps=1e-2, weight_decay=0.1, foreach=True),
    "nadam": partial(NAdam, lr=1e-2, eps=1e-2),
    "radam": partial(RAdam, lr=1e-2, eps=1e-2),
    "adamax": partial(Adamax, lr=1e-2, eps=1e-2),
    "rmsprop": partial(RMSprop, lr=1e-2, eps=1e-2, momentum=0.5, centered=False),
    "adagrad": partial(Adagrad, lr=1e-2, eps=1e-2),
    "adadelta": partial(Adadelta, lr=0.1, eps=1e-2),
    "adafactor": partial(Adafactor, lr=1e-2),
    "lamb": Lamb,
}
WHOLE = {"adafactor", "lamb"}  # need whole parameters

POLICIES: dict[str, Any] = {
    "default": None,
    "layers": ModuleWrapPolicy({nn.Linear, nn.LayerNorm, nn.BatchNorm1d, nn.Conv1d, nn.Embedding, nn.GRU}),
    "blocks": ModuleWrapPolicy({Linear, Feed, Around, Sequence, Checkpointed, Reentrant, Packed.Inner}),
    "size": partial(size_based_auto_wrap_policy, min_num_params=20),
    "none": ModuleWrapPolicy(set()),
}

PREFETCH: dict[str, Any] = {"default": None, "memory": 1, "speed": 3}


def kinds(nodes: tuple[Node, ...]) -> set[str]:
    return {node.kind for node in nodes} | {kind for node in nodes for kind in kinds(node.inside)}


def groups(model: nn.Module, count: int) -> Any:
    params = [*model.parameters()]
    if count == 1:
        return params
    return [
        {"params": params[first::count], "lr": 0.01 * (first + 1)} for first in range(count) if params[first::count]
    ]


def build(case: Case, model: nn.Module, optim: Any) -> tuple[nn.Module, Optimizer]:
    if case.stage == 3:
        return _stage_3(case, model, optim)
    optimizer = zero.OSS(groups(model, case.groups), optim, partition=case.partition)
    if case.stage == 2:
        options = {"reduce_buffer_size": case.bucket, "broadcast_buffers": case.broadcast_buffers}
        return zero.ShardedDDP(model, optimizer, **options), optimizer
    if case.averaged == "hand":
        return ByHand(model), optimizer
    buffers = ddp_sends_buffers(case.broadcast_buffers)
    return DistributedDataParallel(model, find_unused_parameters=True, **buffers), optimizer


def _stage_3(case: Case, model: nn.Module, optim: Any) -> tuple[nn.Module, Optimizer]:
    options: dict[str, Any] = {"sharding_strategy": case.strategy, "partition": case.partition}
    options["prefetch"] = PREFETCH[case.prefetch]
    if case.strategy.startswith("HYBRID"):
        options = {**on_mesh(case.world, {"replicas": case.replicas}), **options}
    if case.by_hand and [*model.body[0].parameters()]:
        model.body[0] = zero.FSDP(model.body[0], **{**options, "reshard_after_forward": False})
    options["broadcast_buffers"] = case.broadcast_buffers
    wrapped = zero.FSDP(model, auto_wrap_policy=POLICIES[case.units], **options)
    return wrapped, optim(groups(wrapped, case.groups))


class Trained(SideBySide):
    """A case's model and its reference."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        optim = OPTIMIZERS[case.optim]
        super().__init__(Root(case), partial(build, case), optim, tolerance=tolerance(case))
        self.plain_optimizer = optim(groups(self.plain, case.groups))
        self._batches = 0
        self._due = case.broadcast_buffers and not (case.stage == 1 and case.averaged == "hand")
        if self._due:
            self.plain.register_forward_pre_hook(self._send_buffers)
        self._broadcast = self._due
        self._sync = True

    def _send_buffers(self, *_: Any) -> None:
        """As DistributedDataParallel does: before a forward that follows one that was reduced."""
        if self._due and dist.is_initialized():
            for buffer in self.plain.buffers():
                dist.broadcast(buffer, 0)
        self._due = self._sync and torch.is_grad_enabled()

    def batch(self, number: int) -> Tensor:
        return data(self.case.rows, self.case.width, rank=self.rank, step=number)

    def run(self, step: Step) -> None:
        EVENTS[step.before](self)
        self.clear(step.clear)
        for number, micro in enumerate(step.micros):
            numbers = range(self._batches, self._batches + micro.forwards)
            self._batches += micro.forwards
            self._sync = micro.sync
            with nullcontext() if micro.sync else self.model.no_sync():
                losses = {model: self.loss(model, numbers) for model in (self.model, self.plain)}
            if micro.cleared and not number:
                self.clear(micro.cleared)
            for again in reversed(range(1 + micro.retained)):
                self.backward(losses.__getitem__, sync=micro.sync, retain_graph=bool(again))
                if isinstance(self.model, ByHand):
                    self.model.collect(sync=micro.sync)
        self._sync = True
        self.give_averages()
        if isinstance(self.model, ByHand):
            self.model.show()
        if step.clip is not None:
            self.clip(step.clip)
        WRITES[step.after](self)
        self.optimizer.step()
        self.plain_optimizer.step()

    def clear(self, how: str) -> None:
        """Gradients, by the optimizer or the model, or by hand: of each parameter or of the head's."""
        whom, _, zeros = how.partition(" to ")
        module = self.each()[0]
        if whom in ("optimizer", "model"):
            (self.optimizer if whom == "optimizer" else self.model).zero_grad(set_to_none=not zeros)
        for param in (module if whom == "each" else module.head if whom == "head" else nn.Module()).parameters():
            if not zeros:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()
        by_hand = self.model.averages if isinstance(self.model, ByHand) else {}
        for param in by_hand:
            param.grad = None  # which shows an average; `collect` would take it for a new gradient
        for sums, of in ((self.averages, self.plain), (by_hand, module)):
            for param in (of.head if whom == "head" else of).parameters():
                old = sums.pop(param, None)
                if old is not None and zeros:
                    sums[param] = old * 0

    def loss(self, model: nn.Module, numbers: range) -> Tensor:
        total = torch.zeros(())
        for number in numbers:
            torch.manual_seed(100 * number + self.rank)  # for dropout
            total = total + torch.tanh(model(self.batch(number))).square().mean()
        return total

    def clip(self, norm: float) -> None:
        if self.case.stage == 3:
            found = self.model.clip_grad_norm_(norm)
        else:
            found = self.optimizer.clip_grad_norm(norm)
        expected = clip_grad_norm_(self.plain.parameters(), norm)
        assert abs(found - expected) <= max(1e-5, self.tolerance) * expected, "norms"

    def compare(self) -> None:
        """Weights; of ByHand under the module's own names."""
        model = self.model
        self.model = model.module if isinstance(model, ByHand) else model
        super().compare()
        self.model = model


def tolerance(case: Case) -> float:
    """0 where the numbers are the same bit for bit."""
    rounded = case.world > 2
    rounded |= any(step.clip is not None for step in case.steps)
    rounded |= case.stage == 3 and "reentrant" in kinds(case.body)  # gradients may be sent in two goes
    if case.stage == 3:  # what no_sync adds to an average is averaged with it
        orders = [[micro.sync for micro in step.micros] for step in case.steps]
        kept = any(step.clear.startswith("head") for step in case.steps)
        rounded |= any(before and not after for order in orders for before, after in pairwise(order))
        accumulates = not all(sync for order in orders for sync in order)
        several = any(micro.forwards > 1 for step in case.steps for micro in step.micros)
        rounded |= accumulates and (kept or several)  # of several forwards it is sent before their gradients come
    rounded |= case.stage == 1 and case.averaged == "ddp" and any(len(step.micros) > 1 for step in case.steps)
    if not rounded:
        return 0.0
    return 0.05 if "half" in kinds(case.body) else 2e-4


def refusals(case: Case) -> Iterator[str]:
    """What the case may be refused for, as patterns of the messages: limits that are written down."""
    if "reentrant" in kinds(case.body) and case.stage == 2:
        yield "after its gradients were sent to their owner"
    several = any(micro.forwards > 1 for step in case.steps for micro in step.micros)
    if several and "batch norm" in kinds(case.body) and case.broadcast_buffers:  # as with DistributedDataParallel
        yield "modified by an inplace operation"


def train(rank: int, world: int, case: Case) -> None:
    NOW.rank, NOW.step = rank, 0
    both = Trained(case, rank)
    for number, step in enumerate(case.steps):
        NOW.step = number
        both.run(step)
        if case.compared or number + 1 == len(case.steps):
            both.compare()
