"""FSDP's words in Accelerate's configurations: `fsdp_config`, what the launcher makes of it, and the plugin."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from zero.fsdp import MixedPrecision
from zero.fsdp.prefetch import of_fsdp1
from zero.fsdp.torch_options import as_precision
from zero.integrations.accelerate.keys import DTYPES, STATE_DICT_TYPES, WRAPPING, Keys, count, flag, names, one_of
from zero.offload import CPUOffload

OTHER_NAMES = {
    "backward_prefetch_policy": "backward_prefetch",  # an old name, which Accelerate 1.15 drops
    "cpu_offload": "offload_params",
    "transformer_cls_to_wrap": "transformer_layer_cls_to_wrap",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
}
_PREFIX = "fsdp_"
_STRATEGY = one_of("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", numbered=True)


def fields(given: Mapping[str, Any], section: str = "fsdp_config", *, launched: bool = False) -> dict[str, Any]:
    """The fields of a ZeroPlugin that a section asks for.

    given: with or without the prefix `fsdp_`. launched: whether the values come from `accelerate launch`, which adds
    its defaults. Raises ValueError for values that are not available.
    """
    others = {
        written: OTHER_NAMES.get(written.removeprefix(_PREFIX), written.removeprefix(_PREFIX)) for written in given
    }
    keys = Keys(given, section, others)
    version = keys.take("version", _version, 1)
    found: dict[str, Any] = {"stage": 3, "sharding_strategy": _strategy(keys, launched=launched)}
    found["offload"] = keys.take("offload_params", _offload)
    found |= _wrapping(keys, launched=launched)
    found["prefetch"] = _prefetch(keys)
    found["state_dict_type"] = keys.take("state_dict_type", one_of(*STATE_DICT_TYPES), "FULL_STATE_DICT")
    keys.take("use_orig_params", flag)  # always so: parameters stay the same objects
    found["sync_module_states"] = keys.take("sync_module_states", flag, True)
    found["cpu_ram_efficient_loading"] = keys.take("cpu_ram_efficient_loading", flag, False)
    found["activation_checkpointing"] = keys.take("activation_checkpointing", flag, False)
    keys.refuse("activation_checkpointing_offload", "checkpointed inputs stay where they are. Leave it out.")
    found["ignored_modules"] = keys.take("ignored_modules", lambda one: one if isinstance(one, str) else tuple(one), ())
    found["mixed_precision_policy"] = keys.take("mixed_precision_policy", as_policy, "auto")
    found["autocast"] = version == 1  # beside the policy; the second version has no autocast
    found["param_init_fn"] = keys.take("param_init_fn")
    if found["cpu_ram_efficient_loading"] and not found["sync_module_states"]:
        raise ValueError(
            f"{section}: fsdp_cpu_ram_efficient_loading=true with fsdp_sync_module_states=false: the other ranks would "
            "train with weights that were never loaded. Set fsdp_sync_module_states to true."
        )
    keys.done()
    return found


def of_environment(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """The same for the environment that `accelerate launch` sets; None if it asks for no FSDP."""
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    given = {name: environment[written] for name in LAUNCHED if (written := f"FSDP_{name.upper()}") in environment}
    return fields(given, "FSDP_... in the environment", launched=True)


LAUNCHED = (
    *("version", "sharding_strategy", "reshard_after_forward", "offload_params", "min_num_params", "auto_wrap_policy"),
    *("transformer_cls_to_wrap", "backward_prefetch", "state_dict_type", "forward_prefetch", "use_orig_params"),
    *("cpu_ram_efficient_loading", "sync_module_states", "activation_checkpointing"),
    *("activation_checkpointing_offload", "ignored_modules"),
)
"""The keys that `accelerate launch` 1.15 sets in the environment."""


def of_plugin(plugin: Any) -> dict[str, Any]:
    """The same for a FullyShardedDataParallelPlugin."""
    given = {one.name: getattr(plugin, one.name) for one in dataclasses.fields(plugin)}
    policy = given.pop("auto_wrap_policy")
    by_name = {transformer_auto_wrap_policy: "TRANSFORMER_BASED_WRAP", size_based_auto_wrap_policy: "SIZE_BASED_WRAP"}
    given["auto_wrap_policy"] = "NO_WRAP" if policy is None else by_name.get(policy, policy)
    for name in ("state_dict_config", "optim_state_dict_config"):
        config = given.pop(name)
        if config is not None and not getattr(config, "offload_to_cpu", True):
            raise ValueError(
                f"FullyShardedDataParallelPlugin: {name}={config!r} is not available: full state dicts are put "
                "together in the memory of the CPU. Leave it out."
            )
    if given["param_init_fn"] is not None and given["param_init_fn"].__qualname__.startswith(type(plugin).__qualname__):
        given["param_init_fn"] = None  # the plugin's default, which allocates memory without initialising it
    if given["backward_prefetch"] is None:
        given["backward_prefetch"] = "NO_PREFETCH"
    return fields(given, "FullyShardedDataParallelPlugin")


def _version(value: Any) -> int:
    if count(value) not in (1, 2):
        raise ValueError("expected 1 or 2")
    return count(value)


def _strategy(keys: Keys, *, launched: bool) -> str:
    """The sharding strategy, which both versions of FSDP give by one of two keys, or by both."""
    named = keys.take("sharding_strategy", _STRATEGY)
    reshard = keys.take("reshard_after_forward", _reshard)
    if launched and isinstance(reshard, str) and named == "FULL_SHARD":
        named = None  # the launcher's default, which would win over the value in the file
    if launched and reshard is True and named is not None:
        reshard = None
    if isinstance(reshard, str):
        named, other = named or reshard, reshard
        if named != other:
            raise ValueError(_TWO_STRATEGIES.format(keys.title("sharding_strategy"), named, other))
        return named
    if named is None:
        return "SHARD_GRAD_OP" if reshard is False else "FULL_SHARD"
    keeps = named in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    if launched and reshard is False and named == "FULL_SHARD":
        return "SHARD_GRAD_OP"
    if reshard is not None and named != "NO_SHARD" and keeps is reshard:
        raise ValueError(_TWO_STRATEGIES.format(keys.title("sharding_strategy"), named, reshard))
    return str(named)


_TWO_STRATEGIES = "{}={} and fsdp_reshard_after_forward={} say different things. Keep one of them."


def _reshard(value: Any) -> bool | str:
    try:
        return flag(value)
    except ValueError:
        return _STRATEGY(value)


def _offload(value: Any) -> CPUOffload | None:
    if isinstance(value, fsdp.CPUOffload):
        return CPUOffload() if value.offload_params else None
    if isinstance(value, fsdp.CPUOffloadPolicy):
        return CPUOffload(pin_memory=value.pin_memory)
    if isinstance(value, fsdp.OffloadPolicy):
        return None
    return CPUOffload() if flag(value) else None


def _wrapping(keys: Keys, *, launched: bool) -> dict[str, Any]:
    known = one_of(*WRAPPING)
    policy = keys.take("auto_wrap_policy", lambda value: known(value) if isinstance(value, str) else value)
    found = {"auto_wrap_policy": policy}
    if policy == "TRANSFORMER_BASED_WRAP":
        found["transformer_cls_names_to_wrap"] = keys.take("transformer_layer_cls_to_wrap", names) or None
    else:
        keys.without_effect("transformer_layer_cls_to_wrap", "TRANSFORMER_BASED_WRAP reads it")
    if policy == "SIZE_BASED_WRAP":
        found["min_num_params"] = keys.take("min_num_params", count, 0)
    elif launched or not keys.says("min_num_params"):
        keys.take("min_num_params", count)  # the launcher always writes one, and the Trainer a 0
    else:
        keys.without_effect("min_num_params", "SIZE_BASED_WRAP reads it")
    return found


def _prefetch(keys: Keys) -> int | None:
    """None where nothing is said of it."""
    known = one_of("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", numbered=True)
    backward = keys.take("backward_prefetch", known, "auto")
    keys.take("forward_prefetch", flag, False)  # a number of units in flight holds for forward and backward
    given: dict[str, Any] = {"limit_all_gathers": keys.take("limit_all_gathers", flag, True)}
    if backward != "auto":
        given["backward_prefetch"] = None if backward == "NO_PREFETCH" else backward
    return of_fsdp1(given)


def as_policy(value: Any) -> MixedPrecision:
    """Of a MixedPrecision of zero's or PyTorch's, of FSDP2's policy, of "bf16" and its like, or of a dict of dtypes."""
    if isinstance(value, str):
        value = {"param_dtype": value, "reduce_dtype": value, "buffer_dtype": value}
    if isinstance(value, fsdp.MixedPrecisionPolicy):
        value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        given: dict[str, Any] = {name: _dtype(one) if name.endswith("_dtype") else one for name, one in value.items()}
        output = given.pop("output_dtype", None)
        if output not in (None, given.get("param_dtype")):
            raise ValueError(f"output_dtype={output} is not available: cast the output of the model")
        return MixedPrecision(**given)
    return as_precision(value)


def _dtype(value: Any) -> torch.dtype | None:
    return value if value is None or isinstance(value, torch.dtype) else DTYPES[value]
