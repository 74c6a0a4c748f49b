"""Accelerate's Accelerator, which shards what it prepares."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, DynamoBackend, compile_regions
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero._torch import follow
from zero.grad_scaler import GradScaler
from zero.integrations.accelerate import choosing, full_files, states
from zero.integrations.accelerate.keys import DTYPES
from zero.integrations.accelerate.plugin import ZeroPlugin
from zero.integrations.accelerate.sharding import WRAPPERS, Sharding, clip_together
from zero.measure.param_groups import params_of


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """accelerate.Accelerator at a stage of ZeRO.

        from zero.integrations.accelerate import Accelerator

        accelerator = Accelerator(zero_plugin=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    zero_plugin: a ZeroPlugin, or a stage. By default the passed fsdp_plugin or deepspeed_plugin is used, and without
        these the environment that `accelerate launch` sets. The other arguments are Accelerate's.

    Losses and weights are those of DistributedDataParallel. Collective, in addition to Accelerate's own methods:
    `prepare`, `clip_grad_norm_`, `get_state_dict`, `save_model`, `save_state`, `load_state`, and a prepared optimizer's
    `step`. At stages 2 and 3 `accumulate` reduces each micro-batch, so that a rank holds its share of the gradients.
    Raises ValueError, on every rank, for options that are not available.
    """

    scaler: Any
    _models: list[nn.Module]

    def __init__(self, *args: Any, zero_plugin: ZeroPlugin | int | None = None, **kwargs: Any) -> None:
        given = inspect.signature(accelerate.Accelerator).bind_partial(*args, **kwargs).arguments
        plugin = choosing.chosen_plugin(zero_plugin, given)
        given = {name: value for name, value in given.items() if name not in choosing.THEIR_PLUGINS}
        choosing.refuse_other_parallelism(given.get("parallelism_config"))
        given |= choosing.agreed(plugin, given)
        if given.get("mixed_precision") == "fp8":
            raise ValueError("mixed_precision='fp8' is not available. Choose 'no', 'bf16' or 'fp16'.")
        with choosing.hidden_environment():
            super().__init__(**given)
        self.set_up(plugin)

    def set_up(self, plugin: ZeroPlugin) -> None:
        """Called by the constructor, and on a plain Accelerator whose class was changed to this one."""
        if self.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise ValueError(
                f"another Accelerator has set this process up for {self.distributed_type.value}, which shards models "
                "itself. Build zero.integrations.accelerate.Accelerator first, or alone."
            )
        choosing.refuse_ranks_apart(self.distributed_type)
        if plugin.stage > 1:
            # Only the Trainer shows whether False was asked for: in a GradientAccumulationPlugin it is the default.
            self.gradient_state.plugin_kwargs.setdefault("sync_each_batch", True)
        self.zero_plugin = plugin
        self.sharding = Sharding(plugin, self.device, DTYPES.get(self.mixed_precision))
        if self.sharding.narrow:
            self.native_amp = False  # which is autocast
        self._unscaled: WeakSet[Optimizer] = WeakSet()
        if self.scaler is not None:
            handler = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
            self.scaler = GradScaler(self.device.type, **handler)
        choosing.ask_for_ram_efficient_loading(plugin.cpu_ram_efficient_loading)

    # ------------------------------------------------------------------------------------------ preparing

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Collective. As Accelerate's. A model and its optimizer belong in one call."""
        if placeholder := next((one for one in args if isinstance(one, DummyOptim | DummyScheduler)), None):
            raise ValueError(
                f"prepare() got a {type(placeholder).__name__}, which stands for what DeepSpeed's own configuration "
                "describes. Build the optimizer and the schedule in the script: docs/integrations.md, Configurations."
            )
        if self.zero_plugin.stage == 0:
            return super().prepare(*args, device_placement=device_placement)
        return super().prepare(*self._sharded(args, device_placement), device_placement=device_placement)

    def _sharded(self, args: Sequence[Any], device_placement: Sequence[bool] | None) -> list[Any]:
        """The objects, with models and optimizers replaced by sharded ones."""
        moved: Sequence[bool | None] = device_placement or [None] * len(args)
        ready: list[Any] = [*args]
        for number, (one, move) in enumerate(zip(args, moved, strict=True)):
            if isinstance(one, nn.Module) and not self._is_sharded(one):
                ready[number] = self._prepared_inside(one, move)
                self.sharding.cast(ready[number])
        of: dict[Optimizer, Optimizer] = {}
        for number, one in enumerate(args):
            if isinstance(one, Optimizer) and not isinstance(one, AcceleratedOptimizer):
                ready[number] = of[one] = self.sharding.shard(one)
        for number, one in enumerate(ready):
            if isinstance(one, nn.Module):
                if not self._is_sharded(one):
                    one = ready[number] = self._wrapped(one, [*of.values()])
                self._keep(one)
            elif isinstance(one, LRScheduler) and one.optimizer in of:
                follow(one, of[one.optimizer])
        return ready

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Collective. As Accelerate's. With evaluation_mode the model is not sharded."""
        if self.zero_plugin.stage == 0:
            return super().prepare_model(model, device_placement, evaluation_mode)  # type: ignore[no-any-return]
        if not self._is_sharded(model) and not evaluation_mode:
            model = self._prepared_inside(model, device_placement)
            self.sharding.cast(model)
            model = self._wrapped(model, [])
        elif evaluation_mode:
            model = self._prepared_inside(model, device_placement)
        self._keep(model)
        return model

    def _wrapped(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> nn.Module:
        return self.sharding.wrap(model, optimizers, choosing.ddp_options(self.ddp_handler, self.zero_plugin.stage))

    def _prepared_inside(self, model: nn.Module, device_placement: bool | None) -> nn.Module:
        """The model on its device, with autocast and compilation, which belong inside the sharding wrapper."""
        if self.device_placement if device_placement is None else device_placement:
            self.sharding.place(model)
        before, plugin = [*self._models], self.state.dynamo_plugin
        backend, plugin.backend = plugin.backend, DynamoBackend.NO
        amp, self.native_amp = self.native_amp, self.native_amp and self.zero_plugin.autocast
        try:
            super().prepare_model(model, device_placement=False, evaluation_mode=True)
        finally:
            plugin.backend, self._models, self.native_amp = backend, before, amp
        if backend != DynamoBackend.NO:
            if plugin.use_regional_compilation:
                return compile_regions(model, **plugin.to_kwargs())  # type: ignore[no-any-return]
            model.compile(**plugin.to_kwargs())
        return model

    def _is_sharded(self, model: nn.Module) -> bool:
        return isinstance(model, WRAPPERS) or model in self.sharding.wrapped

    def _keep(self, model: nn.Module) -> None:
        if isinstance(model, WRAPPERS):
            self.sharding.wrapped[model] = None
        if all(model is not other for other in self._models):
            self._models.append(model)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Collective below stage 3. As Accelerate's."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        optimizer = self.sharding.shard(optimizer)
        prepared = states.ShardedAcceleratedOptimizer(optimizer, self)
        self._optimizers.append(prepared)
        return prepared

    # ----------------------------------------------------------------------------------- between backward and step

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Collective with fp16. As Accelerate's; an optimizer that is unscaled already is left alone until its step."""
        if self.scaler is not None:
            asked = self._optimizers if optimizer is None else optimizer
            for one in asked if isinstance(asked, (tuple, list)) else [asked]:
                while isinstance(one, AcceleratedOptimizer):
                    one = one.optimizer
                if one not in self._unscaled:
                    self.scaler.unscale_(one)
                    self._unscaled.add(one)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Collective. As Accelerate's. At stage 2 pass all parameters of one or several optimizers.

        Raises RuntimeError there for only some parameters of an optimizer.
        """
        params: list[Any] = [parameters] if isinstance(parameters, Tensor) else [*parameters]
        clips = self.sharding.clips(params)
        if not clips:
            return super().clip_grad_norm_(params, max_norm, norm_type)
        self.unscale_gradients()
        return clip_together(clips, float(max_norm), float(norm_type))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """As Accelerate's. Raises RuntimeError at stages 2 and 3, where a rank has gradients of its shards only."""
        params = [parameters] if isinstance(parameters, Tensor) else [*parameters]
        sharded = (model for model in self.sharding.wrapped if isinstance(model, WRAPPERS))
        if not {param for model in sharded for param in model.module.parameters()}.isdisjoint(params):
            raise RuntimeError(
                f"clip_grad_value_ at stage {self.zero_plugin.stage}: gradients are sharded. Use clip_grad_norm_, or "
                "stage 1."
            )
        super().clip_grad_value_(params, clip_value)

    def before_step(self, optimizer: Optimizer) -> None:
        """Called by prepared optimizers. Clips where the ZeroPlugin says so."""
        limit = self.zero_plugin.gradient_clipping
        if limit is not None:
            self.unscale_gradients(optimizer)
            self.clip_grad_norm_(params_of(optimizer), limit)
        self._unscaled.discard(optimizer)

    # --------------------------------------------------------------------------------------------- weights

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """As Accelerate's. The module inside; at stage 3 its parameters stay sharded."""
        inner = model.module if isinstance(model, WRAPPERS) else model
        return super().unwrap_model(inner, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Collective. The full weights under the model's own names, as copies on the CPU of rank 0, which writes them:
        {} on other ranks. With save_on_each_node one rank of each host has them."""
        return full_files.full_weights(model, self._writes, self.saved_dtype)

    @property
    def _writes(self) -> bool:
        each_node = self.project_configuration.save_on_each_node
        return bool(self.is_local_main_process if each_node else self.is_main_process)

    @property
    def saved_dtype(self) -> torch.dtype | None:
        return DTYPES.get(self.mixed_precision) if self.zero_plugin.save_16bit_model else None

    # ------------------------------------------------------------------------------------------------ states

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Collective. As Accelerate's; the ZeroPlugin's state_dict_type chooses the format."""
        models, optimizers, hooks = self._models, self._optimizers, [*self._save_model_state_pre_hook.values()]

        def write(_: Any, __: Any, folder: str) -> None:
            sharded = self.zero_plugin.state_dict_type == "SHARDED_STATE_DICT"
            if self._writes:
                numbers = range(max(len(models), len(optimizers)))
                states.remove_other_kinds(folder, numbers, sharded=sharded, safe=safe_serialization)
            weights = [] if sharded else [full_files.full_weights(model, self._writes) for model in models]
            of_models = [*weights]
            for hook in hooks:
                hook(models, weights, folder)
            if sharded:
                states.save_sharded(folder, models, [one.optimizer for one in optimizers])
                return
            self._save_weights(folder, of_models, weights, safe=safe_serialization)
            weights.clear()
            of_models.clear()  # nothing stays while the state of optimizers is gathered
            for number, one in enumerate(optimizers):
                holder, path = self.sharding.holder_of(one.optimizer), states.optimizer_file(folder, number)
                self.save(full_files.full_state(holder, one, self._writes), path)

        with self._emptied("_save_model_state_pre_hook", write):
            location = super().save_state(output_dir, safe_serialization, **kwargs)
        self.wait_for_everyone()
        return location

    def _save_weights(self, folder: str, of_models: Sequence[Any], left: Sequence[Any], *, safe: bool) -> None:
        """Those that hooks have left."""
        for number, one in enumerate(of_models):
            if any(one is other for other in left):
                self.save(OrderedDict(one), states.weights_file(folder, number, safe=safe), safe_serialization=safe)

    def load_state(self, input_dir: Any = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Collective. As Accelerate's. Loads what `save_state` wrote at any stage, or Accelerate without zero."""
        models, optimizers, hooks = self._models, self._optimizers, [*self._load_model_state_pre_hook.values()]

        def read(_: Any, folder: str) -> None:
            left = [*models]
            for hook in hooks:
                hook(left, folder)
            loaded = [model for model in models if model not in left]
            if states.is_sharded(folder):
                states.load_sharded(folder, models, [one.optimizer for one in optimizers], loaded)
            else:
                strict = kwargs.get("strict", True)
                states.load_full(folder, models, optimizers, loaded, strict=strict, **(load_kwargs or {}))

        with self._emptied("_load_model_state_pre_hook", read):
            super().load_state(input_dir, load_kwargs, **kwargs)

    @contextmanager
    def _emptied(self, hooks: str, hook: Callable[..., None]) -> Iterator[None]:
        """In this context Accelerate knows no models and optimizers, to save or load, but calls the hook."""
        known = {name: self.__dict__[name] for name in ("_models", "_optimizers", hooks)}
        self.__dict__.update({"_models": [], "_optimizers": [], hooks: OrderedDict(zero=hook)})
        try:
            yield
        finally:
            self.__dict__.update(known)
