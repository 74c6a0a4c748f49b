"""ZeroPlugin: how an Accelerator shards models and optimizers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero.fsdp import MixedPrecision, Prefetch
from zero.fsdp.options import as_strategy
from zero.fsdp.prefetch import as_prefetch
from zero.fsdp.torch_options import as_precision
from zero.integrations.accelerate import deepspeed_keys, fsdp_keys
from zero.integrations.accelerate.keys import STATE_DICT_TYPES, WRAPPING, Keys
from zero.integrations.accelerate.sections import Section
from zero.offload import CPUOffload, DiskOffload, take_offload
from zero.shards.partition import Partition, partition_problem

_OF_FSDP = "mixed_precision_policy", "cpu_ram_efficient_loading", "param_init_fn", "ignored_modules"
# Keys for `accelerate launch` itself, on how to start processes, and keys that it passes on to Accelerate.
_LAUNCHERS = {
    *("compute_environment", "distributed_type", "debug", "use_cpu", "num_processes", "num_machines", "machine_rank"),
    *("main_process_ip", "main_process_port", "main_training_function", "rdzv_backend", "same_network", "gpu_ids"),
    *("enable_cpu_affinity", "enable_numa_affinity", "dynamo_config", "dynamo_backend", "mpirun_config"),
    *("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "tpu_name", "tpu_zone", "downcast_bf16", "tpu_vm"),
    *("command_file", "commands"),
}


@dataclass(frozen=True)
class ZeroPlugin:
    """How to shard, in Accelerate's names where the meaning is the same.

        accelerator = Accelerator(zero_plugin=ZeroPlugin(stage=3, auto_wrap_policy="TRANSFORMER_BASED_WRAP"))

    stage: 0 (DistributedDataParallel, as Accelerate itself), 1 (OSS), 2 (ShardedDDP) or 3 (FSDP).
    sharding_strategy: as in FSDP.
    shard_size: the number of ranks in a shard group of a hybrid strategy, by default those of a host.
    auto_wrap_policy: as in FSDP; also "TRANSFORMER_BASED_WRAP": the classes named by transformer_cls_names_to_wrap, by
        default the model's own `_no_split_modules`; "SIZE_BASED_WRAP": modules of min_num_params elements or more;
        "NO_WRAP": one unit.
    as_one_unit: names of classes that become units without units inside, such as mixtures of experts.
    ignored_modules: as in FSDP; also a regular expression that matches a module's full name.
    partition, prefetch, offload, param_init_fn: as in FSDP; partition and offload also as in OSS.
    mixed_precision_policy: FSDP's. Without one the Accelerator's mixed_precision is autocast, as without sharding.
    master_dtype: torch.float32: parameters and buffers are in the 16 bits of mixed_precision instead, and float32
        masters in shards, as with DeepSpeed, whose configurations set this. Batch normalisation stays in float32.
    sync_module_states: all ranks start from the weights of rank 0.
    activation_checkpointing: recompute each unit's activations in backward.
    cpu_ram_efficient_loading: `from_pretrained` of transformers loads on rank 0 only; stage 3.
    reduce_bucket_size: elements of a bucket at stages 1 and 2.
    reduce_dtype: the dtype in which gradients are sent, at stages 2 and 3.
    state_dict_type: the format of `save_state`: "FULL_STATE_DICT", which Accelerate without zero loads, or
        "SHARDED_STATE_DICT", a zero.checkpoint.
    save_16bit_model: saved weights have the dtype of mixed_precision.
    mixed_precision, gradient_accumulation_steps: for the Accelerator.
    gradient_clipping: each step of an optimizer clips to this norm first.
    micro_batch_size: the batch size that data loaders must have.
    scaler: arguments of zero.GradScaler.
    optimizer, scheduler: what stands in for DummyOptim and DummyScheduler, from sections of DeepSpeed's configurations.

    Raises ValueError for options that are not available.
    """

    stage: int
    sharding_strategy: str = "FULL_SHARD"
    shard_size: int | None = None
    auto_wrap_policy: Any = None
    transformer_cls_names_to_wrap: tuple[str, ...] | None = None
    min_num_params: int | None = None
    as_one_unit: tuple[str, ...] = ()
    ignored_modules: Iterable[nn.Module] | str = ()
    partition: Partition = "auto"
    prefetch: Prefetch | None = None
    offload: CPUOffload | DiskOffload | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    mixed_precision_policy: MixedPrecision | None = None
    master_dtype: torch.dtype | None = None
    sync_module_states: bool = True
    activation_checkpointing: bool = False
    cpu_ram_efficient_loading: bool = False
    reduce_bucket_size: int | None = None
    reduce_dtype: torch.dtype | None = None
    state_dict_type: str = "FULL_STATE_DICT"
    save_16bit_model: bool = False
    mixed_precision: str | None = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    micro_batch_size: int | None = None
    scaler: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Section | None = None
    scheduler: Section | None = None

    def __post_init__(self) -> None:
        problem = self._problem() or take_offload({"offload": self.offload})[1]
        if problem is not None:
            raise ValueError(problem)
        if self.prefetch is not None:
            as_prefetch(self.prefetch)
        if self.mixed_precision_policy is not None:
            as_precision(self.mixed_precision_policy)
        as_strategy(self.sharding_strategy)

    def _problem(self) -> str | None:
        if self.stage not in (0, 1, 2, 3):
            return f"stage={self.stage!r} is unknown. Choose 0 (DDP), 1 (OSS), 2 (ShardedDDP) or 3 (FSDP)."
        if self.offload is not None and self.stage == 0:
            return f"offload={self.offload!r} is an option of stages 1 to 3, but stage is 0. Leave it out."
        if isinstance(self.auto_wrap_policy, str) and self.auto_wrap_policy not in WRAPPING:
            return f"auto_wrap_policy={self.auto_wrap_policy!r} is unknown. Choose one of {', '.join(WRAPPING)}."
        if self.state_dict_type not in STATE_DICT_TYPES:
            known = " or ".join(STATE_DICT_TYPES)
            return f"state_dict_type={self.state_dict_type!r} is not available. Choose {known}: both load at any stage."
        if self.mixed_precision not in (None, "no", "bf16", "fp16"):
            return f"mixed_precision={self.mixed_precision!r} is not available. Choose 'no', 'bf16' or 'fp16'."
        if self.reduce_dtype is not None and self.stage < 2:
            return (
                f"reduce_dtype={self.reduce_dtype} is an option of stages 2 and 3. Below, DistributedDataParallel "
                'sends gradients: pass accelerate.DistributedDataParallelKwargs(comm_hook="fp16").'
            )
        if self.reduce_bucket_size is not None and self.stage not in (1, 2):
            return f"reduce_bucket_size is an option of stages 1 and 2, but stage is {self.stage}. Leave it out."
        if self.master_dtype not in (None, torch.float32):
            return f"master_dtype={self.master_dtype} is not available. Choose torch.float32 or None."
        if self.master_dtype is not None and (self.stage == 0 or self.mixed_precision_policy is not None):
            beside = "stage 0" if self.stage == 0 else "mixed_precision_policy"
            return (
                f"master_dtype={self.master_dtype} means nothing with {beside}: it is for stages 1 to 3, where it "
                "decides the dtypes alone. Leave one of them out."
            )
        given = [name for name in _OF_FSDP if getattr(self, name) != getattr(ZeroPlugin, name)]
        if as_strategy(self.sharding_strategy).name != "FULL_SHARD":
            given.append("sharding_strategy")
        if given and self.stage != 3:
            return f"{given[0]} is an option of stage 3, but stage is {self.stage}. Take stage=3, or leave it out."
        return partition_problem(self.partition)

    @classmethod
    def from_yaml(cls, path: str | Path) -> ZeroPlugin:
        """The plugin for the `fsdp_config` or `deepspeed_config` of an Accelerate file, and its mixed_precision.

        Every key is applied or refused by name; a warning names the keys without an effect here. Keys for
        `accelerate launch` itself, on how to start processes, are not read. Raises ValueError for what is refused.
        """
        return cls(**_of_yaml(Path(path)))

    @classmethod
    def from_json(cls, path: str | Path | Mapping[str, Any]) -> ZeroPlugin:
        """The plugin for a DeepSpeed configuration: a file, or its contents. Otherwise as `from_yaml`."""
        given = (path,) if isinstance(path, Mapping) else (json.loads(Path(path).read_text()), str(path))
        return cls(**deepspeed_keys.fields(*given))

    @classmethod
    def from_fsdp_plugin(cls, plugin: Any) -> ZeroPlugin:
        """The plugin for Accelerate's FullyShardedDataParallelPlugin. Otherwise as `from_yaml`."""
        return cls(**fsdp_keys.of_plugin(plugin))

    @classmethod
    def from_deepspeed_plugin(cls, plugin: Any) -> ZeroPlugin:
        """The plugin for Accelerate's DeepSpeedPlugin. Otherwise as `from_yaml`."""
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
    found = (fsdp_keys.fields if name == "fsdp_config" else deepspeed_keys.of_flat)(section, f"{path}, {name}")
    known = found.get("mixed_precision")
    if said is not None and known not in (None, said):
        raise ValueError(
            f"{path}: mixed_precision={said!r}, but the DeepSpeed configuration enables {known}. Keep one."
        )
    return {**found, "mixed_precision": known or said}
