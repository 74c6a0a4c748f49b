"""Accelerate's Accelerator, which shards the models and optimizers that it prepares, as its ZeroPlugin says."""

from __future__ import annotations

import inspect
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import accelerate
import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, DynamoBackend, compile_regions
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero._torch.modules import children_of, recomputed_in_backward
from zero._torch.optimizers import follow
from zero._torch.tensors import wraps_others
from zero.comm import Comm
from zero.comm.comm import launched_ranks
from zero.comm.together import together
from zero.fsdp import FSDP
from zero.fsdp.choice import unit_modules
from zero.fsdp.options import as_strategy
from zero.integrations.accelerate import plugin as plugins
from zero.integrations.accelerate import states
from zero.integrations.accelerate.plugin import DTYPES, NOT_READ, WRAPPING, ZeroPlugin
from zero.measure.built import finding_of_built
from zero.measure.param_groups import params_of, steps
from zero.oss import OSS
from zero.precision import Rounding
from zero.sdp import AveragingDDP, ShardedDDP
from zero.shards.partition import cut_for
from zero.wrap.precision import MixedPrecision, as_precision

WRAPPERS = FSDP, ShardedDDP
_TOGETHER = (
    "whose parameters or gradients it needs. Prepare both in one call: model, optimizer = accelerator.prepare(model, "
    "optimizer); or freeze what is not trained."
)


