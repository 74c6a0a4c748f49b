"""ZeroPlugin: how an Accelerator shards models and optimizers; and which one an Accelerator takes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from zero.fsdp.options import MoreOptions
from zero.integrations.accelerate.sections import (
    DEEPSPEED_NAMES,
    DEEPSPEED_READERS,
    FSDP_NAMES,
    FSDP_READERS,
    WRAPPING,
    of_deepspeed,
    of_fsdp,
)
from zero.measure.param_groups import nearest

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from zero.shards.partition import Partition
    from zero.wrap.precision import GivenPrecision

ASKS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
RAM_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"
OTHERS = (
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
                raise ValueError(f"{path}: {OTHERS.format(name)}")
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
        section = {one.name: getattr(fsdp_plugin, one.name) for one in dataclasses.fields(fsdp_plugin)}
        for name in ("state_dict_config", "optim_state_dict_config"):  # how FSDP puts full state together
            del section[name]
        policy = section["auto_wrap_policy"]
        named = {None: "NO_WRAP", transformer_auto_wrap_policy: WRAPPING[0], size_based_auto_wrap_policy: WRAPPING[1]}
        section["auto_wrap_policy"] = named.get(policy, policy)
        section["backward_prefetch"] = section["backward_prefetch"] or "NO_PREFETCH"
        if getattr(section["param_init_fn"], "__module__", "").startswith("accelerate."):
            section["param_init_fn"] = None  # the plugin's default, which allocates memory without initialising it
        return ZeroPlugin(**of_fsdp(section, "FullyShardedDataParallelPlugin"))
    # What `accelerate launch` puts into the environment.
    environment = os.environ
    if environment.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        variables = {f"FSDP_{name.upper()}": name for name in {**FSDP_READERS, **FSDP_NAMES}}
        section = {name: environment[written] for written, name in variables.items() if written in environment}
        return ZeroPlugin(**of_fsdp(section, "FSDP_... in the environment", launched=True))
    if environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        prefixes, names = ("ACCELERATE_", "ACCELERATE_DEEPSPEED_"), {**DEEPSPEED_READERS, **DEEPSPEED_NAMES}
        variables = {f"{prefix}{name.upper()}": name for prefix in prefixes for name in names}
        section = {name: environment[written] for written, name in variables.items() if written in environment}
        return ZeroPlugin(**of_deepspeed(section, "ACCELERATE_DEEPSPEED_... in the environment"))
    raise ValueError(
        "no stage to shard at was given. Pass zero_plugin=2, or a ZeroPlugin like ZeroPlugin.from_yaml(path), or "
        "start by `accelerate launch` with an fsdp_config."
    )


@contextmanager
def hidden_environment() -> Iterator[None]:
    """In this context Accelerate does not see the launcher's environment variables that ask it to shard."""
    hidden = {name: os.environ.pop(name) for name in ASKS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
