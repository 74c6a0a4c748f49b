"""Accelerate's configurations: every key is honoured, refused by name, or named as without an effect."""

import configparser
import importlib
import inspect
import json
import re
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils import launch as accelerate_launch

from zero import CPUOffload, DiskOffload
from zero.integrations.accelerate import ZeroPlugin
from zero.integrations.accelerate import plugin as plugins
from zero.integrations.accelerate.plugin import chosen
from zero.integrations.versions import TESTED, refuse_older

FSDP: dict[str, tuple[Any, dict[str, Any]]] = {
    "fsdp_version": ("2", {"stage": 3}),
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
    "offload_optimizer_device": {"offload_optimizer_nvme_path": "/scratch"},
}
"""What a key needs."""


def from_yaml(folder: Path, **given: Any) -> ZeroPlugin:
    path = folder / "config.yaml"
    written = {"compute_environment": "LOCAL_MACHINE", "num_processes": 2, **given}
    path.write_text(json.dumps(written))  # JSON is YAML
    return ZeroPlugin.from_yaml(path)


def test_no_key_of_accelerate_is_forgotten():
    options = {name for action in launch_command_parser()._actions for name in action.option_strings}
    assert {name.removeprefix("--") for name in options if name.startswith("--fsdp_")} <= FSDP.keys()
    written = re.findall(r'current_env\["FSDP_(\w+)"\]', inspect.getsource(accelerate_launch))
    assert {name.lower() for name in written} <= KEYS


KEYS = {*plugins.FSDP_READERS, *plugins.FSDP_NAMES}


def launched(**named: str) -> dict[str, str]:
    """What `accelerate launch` writes where a configuration names these."""
    parsed = launch_command_parser().parse_args([*(f"--fsdp_{key}={value}" for key, value in named.items()), "x.py"])
    given = {name: getattr(parsed, f"fsdp_{name}", None) for name in KEYS}
    written = {f"FSDP_{name.upper()}": str(value) for name, value in given.items() if value is not None}
    return {"ACCELERATE_USE_FSDP": "true", **written}


ADDED = {
    "sync_module_states": True,
    "use_orig_params": True,
    "min_num_params": 10**8,
    "activation_checkpointing": False,
}
"""By the launcher: what is so anyway, or what SIZE_BASED_WRAP alone reads."""


def test_what_the_launcher_adds_is_not_taken_for_asked(monkeypatch):
    def plugin(**asked: str) -> ZeroPlugin:
        for name, value in launched(**asked).items():
            monkeypatch.setenv(name, value)
        return chosen(None)

    with pytest.raises(ValueError, match="no stage to shard at was given"):
        chosen(None)
    assert vars(plugin()) == {"stage": 3, "sharding_strategy": "FULL_SHARD", "cpu_ram_efficient_loading": True, **ADDED}
    for asked, expected in [
        ({"reshard_after_forward": "SHARD_GRAD_OP"}, "SHARD_GRAD_OP"),  # Accelerate drops it: its own default wins
        ({"sharding_strategy": "SHARD_GRAD_OP"}, "SHARD_GRAD_OP"),
        ({"version": "2", "reshard_after_forward": "false"}, "SHARD_GRAD_OP"),
        ({"sharding_strategy": "HYBRID_SHARD"}, "HYBRID_SHARD"),
    ]:
        assert plugin(**asked).sharding_strategy == expected
    found = plugin(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params="7")
    assert (found.auto_wrap_policy, found.min_num_params) == ("SIZE_BASED_WRAP", 7)


def test_accelerates_own_plugin_is_taken():
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
    found = chosen(None, plugin)
    assert (found.stage, found.sharding_strategy, found.state_dict_type) == (3, "SHARD_GRAD_OP", "SHARDED_STATE_DICT")
    assert found.precision.param_dtype == torch.bfloat16 and found.offload == CPUOffload()
    assert (found.auto_wrap_policy, found.transformer_cls_names_to_wrap) == ("TRANSFORMER_BASED_WRAP", ("A",))
    assert found.ignored_modules == "head" and found.activation_checkpointing
    object.__setattr__(plugin.mixed_precision_policy, "param_dtype_override_fn", lambda param: None)  # of torch 2.15
    with pytest.raises(ValueError, match=r"keep_fp32=\.\.\.\) in place of param_dtype_override_fn"):
        chosen(None, plugin)


