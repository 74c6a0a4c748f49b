"""Mutants of parameters: gathered, computed with, written into and released."""

from dataclasses import replace

import torch
import torch.distributed as dist

from mutations import Changed, mutant, skipped


@mutant("ShardGroup.reshard")
def full_buffer_never_freed(reshard, self):
    """After a reshard the full buffer keeps its memory."""
    reshard(self)
    self.full.untyped_storage().resize_(self.full.nbytes)


@mutant("Unit.release")
def units_stay_full_after_forward(_, self, *needs):
    """A unit stays unsharded until its backward, whatever was asked for."""
    self.needed_by.difference_update(needs)


@mutant("Unit.unshard")
def prefetch_never(unshard, self, *, ahead=False, **how):
    """No all-gather is launched ahead."""
    if not ahead:
        unshard(self, **how)


@mutant("options.as_prefetch")
def prefetch_option_ignored(as_prefetch, given):
    """Every FSDP prefetches as by default."""
    return as_prefetch(None)


@mutant("FSDP.__init__")
def reshard_after_forward_ignored(init, self, module, *given, reshard_after_forward=True, **more):
    """Every FSDP reshards after forward."""
    init(self, module, *given, **more)


@mutant("Comm.gather")
def swapped_owners(gather, self, full, bounds, *how):
    """Of two ranks with shards of one length each gets its own elements for those of the other."""

    def swapped(result):
        full.copy_(full.roll(bounds[1]))
        return result

    handle = gather(self, full, bounds, *how)
    return Changed(handle, swapped) if self.world == 2 and bounds[2] == 2 * bounds[1] > 0 else handle


@mutant("ShardGroup.__init__")
def param_dtype_ignored(init, self, params, names, layout, placement, options, *label, **more):
    """Parameters are computed with in the dtype of the shards."""
    init(self, params, names, layout, placement, replace(options, compute_dtype=None), *label, **more)


@mutant("MixedPrecision.cast_inputs")
def inputs_not_cast(_, self, module, inputs, *, root):
    """Mixed precision does not cast inputs."""
    return inputs


@mutant("MixedPrecision.dtype_of")
def modules_kept_in_float32_compute_in_16_bits(_, self, module):
    """keep_fp32 changes no parameter's dtype of computing."""
    return self.param_dtype


@mutant("ShardGroup.end_summon")
def shard_not_written_back(end_summon, self, *, keep):
    """What was written into full parameters within summon_full_params is lost."""
    end_summon(self, keep=False)


@mutant("FSDP.__init__")
def ranks_start_from_own_values_at_stage_3(init, self, module, *given, sync_module_states=True, **more):
    """An FSDP does not start from the values of rank 0."""
    init(self, module, *given, sync_module_states=False, **more)


@mutant("ShardedDDP.__init__")
def ranks_start_from_own_values_at_stage_2(init, self, module, *given, sync_module_states=True, **more):
    """A ShardedDDP does not start from the values of rank 0."""
    init(self, module, *given, sync_module_states=False, **more)


@mutant("Comm.broadcast")
def broadcast_from_the_wrong_rank(broadcast, self, tensors, source=0):
    """Buffers and first values are those of the last rank."""
    broadcast(self, tensors, source or self.world - 1)


@mutant("Comm.scatter")
def scattered_in_reverse(scatter, self, read, bounds, into):
    """At stage 3 shards start from their own values in reverse order."""
    scatter(self, read, bounds, into)
    into.copy_(into.flip(0))


@mutant("OSS.__init__", "ShardedDDP.__init__", "FSDP.__init__")
def random_numbers_that_depend_on_the_rank(init, self, *given, **named):
    """Constructors draw a random number on one rank, so that dropout differs from then on."""
    init(self, *given, **named)
    if dist.is_initialized() and dist.get_rank() == 1:
        torch.rand(1)


@mutant("answers.own_elements")
def shards_combined_with_full_tensors(_, value, own, cut):
    """Of a full tensor beside a shard the first elements are taken, not this rank's."""
    return value.reshape(-1)[: own.numel()].reshape(own.shape) if value.numel() >= own.numel() else value


skipped(
    dropped_forward_leaves_its_unit_full="FSDP.reshard",
    buffers_saved_in_the_dtype_of_computing="Uncast.__call__",
    writes_in_forward_lost="ShardGroup._take_over",
    writes_through_data_lost="sharded_parameter.note_data",
    written_shard_not_noticed="OwnedShards.written_between_steps",
    moved_parameters_not_noticed="ShardGroup.moved",
    data_given_by_a_step_lost="shard_group.take_back",
    buffers_never_broadcast="BufferSync.before_forward",
    parameters_at_rest_are_plain="sharded_parameter.rest",
    state_between_steps_is_plain="sharded_parameter.mark_states",
)
