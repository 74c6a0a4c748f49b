"""Hugging Face's Trainer, at any stage: a mixin before any Trainer class.

The Trainer does not know of FSDP: it builds its optimizer from the plain model, and the Accelerator shards both. So
`trainer.model` is the plain module, whose parameters are sharded, and `trainer.model_wrapped` is its wrapper.
"""

# ruff: noqa: E402 (the imports below are what fails with an older version)
from __future__ import annotations

from zero.integrations.oldest import refuse_older

refuse_older("transformers")

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from zero.comm import Comm
from zero.integrations.accelerate import Accelerator, ZeroPlugin, full_files, states
from zero.integrations.accelerate.choosing import chosen_plugin, hidden_environment
from zero.integrations.accelerate.deepspeed_keys import NOT_READ
from zero.integrations.accelerate.fsdp_keys import fields
from zero.integrations.adapters import has_adapters, loading_adapters, saved_names, saving
from zero.wrappers import Wrapped


class ZeroTrainerMixin:
    """A Trainer at a stage of ZeRO.

        class SFTTrainer(ZeroTrainerMixin, trl.SFTTrainer): ...

        trainer = SFTTrainer(model, args, zero_plugin=2, ...)

    zero_plugin: a ZeroPlugin, or a stage. By default `TrainingArguments(fsdp=..., fsdp_config=...)` are used, and
        without these the environment that `accelerate launch` sets.

    Losses and weights are those of DistributedDataParallel. `save_model` and checkpoints have full weights, which
    `from_pretrained` loads. Checkpoints also have the optimizer's full state, so that a run continues at any stage, and
    without zero; with state_dict_type "SHARDED_STATE_DICT" that state is a zero.checkpoint.
    Raises ValueError, on every rank, for arguments that are not available.
    """

    args: Any
    accelerator: Any
    model: nn.Module
    model_wrapped: nn.Module
    optimizer: Any
    lr_scheduler: Any
    state: Any
    _issue_warnings_after_load: Callable[[Any], None]

    def __init__(self, *args: Any, zero_plugin: ZeroPlugin | int | None = None, **kwargs: Any) -> None:
        self._zero_plugin = zero_plugin
        self._full_numel: int | None = None
        self._saves_to_go_on = False
        model = kwargs.get("model", args[0] if args else None)
        if isinstance(model, Wrapped):
            raise ValueError(
                f"the Trainer was given a {type(model).__name__}, whose forward does not show the model's arguments. "
                "Pass the plain model and zero_plugin."
            )
        super().__init__(*args, **kwargs)

    # ----------------------------------------------------------------------------------------- construction

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's own, whose Accelerator then becomes zero's."""
        plugin = plugin_for(self.args, self._zero_plugin)
        asked, self.args.fsdp_plugin_args = self.args.fsdp_plugin_args, None
        try:
            with hidden_environment():
                super().create_accelerator_and_postprocess()  # type: ignore[misc]
        finally:
            self.args.fsdp_plugin_args = asked
        accumulation = self.args.accelerator_config.gradient_accumulation_kwargs or {}
        self.accelerator.gradient_state.plugin_kwargs.update(accumulation)
        self.accelerator.__class__ = Accelerator  # other objects already hold methods of this one, so it must stay
        self.accelerator.set_up(plugin)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._full_numel is None and isinstance(self.model, PreTrainedModel):
            self._full_numel = self.model.num_parameters(exclude_embeddings=True)
        return super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """The Trainer's own, with the number of full parameters."""
        name = getattr(self.model, "main_input_name", "input_ids")
        if self._full_numel is None or name not in inputs:
            return int(super().floating_point_ops(inputs))  # type: ignore[misc]
        return int(6 * inputs[name].numel() * self._full_numel)

    # ------------------------------------------------------------------------------------- weights and state

    @property
    def _sharded(self) -> bool:
        return isinstance(self.model_wrapped, Wrapped)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Collective. Saves the full weights, as `from_pretrained` loads them."""
        self._saves_to_go_on = _internal_call
        try:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        finally:
            self._saves_to_go_on = False

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        dtype = None if self._saves_to_go_on else self.accelerator.saved_dtype
        writes, only = self.args.should_save, None
        for_peft: Callable[[], AbstractContextManager[None]] = nullcontext
        if has_adapters(self.model):
            for_peft = partial(saving, self.model, rank0_only=not self.args.save_on_each_node)
        if state_dict is None and self._sharded:
            if has_adapters(self.model):
                with for_peft():
                    only = full_files.on_some(writes, "the adapters", partial(saved_names, self.model)) or ()
            state_dict = full_files.full_weights(self.model_wrapped, writes, dtype, only)
        with for_peft():
            super()._save(output_dir, state_dict=state_dict)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._load_weights(resume_from_checkpoint, super()._load_from_checkpoint)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        own = super()._load_best_model  # type: ignore[misc]
        self._load_weights(self.state.best_model_checkpoint, lambda _: own())

    def _load_weights(self, folder: str, load: Callable[[str], None]) -> None:
        """Collective. Loads what rank 0 reads. load: the Trainer's own method, on every rank, for adapters of peft."""
        if has_adapters(self.model):
            with loading_adapters(self.model):
                load(folder)
            return
        self._issue_warnings_after_load(full_files.load_weights(self.model, partial(_files, folder), strict=False))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Collective."""
        if not self._sharded:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        state: Any = {"in": "zero"}
        in_shards, writes = self.accelerator.zero_plugin.state_dict_type == "SHARDED_STATE_DICT", self.args.should_save
        if in_shards:
            states.save_sharded(output_dir, [self.model_wrapped], [self.optimizer.optimizer])
        else:
            state = full_files.full_state(self.model_wrapped, self.optimizer, writes)
        if writes:
            if not in_shards:
                states.remove_other_kinds(output_dir, [0], sharded=False)
            torch.save(state, Path(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Collective. Loads what rank 0 reads. The Trainer's own reads it on every rank, onto the rank's device."""
        files = [Path(checkpoint or "", name) for name in (OPTIMIZER_NAME, SCHEDULER_NAME)]
        there = checkpoint is not None and all(file.is_file() for file in files)
        if not Comm.default().all_gather_text("1" if there else "")[0]:
            return
        if states.is_sharded(str(checkpoint)):
            states.load_sharded(str(checkpoint), [self.model_wrapped], [self.optimizer.optimizer])
        else:
            found = full_files.on_first("the state of the optimizer", partial(full_files.mapped, files[0]))
            self.optimizer.load_state_dict(found)
        self.lr_scheduler.load_state_dict(torch.load(files[1], weights_only=True))


