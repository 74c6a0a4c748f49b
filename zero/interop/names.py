"""Names that PyTorch's FSDP and FairScale have and zero does not: the error of each says what to write instead.

The pages docs/from_fsdp.md and docs/from_fairscale.md show the same tables.
"""

from __future__ import annotations

from typing import Any, NoReturn

from zero.fsdp import FSDP
from zero.shards.arguments import instead_of, names_of_others

_FULL = (
    "zero.full_state_dict(model, to=0) gathers full weights, zero.checkpoint.save(path, model, optimizer) writes shards"
)
_STATE = "zero.full_optimizer_state_dict(model, optimizer, to=0)"
_LOAD = "zero.load_full_optimizer_state_dict(model, optimizer, state) takes the full state and cuts it"
_NO_SYNC = "run forward and backward within zero.no_sync(model)"
_ORDER = "prefetch=zero.SPEED_FIRST of FSDP; the order of units is learnt from the last step"
_OFFLOAD = "offload=zero.CPUOffload() keeps shards, gradients and optimizer state on the CPU"
_AVERAGED = "nothing, as gradients are averaged; for another factor scale the loss"
_FROZEN = "nothing, as the next forward sees which parameters are frozen"

FSDP1 = {
    "state_dict_type": _FULL,
    "set_state_dict_type": _FULL,
    "get_state_dict_type": _FULL,
    "full_optim_state_dict": _STATE,
    "sharded_optim_state_dict": "zero.checkpoint.save(path, model, optimizer)",
    "optim_state_dict_to_load": _LOAD,
    "shard_full_optim_state_dict": _LOAD,
    "scatter_full_optim_state_dict": _LOAD,
    "flatten_sharded_optim_state_dict": _LOAD,
    "rekey_optim_state_dict": _LOAD,
    "fsdp_modules": "nothing, as one FSDP has all units, and modules inside it are the plain ones",
    "register_comm_hook": "mixed_precision=zero.MixedPrecision(reduce_dtype=...) says how gradients are sent",
}
"""Attributes of PyTorch's FSDP1, and what to write instead. Users ask the class or an object for them."""

FSDP2 = {
    "set_requires_gradient_sync": _NO_SYNC,
    "set_is_last_backward": _NO_SYNC,
    "set_requires_all_reduce": _NO_SYNC,
    "set_reshard_after_forward": "reshard_after_forward= of FSDP",
    "set_reshard_after_backward": "nothing, as units are resharded after backward",
    "set_modules_to_forward_prefetch": _ORDER,
    "set_modules_to_backward_prefetch": _ORDER,
    "set_gradient_divide_factor": _AVERAGED,
    "set_reduce_scatter_divide_factor": _AVERAGED,
    "unshard": "run the code within model.summon_full_params()",
}
"""Methods of modules that fully_shard has wrapped."""

FSDP2_OPTIONS = {
    "mp_policy": "mixed_precision= takes the same object",
    "mesh": "device_mesh=",
    "offload_policy": "offload= takes the same object, or zero.CPUOffload()",
    "ignored_params": "ignored_parameters=",
    "shard_placement_fn": "partition='even' or 'whole' says how flat buffers are cut",
}
"""Options of fully_shard."""

FAIRSCALE_FSDP = {
    "gather_full_optim_state_dict": _STATE,
    "get_shard_from_optim_state_dict": _LOAD,
    "local_state_dict": "zero.checkpoint.save(path, model)",
    "load_local_state_dict": "zero.checkpoint.load(path, model)",
}
"""Methods of FairScale's FullyShardedDataParallel."""

FAIRSCALE_OPTIONS = {
    "flatten_parameters": "nothing, as parameters are in flat buffers, and stay the same objects",
    "move_params_to_cpu": _OFFLOAD,
    "move_grads_to_cpu": _OFFLOAD,
    "compute_dtype": "mixed_precision=zero.MixedPrecision(param_dtype=...)",
    "buffer_dtype": "mixed_precision=zero.MixedPrecision(buffer_dtype=...); buffers stay in their dtype by default",
    "fp32_reduce_scatter": "mixed_precision=zero.MixedPrecision(reduce_dtype=torch.float32); sums always are",
    "force_input_to_fp32": "mixed_precision=zero.MixedPrecision(keep_fp32=(...)) beside param_dtype",
    "offload_config": "offload=zero.DiskOffload(path)",
    "clear_autocast_cache": "nothing, as casts of earlier steps are dropped when a forward begins after backward",
    "process_group_reduce_scatter": "nothing, as one group serves both",
    "disable_reshard_on_root": "nothing, as the root unit stays unsharded from forward to backward",
    "bucket_cap_mb": "nothing, as the gradients of one unit are reduced together",
    "compute_device": "nothing, as the parameters are computed with where they are",
    "no_broadcast_optim_state": "nothing, as zero.full_optimizer_state_dict(model, optimizer, to=0) sends to one rank",
    "state_dict_device": "zero.full_state_dict(model, device='cpu')",
    "state_dict_on_rank_0_only": "zero.full_state_dict(model, to=0)",
    "gradient_predivide_factor": _AVERAGED,
    "verbose": "ZERO_LOG=info in the environment",
}
"""Its options."""

FAIRSCALE_SDP = {"refresh_trainable": _FROZEN}
"""Methods of FairScale's ShardedDataParallel and OSS."""

FAIRSCALE_SDP_OPTIONS = {"auto_refresh_trainable": _FROZEN, "warn_on_trainable_params_changed": _FROZEN}
"""Options of its ShardedDataParallel."""

FAIRSCALE_OSS_OPTIONS = {
    "broadcast_buffer_size": "nothing, as a bucket is sent as a whole; reduce_buffer_size= of ShardedDDP sets its size",
    "force_broadcast_object": "nothing, as state is gathered as tensors",
}
"""Options of its OSS."""

JOIN = {
    "join_hook": "`with zero.join(model, optimizer):` in place of torch's Join, or equally many batches on every rank "
    "(DistributedSampler gives these, drop_last=True drops the rest)"
}
"""What torch's Join asks every object for, on every rank before it sends anything."""

names_of_others["FSDP"] = FSDP1 | FSDP2 | FSDP2_OPTIONS | FAIRSCALE_FSDP | FAIRSCALE_OPTIONS | JOIN
names_of_others["ShardedDDP"] = FAIRSCALE_SDP | FAIRSCALE_SDP_OPTIONS | JOIN
names_of_others["OSS"] = FAIRSCALE_SDP | FAIRSCALE_OSS_OPTIONS | JOIN


class OfTheClass:
    """Stands for a method that users call on the class. It raises AttributeError, as a name that is not there does.

    help() and dir() show it: only a metaclass could hide it, which would conflict with those of users' subclasses.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.__doc__ = f"Raises AttributeError. Instead: {FSDP1[name]}."

    def __get__(self, instance: Any, owner: type) -> NoReturn:
        raise AttributeError(f"FSDP has no {self._name}.{instead_of(self._name, of='FSDP')}", name=self._name)


for _name in FSDP1:
    setattr(FSDP, _name, OfTheClass(_name))
