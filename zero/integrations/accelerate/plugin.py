"""ZeroPlugin: how an Accelerator shards models and optimizers; which one an Accelerator takes; and its options by the
sections of Accelerate's configurations, `fsdp_config` and `deepspeed_config`. Each key of these is applied, refused by
name, or named by one warning as without an effect here."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import str_to_bool
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from zero._torch.telling import warn_user
from zero.fsdp import MixedPrecision
from zero.fsdp.options import MoreOptions, of_fsdp1
from zero.measure.param_groups import nearest
from zero.offload import CPUOffload, DiskOffload
from zero.wrap.precision import as_precision

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from zero.shards.partition import Partition
    from zero.wrap.precision import GivenPrecision


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
Reader = Callable[[Any], Any]
"""Converts a value. Raises ValueError for those that are not available."""


def _read(
    title: str, given: Mapping[str, Any], readers: Mapping[str, Reader], names: Mapping[str, str], prefix: str = ""
) -> dict[str, Any]:
    """The values of a section, by their readers' names, but "auto". names: of each other name of a key its reader's."""
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
    """The options of a ZeroPlugin that a section asks for. launched: `accelerate launch` has added its defaults."""
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
    if dtypes.pop("param_dtype_override_fn", None) is not None:
        raise ValueError("pass zero.MixedPrecision(keep_fp32=...) in place of param_dtype_override_fn")
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
    """The ZeroPlugin of an Accelerator: by default that of Accelerate's FSDP plugin, or of the environment."""
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
    environment, launched = os.environ, partial(of_fsdp, launched=True)
    for asks, prefixes, names, read in (
        (ASKS[0], ("FSDP_",), {**FSDP_READERS, **FSDP_NAMES}, launched),
        (ASKS[1], ("ACCELERATE_", "ACCELERATE_DEEPSPEED_"), {**DEEPSPEED_READERS, **DEEPSPEED_NAMES}, of_deepspeed),
    ):
        if environment.get(asks, "").lower() == "true":
            variables = {f"{prefix}{name.upper()}": name for prefix in prefixes for name in names}
            section = {name: environment[written] for written, name in variables.items() if written in environment}
            return ZeroPlugin(**read(section, f"{prefixes[-1]}... in the environment"))
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
