"""ZeroPlugin: how an Accelerator shards models and optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from zero.integrations.accelerate import deepspeed_keys, fsdp_keys
from zero.integrations.accelerate.keys import STATE_DICT_TYPES, Keys
from zero.shards.partition import Partition

# At which stages an option of the plugin means something. Others may stay where the stage of a script changes.
_STAGES: dict[str, tuple[int, ...]] = {
    "cpu_ram_efficient_loading": (3,),
    "ignored_modules": (3,),
    "mixed_precision_policy": (3,),
    "sharding_strategy": (3,),
    "reduce_bucket_size": (1, 2),
    "reduce_dtype": (2, 3),
    "master_dtype": (1, 2, 3),
}
# Keys for `accelerate launch` itself, on how to start processes, and keys that it passes on to Accelerate.
_LAUNCHERS = {
    *("compute_environment", "distributed_type", "debug", "use_cpu", "num_processes", "num_machines", "machine_rank"),
    *("main_process_ip", "main_process_port", "main_training_function", "rdzv_backend", "same_network", "gpu_ids"),
    *("enable_cpu_affinity", "enable_numa_affinity", "dynamo_config", "dynamo_backend", "mpirun_config"),
    *("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "tpu_name", "tpu_zone", "downcast_bf16", "tpu_vm"),
    *("command_file", "commands"),
}


class ZeroPlugin(SimpleNamespace):
    """How to shard, in Accelerate's names where the meaning is the same.

        accelerator = Accelerator(zero_plugin=ZeroPlugin(stage=3, auto_wrap_policy="TRANSFORMER_BASED_WRAP"))

    stage: 0 (DistributedDataParallel, as Accelerate itself), 1 (OSS), 2 (ShardedDDP) or 3 (FSDP).
    options: the attributes below. All others are handed to OSS at stages 1 and 2, and to FSDP at stage 3, which check
        them as a model and its optimizer are prepared: offload, prefetch, param_init_fn and so on.

    Raises ValueError for options that mean nothing at the stage.
    """

    stage: int
    partition: Partition = "auto"  # as in OSS and FSDP
    sharding_strategy: str = "FULL_SHARD"  # as in FSDP
    shard_size: int | None = None  # ranks in a shard group of a hybrid strategy; by default those of a host
    auto_wrap_policy: Any = None  # as in FSDP; also "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP" or "NO_WRAP"
    transformer_cls_names_to_wrap: tuple[str, ...] | None = None  # by default the model's own `_no_split_modules`
    min_num_params: int | None = None  # of a unit, by SIZE_BASED_WRAP
    as_one_unit: tuple[str, ...] = ()  # names of classes that are units without units inside
    ignored_modules: Iterable[nn.Module] | str = ()  # as in FSDP; also a regular expression for full names
    mixed_precision_policy: Any = None  # FSDP's mixed_precision; "auto": in the dtype of the Accelerator's
    autocast: bool = True  # whether the Accelerator's mixed_precision is autocast
    master_dtype: torch.dtype | None = None  # torch.float32: the model is in 16 bits, and shards of masters are not
    sync_module_states: bool = True  # all ranks start from the weights of rank 0
    activation_checkpointing: bool = False  # of each unit
    cpu_ram_efficient_loading: bool = False  # `from_pretrained` loads on rank 0 only
    reduce_bucket_size: int | None = None  # in elements
    reduce_dtype: torch.dtype | None = None  # in which gradients are sent
    state_dict_type: str = "FULL_STATE_DICT"  # or "SHARDED_STATE_DICT", a zero.checkpoint: what save_state writes
    save_16bit_model: bool = False  # saved weights have the dtype of mixed_precision
    mixed_precision: str | None = None  # the Accelerator's, as the next one
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None  # to this norm, in each step of an optimizer

    def __init__(self, stage: int, **options: Any) -> None:
        given = {name: value for name, value in options.items() if value != getattr(ZeroPlugin, name, None)}
        super().__init__(stage=stage, **given)
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"stage={stage!r} is unknown. Choose 0 (DDP), 1 (OSS), 2 (ShardedDDP) or 3 (FSDP).")
        for name, value in given.items():
            stages = _STAGES.get(name, (0, 1, 2, 3) if hasattr(ZeroPlugin, name) else (1, 2, 3))
            if (name, value) == ("mixed_precision_policy", "auto"):
                stages = (1, 2, 3)
            if stage not in stages:
                raise ValueError(
                    f"{name}={value!r} is an option of stage {' or '.join(map(str, stages))}, but stage is {stage}. "
                    "Leave it out, or take another stage."
                )
        if self.state_dict_type not in STATE_DICT_TYPES:
            known = " or ".join(STATE_DICT_TYPES)
            raise ValueError(f"state_dict_type={self.state_dict_type!r} is not available. Choose {known}.")
        if self.master_dtype not in (None, torch.float32) or (self.master_dtype and self.mixed_precision_policy):
            raise ValueError(
                f"master_dtype={self.master_dtype} is not available with mixed_precision_policy="
                f"{self.mixed_precision_policy}. Choose torch.float32, which decides the dtypes alone, or None."
            )

    @property
    def handed(self) -> dict[str, Any]:
        """The options of OSS or FSDP."""
        return {name: value for name, value in vars(self).items() if name != "stage" and not hasattr(ZeroPlugin, name)}

    def replace(self, **options: Any) -> ZeroPlugin:
        """A plugin with other values of these options; None: their defaults."""
        return ZeroPlugin(**{name: value for name, value in {**vars(self), **options}.items() if value is not None})

    @classmethod
    def from_yaml(cls, path: str | Path) -> ZeroPlugin:
        """The plugin for the `fsdp_config` or `deepspeed_config` of an Accelerate file, and its mixed_precision.

        Every key is applied or refused by name; a warning names the keys without an effect here. Keys for
        `accelerate launch` itself, on how to start processes, are not read. Raises ValueError for what is refused.
        """
        return cls(**_of_yaml(Path(path)))

    @classmethod
    def from_fsdp_plugin(cls, plugin: Any) -> ZeroPlugin:
        """The plugin for Accelerate's FullyShardedDataParallelPlugin. Otherwise as `from_yaml`."""
        return cls(**fsdp_keys.of_plugin(plugin))

    @classmethod
    def from_deepspeed_plugin(cls, plugin: Any) -> ZeroPlugin:
        """The plugin for Accelerate's DeepSpeedPlugin without a configuration of DeepSpeed's. Otherwise as
        `from_yaml`."""
        return cls(**deepspeed_keys.of_plugin(plugin))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ZeroPlugin | None:
        """The plugin for the environment that `accelerate launch` sets; None if it asks for no sharding."""
        found = fsdp_keys.of_environment(environment) or deepspeed_keys.of_environment(environment)
        return cls(**found) if found else None


