"""DeepSpeed's keys: in its JSON, in `deepspeed_config` in YAML, in the launcher's environment, and in the plugin."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zero._torch import warn_user
from zero.fsdp import SPEED_FIRST, BackwardPrefetch, Prefetch
from zero.integrations.accelerate.keys import DTYPES, Keys, count, flag, names, one_of
from zero.integrations.accelerate.sections import section
from zero.offload import CPUOffload, DiskOffload

_FLAT = "parameters, gradients and state are in flat buffers"
_ENGINE = "zero has no engine that measures or logs"
_OF_STAGE_3 = (
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
    "max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold "
    "use_all_reduce_for_fetch_params allgather_sequential partition_stream_chunk_size"
)
_OTHER_NAMES = {
    **{name: f"stage3_{name}" for name in _OF_STAGE_3.split()},
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
_ZERO_WITHOUT_EFFECT = {
    _FLAT: "contiguous_gradients allgather_partitions allgather_bucket_size reduce_scatter sub_group_size "
    "use_multi_rank_bucket_allreduce round_robin_gradients legacy_stage1 stage3_param_persistence_threshold "
    "stage3_model_persistence_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
    "stage3_module_granularity_threshold mics_hierarchical_params_gather memory_efficient_linear override_module_apply",
    "units in flight are counted, by ZeroPlugin(prefetch=zero.Prefetch(limit=))": "stage3_max_live_parameters "
    "stage3_max_reuse_distance",
    "units get memory one at a time": "stage3_partition_stream_chunk_size",
    "checkpoints load on any number of ranks, masters included": "load_from_fp32_weights elastic_checkpoint "
    "pipeline_loading_checkpoint",
    "ranks are always compared": "log_trace_cache_warnings enable_sanity_checks",
    "state is offloaded as one": "save_muon_momentum_buffer_in_memory",
}
_QUANTIZED = (
    "zero sends gradients and parameters in dtypes of torch. Set it to false, and pass "
    "ZeroPlugin(reduce_dtype=torch.bfloat16) to send gradients in 16 bits."
)
_ZERO_REFUSED = {
    "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param": _QUANTIZED,
    "zenflow": "zero steps all gradients at once. Remove it.",
}
_OFFLOAD_REFUSED = {"super_offload": "state is offloaded as torch does it. Remove it."}
_OFFLOAD_WITHOUT_EFFECT = {
    "the operating system buffers files": "buffer_count buffer_size max_in_cpu pipeline_read pipeline_write fast_init "
    "convert_grad_on_cpu cpuadam_cores_perc"
}
_WITHOUT_EFFECT = {
    _ENGINE: "steps_per_print wall_clock_breakdown dump_state memory_breakdown flops_profiler tensorboard wandb comet "
    "csv_monitor comms_logger monitor_config timers",
    "gradients are summed in float32, then divided": "prescale_gradients gradient_predivide_factor",
    "it is for DeepSpeed's own functions": "activation_checkpointing aio checkpoint disable_allgather "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer nebula load_universal_checkpoint use_node_local_storage "
    "seq_parallel_communication_data_type",
}
_REFUSED = {
    "amp": "use mixed_precision of the Accelerator and remove the section.",
    "torch_autocast data_types": "pass ZeroPlugin(stage=...) itself, with which mixed_precision is autocast.",
    "sparse_gradients sparse_attention": "gradients are dense. Remove it.",
    "tensor_parallel pipeline sequence_parallel_size": "zero shards data-parallel training only. Remove it.",
    "elasticity": "start the ranks by torchrun, which is elastic, and load a zero.checkpoint. Remove the section.",
    "autotuning compression_training data_efficiency curriculum_learning quantize_training progressive_layer_drop "
    "eigenvalue hybrid_engine weight_quantization compile msamp": "zero has no counterpart. Remove the section.",
}
_FP16_REFUSED = {"loss_scale": "zero.GradScaler finds the scale. Set it to 0."}
_FP16_WITHOUT_EFFECT = {
    "zero.GradScaler is torch's": "hysteresis min_loss_scale consecutive_hysteresis fp16_master_weights_and_grads "
    "auto_cast"
}
_BF16_WITHOUT_EFFECT = {
    "masters and state are in float32": "immediate_grad_update bf16_master_weights_and_grads bf16_optimizer_states "
    "check_grad_overflow auto_cast"
}


def fields(
    given: Mapping[str, Any], title: str = "DeepSpeed", *, init_flag: bool = False, as_one_unit: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The fields of a ZeroPlugin for a DeepSpeed configuration. Raises ValueError for values that are not available.

    init_flag, as_one_unit: `zero3_init_flag` and the classes of experts, which only Accelerate's own keys have.
    """
    keys = Keys(given, title)
    found = _zero(keys.section("zero_optimization", _OTHER_NAMES))
    stage = found["stage"]
    found["as_one_unit"] = (*found.get("as_one_unit", ()), *as_one_unit)
    if init_flag and stage != 3:
        warn_user(f"{title}: zero3_init_flag is for stage 3, and without an effect at {stage}.")
    found["cpu_ram_efficient_loading"] = init_flag and stage == 3
    found |= _precision(keys)
    found["master_dtype"] = torch.float32 if stage else None
    found["optimizer"], found["scheduler"] = section(keys, "optimizer"), section(keys, "scheduler")
    found["gradient_clipping"] = keys.take("gradient_clipping", float) or None
    found["gradient_accumulation_steps"] = keys.take("gradient_accumulation_steps", count)
    found["micro_batch_size"] = _micro_batch_size(keys, found["gradient_accumulation_steps"])
    travels_in = keys.take("communication_data_type", lambda name: DTYPES[name])
    found["reduce_dtype"] = None if stage < 2 and travels_in is torch.float32 else travels_in
    keys.done(_REFUSED, _WITHOUT_EFFECT)
    return found