DEEPSPEED: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "zero_stage": (3, 1, {"stage": 1}),
    "gradient_accumulation_steps": (2, "4", {"gradient_accumulation_steps": 4}),
    "gradient_clipping": (2, 0.5, {"gradient_clipping": 0.5}),
    "offload_optimizer_device": (3, "cpu", {"offload": CPUOffload(pin_memory=False)}),
    "offload_param_device": (3, "nvme", {"offload": DiskOffload("/scratch")}),
    "zero3_init_flag": (3, True, {"cpu_ram_efficient_loading": True}),
    "zero3_save_16bit_model": (3, "true", {"save_16bit_model": True}),
    "deepspeed_moe_layer_cls_names": (3, "Moe,Other", {"as_one_unit": ("Moe", "Other")}),
}
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
VALUES: list[tuple[str, str, Any, dict[str, Any]]] = [
    *(("fsdp_config", "fsdp_auto_wrap_policy", one, {"auto_wrap_policy": one}) for one in plugins.WRAPPING),
    *(("fsdp_config", "fsdp_sharding_strategy", one, {"sharding_strategy": one}) for one in STRATEGIES),
    *(("fsdp_config", "fsdp_sharding_strategy", k, {"sharding_strategy": one}) for k, one in enumerate(STRATEGIES, 1)),
    ("fsdp_config", "fsdp_sharding_strategy", "3", {"sharding_strategy": "NO_SHARD"}),
    ("fsdp_config", "fsdp_reshard_after_forward", "true", {"sharding_strategy": "FULL_SHARD"}),
    ("fsdp_config", "fsdp_reshard_after_forward", "HYBRID_SHARD", {"sharding_strategy": "HYBRID_SHARD"}),
    ("fsdp_config", "fsdp_state_dict_type", "FULL_STATE_DICT", {"state_dict_type": "FULL_STATE_DICT"}),
    ("fsdp_config", "fsdp_backward_prefetch", "BACKWARD_POST", {"prefetch": 2}),
    ("fsdp_config", "fsdp_version", 1, {"stage": 3}),
    *(("deepspeed_config", "zero_stage", stage, {"stage": stage}) for stage in range(4)),
    ("deepspeed_config", "offload_param_device", "cpu", {"offload": CPUOffload(pin_memory=False)}),
    ("deepspeed_config", "offload_optimizer_device", "nvme", {"offload": DiskOffload("/scratch")}),
]
"""Further values of the keys."""
IDLE = {"deepspeed_hostfile": "hosts", "deepspeed_multinode_launcher": "standard"}


BUILD: dict[str, Callable[..., ZeroPlugin]] = {
    "fsdp_config": lambda folder, **keys: from_yaml(folder, fsdp_config=keys),
    "yaml": from_yaml,
    "deepspeed_config": lambda folder, **keys: from_yaml(folder, deepspeed_config=keys),
    "ZeroPlugin": lambda _, **options: ZeroPlugin(**options),
}
IN = {"fsdp_config": {}, "deepspeed_config": {"zero_stage": 3}}
HONOURED = [("fsdp_config", key, {}, *case) for key, case in FSDP.items()]
HONOURED += [("deepspeed_config", key, {"zero_stage": stage}, *case) for key, (stage, *case) in DEEPSPEED.items()]
HONOURED += [(section, key, IN[section], *case) for section, key, *case in VALUES]


@pytest.mark.parametrize(
    ("build", "key", "beside", "value", "expected"), HONOURED, ids=[f"{one[1]}={one[3]}" for one in HONOURED]
)
def test_every_key_is_honoured(build, key, beside, value, expected, tmp_path):
    plugin = BUILD[build](tmp_path, **{**beside, **BESIDE.get(key, {}), key: value})
    assert {name: getattr(plugin, name) for name in expected} == expected
    if beside and key != "zero_stage":
        assert BUILD[build](tmp_path, **{**beside, key: "auto"}) == BUILD[build](tmp_path, **beside)


@pytest.mark.parametrize(("said", "expected"), [("bf16", "bf16"), ("fp16", "fp16"), ("no", "no"), (False, "no")])
def test_mixed_precision_beside_a_section_is_read(said, expected, tmp_path):
    for section in ({"deepspeed_config": {"zero_stage": 2}}, {"fsdp_config": V2}):
        assert from_yaml(tmp_path, mixed_precision=said, **section).mixed_precision == expected
        assert from_yaml(tmp_path, fp16=True, **section).mixed_precision == "fp16"  # its old name


def test_keys_that_mean_nothing_here_are_named(tmp_path):
    plain = from_yaml(tmp_path, deepspeed_config={"zero_stage": 3})
    with pytest.warns(UserWarning, match="without an effect here") as warned:
        assert from_yaml(tmp_path, deepspeed_config={"zero_stage": 3, **IDLE}) == plain
    assert [one.filename for one in warned] == [__file__]
    assert all(name in str(warned[0].message) for name in IDLE)
    with pytest.warns(UserWarning, match="offload_param_device is for stage 3") as warned:
        assert from_yaml(tmp_path, deepspeed_config={"offload_param_device": "cpu"}) == ZeroPlugin(2)
    assert warned[0].filename == __file__