def _of_yaml(path: Path) -> dict[str, Any]:
    """The fields for one of Accelerate's files, which is read here because the launcher leaves sections of it out: with
    `distributed_type: DEEPSPEED` it stops where DeepSpeed is not installed, and with another it drops that section."""
    import yaml  # a dependency of Accelerate

    given = yaml.safe_load(path.read_text())
    if not isinstance(given, Mapping):
        raise ValueError(f"{path} holds no keys. Pass one of Accelerate's configuration files.")
    keys = Keys(given, str(path))
    keys.refuse(
        "parallelism_config megatron_lm_config fp8_config",
        "shard over the data-parallel ranks only: remove it; for hybrid sharding use fsdp_sharding_strategy: "
        "HYBRID_SHARD.",
    )
    for name in _LAUNCHERS:
        keys.take(name)
    sections = {name: found for name in ("fsdp_config", "deepspeed_config") if (found := keys.take(name))}
    said = keys.take("mixed_precision", default="fp16" if keys.take("fp16") else None)
    said = "no" if said is False else said  # YAML reads `no` as false
    keys.done()
    if len(sections) != 1:
        has = " and ".join(sections) or "neither fsdp_config nor deepspeed_config"
        raise ValueError(f"{path} has {has}. Keep one.")
    [(name, section)] = sections.items()
    found = (fsdp_keys if name == "fsdp_config" else deepspeed_keys).fields(section, f"{path}, {name}")
    return {**found, "mixed_precision": said}
