"""Chooses the ZeroPlugin of an Accelerator, and keeps Accelerate itself from sharding."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from accelerate.utils import DistributedType

from zero.comm.comm import launched_ranks
from zero.integrations.accelerate.plugin import ZeroPlugin

_ASKS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
THEIR_PLUGINS = ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins")
"""Arguments of Accelerate's Accelerator that say how to shard."""
_RAM_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def chosen_plugin(given: ZeroPlugin | int | None, arguments: Mapping[str, Any]) -> ZeroPlugin:
    """The ZeroPlugin of an Accelerator with these arguments. Raises ValueError if none, or more than one, is given.

    given: a plugin or a stage.
    """
    asked = {"zero_plugin": given, **{name: arguments.get(name) for name in THEIR_PLUGINS}}
    passed = {name: plugin for name, plugin in asked.items() if plugin is not None}
    if len(passed) > 1:
        raise ValueError(f"{' and '.join(passed)} both say how to shard. Pass one of them.")
    if given is not None:
        return given if isinstance(given, ZeroPlugin) else ZeroPlugin(stage=given)
    for name, plugin in passed.items():
        if name == "fsdp_plugin":
            return ZeroPlugin.from_fsdp_plugin(plugin)
        if isinstance(plugin, Mapping):
            raise ValueError(
                "deepspeed_plugins names several plugins. Pass one, or zero_plugin: several models may share it."
            )
        return ZeroPlugin.from_deepspeed_plugin(plugin)
    found = ZeroPlugin.from_environment(os.environ)
    if found is None:
        raise ValueError(
            "no stage to shard at was given. Pass zero_plugin=2, a ZeroPlugin, such as "
            "ZeroPlugin.from_yaml(path), or start by `accelerate launch` with an fsdp_config."
        )
    return found


def agreed(plugin: ZeroPlugin, passed: Mapping[str, Any]) -> dict[str, Any]:
    """The Accelerator's arguments that its configuration gives. Raises ValueError if others were passed."""
    unsaid = {"mixed_precision": (None,), "gradient_accumulation_steps": (None, 1)}
    planned = {name: value for name in unsaid if (value := getattr(plugin, name)) is not None}
    for name, value in planned.items():
        if passed.get(name) not in (*unsaid[name], value):
            raise ValueError(
                f"{name}={passed[name]!r} was passed, but the configuration says {value!r}. Make them the same."
            )
    accumulation = passed.get("gradient_accumulation_plugin")
    if accumulation is not None:
        steps = planned.pop("gradient_accumulation_steps", None)
        if steps not in (None, accumulation.num_steps):
            raise ValueError(
                f"GradientAccumulationPlugin(num_steps={accumulation.num_steps}) was passed, but the configuration "
                f"says gradient_accumulation_steps={steps}. Make them the same."
            )
    return planned


@contextmanager
def hidden_environment() -> Iterator[None]:
    """In this context Accelerate does not see the launcher's environment variables that ask it to shard."""
    hidden = {name: os.environ.pop(name) for name in _ASKS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def ask_for_ram_efficient_loading(wanted: bool) -> None:
    """Sets the environment variables that `from_pretrained` of transformers reads."""
    if wanted:
        os.environ.update({_ASKS[0]: "true", _RAM_EFFICIENT: "true"})
    elif _RAM_EFFICIENT in os.environ:
        os.environ[_RAM_EFFICIENT] = "false"  # the launcher's default is `true`: ranks would load without values


def ddp_options(handler: Any, stage: int) -> dict[str, Any]:
    """The options of DistributedDataParallelKwargs, or None, for a model at a stage.

    "register_comm_hook" has the function that registers a hook. Raises ValueError for a hook at stages 2 and 3, where
    it would not be called.
    """
    if handler is None:
        return {}
    options = {name: value for name, value in handler.to_kwargs().items() if not name.startswith("comm_")}
    hook = getattr(handler.comm_hook, "value", handler.comm_hook)
    if hook != "no":
        if stage > 1:
            raise ValueError(
                f"DistributedDataParallelKwargs(comm_hook={hook!r}) is for stage 1. At stages 2 and 3 set reduce_dtype "
                "of the ZeroPlugin."
            )
        options["register_comm_hook"] = handler.register_comm_hook
    return options


def refuse_other_parallelism(config: Any) -> None:
    """Raises ValueError for other kinds of parallelism than data parallelism."""
    asked = [
        name for name in ("PARALLELISM_CONFIG", "MEGATRON_LM") if os.environ.get(f"ACCELERATE_USE_{name}") == "true"
    ]
    if config is not None or asked:
        raise ValueError(
            f"{', '.join(asked).lower() or 'parallelism_config'} is not available: zero shards over data-parallel "
            'ranks. Leave it out; for hybrid sharding pass ZeroPlugin(stage=3, sharding_strategy="HYBRID_SHARD").'
        )


def refuse_ranks_apart(distributed_type: DistributedType) -> None:
    """Raises RuntimeError if Accelerate takes this process for the only one, but there are other ranks."""
    ranks = dist.get_world_size() if dist.is_initialized() else launched_ranks()
    if distributed_type == DistributedType.NO and ranks > 1:
        raise RuntimeError(
            f"Accelerate found one process (DistributedType.NO), but there are {ranks} ranks, which would train apart, "
            "or on the same batches. To train on CPUs, pass Accelerator(cpu=True) or TrainingArguments(use_cpu=True), "
            "or set ACCELERATE_USE_CPU=true in the environment: `accelerate launch` does not pass `use_cpu: true` of "
            "its configuration on to several ranks. To train on GPUs, set `distributed_type: MULTI_GPU` and `use_cpu: "
            "false` in the configuration, and start where torch.cuda.is_available(). For a process that is to train "
            "alone, set `num_processes: 1`."
        )