def of_flat(given: Mapping[str, Any], title: str = "deepspeed_config") -> dict[str, Any]:
    """The same for Accelerate's own keys, as in its YAML."""
    keys = Keys(given, title)
    init_flag = keys.take("zero3_init_flag", flag, False)
    as_one_unit = keys.take("deepspeed_moe_layer_cls_names", names, ())
    keys.without_effect(
        "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter",
        "accelerate launch or torchrun starts the processes",
    )
    file = keys.take("deepspeed_config_file", str)
    if file is not None:
        keys.done()  # Accelerate, too, refuses other keys with it
        return fields(json.loads(Path(file).read_text()), file, init_flag=init_flag, as_one_unit=as_one_unit)
    device = one_of("NONE", "CPU", "NVME")
    zero: dict[str, Any] = {"stage": keys.take("zero_stage", count, 2)}
    for what in ("optimizer", "param"):
        where, path = keys.take(f"offload_{what}_device", device), keys.take(f"offload_{what}_nvme_path", str)
        zero[f"offload_{what}"] = {"device": where.lower() if where else "none", "nvme_path": path}
    zero["stage3_gather_16bit_weights_on_model_save"] = keys.take("zero3_save_16bit_model", flag, False)
    rest = {name: keys.take(name) for name in ("gradient_accumulation_steps", "gradient_clipping")}
    keys.done()
    return fields({"zero_optimization": zero, **rest}, title, init_flag=init_flag, as_one_unit=as_one_unit)


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
    if given.get("deepspeed_config_file", "none") != "none":  # the other variables are the launcher's defaults
        used = ("deepspeed_config_file", "zero3_init_flag", "deepspeed_moe_layer_cls_names")
        given = {name: given[name] for name in used if name in given}
    return of_flat(given, "ACCELERATE_DEEPSPEED_... in the environment")


def of_plugin(plugin: Any) -> dict[str, Any]:
    """The same for a DeepSpeedPlugin."""
    config = {name: value for name, value in plugin.deepspeed_config.items() if name != "steps_per_print"}
    experts = names(plugin.transformer_moe_cls_names or "")
    return fields(config, "DeepSpeedPlugin", init_flag=bool(plugin.zero3_init_flag), as_one_unit=experts)


def _zero(keys: Keys) -> dict[str, Any]:
    stage = keys.take("stage", count, 0)
    found = {"stage": stage, "offload": _offload(keys, stage), "prefetch": _prefetch(keys, stage)}
    found["save_16bit_model"] = keys.take("stage3_gather_16bit_weights_on_model_save", flag, False) and stage == 3
    if stage == 3:
        keys.without_effect("reduce_bucket_size", "at stage 3 a unit is the bucket")
        found |= _hybrid(keys)
    else:
        if stage == 0:
            keys.without_effect("reduce_bucket_size", "stage 0 is DistributedDataParallel as it is")
        found["reduce_bucket_size"] = keys.take("reduce_bucket_size", count)
        keys.without_effect("zero_hpz_partition_size mics_shard_size", "it is for stage 3")
    leaf = keys.section("leaf_module")
    found["as_one_unit"] = leaf.take("classes", names, ())
    leaf.done({"names name_suffixes": "name the classes."})
    if not keys.take("ignore_unused_parameters", flag, True):
        raise ValueError(
            f"{keys.name}: ignore_unused_parameters=false is not available: unused parameters have no gradient at "
            "every stage. Remove it."
        )
    keys.done(_ZERO_REFUSED, _ZERO_WITHOUT_EFFECT)
    return found


