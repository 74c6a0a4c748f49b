"""Configuration files of Accelerate and DeepSpeed, read here because the launcher leaves sections of them out: with
`distributed_type: DEEPSPEED` it stops where DeepSpeed is not installed, and with another it drops that section."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero.integrations.accelerate import deepspeed_keys, fsdp_keys

_REFUSED = ("parallelism_config", "megatron_lm_config", "fp8_config")
_LAUNCHERS = {
    *("compute_environment", "distributed_type", "debug", "use_cpu", "num_processes", "num_machines", "machine_rank"),
    *("main_process_ip", "main_process_port", "main_training_function", "rdzv_backend", "same_network", "gpu_ids"),
    *("enable_cpu_affinity", "enable_numa_affinity", "dynamo_config", "dynamo_backend", "mpirun_config"),
    *("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "tpu_name", "tpu_zone", "downcast_bf16", "tpu_vm"),
    *("command_file", "commands"),
}
"""Keys for `accelerate launch` itself, on how to start processes, and keys that it passes on to Accelerate."""


def of_yaml(path: Path) -> dict[str, Any]:
    """The fields of a ZeroPlugin for one of Accelerate's files. Raises ValueError for values that are not available."""
    import yaml  # a dependency of Accelerate

    given = yaml.safe_load(path.read_text())
    if not isinstance(given, Mapping):
        raise ValueError(f"{path} holds no keys. Pass one of Accelerate's configuration files.")
    sections = {name: given.get(name) or {} for name in ("fsdp_config", "deepspeed_config", *_REFUSED)}
    for name in _REFUSED:
        if sections[name]:
            raise ValueError(
                f"{path}: {name} is not available. Shard over the data-parallel ranks only: remove it; for hybrid "
                "sharding use fsdp_sharding_strategy: HYBRID_SHARD."
            )
    unknown = [name for name in given if name not in (*sections, *_LAUNCHERS, "mixed_precision", "fp16")]
    if unknown:
        raise ValueError(f"{path}: {', '.join(unknown)} is not known to zero. Remove it.")
    asked = [name for name in ("fsdp_config", "deepspeed_config") if sections[name]]
    if len(asked) != 1:
        raise ValueError(f"{path} has {' and '.join(asked) or 'neither fsdp_config nor deepspeed_config'}. Keep one.")
    if asked == ["fsdp_config"]:
        found = fsdp_keys.fields(sections["fsdp_config"], f"{path}, fsdp_config")
    else:
        found = deepspeed_keys.of_flat(sections["deepspeed_config"], f"{path}, deepspeed_config")
    return _with_precision(found, given, path)


def _with_precision(found: dict[str, Any], given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    said = given.get("mixed_precision", "fp16" if given.get("fp16") else None)
    said = "no" if said is False else said  # YAML reads `no` as false
    known = found.get("mixed_precision")
    if said is not None and known not in (None, said):
        raise ValueError(
            f"{path}: mixed_precision={said!r}, but the DeepSpeed configuration enables {known}. Keep one."
        )
    return {**found, "mixed_precision": known or said}


def of_json(given: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The same for a file of DeepSpeed, or its contents."""
    if isinstance(given, Mapping):
        return deepspeed_keys.fields(given)
    return deepspeed_keys.fields(json.loads(Path(given).read_text()), str(given))
