"""Hugging Face's Trainer, at any stage: a mixin before any Trainer class.

The Trainer does not know of FSDP: it builds its optimizer from the plain model, and the Accelerator shards both. So
`trainer.model` is the plain module, whose parameters are sharded, and `trainer.model_wrapped` is its wrapper.
"""

# ruff: noqa: E402 (the imports below are what fails with an older version)
from __future__ import annotations

from zero.integrations.versions import refuse_older

refuse_older("transformers")

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.trainer import FSDP_MODEL_NAME, OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from zero._torch.telling import warn_user
from zero.checkpoint import load as load_checkpoint
from zero.checkpoint.read import load_part
from zero.comm import Comm
from zero.comm.together import together
from zero.fsdp import FSDP
from zero.fsdp.full_weights import loading, naming
from zero.fsdp.model import models_of
from zero.full_state import full_optimizer_state_dict
from zero.integrations.accelerate import Accelerator, ZeroPlugin, states
from zero.integrations.accelerate.plugin import NOT_READ, chosen, hidden_environment, of_fsdp
from zero.state.given import Later
from zero.wrappers import Wrapped

_BeforeATrainer: Any = object


class ZeroTrainerMixin(_BeforeATrainer):  # type: ignore[misc]
    """A Trainer at a stage of ZeRO.

        class SFTTrainer(ZeroTrainerMixin, trl.SFTTrainer): ...

        trainer = SFTTrainer(model, args, zero_plugin=2, ...)

    zero_plugin: a ZeroPlugin, or a stage. By default `TrainingArguments(fsdp=..., fsdp_config=...)` are used, and
        without these the environment that `accelerate launch` sets.

    Numbers are those of DistributedDataParallel. `save_model` and checkpoints have full weights, for `from_pretrained`,
    and checkpoints the optimizer's full state, so that a run continues at any stage, and without zero.
    Raises ValueError, on every rank, for arguments that are not available.
    """

    def __init__(self, *args: Any, zero_plugin: ZeroPlugin | int | None = None, **kwargs: Any) -> None:
        self._zero_plugin, self._saves_to_go_on = zero_plugin, False
        if isinstance(model := kwargs.get("model", args[0] if args else None), Wrapped):
            raise ValueError(f"the Trainer was given a {type(model).__name__}. Pass the plain model and zero_plugin.")
        super().__init__(*args, **kwargs)
        counts = hasattr(self.model, "num_parameters")
        self._full_numel = self.model.num_parameters(exclude_embeddings=True) if counts else 0

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's own, whose Accelerator then becomes zero's."""
        args, given = self.args, self._zero_plugin
        if getattr(args, "deepspeed", None) is not None:
            raise ValueError(
                f"TrainingArguments(deepspeed=...): transformers then builds models by DeepSpeed. {NOT_READ}"
            )
        if args.fsdp and given is not None:
            raise ValueError("zero_plugin and TrainingArguments(fsdp=...) both say how to shard. Keep one of them.")
        if args.fsdp:  # without the prefix `fsdp_`, and with keys for XLA, which say no unless they were given
            config = {name: one for name, one in args.fsdp_config.items() if one or not name.startswith("xla")}
            given = ZeroPlugin(**of_fsdp({"version": 2, **config}))  # the Trainer's default
        options = {**vars(chosen(given))}
        refused = {"auto_find_batch_size": "ranks without memory would leave the others behind"}
        if options["stage"] == 3:
            reason = "it casts the model, whose shards are trained. Pass bf16=True or fp16=True, or take stage 2"
            refused |= dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), reason)
        for name in filter(partial(getattr, args), refused):
            raise ValueError(f"{name}=True is not available: {refused[name]}.")
        for name in ("mixed_precision", "gradient_accumulation_steps", "gradient_clipping"):
            wanted = options.pop(name, None)  # the Trainer applies these itself
            found = getattr(args, "max_grad_norm" if name == "gradient_clipping" else name)
            if wanted not in (None, found):
                raise ValueError(f"{name} is {wanted!r} in the configuration, but {found!r} in TrainingArguments.")
        plugin = ZeroPlugin(**options)
        asked, self.args.fsdp_plugin_args = self.args.fsdp_plugin_args, None
        try:
            with hidden_environment():
                super().create_accelerator_and_postprocess()
        finally:
            self.args.fsdp_plugin_args = asked
        accumulation = self.args.accelerator_config.gradient_accumulation_kwargs or {}
        self.accelerator.gradient_state.plugin_kwargs.update(accumulation)
        self.accelerator.__class__ = Accelerator  # other objects already hold methods of this one, so it must stay
        self.accelerator.set_up(plugin)

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """The Trainer's own, with the number of full parameters."""
        name = getattr(self.model, "main_input_name", "input_ids")
        return 6 * inputs[name].numel() * self._full_numel if name in inputs else 0

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Collective. Saves the full weights, as `from_pretrained` loads them."""
        self._saves_to_go_on = _internal_call
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._saves_to_go_on = False

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Collective. Another Trainer's own `_save` finds full parameters in the module at stage 3."""
        dtype = None if self._saves_to_go_on else self.accelerator.saved_dtype
        writes, only, adapts = self.args.should_save, None, hasattr(self.model, "peft_config")
        rank0_only, save = not self.args.save_on_each_node, super()._save
        by_itself = isinstance(self.model_wrapped, FSDP) and not _is_own(save)
        with ExitStack() as stack, together():
            if by_itself:
                options = {"writeback": False, "rank0_only": rank0_only, "offload_to_cpu": True}
                stack.enter_context(FSDP.summon_full_params(self.model_wrapped, **options))
                if writes and dtype is not None:
                    found = self.model.state_dict().items()
                    state_dict = {name: value.to(dtype if value.is_floating_point() else None) for name, value in found}
            elif state_dict is None and isinstance(self.model_wrapped, Wrapped):
                if adapts:
                    with saving(self.model, rank0_only=rank0_only):
                        only = states.on_first(partial(saved_names, self.model), here=writes) or ()
                state_dict = states.full_weights(self.model_wrapped, writes, dtype, only)
            if adapts and not by_itself:
                stack.enter_context(saving(self.model, rank0_only=rank0_only))
            if writes or not by_itself:
                save(output_dir, state_dict=state_dict)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Collective. Where a rank cannot write, every rank raises."""
        with together():
            super()._save_checkpoint(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._load_weights(resume_from_checkpoint, own := super()._load_from_checkpoint, _is_own(own))

    def _load_best_model(self) -> None:
        own = super()._load_best_model
        self._load_weights(self.state.best_model_checkpoint, lambda _: own(), _is_own(own))

    def _load_weights(self, folder: str, load: Callable[[str], None], is_own: bool) -> None:
        """Collective. Loads what rank 0 reads. load: the Trainer's method, which every rank calls in place of that for
        adapters of peft, and where it is not transformers' own: it may read files by other names."""
        adapts = hasattr(self.model, "peft_config")
        names = SAFE_WEIGHTS_NAME, WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME
        file, in_shards = states.stored([Path(folder, name) for name in names], Path(folder, f"{FSDP_MODEL_NAME}_0"))
        if in_shards:
            load_checkpoint(file, self.model)
        elif is_own and not adapts:
            self._issue_warnings_after_load(states.load_weights(self.model, _files(file), strict=False))
        else:
            with loading([one for one, _ in models_of(self.model)], frozen=not adapts), together():
                load(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Collective."""
        if not isinstance(self.model_wrapped, Wrapped):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state: Any = {"in": "zero"}
        if self.accelerator.saves_shards:
            adapts = hasattr(self.model, "peft_config")  # the base stays where it came from
            states.save_sharded(output_dir, [self.model_wrapped], [self.optimizer], frozen=not adapts)
        else:
            state = states.for_writers(
                self.args.should_save, partial(full_optimizer_state_dict, self.model_wrapped, self.optimizer)
            )
        if self.args.should_save:
            torch.save(state, Path(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))
            if not self.accelerator.saves_shards:
                states.remove_others(output_dir, [SAFE_WEIGHTS_NAME])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Collective. Each rank reads a file of its own."""
        with together():
            super()._load_rng_state(checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Collective. Loads what rank 0 reads. The Trainer's own reads it on every rank, onto the rank's device."""
        if checkpoint is None:
            return
        with together() as step:
            file = None
            if Comm.default().rank == 0:  # also as transformers' FSDP Trainer saves it in full
                folder = Path(checkpoint)
                own, scheduled = folder / OPTIMIZER_NAME, folder / SCHEDULER_NAME
                kinds = own, own.with_suffix(".bin"), folder / f"{own.stem}_0"
                file = next((one for one in kinds if one.exists()), None)
                if (file is not None) != scheduled.is_file():  # the run would begin anew in part
                    raise FileNotFoundError(
                        f"{file or scheduled} has no {scheduled.name if file else own.name} beside it. Copy that "
                        "there; or remove it, to go on with a new optimizer and a new schedule."
                    )
            if not step.agree(int(file is not None)):
                warn_user(
                    f"{checkpoint} has neither {OPTIMIZER_NAME} nor {SCHEDULER_NAME}, as save_only_model=True leaves "
                    "it: the optimizer's state and the schedule begin anew."
                )
                return
            schedule = torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True)
            if step.agree(int(file is not None and file.is_dir())):
                shards = f"{checkpoint}/{Path(OPTIMIZER_NAME).stem}_0"
                load_part(shards, self.model_wrapped, [self.optimizer.optimizer], weights=False)
            elif states.has_shards(checkpoint, 1):
                states.load_sharded(checkpoint, [self.model_wrapped], [self.optimizer], [self.model_wrapped])
            else:
                states.load_optimizer(self.optimizer, file, [self.model_wrapped])
            self.lr_scheduler.load_state_dict(schedule)


def _is_own(method: Any) -> bool:
    """Whether a method is transformers' own, and not that of a Trainer between it and the mixin."""
    return method.__func__ is getattr(transformers.Trainer, method.__name__)


def _files(file: Path) -> Iterator[Path]:
    """Yields the files with full weights. Raises FileNotFoundError if there are none. file: one with all of them, or
    the index of several."""
    if not file.is_file():
        raise FileNotFoundError(
            f"{file.parent} has no {SAFE_WEIGHTS_NAME}, {WEIGHTS_NAME} or an index of several such."
        )
    parts = {file.name} if file.suffix != ".json" else {*json.loads(file.read_text())["weight_map"].values()}
    yield from (file.parent / one for one in sorted(parts))


class Trainer(ZeroTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """transformers.Trainer with the argument zero_plugin; see ZeroTrainerMixin."""


class Seq2SeqTrainer(ZeroTrainerMixin, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """transformers.Seq2SeqTrainer with the argument zero_plugin; see ZeroTrainerMixin."""


@contextmanager
def saving(model: nn.Module, *, rank0_only: bool) -> Iterator[None]:
    """Collective. In this context peft saves adapters, if it is given their weights. rank0_only: on rank 0 alone."""
    sharded = [one for one, _ in models_of(model)]
    encoders = getattr(model, "prompt_encoder", None)
    with ExitStack() as stack:
        if sharded and isinstance(encoders, nn.Module):
            full = FSDP.summon_full_params(encoders, writeback=False, rank0_only=rank0_only, offload_to_cpu=True)
            stack.enter_context(full)
        stack.enter_context(naming(sharded))
        stack.enter_context(torch.no_grad())
        yield


def saved_names(model: Any) -> Sequence[str]:
    """Within `saving`: the names of the weights whose values peft asks for to save the adapters of a model."""
    import peft

    asked = set[str]()

    def zeros(name: str, weight: Tensor) -> Tensor:
        asked.add(name)
        return torch.zeros((), dtype=weight.dtype, device="cpu").expand(weight.shape)

    weights = {**model.state_dict()}
    for name, value in weights.items():
        if isinstance(value, Tensor):
            weights[name] = made = Later.like(value, device=torch.device("cpu"))
            made.receive = partial(zeros, name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns again as it saves
        for adapter in model.peft_config:
            kept = peft.get_peft_model_state_dict(model, state_dict={**weights}, adapter_name=adapter)
            for value in kept.values():
                if isinstance(value, Later):
                    value.receive()
    return [name for name in weights if name in asked]
