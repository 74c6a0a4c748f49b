"""ZeroPlugin: how an Accelerator shards models and optimizers; and which one an Accelerator takes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from zero.fsdp.torch_options import MoreOptions
from zero.integrations.accelerate.sections import NOT_READ, of_deepspeed, of_environment, of_fsdp, of_plugin
from zero.measure.param_groups import nearest

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from zero.shards.partition import Partition
    from zero.wrap.precision import GivenPrecision

ASKS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
RAM_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"
_OTHERS = (
    "{} is not available: zero shards over data-parallel ranks. Leave it out. For hybrid sharding sharding_strategy or "
    "fsdp_sharding_strategy, is HYBRID_SHARD."
)


class PluginOptions(MoreOptions, total=False):
    """Those that docs/integrations.md lists: a misspelt one is an error of type checkers."""

    precision: GivenPrecision
    mixed_precision: str | None
    partition: Partition
    auto_wrap_policy: Any
    transformer_cls_names_to_wrap: Sequence[str]
    min_num_params: int
    as_one_unit: Sequence[str]
    ignored_modules: Any
    sharding_strategy: Any
    shard_size: int
    prefetch: int | None
    reshard_after_forward: bool
    param_init_fn: Any
    activation_checkpointing: bool
    sync_module_states: bool
    cpu_ram_efficient_loading: bool
    state_dict_type: str
    save_16bit_model: bool
    gradient_accumulation_steps: int
    gradient_clipping: float | None


class ZeroPlugin(SimpleNamespace):
    """How to shard, in Accelerate's names where the meaning is the same.

        accelerator = Accelerator(zero_plugin=ZeroPlugin(stage=3, auto_wrap_policy="TRANSFORMER_BASED_WRAP"))

    stage: 0 (DistributedDataParallel, as Accelerate itself), 1 (OSS), 2 (ShardedDDP) or 3 (FSDP).
    options: those that docs/integrations.md lists; OSS, ShardedDDP and FSDP have theirs. Who takes an option refuses
        what it cannot be, as a model and its optimizer are prepared. None leaves an option out.
    """

    stage: int

    def __init__(self, stage: int, **options: Unpack[PluginOptions]) -> None:
        super().__init__(stage=stage, **{name: value for name, value in options.items() if value is not None})
        known = {*PluginOptions.__annotations__, *MoreOptions.__annotations__}
        for name in sorted(options.keys() - known):
            raise ValueError(f"ZeroPlugin has no option {name}=.{nearest(name, known)}")
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"stage={stage!r} is unknown. Choose 0 (DDP), 1 (OSS), 2 (ShardedDDP) or 3 (FSDP).")

    @classmethod
    def from_yaml(cls, path: str | Path) -> ZeroPlugin:
        """The plugin for the `fsdp_config` or `deepspeed_config` of an Accelerate file, and its mixed_precision.

        Every key of the section is applied or refused by name; a warning names the keys without an effect here. Keys on
        how to start processes are not read. Raises ValueError for what is refused.
        """
        import yaml  # a dependency of Accelerate

        given = yaml.safe_load(Path(path).read_text()) or {}
        sections: dict[str, Any] = {"fsdp_config": of_fsdp, "deepspeed_config": of_deepspeed}
        for name in ("parallelism_config", "megatron_lm_config", "fp8_config"):
            if given.get(name):
                raise ValueError(f"{path}: {_OTHERS.format(name)}")
        found = [name for name in sections if given.get(name)]
        if len(found) != 1:
            has = " and ".join(found) or "neither fsdp_config nor deepspeed_config"
            raise ValueError(f"{path} has {has}. Keep one.")
        precision = given.get("mixed_precision", "fp16" if given.get("fp16") else None)
        options = sections[found[0]](given[found[0]], f"{path}, {found[0]}")
        return cls(**options, mixed_precision="no" if precision is False else precision)  # YAML reads `no` as false


def chosen(given: ZeroPlugin | int | None, fsdp_plugin: Any = None) -> ZeroPlugin:
    """The ZeroPlugin of an Accelerator; given: a plugin or a stage. By default that of Accelerate's FSDP plugin, or of
    the environment. Raises ValueError if there is none."""
    if given is not None:
        return given if isinstance(given, ZeroPlugin) else ZeroPlugin(stage=given)
    if fsdp_plugin is not None:
        return ZeroPlugin(**of_plugin(fsdp_plugin))
    options = of_environment(os.environ)
    if options is None:
        raise ValueError(
            "no stage to shard at was given. Pass zero_plugin=2, or a ZeroPlugin like ZeroPlugin.from_yaml(path), or "
            "start by `accelerate launch` with an fsdp_config."
        )
    return ZeroPlugin(**options)


def taken_from(arguments: dict[str, Any], given: ZeroPlugin | int | None) -> ZeroPlugin:
    """Takes what says how to shard out of an Accelerator's arguments, and puts those in that its plugin has. Raises
    ValueError for what contradicts the plugin, and for other parallelism."""
    fsdp_plugin = arguments.pop("fsdp_plugin", None)
    if given is not None and fsdp_plugin is not None:
        raise ValueError("zero_plugin and fsdp_plugin both say how to shard. Pass one of them.")
    if any(arguments.pop(name, None) is not None for name in ("deepspeed_plugin", "deepspeed_plugins")):
        raise ValueError(f"deepspeed_plugin: {NOT_READ}")
    if arguments.get("parallelism_config") or os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
        raise ValueError(_OTHERS.format("parallelism_config"))
    plugin = chosen(given, fsdp_plugin)
    for name, unsaid in {"mixed_precision": None, "gradient_accumulation_steps": 1}.items():
        asked, passed = getattr(plugin, name, None), arguments.get(name)
        if asked is not None and passed not in (None, unsaid, asked):
            raise ValueError(f"{name}={passed!r} was passed, but the configuration says {asked!r}. Make them the same.")
        if asked is not None:
            arguments[name] = asked
    if arguments.get("mixed_precision") == "fp8":
        raise ValueError("mixed_precision='fp8' is not available. Choose 'no', 'bf16' or 'fp16'.")
    return plugin


@contextmanager
def hidden_environment() -> Iterator[None]:
    """In this context Accelerate does not see the launcher's environment variables that ask it to shard."""
    hidden = {name: os.environ.pop(name) for name in ASKS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
