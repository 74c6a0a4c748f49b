"""Reads of parameters at rest between forward and backward, such as those of a penalty in the loss.

At rest a parameter is this rank's shard, and the gradient of a result computed from it is that of the shard. Autograd
adds it to `param.grad`, not averaged. For a sum over elements, the shards' gradients together are the full gradient.
So a penalty must be computed after forward from `parameters()` or `named_parameters()` of the FSDP, and be a sum over
elements: a norm or a matrix product of shards is not that of the full parameter.

The node by which autograd accumulates the gradient of a leaf (AccumulateGrad) keeps the shape that the leaf had when
the node was made, and a graph keeps it alive: after forward, its shape is the full one. torch drops the node when data
of another dtype is set. `_renew_nodes` does so when the user asks the model for parameters, so that results computed
from them have nodes of their own, and again before the parameters are unsharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from zero._torch import writes_into
from zero.fsdp.events import ModelEvents, model_events
from zero.fsdp.model import Model
from zero.fsdp.unit import Unit
from zero.shards.group_state import GroupState
from zero.shards.shard_group import ShardGroup


class ReadsAtRest(ModelEvents):
    """Tracks the AccumulateGrad nodes of the parameters of one model between forward and backward.

    `skipped`: units of which the last backward was asked for particular gradients, and for none of theirs.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.skipped: set[Unit] = set()
        self._shard_nodes: dict[Unit, list[Node]] = {}
        """The nodes of reads at rest, for units whose parameters have these nodes now."""
        self._full_nodes: dict[Unit, list[Node]] = {}
        """The nodes of the forwards before, until backward has ended."""
        self._reread: set[Unit] = set()
        """Units of `_full_nodes` that a later forward has read since, by nodes that are not listed there."""
        self._skipped: set[Unit] = set()
        """Units for whose parameters the running backward computes no gradients."""
        self._reached: set[Unit] = set()
        """The units of `_skipped` that it has reached."""

    def listed(self) -> None:
        """Gives sharded parameters nodes for reads at rest. Unsharded parameters keep the nodes of the forward."""
        backward = self.model.backward
        if not backward.awaited or backward.active or not torch.is_grad_enabled():
            return
        for unit in self.model.units:
            groups = [group for group in unit.groups if group.state is GroupState.SHARDED and group.comm.world > 1]
            if groups and unit not in self._shard_nodes:
                self._record_full_nodes(unit)
                self._shard_nodes[unit] = [node for group in groups for node in _new_nodes(unit, group)]

    def unsharding(self, unit: Unit) -> None:
        """Gives the parameters new nodes before the unit is unsharded. Results computed so far keep theirs."""
        if self.model.backward.active:
            self.skipped.discard(unit)
            if unit in self._skipped:
                self._reached.add(unit)
        if self._shard_nodes.pop(unit, None) is not None:
            self._reread.add(unit)
            _renew_nodes(unit.params)

    def _record_full_nodes(self, unit: Unit) -> None:
        """Records the nodes of the last forward, which exist if its graph does."""
        nodes = self._full_nodes.setdefault(unit, [])
        nodes += [get_gradient_edge(param).node for param in unit.params if param.requires_grad]
        self._reread.discard(unit)

    def backward_begins(self) -> None:
        """Finds the units that a backward skips, when autograd reaches the first unit. A backward with `inputs=` that
        were listed after forward executes no node of the forward, as if asked for gradients of other tensors."""
        for unit in [*self._reread]:
            self._record_full_nodes(unit)
        executes = any(writes_into(node) for nodes in self._full_nodes.values() for node in nodes)
        self._skipped = set() if executes else {*self._full_nodes}

    def backward_ends(self, reduced: bool) -> None:
        self.skipped |= self._reached
        self.abandoned()

    def unstepped(self, unit: Unit) -> str | None:
        if unit not in self.skipped or any(param.grad is not None for param in unit.params):
            return None
        return (
            f"{unit.title} has no gradients: the last backward was asked for particular gradients (inputs=..., "
            "autograd.grad), and parameters that the model gave between forward and backward are shards, not the full "
            "parameters of the forward. Call backward() without inputs, and freeze by requires_grad_(False) what is "
            "not trained; or list the parameters before the forward."
        )

    def abandoned(self) -> None:
        self._full_nodes.clear()
        self._reread.clear()
        self._skipped.clear()
        self._reached.clear()


def _new_nodes(unit: Unit, group: ShardGroup) -> Iterator[Node]:
    """Yields new nodes of the parameters, with hooks. They exist only as long as they are referenced."""
    _renew_nodes(group.params)
    for param, name in zip(group.params, group.names, strict=True):
        if param.requires_grad:
            node = get_gradient_edge(param).node
            node.register_prehook(partial(_before_accumulation, unit, param, name))
            yield node


def _before_accumulation(unit: Unit, param: nn.Parameter, name: str, _: tuple[Tensor, ...]) -> None:
    """Autograd calls this before it adds a gradient of the shard to `param.grad`.

    Raises RuntimeError within the backward of the unit, where `param.grad` is the full gradient.
    """
    if not unit.at_rest:
        raise RuntimeError(
            f"{name} got a gradient of this rank's shard within the backward of {unit.title} of FSDP: something, such "
            "as a penalty, was computed from it before the forward of the model. Compute it after: "
            "loss = criterion(model(inputs), targets) + penalty."
        )
    unit.settle()  # `param.grad` may be on its way to the memory of the CPU
    unit.gradients.show_accumulated(param)


def _renew_nodes(params: Iterable[nn.Parameter]) -> None:
    """Makes torch drop the nodes of the parameters."""
    for param in params:
        if param.requires_grad:
            data = param.data
            param.data = data.new_empty(0, dtype=torch.float16 if data.dtype != torch.float16 else torch.float32)
            param.data = data


model_events.append(ReadsAtRest)
