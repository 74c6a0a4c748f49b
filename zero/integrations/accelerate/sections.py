"""Sections of Accelerate's configurations as options of a ZeroPlugin: `fsdp_config` and `deepspeed_config`, what the
launcher makes of them in the environment, and FSDP's plugin."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from zero._torch.telling import warn_user
from zero.fsdp import MixedPrecision
from zero.fsdp.options import of_fsdp1
from zero.integrations.accelerate import keys
from zero.integrations.accelerate.keys import flag, one_of
from zero.offload import CPUOffload, DiskOffload
from zero.wrap.precision import as_precision

WRAPPING = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
FSDP_NAMES = {
    "backward_prefetch_policy": "backward_prefetch",  # an old name, which Accelerate 1.15 drops
    "offload_params": "offload",
    "cpu_offload": "offload",
    "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
    "transformer_cls_to_wrap": "transformer_cls_names_to_wrap",
    "mixed_precision_policy": "precision",
}
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_RESHARDS = {None: "FULL_SHARD", "TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}


def of_fsdp(given: Mapping[str, Any], title: str = "fsdp_config", *, launched: bool = False) -> dict[str, Any]:
    """The options of a ZeroPlugin that a section asks for.

    given: keys with or without `fsdp_`. launched: whether `accelerate launch` has added its defaults.
    Raises ValueError for what is not available.
    """
    found = keys.read(title, given, FSDP_READERS, FSDP_NAMES, prefix="fsdp_")
    found.pop("version", None)
    found["sharding_strategy"] = _strategy(found, title, launched=launched)
    found["prefetch"] = _prefetch(found)
    if found.get("cpu_ram_efficient_loading"):
        found["sync_module_states"] = True  # other ranks have no values of their own
    return {"stage": 3, **found}


def of_plugin(plugin: Any) -> dict[str, Any]:
    """The same for a FullyShardedDataParallelPlugin."""
    given = {one.name: getattr(plugin, one.name) for one in dataclasses.fields(plugin)}
    for name in ("state_dict_config", "optim_state_dict_config"):  # how FSDP puts full state together
        del given[name]
    by_name = {transformer_auto_wrap_policy: "TRANSFORMER_BASED_WRAP", size_based_auto_wrap_policy: "SIZE_BASED_WRAP"}
    policy = given["auto_wrap_policy"]
    given["auto_wrap_policy"] = "NO_WRAP" if policy is None else by_name.get(policy, policy)
    given["backward_prefetch"] = given["backward_prefetch"] or "NO_PREFETCH"
    if getattr(given["param_init_fn"], "__module__", "").startswith("accelerate."):
        given["param_init_fn"] = None  # the plugin's default, which allocates memory without initialising it
    return of_fsdp(given, "FullyShardedDataParallelPlugin")


def _strategy(found: dict[str, Any], title: str, *, launched: bool) -> str:
    """The sharding strategy, which both versions of FSDP give by one of two keys, or by both."""
    named, reshard = found.pop("sharding_strategy", None), found.pop("reshard_after_forward", None)
    if launched and named is not None:  # the launcher adds FULL_SHARD, and true: the other one is the user's
        named, reshard = (None if named == "FULL_SHARD" else named), (None if reshard == "TRUE" else reshard)
    if named is None or reshard is None:
        return str(named or _RESHARDS.get(reshard, reshard))
    keeps = named in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    if named not in ("NO_SHARD", reshard) and (reshard not in _RESHARDS or keeps == (reshard == "TRUE")):
        both = f"fsdp_sharding_strategy={named} and fsdp_reshard_after_forward={reshard}"
        raise ValueError(f"{title}: {both} say different things. Keep one of them.")
    return str(named)


def _prefetch(found: dict[str, Any]) -> int | None:
    """None where nothing is said of it."""
    names = ("backward_prefetch", "forward_prefetch", "limit_all_gathers")
    given = {name: found.pop(name) for name in names if name in found}
    if given.get("backward_prefetch") == "NO_PREFETCH":
        given["backward_prefetch"] = None
    return of_fsdp1(given)


def _offload(value: Any) -> CPUOffload | None:
    if isinstance(value, fsdp.OffloadPolicy):
        return CPUOffload(pin_memory=value.pin_memory) if isinstance(value, fsdp.CPUOffloadPolicy) else None
    return CPUOffload() if flag(getattr(value, "offload_params", value)) else None


def _policy(value: Any) -> MixedPrecision:
    """Of a MixedPrecision of zero's or PyTorch's, of FSDP2's policy, of "bf16" and its like, or of a dict of dtypes."""
    if isinstance(value, str):
        value = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), value)
    value = vars(value) if isinstance(value, fsdp.MixedPrecisionPolicy) else value
    if not isinstance(value, Mapping):
        return as_precision(value)
    dtypes: dict[str, Any] = {name: keys.DTYPES[one] if isinstance(one, str) else one for name, one in value.items()}
    if dtypes.pop("output_dtype", None) not in (None, dtypes.get("param_dtype")):
        raise ValueError("cast the output of the model in place of output_dtype")
    return MixedPrecision(**dtypes)


