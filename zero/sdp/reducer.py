"""The backward of ShardedDDP: gradients on their way into buckets, and buckets on their way to the owners."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import finalize, proxy, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from zero._torch import at_end_of_backward, in_a_backward, writes_into
from zero.comm import Comm, Int8
from zero.comm.streams import Streams
from zero.oss.optimizer import OSS
from zero.oss.places import Place
from zero.oss.shard_group import ShardGroup
from zero.sdp.bucket import GradBucket
from zero.sdp.gathers import finish_all
from zero.sdp.tensors import nearest_leaf, tensors_in
from zero.sdp.usage import End


class Reducer:
    """Drives the buckets through a backward.

    `active`: whether gradients are reduced now, or left where they are (no_sync).
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[OSS],
        comm: Comm,
        sent_as: torch.dtype | Int8 | None = None,
    ) -> None:
        self.active = True
        self._module, self._optimizers, self._comm, self._sent_as = module, optimizers, comm, sent_as
        self._buckets: list[GradBucket] = []
        self._places: dict[nn.Parameter, Place] = {}
        self._numbers: dict[ShardGroup, int] = {}
        self._end = End([comm], f"the end of a backward of ShardedDDP({type(module).__name__})")
        self._hooks: dict[Tensor, RemovableHandle] = {}
        finalize(self, _remove, self._hooks)
        self._hooks_on_leaves: list[RemovableHandle] = []
        self._ran_trained: set[Tensor] = set()
        """What was trained in some forward since the last backward, and may have been frozen since."""
        self._retired: str | None = None
        """Why it takes no gradients any more."""
        self._in_backward = False
        self._launched = 0
        self._in_flight: int | None = None
        self._notice_groups()
        for param in self._places:
            before = _reducers[param]() if param in _reducers else None
            if before is not None:
                before.retire(_REPLACED)
            _reducers[param] = ref(self)
        self._hook_trained()

    def _notice_groups(self) -> None:
        """Makes a bucket of each shard group that the optimizers have now (add_param_group, set_bucket_size)."""
        owners = {group: optimizer for optimizer in self._optimizers for group in optimizer.shard_groups}
        if [bucket.group for bucket in self._buckets] == list(owners):
            return
        self._buckets = [GradBucket(group, owner, sent_as=self._sent_as) for group, owner in owners.items()]
        self._owners = [*owners.values()]
        self._numbers = {group: number for number, group in enumerate(owners)}
        self._places = {param: place for optimizer in self._optimizers for param, place in optimizer.places.items()}
        streams = {group.streams for group in owners}
        self._streams = [one for one in streams if isinstance(one, Streams)]
        self._largest_bucket = max(group.full.nbytes for group in owners)
        self._largest_param = max(param.nbytes for param in self._places)

    def before_forward(self) -> None:
        if self._retired is not None:
            raise RuntimeError(self._retired.format("ShardedDDP"))
        if self._in_backward and not in_a_backward():
            self._abandon()
        if not self._in_backward:
            self._comm.begin_schedule()
            while self._hooks_on_leaves:
                self._hooks_on_leaves.pop().remove()
            self._notice_groups()
            self._hook_trained()

    def after_forward(self, output: Any) -> None:
        """Backward begins at the outputs: from there its end can be awaited, also where it is entered anew within."""
        if self.active:
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    hook = tensor.register_hook(partial(self._reached, nearest_leaf(tensor)))
                    if tensor.is_leaf:  # it outlives the graph
                        self._hooks_on_leaves.append(hook)

    def _reached(self, leaf: Node | None, _: Tensor) -> None:
        """A backward is at an output: one that leaves gradients, on all ranks, or an inner torch.autograd.grad."""
        if leaf is None or writes_into(leaf):
            self._begin()

    def _hook_trained(self) -> None:
        # What autograd calls lies where the garbage collector does not look for cycles.
        arrived = partial(Reducer.arrived, proxy(self))
        for param in self._places:
            if param.requires_grad:
                self._ran_trained.add(param)
            if param.requires_grad and param not in self._hooks:
                self._hooks[param] = param.register_post_accumulate_grad_hook(arrived)

    def _notice_trained(self) -> None:
        """Collective where other parameters are trained than in the last backward."""
        changed = [bucket.notice_trained(self._ran_trained) for bucket in self._buckets]
        self._ran_trained.clear()
        if any(changed):
            trained = [bucket.group.names[index] for bucket in self._buckets for index in bucket.trained]
            self._comm.compare("the parameters that are trained", trained)

    def retire(self, reason: str) -> None:
        """Takes no gradients any more, because the parameters are another's. reason: what a forward raises then."""
        self._retired = reason
        _remove(self._hooks)
        while self._hooks_on_leaves:
            self._hooks_on_leaves.pop().remove()

    def arrived(self, param: nn.Parameter) -> None:
        """autograd has written all of `param.grad`, which is taken over, and None from here on."""
        if not self.active:
            return
        self._begin()
        group, index = self._places[param]
        number = self._numbers[group]
        bucket = self._buckets[number]
        for streams in self._streams:
            streams.expect_computing(f"the gradient of {group.names[index]} arrived")
        if number < self._launched:
            bucket.refuse_late(index)
        gradient, param.grad = param.grad, None
        bucket.take(index, gradient)
        self._make_room(bucket)
        if bucket.complete:
            self._launch()

    def _begin(self) -> None:
        if not self._in_backward:
            finish_all(self._optimizers)  # of a graph from before the last step
            self._begin_reducing()
            self._in_backward = True
            for streams in self._streams:
                streams.compute_here()
            at_end_of_backward(self._finish)

    def _launch(self, *, incomplete: bool = False) -> None:
        """Launches, in the order that is the same on all ranks, what is complete up to the first bucket that is not.

        incomplete: with what lies in `grad` from backwards under no_sync, and zeros.
        """
        while self._launched < len(self._buckets):
            bucket = self._buckets[self._launched]
            if incomplete:
                bucket.take_leftovers()
            elif not bucket.complete:
                return
            self._finish_in_flight()
            if bucket.trained:
                bucket.launch()
                self._in_flight = self._launched
            self._launched += 1
            if self._launched < len(self._buckets):
                self._make_room(self._buckets[self._launched])

    def _make_room(self, filling: GradBucket) -> None:
        """Waits for the bucket in flight while what fills the next is little: two buckets' bytes are all there may be.

        A bucket in flight takes its gradients and as much to receive them in; in their place 1/W of it stays, and as
        much of the next is not there yet. Where transfers run beside the computing, waiting would cost their overlap.
        """
        upcoming = filling.taken_bytes + self._largest_param
        if (
            self._in_flight is not None
            and upcoming * self._comm.world > self._largest_bucket
            and not filling.group.overlaps
        ):
            self._finish_in_flight()

    def _finish_in_flight(self) -> None:
        if self._in_flight is not None:
            number, self._in_flight = self._in_flight, None
            self._buckets[number].finish()
            self._owners[number].gradients_arrived(self._buckets[number].group)

    def _finish(self) -> None:
        """At the end of backward, on every rank, whatever it used."""
        if self._launched < len(self._buckets):
            self._refuse_replaced()
        self._launch(incomplete=True)
        self._finish_in_flight()
        self._end.reach(self._buckets)
        for optimizer in self._optimizers:
            optimizer.backward_ends()
        self._launched = 0
        self._in_backward = False

    def reduce_now(self) -> None:
        self.before_forward()
        self._begin_reducing()
        self._finish()

    def _begin_reducing(self) -> None:
        self._notice_trained()
        for optimizer in self._optimizers:
            optimizer.backward_begins()

    def _refuse_replaced(self) -> None:
        """Where a gradient did not come, the parameter may be one that the module no longer has."""
        for name, param in self._module.named_parameters():
            if param.requires_grad and param not in self._places:
                raise RuntimeError(
                    f"{name!r} is in no optimizer of this ShardedDDP: it was replaced (by load_state_dict with "
                    "assign=True, say) or added since, and its gradient would be nobody's. Wrap the model again, "
                    "with an OSS built from its present parameters, or add it by add_param_group."
                )

    def _abandon(self) -> None:
        """An exception ended the last backward before its end."""
        for bucket in self._buckets:
            bucket.abandon()
        self._launched = 0
        self._in_flight = None
        self._in_backward = False


_REPLACED = (
    "this {} was replaced by another around the same parameters, which has their gradients now. Call the new one, and "
    "drop this one and its optimizer."
)

_reducers: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By parameter, the Reducer that takes its gradients."""


def _remove(hooks: dict[Tensor, RemovableHandle]) -> None:
    for hook in hooks.values():
        hook.remove()