class Sharding:
    """The models and optimizers that an Accelerator has sharded, also those that it no longer holds itself.

    precision: of the ZeroPlugin, or what the Accelerator's mixed_precision means. options: of a ZeroPlugin, but those
    of the Accelerator itself. saves_shards: whether each model is saved in shards, with its optimizers.
    """

    def __init__(
        self, stage: int, device: torch.device, precision: MixedPrecision, options: dict[str, Any], saves_shards: bool
    ) -> None:
        take = options.pop
        self.stage, self._device, self._one_model_each = stage, device, stage == 2 or saves_shards
        self._precision, self._synced = precision, take("sync_module_states", True)
        self._policy, self._class_names = take("auto_wrap_policy", None), take("transformer_cls_names_to_wrap", ())
        self._min_numel, self._as_one_unit = take("min_num_params", 0), take("as_one_unit", ())
        self._recomputes, self._shard_size = take("activation_checkpointing", False), take("shard_size", None)
        if stage == 0 and options:
            raise ValueError(f"{', '.join(options)}: for stages 1 to 3, but stage is 0. Leave it out.")
        self._rest = options  # for OSS, or FSDP
        # Those that still exist, in the order of wrapping.
        self.wrapped: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        self._optimizers: WeakKeyDictionary[Optimizer, None] = WeakKeyDictionary()
        # At stages 1 and 2, of models that are not wrapped yet.
        self._roundings: WeakKeyDictionary[nn.Module, Rounding] = WeakKeyDictionary()

    def prepare(self, model: nn.Module, *, moves: bool, rounds: bool = True) -> None:
        """Collective at stages 1 and 2 in 16 bits. Puts the model on its device, and into its dtypes."""
        if self.stage == 0 or self.has(model):
            return
        # Tensors on the device stay: `.to("cpu:0")` would copy those on "cpu".
        there, index = self._device.type, None if self._device.type == "cpu" else self._device.index
        devices = [tensor.device for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
        if moves and any(device.type != there or index not in (None, device.index) for device in devices):
            model.to(self._device)
        if not rounds or self._precision.param_dtype is None or model in self._roundings:
            return
        for param in model.parameters():
            if param.requires_grad and param.is_floating_point() and not wraps_others(param) and param.itemsize < 4:
                param.data = param.data.float()
        if self.stage in (1, 2):
            rounding = Rounding(self._precision, model, self._policy_for(model), Comm())
            if any(param in rounding.dtypes for one in self._optimizers for param in params_of(one)):
                raise ValueError(f"an optimizer was prepared before its model, {_TOGETHER}")
            if self._synced:
                rounding.start_alike()
            self._roundings[model] = rounding

    def has(self, model: nn.Module) -> bool:
        return isinstance(model, WRAPPERS) or model in self.wrapped

    def shard(self, optimizer: Optimizer) -> Optimizer:
        """Collective at stages 1 and 2. The optimizer that this stage steps."""
        if self.stage in (1, 2) and not isinstance(optimizer, OSS):
            own, roundings = params_of(optimizer), self._roundings.values()
            rounded = {param: one.dtypes[param] for one in roundings for param in own if param in one.dtypes}
            optimizer = OSS.from_optimizer(optimizer, precision=self._precision, rounded=rounded, **self._rest)
        self._optimizers[optimizer] = None
        for holder in self.wrapped:  # prepared before, not in one call
            if steps(optimizer, holder):
                self._refuse_shared(optimizer, holder)
                if isinstance(holder, FSDP):
                    holder.register_optimizer(optimizer)
                elif isinstance(holder, AveragingDDP) and isinstance(optimizer, OSS):
                    holder.adopt(optimizer)
        return optimizer

    def _refuse_shared(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Raises ValueError where an optimizer steps more than this model, and a model has to have its own."""
        if self._one_model_each and (more := {*params_of(optimizer)} - {*model.parameters()}):
            raise ValueError(
                f"the {type(optimizer).__name__} also steps {len(more)} parameters that are not in the "
                f"{type(model).__name__} it was prepared with. At stage 2, and with SHARDED_STATE_DICT, each model has "
                "optimizers of its own: build an optimizer for each model, or take stage 1 or 3 and FULL_STATE_DICT."
            )

    def wrap(self, model: nn.Module, handler: Any) -> nn.Module:
        """Collective. The model, wrapped for this stage. handler: DistributedDataParallelKwargs."""
        for one in self._optimizers:
            if steps(one, model):
                self._refuse_shared(one, model)
        options = handler.to_kwargs() if handler is not None else {}
        hook = getattr(handler, "comm_hook", "no")
        if getattr(hook, "value", hook) != "no":
            raise ValueError("comm_hook is for stage 0. Pass ZeroPlugin(precision=MixedPrecision(reduce_dtype=...)).")
        synced = options.get("broadcast_buffers", True)
        if self.stage == 3:
            as_one_unit = _classes(model, self._as_one_unit, "as_one_unit")
            policy = self._policy_for(model)
            if self._recomputes:
                units = [*unit_modules(model, policy, as_one_unit).values()][1:]
                for parent in [*model.modules()]:
                    for name, child in children_of(parent).items():
                        if child is not None and child in units:
                            children_of(parent)[name] = recomputed_in_backward(child)
                policy = CustomPolicy(lambda module: module in units)
            for module in model.modules():
                if callable(getattr(module, "generate", None)):  # of transformers: until all ranks have finished
                    vars(module)["_is_fsdp_managed_module"] = True
            rest = {"broadcast_buffers": synced, "sync_module_states": self._synced, **self._rest}
            if isinstance(pattern := rest.get("ignored_modules"), str):
                rest["ignored_modules"] = [one for name, one in model.named_modules() if re.fullmatch(pattern, name)]
            own = [one for one in self._optimizers if steps(one, model)]
            if "whole" in [cut_for(rest.get("partition", "auto"), finding_of_built(one)) for one in own]:
                rest["partition"] = "whole"
            rest |= {"auto_wrap_policy": policy, "as_one_unit": as_one_unit, "precision": self._precision}
            mesh: DeviceMesh | None = None
            if as_strategy(strategy := self._rest.get("sharding_strategy", "FULL_SHARD")).hybrid:
                world = dist.get_world_size()
                size = self._shard_size or int(os.environ.get("LOCAL_WORLD_SIZE") or world)
                if world % size:
                    raise ValueError(f"{strategy}: {world} ranks are no multiple of {size}. Set shard_size.")
                mesh = init_device_mesh(self._device.type, (world // size, size))
            sharded = FSDP(model, device_mesh=mesh, **rest)
            for one in own:
                sharded.register_optimizer(one)
            wrapped: nn.Module = sharded
        elif not any(param.requires_grad for param in model.parameters()) or (
            self.stage == 1 and not dist.is_initialized() and self._precision.param_dtype is None
        ):
            if (rounding := self._roundings.pop(model, None)) is not None:
                rounding.wrap(None, ())
            return model
        else:
            oss = [one for one in self._optimizers if isinstance(one, OSS) and steps(one, model)]
            if not oss and self.stage == 2:
                raise ValueError(f"a model was prepared at stage 2 without its optimizer, {_TOGETHER}")
            rounding = self._roundings.pop(model, None) or Rounding(self._precision, model, None, Comm())
            how: dict[str, Any] = {"broadcast_buffers": synced, "sync_module_states": self._synced}
            cap_mb = options.get("bucket_cap_mb")
            how["reduce_buffer_size"] = int(cap_mb * 2**20 / 4) if cap_mb else None
            wrapped = rounding.wrap(ShardedDDP if self.stage == 2 else AveragingDDP, oss, **how)
        self.wrapped[wrapped] = None
        return wrapped

    def _policy_for(self, model: nn.Module) -> Any:
        """FSDP's auto_wrap_policy. Raises ValueError for an unknown name, and if a class to wrap is not found."""
        policy = self._policy
        if policy == "SIZE_BASED_WRAP" and self._min_numel:
            return partial(size_based_auto_wrap_policy, min_num_params=self._min_numel)
        if policy in ("SIZE_BASED_WRAP", "NO_WRAP"):
            return CustomPolicy(lambda module: False)
        if isinstance(policy, str) and policy not in WRAPPING:
            known = ", ".join(WRAPPING)
            raise ValueError(f"auto_wrap_policy={policy!r} is unknown. Choose a policy, or one of {known}.")
        if policy != "TRANSFORMER_BASED_WRAP":
            return policy
        own = {*(getattr(model, "_no_split_modules", None) or ())}  # may name classes that this model does not have
        found = {type(module).__name__ for module in model.modules()} & own or {*own, "no class"}
        return ModuleWrapPolicy(_classes(model, self._class_names or [*found], "TRANSFORMER_BASED_WRAP"))


def _classes(model: nn.Module, names: Sequence[str], option: str) -> list[type[nn.Module]]:
    by_name = {type(module).__name__: type(module) for module in model.modules()}
    if missing := [name for name in names if name not in by_name]:
        has = ", ".join(sorted({type(module).__name__ for module in model.modules() if [*module.children()]}))
        raise ValueError(
            f"{option} names {', '.join(missing)}, of which {type(model).__name__} has no module. It has {has}: name "
            "these by fsdp_transformer_layer_cls_to_wrap, or by transformer_cls_names_to_wrap of the ZeroPlugin."
        )
    return [by_name[name] for name in names]


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """accelerate.Accelerator at a stage of ZeRO.

        from zero.integrations.accelerate import Accelerator

        accelerator = Accelerator(zero_plugin=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    zero_plugin: a ZeroPlugin, or a stage. By default the passed fsdp_plugin is used, and without it the environment
        that `accelerate launch` sets. The other arguments are Accelerate's.

    Losses and weights are those of DistributedDataParallel. Collective, in addition to Accelerate's own methods:
    `prepare`, `clip_grad_norm_`, `get_state_dict`, `save_model`, `save_state`, `load_state`, and a prepared optimizer's
    `step`. At stages 2 and 3 `accumulate` reduces each micro-batch, so that a rank holds its share of the gradients.
    Raises ValueError, on every rank, for options that are not available.
    """

    scaler: Any
    native_amp: bool
    _models: list[nn.Module]

    def __init__(self, *args: Any, zero_plugin: ZeroPlugin | int | None = None, **kwargs: Any) -> None:
        given = inspect.signature(accelerate.Accelerator).bind_partial(*args, **kwargs).arguments
        fsdp_plugin = given.pop("fsdp_plugin", None)
        if zero_plugin is not None and fsdp_plugin is not None:
            raise ValueError("zero_plugin and fsdp_plugin both say how to shard. Pass one of them.")
        if any(given.pop(name, None) is not None for name in ("deepspeed_plugin", "deepspeed_plugins")):
            raise ValueError(f"deepspeed_plugin: {NOT_READ}")
        if given.get("parallelism_config") or os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
            raise ValueError(plugins.OTHERS.format("parallelism_config"))
        plugin = plugins.chosen(zero_plugin, fsdp_plugin)
        for name, unsaid in {"mixed_precision": None, "gradient_accumulation_steps": 1}.items():
            asked, passed = getattr(plugin, name, None), given.get(name)
            if asked is not None and passed not in (None, unsaid, asked):
                raise ValueError(
                    f"{name}={passed!r} was passed, but the configuration says {asked!r}. Make them the same."
                )
            if asked is not None:
                given[name] = asked
        if given.get("mixed_precision") == "fp8":
            raise ValueError("mixed_precision='fp8' is not available. Choose 'no', 'bf16' or 'fp16'.")
        with plugins.hidden_environment():
            super().__init__(**given)
        self.set_up(plugin)

    def set_up(self, plugin: ZeroPlugin) -> None:
        """Called by the constructor, and on a plain Accelerator whose class was changed to this one."""
        if self.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            taken = self.distributed_type.value
            raise ValueError(f"another Accelerator has set this process up for {taken}. Build zero's first, or alone.")
        ranks = dist.get_world_size() if dist.is_initialized() else launched_ranks()
        if self.distributed_type == DistributedType.NO and ranks > 1:
            raise RuntimeError(
                f"Accelerate found one process (DistributedType.NO), but there are {ranks} ranks, which would train "
                "apart. On CPUs pass Accelerator(cpu=True) or TrainingArguments(use_cpu=True), or set "
                "ACCELERATE_USE_CPU=true in the environment; `accelerate launch` does not pass `use_cpu: true` on. On "
                "GPUs set `distributed_type: MULTI_GPU` and `use_cpu: false`. For a process that is to train alone set "
                "`num_processes: 1`."
            )
        if plugin.stage > 1:
            # Only the Trainer shows whether False was asked for: in a GradientAccumulationPlugin it is the default.
            self.gradient_state.plugin_kwargs.setdefault("sync_each_batch", True)
        self.zero_plugin, options = plugin, {**vars(plugin)}
        for name in ("mixed_precision", "gradient_accumulation_steps"):  # which the constructor has taken
            options.pop(name, None)
        if options.pop("cpu_ram_efficient_loading", False):  # `from_pretrained` of transformers reads the environment
            os.environ.update({plugins.ASKS[0]: "true", plugins.RAM_EFFICIENT: "true"})
        elif plugins.RAM_EFFICIENT in os.environ:
            os.environ[plugins.RAM_EFFICIENT] = "false"  # the launcher's default is `true`: ranks would have no values
        self._max_norm = options.pop("gradient_clipping", None)
        asked = options.pop("precision", None) if plugin.stage else None  # of which stage 0 says that it has none
        dtype = DTYPES.get(self.mixed_precision)
        precision = as_precision(dtype if asked is None else asked)
        # Without "fp16" of its own the Accelerator scales no loss.
        if precision.param_dtype != dtype and (dtype is not None or precision.param_dtype == DTYPES["fp16"]):
            raise ValueError(
                f"mixed_precision={self.mixed_precision!r} and {precision} of the ZeroPlugin say different things. "
                "Pass mixed_precision alone, or a policy with the same param_dtype beside it."
            )
        self.saved_dtype = precision.param_dtype if options.pop("save_16bit_model", False) else None
        kind = options.pop("state_dict_type", "FULL_STATE_DICT")
        if kind not in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            raise ValueError(f"state_dict_type={kind!r} is unknown. Choose FULL_STATE_DICT or SHARDED_STATE_DICT.")
        self.saves_shards = kind == "SHARDED_STATE_DICT"
        self.sharding = Sharding(options.pop("stage"), self.device, precision, options, self.saves_shards)
        self.native_amp = self.native_amp and plugin.stage == 0  # which is autocast
        self._unscaled: WeakSet[Optimizer] = WeakSet()

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Collective. As Accelerate's. A model and its optimizer belong in one call."""
        if placeholder := next((one for one in args if isinstance(one, DummyOptim | DummyScheduler)), None):
            raise ValueError(
                f"prepare() got a {type(placeholder).__name__}, which stands for a part of DeepSpeed's configuration. "
                "Build the optimizer and the schedule in the script: docs/integrations.md, Configurations."
            )
        moved: Sequence[bool | None] = device_placement or [None] * len(args)
        for one, moves in zip(args, moved, strict=True):
            if isinstance(one, nn.Module):
                self.sharding.prepare(one, moves=self.device_placement if moves is None else moves)
        # An optimizer is sharded after its model is cast, and before that is wrapped.
        plain = (one for one in args if isinstance(one, Optimizer) and not isinstance(one, AcceleratedOptimizer))
        of = {one: self.sharding.shard(one) for one in plain}
        for one in args:
            if isinstance(one, LRScheduler) and one.optimizer in of:
                follow(one, of[one.optimizer])
        ready = [of.get(one, one) if isinstance(one, Optimizer) else one for one in args]
        return super().prepare(*ready, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Collective. As Accelerate's. With evaluation_mode the model is not sharded."""
        if self.zero_plugin.stage == 0:
            return super().prepare_model(model, device_placement, evaluation_mode)  # type: ignore[no-any-return]
        if not self.sharding.has(model):
            moves = self.device_placement if device_placement is None else device_placement
            self.sharding.prepare(model, moves=moves, rounds=not evaluation_mode)
            # Autocast and compilation belong inside the sharding wrapper.
            before, compiling = [*self._models], self.state.dynamo_plugin
            backend, compiling.backend = compiling.backend, DynamoBackend.NO
            try:
                super().prepare_model(model, device_placement=False, evaluation_mode=True)
            finally:
                compiling.backend, self._models = backend, before
            if backend != DynamoBackend.NO:
                if compiling.use_regional_compilation:
                    model = compile_regions(model, **compiling.to_kwargs())
                else:
                    model.compile(**compiling.to_kwargs())
            if not evaluation_mode:
                model = self.sharding.wrap(model, self.ddp_handler)
        elif isinstance(model, WRAPPERS):
            self.sharding.wrapped[model] = None
        if all(model is not other for other in self._models):
            self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Collective below stage 3. As Accelerate's."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        self._optimizers.append(states.ShardedAcceleratedOptimizer(self.sharding.shard(optimizer), self))
        return self._optimizers[-1]

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """As Accelerate's. What was unscaled before has scaled gradients again."""
        self._unscaled.clear()
        super().backward(loss, **kwargs)

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

    def before_step(self, optimizer: Optimizer) -> None:
        """Called by prepared optimizers. Clips where the ZeroPlugin says so."""
        if self._max_norm is not None:
            self.unscale_gradients(optimizer)
            self.clip_grad_norm_(params_of(optimizer), self._max_norm)
        self._unscaled.discard(optimizer)

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """As Accelerate's where batches are even. Raises RuntimeError, on every rank, where they need not be."""
        if self.zero_plugin.stage == 0 or self.num_processes == 1:
            with super().join_uneven_inputs(joinables, even_batches):
                yield
            return
        if not (self.even_batches if even_batches is None else even_batches):
            raise RuntimeError(
                f"join_uneven_inputs() at stage {self.zero_plugin.stage}: a rank without batches leaves the others "
                "waiting. Write `for batch, weight in zero.join(loader, model):`, and backward(weight * loss), with "
                "dataloader_config=DataLoaderConfiguration(even_batches=False)."
            )
        yield

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """As Accelerate's. The module inside; at stage 3 its parameters stay sharded."""
        inner = model.module if isinstance(model, WRAPPERS) else model
        return super().unwrap_model(inner, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Collective. The full weights under the model's own names, as copies on the CPU of rank 0, which writes them:
        {} on other ranks. With save_on_each_node one rank of each host has them."""
        return states.full_weights(model, self.writes, self.saved_dtype)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Collective. As Accelerate's."""
        with together():
            super().save_model(*args, **kwargs)

    @property
    def writes(self) -> bool:
        each_node = self.project_configuration.save_on_each_node
        return bool(self.is_local_main_process if each_node else self.is_main_process)

    def save_state(
        self,
        output_dir: Any = None,
        safe_serialization: bool = True,
        *,
        exclude_frozen_parameters: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Collective. As Accelerate's; the ZeroPlugin's state_dict_type chooses the format. Where a rank cannot write,
        every rank raises. exclude_frozen_parameters: DeepSpeed's word; full weights then load by strict=False."""
        save = partial(states.save, self, self._models, self._optimizers, [*self._save_model_state_pre_hook.values()])
        how = {"safe": safe_serialization, "frozen": not exclude_frozen_parameters}
        saves: Callable[..., None] = lambda _, __, folder: save(folder, **how)  # noqa: E731
        with together(), self._emptied("_save_model_state_pre_hook", saves):
            return super().save_state(output_dir, safe_serialization, **kwargs)

    def load_state(self, input_dir: Any = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Collective. As Accelerate's. Loads what `save_state` wrote at any stage, or Accelerate without zero."""
        models, optimizers, hooks = self._models, self._optimizers, [*self._load_model_state_pre_hook.values()]
        load = partial(states.load, models, optimizers, hooks, kwargs.get("strict", True), load_kwargs or {})
        with together(), self._emptied("_load_model_state_pre_hook", lambda _, folder: load(folder)):
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
