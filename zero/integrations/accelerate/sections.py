"""Sections of Accelerate's configurations as options of a ZeroPlugin: `fsdp_config` and `deepspeed_config`. Each key is
applied, refused by name, or named by one warning as without an effect here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.utils import str_to_bool
from torch.distributed import fsdp

from zero._torch.telling import warn_user
from zero.fsdp import MixedPrecision
from zero.fsdp.options import of_fsdp1
from zero.offload import CPUOffload, DiskOffload
from zero.wrap.precision import as_precision

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
Reader = Callable[[Any], Any]
"""Converts a value. Raises ValueError for those that are not available."""


def _read(
    title: str, given: Mapping[str, Any], readers: Mapping[str, Reader], names: Mapping[str, str], prefix: str = ""
) -> dict[str, Any]:
    """The values of a section, by the names of their readers. What a configuration leaves open is left out: "auto".

    names: for each other name of a key that of its reader, both without the prefix. Raises ValueError for unknown keys,
    for values that are not available, and for a key that is given under two names with two values.
    """
    found, written_as, idle = dict[str, Any](), dict[str, str](), list[str]()
    for written, value in given.items():
        name = written.removeprefix(prefix)
        name = names.get(name, name)
        if name not in readers:
            raise ValueError(f"{title}: {written} is not known to zero. Remove it, or use an option of ZeroPlugin.")
        if value in (None, "auto", "none", "None", ""):
            continue
        try:
            converted = readers[name](value)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{title}: {written}={value!r} is not available: {error}") from error
        if readers[name] is without_effect:
            idle.append(written)
        elif converted is not None and found.setdefault(name, converted) != converted:
            raise ValueError(f"{title}: {written_as[name]} and {written}={value!r} are two names of one option.")
        written_as[name] = written
    if idle and int(os.environ.get("RANK", 0)) == 0:
        warn_user(f"{title}: {', '.join(idle)}: without an effect here.")
    return found


def without_effect(value: Any) -> None:
    """Of a key that means nothing here."""


def flag(value: Any) -> bool:
    return bool(str_to_bool(str(value)))


def refused(reason: str) -> Reader:
    """Of a key that may switch nothing on."""

    def read(value: Any) -> None:
        if str(value).lower() not in ("false", "0"):
            raise ValueError(reason)

    return read


def count(value: Any) -> int:
    """A whole number, also of "1e8"."""
    if float(value) < 0 or float(value) != int(float(value)):
        raise ValueError("expected a whole number of at least 0")
    return int(float(value))


def listed(value: Any) -> tuple[str, ...]:
    """Names from a list, or from text with commas between them."""
    return tuple(name.strip() for name in (value.split(",") if isinstance(value, str) else value))


def one_of(*known: str, numbered: bool = False) -> Reader:
    """Of one of these names in any case, or of an enum's member. numbered: or of its number, from 1 on."""

    def read(value: Any) -> str:
        name = str(getattr(value, "name", value)).upper().removeprefix("_")
        if numbered and name.isdigit() and 1 <= int(name) <= len(known):
            return known[int(name) - 1]
        if name not in known:
            raise ValueError(f"expected one of {', '.join(known)}{f', or 1 to {len(known)}' * numbered}")
        return name

    return read


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
    found = _read(title, given, FSDP_READERS, FSDP_NAMES, prefix="fsdp_")
    found.pop("version", None)
    # Both versions of FSDP give the sharding strategy by one of two keys, or by both.
    named, reshard = found.pop("sharding_strategy", None), found.pop("reshard_after_forward", None)
    if launched and named is not None:  # the launcher adds FULL_SHARD, and true: the other one is the user's
        named, reshard = (None if named == "FULL_SHARD" else named), (None if reshard == "TRUE" else reshard)
    if named is None or reshard is None:
        found["sharding_strategy"] = named or _RESHARDS.get(reshard, reshard)
    else:
        keeps = named in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
        if named not in ("NO_SHARD", reshard) and (reshard not in _RESHARDS or keeps == (reshard == "TRUE")):
            both = f"fsdp_sharding_strategy={named} and fsdp_reshard_after_forward={reshard}"
            raise ValueError(f"{title}: {both} say different things. Keep one of them.")
        found["sharding_strategy"] = named
    names = ("backward_prefetch", "forward_prefetch", "limit_all_gathers")
    prefetch = {name: found.pop(name) for name in names if name in found}
    if prefetch.get("backward_prefetch") == "NO_PREFETCH":
        prefetch["backward_prefetch"] = None
    found["prefetch"] = of_fsdp1(prefetch)
    if found.get("cpu_ram_efficient_loading"):
        found["sync_module_states"] = True  # other ranks have no values of their own
    return {"stage": 3, **found}


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
    dtypes: dict[str, Any] = {name: DTYPES[one] if isinstance(one, str) else one for name, one in value.items()}
    if dtypes.pop("output_dtype", None) not in (None, dtypes.get("param_dtype")):
        raise ValueError("cast the output of the model in place of output_dtype")
    return MixedPrecision(**dtypes)


