"""DeepSpeed's words in Accelerate's configurations: `deepspeed_config`, what the launcher makes of it, the plugin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zero._torch import warn_user
from zero.integrations.accelerate.keys import Keys, count, flag, names, one_of
from zero.offload import CPUOffload, DiskOffload

NOT_READ = (
    "DeepSpeed's own configuration is not read. Pass ZeroPlugin(stage=...) with options instead: docs/integrations.md, "
    "Configurations, names them by key."
)
_LAUNCHERS = (
    "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter "
    "deepspeed_config_file"
)


def fields(given: Mapping[str, Any], title: str = "deepspeed_config") -> dict[str, Any]:
    """The fields of a ZeroPlugin for Accelerate's own keys, as in its YAML. Raises ValueError for what is not
    available."""
    keys = Keys(given, title)
    keys.refuse("deepspeed_config_file", NOT_READ)
    keys.without_effect(_LAUNCHERS, "accelerate launch or torchrun starts the processes")
    stage, init_flag = keys.take("zero_stage", count, 2), keys.take("zero3_init_flag", flag, False)
    if init_flag and stage != 3:
        warn_user(f"{title}: zero3_init_flag is for stage 3, and without an effect at {stage}.")
    found = {
        "stage": stage,
        "offload": _offload(keys, stage),
        "cpu_ram_efficient_loading": init_flag and stage == 3,
        "as_one_unit": keys.take("deepspeed_moe_layer_cls_names", names, ()),
        "save_16bit_model": keys.take("zero3_save_16bit_model", flag, False) and stage == 3,
        "master_dtype": torch.float32 if stage else None,
        "gradient_clipping": keys.take("gradient_clipping", float) or None,
        "gradient_accumulation_steps": keys.take("gradient_accumulation_steps", count),
    }
    keys.done()
    return found


LAUNCHED = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "offload_optimizer_nvme_path",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "offload_param_nvme_path",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "zero3_init_flag",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "zero3_save_16bit_model",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config_file",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "deepspeed_moe_layer_cls_names",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
}
"""The variables that `accelerate launch` 1.15 sets, and the keys that its plugin reads from them."""


def of_environment(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """The same for the environment that `accelerate launch` sets; None if it asks for no DeepSpeed."""
    if environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return None
    given = {name: environment[written] for written, name in LAUNCHED.items() if written in environment}
    return fields(given, "ACCELERATE_DEEPSPEED_... in the environment")


def of_plugin(plugin: Any) -> dict[str, Any]:
    """The same for a DeepSpeedPlugin, which has put its own arguments into a configuration of DeepSpeed's."""
    given = {name: value for name, value in plugin.deepspeed_config.items() if value not in ("auto", float("inf"))}
    zero = dict(given.pop("zero_optimization", {}))
    flat = {name: given.pop(name, None) for name in ("gradient_accumulation_steps", "gradient_clipping")}
    flat["zero_stage"] = zero.pop("stage", None)
    flat["zero3_save_16bit_model"] = zero.pop("stage3_gather_16bit_weights_on_model_save", None)
    for name in ("offload_optimizer", "offload_param"):
        section = dict(zero.pop(name, None) or {})
        flat |= {f"{name}_{key}": section.pop(key, None) for key in ("device", "nvme_path")}
        zero |= section
    if others := [*given, *zero]:
        raise ValueError(f"DeepSpeedPlugin: {', '.join(others)}: {NOT_READ}")
    flat |= {
        "zero3_init_flag": plugin.zero3_init_flag,
        "deepspeed_moe_layer_cls_names": plugin.transformer_moe_cls_names,
    }
    return fields(flat, "DeepSpeedPlugin")


def _offload(keys: Keys, stage: int) -> CPUOffload | DiskOffload | None:
    """The further of the two offloads: shards, their gradients and the optimizer's state are offloaded together."""
    device, found = one_of("NONE", "CPU", "NVME"), {}
    for name in ("offload_optimizer", "offload_param"):
        found[name] = keys.take(f"{name}_device", device, "NONE"), keys.take(f"{name}_nvme_path", str)
    if stage < 3 and found["offload_param"][0] != "NONE":
        warn_user(f"{keys.name}: offload_param_device is for stage 3, and without an effect at {stage}.")
        del found["offload_param"]
    for name, (where, path) in found.items():
        if where == "NVME":
            if path is None:
                raise ValueError(f"{keys.name}: {name}_device nvme needs a folder: set {name}_nvme_path.")
            return DiskOffload(path)
    return CPUOffload(pin_memory=False) if any(where == "CPU" for where, _ in found.values()) else None