def test_accelerates_own_words_for_deepspeed(tmp_path, monkeypatch):
    keys = ("offload_param_device", "gradient_accumulation_steps", "zero3_init_flag", "deepspeed_moe_layer_cls_names")
    section = {"zero_stage": 3, "offload_param_nvme_path": "/scratch", **{key: DEEPSPEED[key][1] for key in keys}}
    expected = ZeroPlugin(stage=3, **{name: value for key in keys for name, value in DEEPSPEED[key][2].items()})
    assert from_yaml(tmp_path, deepspeed_config=section) == expected
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    for name, value in section.items():
        of_deepspeed = name.startswith(("zero", "offload"))
        variable = f"{'DEEPSPEED_' * of_deepspeed}{name}".removesuffix("_flag").upper()
        monkeypatch.setenv(f"ACCELERATE_{variable}", str(value))
    assert chosen(None) == expected


V2 = {"fsdp_version": 2}
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "fsdp_config": [
        ({"fsdp_activation_checkpointing_offload": True}, "activation_checkpointing_offload=True"),
        ({"fsdp_speed": 3}, "fsdp_speed is not known"),
        ({"fsdp_version": 3}, "fsdp_version=3"),
        ({"fsdp_sharding_strategy": 6}, "fsdp_sharding_strategy=6 .*1 to 5"),
        ({"fsdp_state_dict_type": "LOCAL_STATE_DICT"}, "FULL_STATE_DICT, SHARDED_STATE_DICT"),
        ({"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": False}, "different things"),
        (
            {"fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_backward_prefetch_policy": "NO_PREFETCH"},
            "fsdp_backward_prefetch and fsdp_backward_prefetch_policy='NO_PREFETCH' are two names",
        ),
    ],
    "yaml": [
        ({"fsdp_config": V2, "deepspeed_config": {"zero_stage": 2}}, "fsdp_config and deepspeed_config"),
        ({"mixed_precision": "bf16"}, "neither fsdp_config nor deepspeed_config"),
        ({"parallelism_config": {"tp_size": 2}, "fsdp_config": V2}, "parallelism_config is not available"),
    ],
    "deepspeed_config": [
        ({"zero_stage": 4}, "stage=4"),
        ({"zero_stage": 3, "offload_param_device": "nvme"}, "offload_param_nvme_path"),
        ({"deepspeed_config_file": "ds.json"}, "ds.json.* docs/integrations.md"),
        ({"wings": 2}, "wings is not known"),
    ],
    "ZeroPlugin": [({"stage": 5}, "0 \\(DDP\\)")],
}


@pytest.mark.parametrize(
    ("build", "given", "told"), [(build, *case) for build, cases in REFUSED.items() for case in cases]
)
def test_what_cannot_be_is_refused_by_name(build, given, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        BUILD[build](tmp_path, **given)


# Versions of other libraries that are too old for the integrations.


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("library", TESTED)
@pytest.mark.parametrize(("found", "told"), [("0.9.1", "0.9.1"), (PackageNotFoundError, "none")])
def test_importing_an_integration_says_which_version_it_needs(library, found, told):
    name = f"zero.integrations.{library}"
    with mock.patch.dict(sys.modules), mock.patch("zero.integrations.versions.version", side_effect=[found]):
        for module in [module for module in sys.modules if module.startswith(name)]:
            del sys.modules[module]
        with pytest.raises(
            ImportError, match=f"needs {library} {TESTED[library][0]} or newer, and {told} is installed"
        ):
            importlib.import_module(name)


def test_a_library_that_is_newer_than_what_was_tested_is_named():
    for found, told in [("2.6.99", False), ("2.7.0", True), ("10.0", True)]:
        with (
            mock.patch("zero.integrations.versions.version", return_value=found),
            warnings.catch_warnings(record=True) as w,
        ):
            warnings.simplefilter("always")
            refuse_older("lightning")
        assert [f"lightning {found} is newer than 2.6" in str(one.message) for one in w] == [True] * told


def test_the_extras_ask_for_the_same_versions():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    asked = {line for name in TESTED for line in extras[name].split() if line != "safetensors"}
    assert asked == {f"{library}>={oldest}" for library, (oldest, _) in TESTED.items()}
    page = " ".join((ROOT / "docs" / "integrations.md").read_text().lower().split())
    assert all(f"{library} {oldest}" in page for library, (oldest, _) in TESTED.items())
