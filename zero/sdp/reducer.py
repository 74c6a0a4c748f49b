"""The backward of ShardedDDP: puts gradients into buckets, and reduces the buckets to the owners.

Each backward launches the buckets in one order, which is the same on all ranks, and waits until one is sent before it
sends another: more at once would take more memory. The first backward finds the order: that in which the first rank's
buckets became complete. Those that some rank could not complete are last in the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import finalize, proxy, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from zero._torch.autograd import at_end_of_backward, in_a_backward, writes_into
from zero._torch.modules import parameters_of, registrations
from zero._torch.tensors import call_last
from zero.comm import Comm
from zero.comm.streams import streams_in
from zero.comm.transport import summed_as
from zero.oss.optimizer import OSS
from zero.shards.cut import hold, take_over
from zero.shards.owned_shards import WRITTEN
from zero.shards.shard_group import ShardGroup
from zero.wrap.bucket import EndOfBackward, FullBucket, GradBucket, OwnedBucket
from zero.wrap.tensors import nearest_leaf, tensors_in

# Bytes of a bucket at stage 1, as of DistributedDataParallel.
_BUCKET = 25 << 20


def _together(owners: Mapping[ShardGroup, OSS], sent_as: torch.dtype | None) -> list[list[ShardGroup]]:
    """Groups for buckets of full gradients: of several small ones, which take no more memory and fewer messages. Beside
    the computing groups are large already, and 16 bits are summed in a copy."""
    found: list[list[ShardGroup]] = []
    kind, size = None, 0
    for group, owner in owners.items():
        now = owner, group.full.dtype, group.full.device, any(param.requires_grad for param in group.params)
        sent = sent_as or group.full.dtype
        alone = group.overlaps or summed_as(sent) != sent
        if alone or now != kind or size + group.full.nbytes > _BUCKET:
            found.append([])
            kind, size = now, 0
        found[-1].append(group)
        size += group.full.nbytes
    return found


_REPLACED = (
    "this {} was replaced by another wrapper of the same parameters, which takes their gradients now. Use the new "
    "wrapper, and drop this one and its optimizer."
)


def _remove(hooks: dict[Tensor, RemovableHandle]) -> None:
    for hook in hooks.values():
        hook.remove()


class Reducer:
    """Takes gradients during backward into buckets, which are reduced meanwhile.

    wrapper: the name of the wrapper's class. full: whether all ranks get the averages, in `param.grad`.
    `active`: whether gradients are reduced, or accumulated in `param.grad` (no_sync).
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[OSS],
        comm: Comm,
        wrapper: str,
        *,
        full: bool,
        sent_as: torch.dtype | None = None,
    ) -> None:
        self._active, self._wrapper, self._full = True, wrapper, full
        # Whether gradients may have been accumulated since the last backward that reduced, on any rank.
        self._unsent = False
        self._module, self._optimizers, self._comm, self._sent_as = module, optimizers, comm, sent_as
        name = f"a forward or backward of {wrapper}({type(module).__name__})"
        self._end = EndOfBackward([comm], name)
        name = "a comparison of which parameters are trained, as that has changed there"
        self._trained = comm.channel(name, "Freeze and unfreeze parameters on every rank.")
        # In the order of their launches: the first `_launched` were launched by the running backward.
        self._buckets: list[OwnedBucket | FullBucket] = []
        self._launched = 0
        self._in_flight: list[GradBucket] = []
        # How many are in flight at most. Over Gloo another message that waits costs its memory alone, and none of the
        # time in which this rank computes.
        self._at_once = 1
        # The numbers of buckets in the order in which they became complete; None once that order is theirs.
        self._arrived: list[int] | None = []
        self._hooks: dict[Tensor, RemovableHandle] = {}
        finalize(self, _remove, self._hooks)  # whoever trains the module without the wrapper has plain parameters
        self._hooks_on_leaves: list[RemovableHandle] = []
        # The error message of a forward, after `retire`.
        self._retired: str | None = None
        self._in_backward = False
        # When the module was last looked through for parameters that nobody reduces.
        self._registrations = registrations()
        # What autograd calls at the end of the backward, while it may still do so.
        self._awaits_end: Callable[[], object | None] = lambda: None
        self._update_buckets()
        take_over(self._params())
        for param in self._params():
            hold(param).reduced_by = ref(self)
        self.take_groups()

    @property
    def active(self) -> bool:
        return self._active

    @active.setter
    def active(self, active: bool) -> None:
        self._active, self._unsent = active, self._unsent or not active

    def _update_buckets(self) -> None:
        """Makes a bucket for each shard group, if the groups have changed (add_param_group, set_bucket_size)."""
        owners = {group: optimizer for optimizer in self._optimizers for group in optimizer.shards.shard_groups}
        if {group for bucket in self._buckets for group in bucket.groups} == owners.keys():
            return
        # A bucket waits for its first parameter in the module, which a backward reaches last.
        place = {param: number for number, param in enumerate(parameters_of(self._module))}
        if self._full:
            together = _together(owners, self._sent_as)
            full = [FullBucket(alike, place, sent_as=self._sent_as) for alike in together]
            unreduced = {one.params[i] for one in self._buckets if isinstance(one, FullBucket) for i in one.accumulated}
            for one in full:
                one.accumulated = {i for i, param in enumerate(one.params) if param in unreduced}
            self._buckets = [*full]
        else:
            self._buckets = [OwnedBucket(group, sent_as=self._sent_as, of=place) for group in owners]
        # 0, so last: add_param_group may have brought a parameter that the module does not have.
        self._buckets.sort(key=lambda bucket: -min(place.get(param, 0) for param in bucket.params))
        self._arrived = []
        sent_by_threads = not any(group.overlaps or group.comm.reads_memory(group.full.device) for group in owners)
        self._at_once = 2 if self._comm.world > 1 and sent_by_threads else 1
        for owner in self._optimizers:
            own = [one for one in self._buckets if isinstance(one, FullBucket) and owners[one.group] is owner]
            owner.gradients.filled_by[self._module] = own
        _remove(self._hooks)  # of the buckets of before
        self._hooks.clear()
        for bucket, index in [(one, index) for one in self._buckets for index in one.own]:
            param = bucket.params[index]
            if param.is_floating_point() or param.is_complex():
                # Also of what is frozen: a backward may come after it is trained, and no forward of the wrapper before.
                trained = param.requires_grad
                # A weak reference: the garbage collector does not find cycles through hooks of autograd.
                ready = partial(Reducer.gradient_ready, proxy(self), bucket, index)
                self._hooks[param] = param.requires_grad_().register_post_accumulate_grad_hook(ready)
                param.requires_grad_(trained)
        self._streams = streams_in(group.streams for group in owners)

    def take_groups(self) -> None:
        """Takes gradients of all shard groups of its optimizers, from here on."""
        self._update_buckets()
        for bucket in self._buckets:
            bucket.notice_forward()
        call_last(self._hooks)  # they take gradients away, which hooks of the user's are to see

    def _params(self) -> set[nn.Parameter]:
        """Those of which gradients are reduced."""
        return {bucket.params[index] for bucket in self._buckets for index in bucket.own}

    def retire(self, reason: str = _REPLACED) -> None:
        """Removes all hooks: the wrapper no longer owns the parameters. reason: the error message of later forwards."""
        self._retired = reason
        _remove(self._hooks)
        while self._hooks_on_leaves:
            self._hooks_on_leaves.pop().remove()

    # ------------------------------------------------------------------------------------------------ a forward

    def before_forward(self) -> None:
        if self._retired is not None:
            raise RuntimeError(self._retired.format(self._wrapper))
        if self._in_backward and not in_a_backward():
            self._abandon()
        if not self._in_backward:
            self._comm.log.begin_schedule()
            while self._hooks_on_leaves:
                self._hooks_on_leaves.pop().remove()
            self.take_groups()

    def after_forward(self, output: Any) -> None:
        """Registers hooks on the outputs, where backward begins: so its end is known, also in a re-entrant backward. An
        inner torch.autograd.grad, which writes no gradients into leaves, is none."""
        was_active = self.active

        def reached(leaf: Node | None, _: Tensor) -> None:
            if (was_active or self.active) and (leaf is None or writes_into(leaf)):
                self._begin(adds=False)
                self._end.forwards.append(was_active)

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                leaf = nearest_leaf(((get_gradient_edge(tensor).node, 0),))
                hook = tensor.register_hook(partial(reached, leaf))
                if tensor.is_leaf:  # it outlives the graph
                    self._hooks_on_leaves.append(hook)

    def tell(self, error: Exception) -> None:
        """Collective. Called before this rank raises an error of the module's forward: other ranks raise it, too."""
        self._end.together.tell(error)

    # ----------------------------------------------------------------------------------------------- a backward

    def gradient_ready(self, bucket: OwnedBucket | FullBucket, index: int, param: nn.Parameter) -> None:
        """Moves the gradient, which autograd has accumulated, from `param.grad` into its bucket."""
        if not self.active or isinstance(bucket, FullBucket):
            bucket.accumulated.add(index)
        if not self.active:
            return
        try:  # not a context, which costs two calls for each gradient
            if param is not bucket.params[index]:
                raise RuntimeError(
                    "a hook of register_post_accumulate_grad_hook has returned a tensor, of shape "
                    f"{list(param.shape)}, which torch gives to the next hook in place of the parameter. Return None "
                    "from it."
                )
            if not self._in_backward or self._awaits_end() is None:
                self._begin(adds=True)
            for streams in self._streams:
                streams.expect_computing("the gradient of {} is ready", bucket.names[index])
            bucket.take_written(index)
            if len(bucket.taken) == len(bucket.trained):
                if self._arrived is not None:
                    self._arrived.append(self._buckets.index(bucket))
                self._launch()
        except Exception as error:
            self._end.together.tell(error)
            raise

    def _begin(self, *, adds: bool) -> None:
        """adds: whether this rank has added to a gradient already."""
        if self._in_backward and self._awaits_end() is not None:
            return
        if self._in_backward:  # the one that began last has failed, and this is another, of a graph that was kept
            self._abandon()
        self._update_trained()
        for bucket in self._buckets:
            bucket.refuse_lost()
            if isinstance(bucket, FullBucket) and not (adds or self._unsent):  # else some rank has added to an average
                bucket.set_aside()
        self._in_backward = True
        self._end.forwards.clear()
        for streams in self._streams:
            streams.compute_here()
        # autograd alone holds what it is to call, and drops it uncalled once a backward has failed. A backward within
        # this one, as of re-entrant checkpointing, finds it alive.
        finish, own = partial(Reducer._finish, self), ref(self)

        def dropped(_: Any) -> None:
            # Where autograd has not called it, the backward has failed, and gradients that the user clears from here on
            # are told from those that it has taken; all else is for `_abandon`.
            reducer = own()
            for bucket in reducer._buckets if reducer is not None and reducer._in_backward else ():
                bucket.interrupt()

        self._awaits_end = ref(finish, dropped)
        at_end_of_backward(finish)

    def _update_trained(self) -> None:
        """Tells the buckets which parameters are trained. Collective if these have changed since the last backward."""
        # A list: `any` of a generator would stop at the first change, and the other buckets would not notice theirs.
        changed = [bucket.notice_trained() for bucket in self._buckets]
        if any(changed):
            self._arrived = []
            trained = [bucket.names[index] for bucket in self._buckets for index in bucket.trained]
            self._comm.compare("the parameters that are trained", trained, channel=self._trained)

    def _launch(self, *, incomplete: bool = False) -> None:
        """Launches buckets, in the same order on all ranks, up to the first incomplete bucket.

        incomplete: launches incomplete buckets, too, with gradients accumulated under no_sync, and zeros for the rest.
        """
        while self._launched < len(self._buckets):
            bucket = self._buckets[self._launched]
            if incomplete:  # what was accumulated of parameters that this backward did not reach
                for index in bucket.trained:
                    if index not in bucket.taken:
                        bucket.take_written(index)
            elif len(bucket.taken) < len(bucket.trained):
                return
            left = []  # whose sums are still to be computed, during which the wire need not be idle
            while len(self._in_flight) >= self._at_once:
                before = self._in_flight.pop(0)
                if before.wait_for_sent():
                    left.append(before)
                else:
                    before.finish()
            if bucket.trained:
                bucket.launch()
                self._in_flight.append(bucket)
            for one in left:
                one.finish()
            self._launched, bucket.launched = self._launched + 1, True

    def _finish(self) -> None:
        """Ends the backward. Called on every rank, whichever parameters it has used."""
        with self._end.together:
            if self._launched < len(self._buckets) or not self._buckets or self._registrations != registrations():
                reduced = self._params()
                for name, param in self._module.named_parameters():
                    if param.requires_grad and param not in reduced:
                        raise RuntimeError(
                            f"{name!r} is in no optimizer of this {self._wrapper}: it was added or replaced (for "
                            "example by load_state_dict with assign=True) after wrapping, so its gradient would not "
                            "be reduced. Wrap the model again, with an OSS built from its present parameters, or add "
                            "it by add_param_group."
                        )
                self._registrations = registrations()
            self._launch(incomplete=True)
            while self._in_flight:
                self._in_flight.pop(0).finish()
            for optimizer in self._optimizers:
                if (group := optimizer.shards.written_between_steps()) is not None:
                    raise RuntimeError(f"of {group.label}, {WRITTEN}")
            self._end.synchronize(self._buckets, reduces=self.active)
            for optimizer in self._optimizers:
                # The user reads gradients once backward() has returned; copies to the CPU may still be on their way.
                optimizer.gradients.wait_for_copies()
            self._begin_again()
            if self._arrived is not None:
                # One that waits for a gradient keeps those of all later ones. Those that did not come are last.
                told = self._comm.all_gather_text(" ".join(map(str, self._arrived)))[0].split()
                self._arrived = None if told else []  # as where all gradients were accumulated before
                order = dict.fromkeys([*map(int, told), *range(len(self._buckets))])
                self._buckets = [self._buckets[number] for number in order]
            # As where experts get tokens in turn: what is launched behind such a bucket waits for the end, too.
            self._buckets.sort(key=lambda bucket: bucket.late)
            self._unsent = not self._active
            # Last: if anything before raises, the next forward finds it set and drops what is left of this backward.
            self._in_backward = False

    def reduce_now(self) -> None:
        """Collective. Reduces the gradients accumulated under no_sync."""
        self.before_forward()
        self._update_trained()
        self._finish()

    def _abandon(self) -> None:
        """Forgets a backward that an exception ended. Collective: ranks that are in it wait for this one, and would
        take the gradients of its next one."""
        self._end.together.tell(RuntimeError(f"a backward of the {self._wrapper} has failed, and has not ended there."))
        for bucket in self._buckets:
            bucket.abandon()
        # None stays None: the order is known, and finding it again is a collective of one more backward.
        self._arrived = self._arrived and []
        self._begin_again()
        self._in_flight = []
        self._in_backward = False

    def _begin_again(self) -> None:
        self._launched = 0
        for bucket in self._buckets:
            bucket.launched = False