def _offload(keys: Keys, stage: int) -> CPUOffload | DiskOffload | None:
    """The further of the two offloads: shards, their gradients and the optimizer's state are offloaded together."""
    pinned = keys.take("cpu_offload_use_pin_memory", flag, False)
    offloads = {}
    for name, old in (("offload_optimizer", "cpu_offload"), ("offload_param", "cpu_offload_param")):
        its_keys = keys.section(name)
        default = "CPU" if keys.take(old, flag, False) else "NONE"
        device = its_keys.take("device", one_of("NONE", "CPU", "NVME"), default).lower()
        offloads[name] = (device, its_keys.take("nvme_path", str), its_keys.take("pin_memory", flag, pinned))
        if its_keys.take("ratio", float, 1.0) != 1.0:
            raise ValueError(f"{its_keys.name}: ratio is not available: all state is offloaded. Remove it.")
        its_keys.done(_OFFLOAD_REFUSED, _OFFLOAD_WITHOUT_EFFECT)
    if stage < 3 and offloads["offload_param"][0] != "none":
        warn_user(f"{keys.name}: offload_param is for stage 3, and without an effect at {stage}.")
        del offloads["offload_param"]
    asked = [offload for offload in offloads.values() if offload[0] != "none"]
    for device, path, _ in asked:
        if device == "nvme" and path is None:
            raise ValueError(f"{keys.name}: device nvme needs a folder: set nvme_path.")
        if device == "nvme":
            return DiskOffload(path)
    return CPUOffload(pin_memory=any(pin for _, _, pin in asked)) if asked else None


def _prefetch(keys: Keys, stage: int) -> Prefetch | None:
    overlap = keys.take("overlap_comm", flag)
    if stage < 3:
        keys.without_effect("stage3_prefetch_bucket_size", "it is for stage 3")
        return None  # gradients are sent while backward runs in any case
    ahead = keys.take("stage3_prefetch_bucket_size", count)
    if ahead == 0:
        return Prefetch(None)
    if overlap:
        return SPEED_FIRST
    return None if ahead is None else Prefetch(BackwardPrefetch.BACKWARD_PRE, forward_prefetch=True)


def _hybrid(keys: Keys) -> dict[str, Any]:
    secondary = keys.take("zero_hpz_partition_size", int, 0)
    if secondary > 1:
        raise ValueError(
            f"{keys.title('zero_hpz_partition_size')}={secondary} is not available: optimizer state is sharded over "
            "the ranks that parameters are sharded over. Remove it, or set mics_shard_size for both."
        )
    size = keys.take("mics_shard_size", int, 0)
    return {"sharding_strategy": "HYBRID_SHARD", "shard_size": size} if size > 1 else {}


def _precision(keys: Keys) -> dict[str, Any]:
    bf16, fp16 = keys.section("bf16"), keys.section("fp16")
    enabled = [name for name, one in (("bf16", bf16), ("fp16", fp16)) if one.take("enabled", flag, False)]
    if len(enabled) > 1:
        raise ValueError(f"{keys.name}: bf16 and fp16 are both enabled. Enable one of them.")
    scaler = {
        "init_scale": fp16.take("initial_scale_power", lambda power: 2.0 ** count(power)),
        "growth_interval": fp16.take("loss_scale_window", count),
    }
    bf16.done(None, _BF16_WITHOUT_EFFECT)
    fp16.done(_FP16_REFUSED, _FP16_WITHOUT_EFFECT)
    scaler = {name: value for name, value in scaler.items() if value is not None}
    return {"mixed_precision": enabled[0] if enabled else None, "scaler": scaler}


def _micro_batch_size(keys: Keys, accumulated: int | None) -> int | None:
    """The micro-batch size of a rank. Raises ValueError if the three numbers contradict one another."""
    micro: int | None = keys.take("train_micro_batch_size_per_gpu", count)
    total: int | None = keys.take("train_batch_size", count)
    if total is None:
        return micro
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    size, left = divmod(total, ranks * (accumulated or 1))
    if left or micro not in (None, size):
        raise ValueError(
            f"{keys.title('train_batch_size')}={total} is not train_micro_batch_size_per_gpu={micro} times "
            f"gradient_accumulation_steps={accumulated} times {ranks} ranks. Set it to 'auto'."
        )
    return size