FSDP_READERS: dict[str, Reader] = {
    "version": one_of("1", "2"),
    "sharding_strategy": one_of(*_STRATEGIES, numbered=True),
    "reshard_after_forward": one_of("TRUE", "FALSE", *_STRATEGIES),
    "offload": _offload,
    "auto_wrap_policy": lambda value: one_of(*WRAPPING)(value) if isinstance(value, str) else value,
    "transformer_cls_names_to_wrap": listed,
    "min_num_params": count,
    "backward_prefetch": one_of("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", numbered=True),
    "state_dict_type": one_of("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
    "activation_checkpointing_offload": refused("checkpointed inputs stay where they are. Leave it out."),
    "xla": refused("zero does not support torch_xla"),
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
    found = {"stage": 2, **_read(title, given, DEEPSPEED_READERS, DEEPSPEED_NAMES)}
    if found["stage"] < 3:
        for name in ("cpu_ram_efficient_loading", "save_16bit_model", "as_one_unit"):
            found.pop(name, None)
        if found.pop("offload_param_device", "NONE") != "NONE":
            warn_user(f"{title}: offload_param_device is for stage 3, and without an effect at {found['stage']}.")
    # The further of two offloads: shards, their gradients and the optimizer's state are offloaded together.
    given = {name: (found.pop(f"{name}_device", "NONE"), found.pop(f"{name}_nvme_path", None)) for name in _OFFLOADS}
    found["offload"] = CPUOffload(pin_memory=False) if any(one == "CPU" for one, _ in given.values()) else None
    for name, (device, path) in given.items():
        if device == "NVME":
            if path is None:
                raise ValueError(f"{title}: {name}_device nvme needs a folder: set {name}_nvme_path.")
            found["offload"] = DiskOffload(path)
            break
    return found


_OFFLOADS = ("offload_optimizer", "offload_param")
_LAUNCHERS = ("multinode_launcher", "hostfile", "exclusion_filter", "inclusion_filter")
DEEPSPEED_READERS: dict[str, Reader] = {
    **dict.fromkeys(("stage", "gradient_accumulation_steps"), count),
    "gradient_clipping": lambda value: float(value) or None,
    **dict.fromkeys((f"{name}_device" for name in _OFFLOADS), one_of("NONE", "CPU", "NVME")),
    **dict.fromkeys((f"{name}_nvme_path" for name in _OFFLOADS), str),
    **dict.fromkeys(("cpu_ram_efficient_loading", "save_16bit_model"), flag),
    "as_one_unit": listed,
    "deepspeed_config_file": refused(NOT_READ),
    **dict.fromkeys((f"deepspeed_{name}" for name in _LAUNCHERS), without_effect),
}
