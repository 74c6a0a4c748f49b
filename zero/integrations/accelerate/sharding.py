"""Shards the models and optimizers of an Accelerator by the options of its ZeroPlugin."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.optim import Optimizer

from zero._torch.modules import children_of, recomputed_in_backward
from zero._torch.tensors import wraps_others
from zero.comm import Comm
from zero.fsdp import FSDP
from zero.fsdp.choice import unit_modules
from zero.fsdp.options import as_strategy
from zero.integrations.accelerate.sections import WRAPPING
from zero.measure.built import finding_of_built
from zero.measure.param_groups import params_of, steps
from zero.oss import OSS
from zero.precision import Rounding
from zero.sdp import AveragingDDP, ShardedDDP
from zero.shards.partition import cut_for
from zero.wrap.precision import MixedPrecision

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
        """Collective at stages 1 and 2 in 16 bits: before the model's optimizer is sharded. Puts the model on its
        device, and into its dtypes: trained parameters become float32, which masters are."""
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
            own, rounded = params_of(optimizer), dict[nn.Parameter, torch.dtype]()
            for rounding in self._roundings.values():
                rounded |= {param: rounding.dtypes[param] for param in own if param in rounding.dtypes}
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
        """Collective. The model, wrapped for this stage. handler: DistributedDataParallelKwargs, of which stages have
        what means something to them."""
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
                rounding.round_rest(())
                rounding.cast_inputs(self._precision.prepare(model.modules()), root=True)
            return model
        else:
            oss = [one for one in self._optimizers if isinstance(one, OSS) and steps(one, model)]
            if not oss and self.stage == 2:
                raise ValueError(f"a model was prepared at stage 2 without its optimizer, {_TOGETHER}")
            kind, rounding = ShardedDDP if self.stage == 2 else AveragingDDP, self._roundings.pop(model, None)
            how: dict[str, Any] = {"broadcast_buffers": synced, "sync_models_at_startup": self._synced}
            cap_mb = options.get("bucket_cap_mb")
            how["reduce_buffer_size"] = int(cap_mb * 2**20 / 4) if cap_mb else None
            if rounding is not None:
                wrapped = rounding.wrap(kind, oss, **how)
            else:
                wrapped = kind(model, oss, precision=self._precision, **how)
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

    def holder_of(self, optimizer: Optimizer) -> nn.Module:
        """The wrapper that holds the optimizer's parameters; a module of several, or of none where none is wrapped."""
        holders = [one for one in self.wrapped if steps(optimizer, one)]
        return holders[0] if len(holders) == 1 else nn.ModuleList(holders)


def _classes(model: nn.Module, names: Sequence[str], option: str) -> list[type[nn.Module]]:
    by_name = {type(module).__name__: type(module) for module in model.modules()}
    if missing := [name for name in names if name not in by_name]:
        has = ", ".join(sorted({type(module).__name__ for module in model.modules() if [*module.children()]}))
        raise ValueError(
            f"{option} names {', '.join(missing)}, of which {type(model).__name__} has no module. It has {has}: name "
            "these by fsdp_transformer_layer_cls_to_wrap, or by transformer_cls_names_to_wrap of the ZeroPlugin."
        )
    return [by_name[name] for name in names]
