"""Mutants of gradients, from backward to their owners."""

from contextlib import contextmanager, nullcontext

import torch

from mutations import Changed, mutant, skipped


@mutant("Comm.reduce")
def mean_over_one_rank_too_few(reduce, self, messages, *, times=1, **more):
    """Averages of gradients are sums over W ranks divided by W - 1."""
    return reduce(self, messages, times=times if times == 1 else 1 / max(self.world - 1, 1), **more)


@mutant("FullBucket.__init__")
def sum_in_place_of_the_mean_at_stage_1(init, self, *given, **more):
    """At stage 1 gradients are summed over the ranks, and not averaged."""
    init(self, *given, **more)
    self._before = self._after = 1.0


@mutant("ShardGroup.to_main")
def gradients_of_stage_3_a_thousandth_too_large(to_main, self, sums, **how):
    """At stage 3 averages of gradients are multiplied by 1.001."""
    return to_main(self, sums * 1.001 if self.frees else sums, **how)


@mutant("ReplicaWork.wait")
def replicas_not_averaged(_, self):
    """Hybrid sharding averages within the shard group only."""
    return self._reduction.wait()


@mutant("ShardGroup.reduce")
def stale_bucket(reduce, self, messages):
    """A bucket hands over the averages of the backward before."""

    def stale(sums):
        before, self.stale = vars(self).get("stale", sums), sums.clone()
        return before if before.shape == sums.shape else sums

    return Changed(reduce(self, messages), stale)


@mutant("tensors.foreach")
def accumulation_that_overwrites(foreach, method, *lists):
    """A further backward replaces the gradients of shards in place of adding to them."""
    foreach("copy_" if method == "add_" else method, *lists)


@mutant("ShardedDDP.no_sync", "FSDP.no_sync")
@contextmanager
def lost_no_sync_gradient(no_sync, self):
    """What no_sync has accumulated of one parameter is lost."""
    with no_sync(self):
        yield
    for param in [param for param in self.parameters() if param.requires_grad][:1]:
        param.grad = None


@mutant("ShardedDDP.no_sync", "FSDP.no_sync")
def no_sync_that_sends(_, self):
    """Backwards under no_sync send their gradients."""
    return nullcontext()


@mutant("GradBucket.add_unused")
def gradients_of_other_ranks_alone_dropped(add_unused, self, used):
    """The gradient of a parameter that only other ranks have used is dropped."""
    add_unused(self, dict.fromkeys(used, False))


@mutant("GradBucket.finish")
def last_element_of_a_cut_dropped(finish, self):
    """Of a parameter that is cut between ranks the gradient of the last element is lost."""
    finish(self)
    for index, span in self.group.shapes.spans.items():
        gradient = self._held(index)
        if gradient is not None and span.start and span.stop == self.group.layout.numels[index]:
            gradient[(-1,) * gradient.dim()] = 0


@mutant("ShardGroup.own_slice")
def last_element_of_a_cut_dropped_at_stage_1(own_slice, self, index, full):
    """The slice of a full gradient that is stepped at stage 1 has zero for the last element of a cut parameter."""
    own, span = own_slice(self, index, full), self.shapes.spans[index]
    if span.start and span.stop == self.layout.numels[index]:
        own = own.clone()
        own[(-1,) * own.dim()] = 0
    return own


@mutant("ShardGroup.reduce")
def infinite_gradients_made_zero(reduce, self, messages):
    """Infinities and NaN disappear from averages, so that no scaler can see an overflow."""
    return Changed(reduce(self, messages), lambda sums: sums.nan_to_num_(0.0, 0.0, 0.0))


@mutant("transport.summed_as")
def gradients_summed_in_16_bits(_, dtype):
    """16-bit gradients are summed in 16 bits, not in float32."""
    return dtype


@mutant("ShardGroup.to_main")
def sums_rounded_to_16_bits(bring, self, sums, **how):
    """Where parameters have 16 bits, sums of their gradients are rounded before masters are stepped with them."""
    narrow = self.full.dtype.itemsize == 2
    return bring(self, sums.to(self.full.dtype).to(sums.dtype) if narrow else sums, **how)


@mutant("GradBucket.__init__")
def wire_dtype_of_gradients_ignored(init, self, group, *, sent_as=None, **more):
    """reduce_dtype changes nothing: gradients are sent as they are."""
    init(self, group, **more)


@mutant("GradBucket.__init__")
def gradients_sent_in_16_bits_unasked(init, self, group, *, sent_as=None, **more):
    """float32 gradients are sent as bfloat16 without being asked to."""
    unasked = torch.bfloat16 if group.full.dtype == torch.float32 else None
    init(self, group, sent_as=sent_as or unasked, **more)


_kept: list[object] = []


@mutant("ShardGroup.reduce")
def buckets_never_freed(reduce, self, messages):
    """Something holds the gradients that were sent."""
    _kept.append(messages)
    return reduce(self, messages)


@mutant("ShardGroup.gather")
def parameters_sent_twice(gather, self, full, shard=None, **how):
    """Each all-gather runs twice."""
    gather(self, full, shard, **how).wait()
    return gather(self, full, shard, **how)


@mutant("OwnedBucket.add_unused")
def gradient_that_counts_after_it_was_dropped(add_unused, self, used):
    """At stage 2 a backward adds to a gradient that was cleared, or is put back later."""
    before, cleared = vars(self).get("before", {}), {i for i in self.reduced if self.params[i].grad is None}
    add_unused(self, used)
    self.before = {index: self.params[index].grad.shard for index in self.reduced}
    for index in cleared & before.keys():
        before[index].add_(self.before[index])
        self.params[index].grad.shard = before[index]


@mutant("WideAverage.settled")
def average_that_forgets_what_was_clipped(settled, self):
    """At stage 1 in 16 bits what was clipped is stepped as it was rounded."""
    return settled(self) if self.own.narrow is None else self.own.narrow.to(self.own.wide.dtype)


@mutant("OwnedShards.trained_groups")
def gathered_by_what_requires_gradients(_, self):
    """What has a gradient by hand, and requires none, is stepped by its owner alone."""
    self._trained |= {flat for flat in self.shard_groups if any(param.requires_grad for param in flat.params)}
    return [flat for flat in self.shard_groups if flat in self._trained]


@mutant("OwnedGradients.refuse")
def gradients_of_any_backward_taken_for_averages(refuse, self):
    """At stage 1 a step takes what a backward under no_sync() has left."""
    if self.are_sharded:
        refuse(self)


skipped(
    late_gradient_is_not_reduced="Model.param_reached",
    interrupted_backward_not_forgotten="GradBucket.abandon",
    part_without_its_gradient="OwnedGradients.show",
)