FSDP_READERS: dict[str, keys.Reader] = {
    "version": one_of("1", "2"),
    "sharding_strategy": one_of(*_STRATEGIES, numbered=True),
    "reshard_after_forward": one_of("TRUE", "FALSE", *_STRATEGIES),
    "offload": _offload,
    "auto_wrap_policy": lambda value: one_of(*WRAPPING)(value) if isinstance(value, str) else value,
    "transformer_cls_names_to_wrap": keys.listed,
    "min_num_params": keys.count,
    "backward_prefetch": one_of("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", numbered=True),
    "state_dict_type": one_of("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
    "activation_checkpointing_offload": keys.refused("checkpointed inputs stay where they are. Leave it out."),
    "xla": keys.refused("zero does not support torch_xla"),
    "precision": _policy,
    **dict.fromkeys(("forward_prefetch", "limit_all_gathers", "use_orig_params", "sync_module_states"), flag),
    **dict.fromkeys(("cpu_ram_efficient_loading", "activation_checkpointing"), flag),
    **dict.fromkeys(("ignored_modules", "param_init_fn"), lambda value: value),
}
"""By the names of a ZeroPlugin's options, and of what they are made of."""

NOT_READ = (
    "DeepSpeed's own configuration is not read. Pass ZeroPlugin(stage=...) with options instead: docs/integrations.md, "
    "Configurations, names them by key."
)
DEEPSPEED_NAMES = {
    "zero_stage": "stage",
    "zero3_init_flag": "cpu_ram_efficient_loading",
    "zero3_init": "cpu_ram_efficient_loading",
    "zero3_save_16bit_model": "save_16bit_model",
    "deepspeed_moe_layer_cls_names": "as_one_unit",
}


def of_deepspeed(given: Mapping[str, Any], title: str = "deepspeed_config") -> dict[str, Any]:
    """The options of a ZeroPlugin that a section asks for. Raises ValueError for what is not available."""
    found = {"stage": 2, **keys.read(title, given, DEEPSPEED_READERS, DEEPSPEED_NAMES)}
    if found["stage"] < 3:
        for name in ("cpu_ram_efficient_loading", "save_16bit_model", "as_one_unit"):
            found.pop(name, None)
        if found.pop("offload_param_device", "NONE") != "NONE":
            warn_user(f"{title}: offload_param_device is for stage 3, and without an effect at {found['stage']}.")
    found["offload"] = _offloads(found, title)
    return found


def _offloads(found: dict[str, Any], title: str) -> CPUOffload | DiskOffload | None:
    """The further of the two offloads: shards, their gradients and the optimizer's state are offloaded together."""
    given = {name: (found.pop(f"{name}_device", "NONE"), found.pop(f"{name}_nvme_path", None)) for name in _OFFLOADS}
    for name, (device, path) in given.items():
        if device == "NVME" and path is None:
            raise ValueError(f"{title}: {name}_device nvme needs a folder: set {name}_nvme_path.")
        if device == "NVME":
            return DiskOffload(path)
    return CPUOffload(pin_memory=False) if any(device == "CPU" for device, _ in given.values()) else None


_OFFLOADS = ("offload_optimizer", "offload_param")
_LAUNCHERS = ("multinode_launcher", "hostfile", "exclusion_filter", "inclusion_filter")
DEEPSPEED_READERS: dict[str, keys.Reader] = {
    **dict.fromkeys(("stage", "gradient_accumulation_steps"), keys.count),
    "gradient_clipping": lambda value: float(value) or None,
    **dict.fromkeys((f"{name}_device" for name in _OFFLOADS), one_of("NONE", "CPU", "NVME")),
    **dict.fromkeys((f"{name}_nvme_path" for name in _OFFLOADS), str),
    **dict.fromkeys(("cpu_ram_efficient_loading", "save_16bit_model"), flag),
    "as_one_unit": keys.listed,
    "deepspeed_config_file": keys.refused(NOT_READ),
    **dict.fromkeys((f"deepspeed_{name}" for name in _LAUNCHERS), keys.without_effect),
}


def of_environment(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """The options for what `accelerate launch` puts into the environment; None if it asks for no sharding."""
    if environment.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        given = _named(environment, "FSDP_", {**FSDP_READERS, **FSDP_NAMES})
        return of_fsdp(given, "FSDP_... in the environment", launched=True)
    if environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        names = {**DEEPSPEED_READERS, **DEEPSPEED_NAMES}
        given = _named(environment, "ACCELERATE_", names) | _named(environment, "ACCELERATE_DEEPSPEED_", names)
        return of_deepspeed(given, "ACCELERATE_DEEPSPEED_... in the environment")
    return None


def _named(environment: Mapping[str, str], prefix: str, names: Iterable[str]) -> dict[str, str]:
    variables = {f"{prefix}{name.upper()}": name for name in names}
    return {name: environment[variable] for variable, name in variables.items() if variable in environment}
