"""Configurations of Accelerate and DeepSpeed: every key is honoured, refused by name, or named as without an effect."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils import launch as accelerate_launch
from torch.distributed import fsdp

from zero import CPUOffload, DiskOffload, MixedPrecision
from zero.integrations.accelerate import ZeroPlugin, deepspeed_keys, fsdp_keys

FSDP: dict[str, tuple[Any, dict[str, Any]]] = {
    "fsdp_version": ("2", {"stage": 3, "mixed_precision_policy": "auto", "autocast": False}),
    "fsdp_sharding_strategy": (4, {"sharding_strategy": "HYBRID_SHARD"}),
    "fsdp_reshard_after_forward": (False, {"sharding_strategy": "SHARD_GRAD_OP"}),
    "fsdp_offload_params": (True, {"offload": CPUOffload()}),
    "fsdp_auto_wrap_policy": ("NO_WRAP", {"auto_wrap_policy": "NO_WRAP"}),
    "fsdp_transformer_layer_cls_to_wrap": ("A, B", {"transformer_cls_names_to_wrap": ("A", "B")}),
    "fsdp_min_num_params": ("1e8", {"min_num_params": 10**8}),
    "fsdp_backward_prefetch": ("NO_PREFETCH", {"prefetch": 1}),
    "fsdp_backward_prefetch_policy": ("BACKWARD_PRE", {"prefetch": 3}),
    "fsdp_forward_prefetch": (True, {}),
    "fsdp_state_dict_type": ("SHARDED_STATE_DICT", {"state_dict_type": "SHARDED_STATE_DICT"}),
    "fsdp_use_orig_params": (False, {}),
    "fsdp_sync_module_states": (False, {"sync_module_states": False}),
    "fsdp_cpu_ram_efficient_loading": ("true", {"cpu_ram_efficient_loading": True}),
    "fsdp_activation_checkpointing": ("True", {"activation_checkpointing": True}),
    "fsdp_activation_checkpointing_offload": (False, {}),
    "fsdp_ignored_modules": (r"blocks\.\d", {"ignored_modules": r"blocks\.\d"}),
}
BESIDE = {
    "fsdp_transformer_layer_cls_to_wrap": {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    "fsdp_min_num_params": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"},
    "offload_param_device": {"offload_param_nvme_path": "/scratch"},
}
"""What a key needs."""


def from_yaml(folder: Path, **sections: Any) -> ZeroPlugin:
    path = folder / "config.yaml"
    written = {"compute_environment": "LOCAL_MACHINE", "num_processes": 2, **sections}
    path.write_text(json.dumps(written))  # JSON is YAML
    return ZeroPlugin.from_yaml(path)


def test_no_key_of_accelerate_is_forgotten() -> None:
    options = {name for action in launch_command_parser()._actions for name in action.option_strings}
    assert {name.removeprefix("--") for name in options if name.startswith("--fsdp_")} <= FSDP.keys()
    written = re.findall(r'current_env\["FSDP_(\w+)"\]', inspect.getsource(accelerate_launch))
    assert {name.lower() for name in written} == {*fsdp_keys.LAUNCHED}


def test_a_key_that_another_one_makes_idle_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="fsdp_min_num_params .*SIZE_BASED_WRAP"):
        from_yaml(tmp_path, fsdp_config={"fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_min_num_params": 5})


def launched(**named: str) -> dict[str, str]:
    """What `accelerate launch` writes where a configuration names these."""
    parsed = launch_command_parser().parse_args([*(f"--fsdp_{key}={value}" for key, value in named.items()), "x.py"])
    given = {name: getattr(parsed, f"fsdp_{OTHER_OPTION.get(name, name)}", None) for name in fsdp_keys.LAUNCHED}
    written = {f"FSDP_{name.upper()}": str(value) for name, value in given.items() if value is not None}
    return {"ACCELERATE_USE_FSDP": "true", **written}


OTHER_OPTION = {"transformer_cls_to_wrap": "transformer_layer_cls_to_wrap"}


def test_what_the_launcher_adds_is_not_taken_for_asked() -> None:
    assert ZeroPlugin.from_environment({}) is None
    plugin = ZeroPlugin.from_environment(launched())
    assert plugin == ZeroPlugin(3, cpu_ram_efficient_loading=True, mixed_precision_policy="auto")
    for asked, expected in [
        ({"reshard_after_forward": "SHARD_GRAD_OP"}, "SHARD_GRAD_OP"),  # Accelerate drops it: its own default wins
        ({"sharding_strategy": "SHARD_GRAD_OP"}, "SHARD_GRAD_OP"),
        ({"version": "2", "reshard_after_forward": "false"}, "SHARD_GRAD_OP"),
        ({"sharding_strategy": "HYBRID_SHARD"}, "HYBRID_SHARD"),
    ]:
        plugin = ZeroPlugin.from_environment(launched(**asked))
        assert plugin is not None and plugin.sharding_strategy == expected
    plugin = ZeroPlugin.from_environment(launched(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params="7"))
    assert plugin is not None and (plugin.auto_wrap_policy, plugin.min_num_params) == ("SIZE_BASED_WRAP", 7)


def test_accelerates_own_plugins_are_taken() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=False,
        mixed_precision_policy="bf16",
        cpu_offload=True,
        ignored_modules="head",
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["A"],
        activation_checkpointing=True,
    )
    found = ZeroPlugin.from_fsdp_plugin(plugin)
    assert (found.stage, found.sharding_strategy, found.state_dict_type) == (3, "SHARD_GRAD_OP", "SHARDED_STATE_DICT")
    assert found.mixed_precision_policy.param_dtype == torch.bfloat16 and found.offload == CPUOffload()
    assert not found.autocast
    assert (found.auto_wrap_policy, found.transformer_cls_names_to_wrap) == ("TRANSFORMER_BASED_WRAP", ("A",))
    assert found.ignored_modules == "head" and found.activation_checkpointing
    given = {"gradient_clipping": 0.5, "gradient_accumulation_steps": 3, "offload_optimizer_device": "cpu"}
    found = ZeroPlugin.from_deepspeed_plugin(DeepSpeedPlugin(zero_stage=2, **given))
    del given["offload_optimizer_device"]
    assert found == ZeroPlugin(2, master_dtype=torch.float32, offload=CPUOffload(pin_memory=False), **given)


DEEPSPEED: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "zero_stage": (3, 1, {"stage": 1, "master_dtype": torch.float32}),
    "gradient_accumulation_steps": (2, "4", {"gradient_accumulation_steps": 4}),
    "gradient_clipping": (2, 0.5, {"gradient_clipping": 0.5}),
    "offload_optimizer_device": (3, "cpu", {"offload": CPUOffload(pin_memory=False)}),
    "offload_param_device": (3, "nvme", {"offload": DiskOffload("/scratch")}),
    "zero3_init_flag": (3, True, {"cpu_ram_efficient_loading": True}),
    "zero3_save_16bit_model": (3, "true", {"save_16bit_model": True}),
    "deepspeed_moe_layer_cls_names": (3, "Moe,Other", {"as_one_unit": ("Moe", "Other")}),
}
IDLE = {"deepspeed_hostfile": "hosts", "deepspeed_multinode_launcher": "standard"}


BUILD: dict[str, Callable[..., ZeroPlugin]] = {
    "fsdp_config": lambda folder, **keys: from_yaml(folder, fsdp_config=keys),
    "yaml": from_yaml,
    "Accelerate's plugin": lambda _, **keys: ZeroPlugin.from_fsdp_plugin(FullyShardedDataParallelPlugin(**keys)),
    "deepspeed_config": lambda folder, **keys: from_yaml(folder, deepspeed_config=keys),
    "DeepSpeed's plugin": lambda _, **keys: ZeroPlugin.from_deepspeed_plugin(DeepSpeedPlugin(hf_ds_config=keys)),
    "ZeroPlugin": lambda _, **options: ZeroPlugin(**options),
}
HONOURED = [
    *(("fsdp_config", key, {}, *case) for key, case in FSDP.items()),
    *(("deepspeed_config", key, {"zero_stage": stage}, *case) for key, (stage, *case) in DEEPSPEED.items()),
]


@pytest.mark.parametrize(
    ("build", "key", "beside", "value", "expected"), HONOURED, ids=[f"{build}: {key}" for build, key, *_ in HONOURED]
)
def test_every_key_is_honoured(
    build: str, key: str, beside: dict[str, Any], value: Any, expected: dict[str, Any], tmp_path: Path
) -> None:
    plugin = BUILD[build](tmp_path, **{**beside, **BESIDE.get(key, {}), key: value})
    assert {name: getattr(plugin, name) for name in expected} == expected
    if beside and key != "zero_stage":
        assert BUILD[build](tmp_path, **{**beside, key: "auto"}) == BUILD[build](tmp_path, **beside)


def test_keys_that_mean_nothing_here_are_named(tmp_path: Path) -> None:
    plain = from_yaml(tmp_path, deepspeed_config={"zero_stage": 3})
    with pytest.warns(UserWarning, match="without an effect here") as warned:
        assert from_yaml(tmp_path, deepspeed_config={"zero_stage": 3, **IDLE}) == plain
    assert len(warned) == 1
    assert all(name in str(warned[0].message) for name in IDLE)
    with pytest.warns(UserWarning, match="offload_param_device is for stage 3"):
        assert from_yaml(tmp_path, deepspeed_config={"offload_param_device": "cpu"}).handed == {}


def test_accelerates_own_words_for_deepspeed(tmp_path: Path) -> None:
    section = {
        "zero_stage": 3,
        "offload_param_device": "nvme",
        "offload_param_nvme_path": "/scratch",
        "gradient_accumulation_steps": 4,
        "zero3_init_flag": "true",
        "deepspeed_moe_layer_cls_names": "Moe,Other",
    }
    expected = ZeroPlugin(
        stage=3,
        master_dtype=torch.float32,
        offload=DiskOffload("/scratch"),
        gradient_accumulation_steps=4,
        cpu_ram_efficient_loading=True,
        as_one_unit=("Moe", "Other"),
    )
    assert from_yaml(tmp_path, deepspeed_config=section) == expected
    of_name = {name: variable for variable, name in deepspeed_keys.LAUNCHED.items()}
    environment = {of_name[name]: str(value) for name, value in section.items()}
    assert ZeroPlugin.from_environment({"ACCELERATE_USE_DEEPSPEED": "true", **environment}) == expected


HALF, V2 = MixedPrecision(), {"fsdp_version": 2}
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "fsdp_config": [
        ({"fsdp_activation_checkpointing_offload": True}, "activation_checkpointing_offload=True"),
        ({"fsdp_speed": 3}, "fsdp_speed is not known"),
        ({"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": False}, "different things"),
    ],
    "yaml": [
        ({"fsdp_config": V2, "deepspeed_config": {"zero_stage": 2}}, "fsdp_config and deepspeed_config"),
        ({"parallelism_config": {"tp_size": 2}, "fsdp_config": V2}, "parallelism_config=.* is not available"),
    ],
    "Accelerate's plugin": [
        ({"state_dict_config": fsdp.FullStateDictConfig(offload_to_cpu=False)}, "state_dict_config"),
    ],
    "deepspeed_config": [
        ({"zero_stage": 4}, "stage=4"),
        ({"zero_stage": 3, "offload_param_device": "nvme"}, "offload_param_nvme_path"),
        ({"deepspeed_config_file": "ds.json"}, "ds.json.* docs/integrations.md"),
        ({"wings": 2}, "wings is not known"),
    ],
    "DeepSpeed's plugin": [
        ({"zero_optimization": {"stage": 3, "overlap_comm": True}}, "overlap_comm: .* docs/integrations.md"),
        ({"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}, "optimizer: .* docs/integrations.md"),
    ],
    "ZeroPlugin": [
        ({"stage": 5}, "0 \\(DDP\\)"),
        ({"stage": 2, "mixed_precision_policy": HALF}, "mixed_precision_policy=.* stage 3"),
        ({"stage": 1, "reduce_dtype": torch.bfloat16}, "reduce_dtype=torch.bfloat16 .* stage 2 or 3"),
        ({"stage": 3, "reduce_bucket_size": 7}, "reduce_bucket_size=7 .* stage 1 or 2"),
        ({"stage": 0, "offload": CPUOffload()}, "offload=.* stage 1 or 2 or 3"),
        ({"stage": 3, "state_dict_type": "LOCAL_STATE_DICT"}, "FULL_STATE_DICT or SHARDED_STATE_DICT"),
        ({"stage": 3, "master_dtype": torch.float64}, "master_dtype=torch.float64"),
        ({"stage": 3, "master_dtype": torch.float32, "mixed_precision_policy": HALF}, "decides the dtypes alone"),
    ],
}


@pytest.mark.parametrize(
    ("build", "given", "told"), [(build, *case) for build, cases in REFUSED.items() for case in cases]
)
def test_what_cannot_be_is_refused_by_name(
    build: str, given: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=told):
        BUILD[build](tmp_path, **given)
