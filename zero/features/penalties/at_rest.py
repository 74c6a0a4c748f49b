"""Reads of parameters at rest between forward and backward, such as those of a penalty in the loss.

At rest a parameter is this rank's shard, and the gradient of a result computed from it is that of the shard. Autograd
adds it to `param.grad`, not averaged. For a sum over elements, the shards' gradients together are the full gradient.

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
from zero.fsdp.unit import Unit
from zero.shards.shard_group import GroupState, ShardGroup


class ReadsAtRest:
    """Tracks the AccumulateGrad nodes of the parameters of one model between forward and backward."""

    def __init__(self) -> None:
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

    def begin(self, units: Iterable[Unit]) -> None:
        """Gives sharded parameters nodes for reads at rest. Unsharded parameters keep the nodes of the forward."""
        for unit in units:
            groups = [group for group in unit.groups if group.state is GroupState.SHARDED and group.comm.world > 1]
            if groups and unit not in self._shard_nodes:
                self._record_full_nodes(unit)
                self._shard_nodes[unit] = [node for group in groups for node in _new_nodes(unit, group)]

    def end(self, unit: Unit) -> None:
        """Gives the parameters new nodes before the unit is unsharded. Results computed so far keep theirs."""
        if unit in self._skipped:
            self._reached.add(unit)
        if self._shard_nodes.pop(unit, None) is not None:
            self._reread.add(unit)
            for group in unit.groups:
                _renew_nodes(group)

    def _record_full_nodes(self, unit: Unit) -> None:
        """Records the nodes of the last forward, which exist if its graph does."""
        nodes = self._full_nodes.setdefault(unit, [])
        nodes += [_node(param) for group in unit.groups for param in _trained(group)]
        self._reread.discard(unit)

    def backward_begins(self) -> None:
        """Finds the units that a backward skips, when autograd reaches the first unit. A backward with `inputs=` that
        were listed after forward executes no node of the forward, as if asked for gradients of other tensors."""
        for unit in [*self._reread]:
            self._record_full_nodes(unit)
        executes = any(writes_into(node) for nodes in self._full_nodes.values() for node in nodes)
        self._skipped = set() if executes else {*self._full_nodes}

    def backward_ends(self) -> None:
        for unit in self._reached:
            unit.skipped = True
        self.forget()

    def forget(self) -> None:
        self._full_nodes.clear()
        self._reread.clear()
        self._skipped.clear()
        self._reached.clear()


def _trained(group: ShardGroup) -> Iterator[nn.Parameter]:
    return (param for param in group.params if param.requires_grad)


def _node(param: nn.Parameter) -> Node:
    return get_gradient_edge(param).node


def _new_nodes(unit: Unit, group: ShardGroup) -> Iterator[Node]:
    """Yields new nodes of the parameters, with hooks. They exist only as long as they are referenced."""
    _renew_nodes(group)
    for param, name in zip(group.params, group.names, strict=True):
        if param.requires_grad:
            node = _node(param)
            node.register_prehook(partial(_before_accumulation, unit, param, name))
            yield node


def _before_accumulation(unit: Unit, param: nn.Parameter, name: str, _: tuple[Tensor, ...]) -> None:
    """Autograd calls this before it adds a gradient to `param.grad`."""
    unit.prepare_for_shard_gradient(param, name)


def _renew_nodes(group: ShardGroup) -> None:
    """Makes torch drop the nodes of the parameters."""
    dtype = torch.float16 if group.shard.dtype != torch.float16 else torch.float32
    for param in _trained(group):
        data = param.data
        param.data = data.new_empty(0, dtype=dtype)
        param.data = data