def _files(folder: str) -> list[Path]:
    """The files with full weights in a checkpoint. Raises FileNotFoundError if there are none."""
    for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        if (file := Path(folder, name)).is_file():
            return [file]
    for name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        if (file := Path(folder, name)).is_file():
            return [Path(folder, one) for one in sorted({*json.loads(file.read_text())["weight_map"].values()})]
    raise FileNotFoundError(f"{folder} has no {SAFE_WEIGHTS_NAME}, {WEIGHTS_NAME} or an index of several such files.")


class Trainer(ZeroTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """transformers.Trainer with the argument zero_plugin; see ZeroTrainerMixin."""


class Seq2SeqTrainer(ZeroTrainerMixin, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """transformers.Seq2SeqTrainer with the argument zero_plugin; see ZeroTrainerMixin."""


# ---------------------------------------------------------------------------------------------- arguments


def plugin_for(args: Any, given: ZeroPlugin | int | None) -> ZeroPlugin:
    """The ZeroPlugin of a Trainer with these TrainingArguments. Raises ValueError for arguments that contradict it."""
    if getattr(args, "deepspeed", None) is not None:
        raise ValueError(
            f"TrainingArguments(deepspeed=...) makes transformers build models by DeepSpeed. Leave it out: {NOT_READ}"
        )
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size=True is not available: a rank that is out of memory would change its batches while "
            "the others wait for it. Set per_device_train_batch_size; zero.plan computes the memory before a run."
        )
    if given is not None and args.fsdp:
        raise ValueError("zero_plugin and TrainingArguments(fsdp=...) both say how to shard. Keep one of them.")
    if args.fsdp:
        plugin = ZeroPlugin(**_of_fsdp_config(args.fsdp_config))
    else:
        plugin = chosen_plugin(given, {})
    theirs = {
        "mixed_precision": (plugin.mixed_precision, args.mixed_precision),
        "gradient_accumulation_steps": (plugin.gradient_accumulation_steps, args.gradient_accumulation_steps),
        "gradient_clipping": (plugin.gradient_clipping, args.max_grad_norm),
    }
    for name, (asked, found) in theirs.items():
        if asked is not None and asked != found:
            raise ValueError(
                f"{name} is {asked!r} in the configuration of zero, but {found!r} in TrainingArguments. Make them the "
                "same, or leave it out of the configuration."
            )
    # The Trainer applies these itself.
    return plugin.replace(gradient_accumulation_steps=None, gradient_clipping=None)


def _of_fsdp_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an fsdp_config. TrainingArguments have removed the prefix `fsdp_`, and added keys for XLA."""
    for name in ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings"):
        if config.get(name):
            raise ValueError(f"fsdp_config: {name}={config[name]!r} is not available: zero does not support torch_xla.")
    given = {name: value for name, value in config.items() if not name.startswith("xla")}
    return fields({"version": 2, **given})  # the Trainer's default
