"""What is computed from parameters at rest between forward and backward, such as a penalty that is added to the loss.

At rest a parameter is this rank's shard, and so is the gradient of what is computed from it: it is added to
`param.grad` as it is, not averaged. The shards of a sum over elements together get the gradient of the full parameter.

The node by which autograd accumulates the gradient of a leaf keeps the shape that the leaf had when the node was made,
and stays the leaf's while a graph holds it: after forward, that of the full one. torch lets go of it where data of
another dtype is set. This is done when somebody asks the model for its parameters, so that what is computed from them
has nodes of its own, and again before they are unsharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from zero._torch import writes_into
from zero.fsdp.unit import Unit
from zero.oss.shard_group import GroupState, ShardGroup


class RestingReads:
    """Of the units of one model, between forward and backward."""

    def __init__(self) -> None:
        self._open: dict[Unit, list[Node]] = {}
        """The nodes of reads at rest, of units whose parameters have them now."""
        self._of_full: dict[Unit, list[Node]] = {}
        """Those of reads in the forwards before, until backward has ended."""
        self._read_again: set[Unit] = set()
        """Units of `_of_full` that another forward has read since, by nodes that are not among those."""
        self._missed: set[Unit] = set()
        """Units whose parameters the backward that goes on passes by; of these those that it `_came` to."""
        self._came: set[Unit] = set()

    def begin(self, units: Iterable[Unit]) -> None:
        """Parameters may be read as they are now. Those that stay unsharded are read by the nodes of the full ones."""
        for unit in units:
            groups = [group for group in unit.groups if group.state is GroupState.SHARDED and group.comm.world > 1]
            if groups and unit not in self._open:
                self._know_nodes(unit)
                self._open[unit] = [node for group in groups for node in _new_nodes(unit, group)]

    def end(self, unit: Unit) -> None:
        """Before the unit is made full. What was computed so far keeps its nodes."""
        if unit in self._missed:
            self._came.add(unit)
        if self._open.pop(unit, None) is not None:
            self._read_again.add(unit)
            for group in unit.groups:
                _renew(group)

    def _know_nodes(self, unit: Unit) -> None:
        """Those by which the last forward read, if a graph of it is still there."""
        known = self._of_full.setdefault(unit, [])
        known += [_node(param) for group in unit.groups for param in _trained(group)]
        self._read_again.discard(unit)

    def backward_begins(self) -> None:
        """Called when autograd comes to the first unit. Parameters are not known to a backward that is asked for them
        by name (`inputs`) after this: it passes all nodes by, as one that is asked for other gradients only."""
        for unit in [*self._read_again]:
            self._know_nodes(unit)
        comes = any(writes_into(node) for nodes in self._of_full.values() for node in nodes)
        self._missed = set() if comes else {*self._of_full}

    def backward_ends(self) -> None:
        for unit in self._came:
            unit.passed_by = True
        self.forget()

    def forget(self) -> None:
        self._of_full.clear()
        self._read_again.clear()
        self._missed.clear()
        self._came.clear()


def _trained(group: ShardGroup) -> Iterator[nn.Parameter]:
    return (param for param in group.params if param.requires_grad)


def _node(param: nn.Parameter) -> Node:
    return get_gradient_edge(param).node


def _new_nodes(unit: Unit, group: ShardGroup) -> Iterator[Node]:
    """To be held until they are read."""
    _renew(group)
    for param, name in zip(group.params, group.names, strict=True):
        if param.requires_grad:
            node = _node(param)
            node.register_prehook(partial(_before, unit, param, name))
            yield node


def _before(unit: Unit, param: nn.Parameter, name: str, _: tuple[Tensor, ...]) -> None:
    """Called by autograd before it adds a gradient to `param.grad`."""
    unit.take_resting(param, name)


def _renew(group: ShardGroup) -> None:
    """Has parameters let go of their nodes."""
    dtype = torch.float16 if group.shard.dtype != torch.float16 else torch.float32
    for param in _trained(group):
        data = param.data
        param.data = data.new_empty(0, dtype=dtype)
        param.data = data
