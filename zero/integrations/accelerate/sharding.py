"""Shards the models and optimizers of an Accelerator by its ZeroPlugin."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zero._torch import children_of, recomputed_in_backward, wraps_others
from zero.comm import Comm
from zero.fsdp import FSDP, MixedPrecision
from zero.fsdp.options import as_strategy
from zero.fsdp.units import unit_modules
from zero.integrations.accelerate.keys import WRAPPING
from zero.integrations.accelerate.plugin import ZeroPlugin
from zero.measure.built import finding_of_built
from zero.measure.param_groups import params_of, steps
from zero.oss import OSS
from zero.sdp import ShardedDDP
from zero.shards.partition import Partition, cut_for
from zero.wrap.ddp import average_by_reading
from zero.wrappers import Wrapped

WRAPPERS = (FSDP, ShardedDDP)
Clip = Callable[[float, float], Tensor]
"""Clips gradients to a norm; returns the norm before. Called with the largest norm, and the order of the norm."""


class Sharding:
    """The models and optimizers that an Accelerator has sharded, also those that it no longer holds itself.

    dtype: of the Accelerator's mixed_precision; None for float32. narrow: whether models are rounded to it, and have
    float32 master weights beside: at stages 1 and 2 that is what comes closest to FSDP's mixed precision.
    """

    def __init__(self, plugin: ZeroPlugin, device: torch.device, dtype: torch.dtype | None) -> None:
        self.plugin, self._device = plugin, device
        policy, sent = plugin.mixed_precision_policy, plugin.reduce_dtype
        as_fsdp = policy == "auto" and dtype is not None
        self.narrow = dtype is not None and (plugin.master_dtype is not None or (as_fsdp and plugin.stage < 3))
        if self.narrow:
            policy = MixedPrecision(param_dtype=dtype, buffer_dtype=dtype, reduce_dtype=sent)
        elif as_fsdp:
            buffers = dtype if plugin.autocast else None  # of FSDP's first version alone
            policy = MixedPrecision(param_dtype=dtype, reduce_dtype=sent or dtype, buffer_dtype=buffers)
        elif policy in (None, "auto"):
            policy = None if sent is None else MixedPrecision(reduce_dtype=sent)
        self._precision, self._as_fsdp = policy, as_fsdp
        # The wrapped models that still exist, in the order of wrapping.
        self.wrapped: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        self._optimizers: WeakKeyDictionary[OSS, None] = WeakKeyDictionary()

    # ------------------------------------------------------------------------------------------- wrapping

    def place(self, model: nn.Module) -> None:
        """Moves parameters and buffers of other devices. Others stay: `.to("cpu:0")` would copy tensors on "cpu"."""
        tensors = [*model.parameters(), *model.buffers()]
        if not all(tensor.is_meta or _same(tensor.device, self._device) for tensor in tensors):
            model.to(self._device)

    def cast(self, model: nn.Module) -> None:
        """Rounds a model to 16 bits, if it is to have master weights: in place, and before its optimizer is sharded.

        At stages 1 and 2 parameters and buffers are of 16 bits from here on. At stage 3 the parameters, which become
        the masters, are float32, and FSDP does the rest; by FSDP's words they are not rounded.
        """
        if not self.narrow or self._precision is None:
            for param in model.parameters() if self._as_fsdp else ():
                if param.requires_grad and param.is_floating_point():
                    param.data = param.data.float()
            return
        held = {param for one in self._optimizers for param in params_of(one)}
        if not held.isdisjoint(model.parameters()):
            raise ValueError(
                "an optimizer was prepared before its model, whose parameters are then to be rounded to 16 bits. "
                "Prepare both in one call: model, optimizer = accelerator.prepare(model, optimizer)."
            )
        modules, precision = [*model.modules()], self._precision
        for module in modules:
            narrow = precision.dtype_of(module)
            if narrow is None:
                module.float()
                continue
            for param in module.parameters(recurse=False):
                if param.is_floating_point() and not wraps_others(param):
                    param.data = param.data.to(narrow).to(torch.float32 if self.plugin.stage == 3 else narrow)
        if self.plugin.stage < 3:
            precision.prepare(modules)
            model.register_forward_pre_hook(partial(_cast_inputs, precision), with_kwargs=True)

    def shard(self, optimizer: Optimizer) -> Optimizer:
        """Collective at stages 1 and 2. The optimizer that this stage steps."""
        if not isinstance(optimizer, OSS) and self.plugin.stage in (1, 2):
            elsewhere = [param for param in params_of(optimizer) if not _same(param.device, self._device)]
            if elsewhere:
                raise ValueError(
                    f"an optimizer was prepared whose parameters are on {elsewhere[0].device}, not on {self._device}. "
                    "Prepare the model in the same call: model, optimizer = accelerator.prepare(model, optimizer)."
                )
            partition, masters = self.plugin.partition, torch.float32 if self.narrow else self.plugin.master_dtype
            optimizer = OSS.from_optimizer(optimizer, partition=partition, master_dtype=masters, **self.plugin.handed)
        if isinstance(optimizer, OSS):
            self._optimizers[optimizer] = None
        return optimizer

    def wrap(self, model: nn.Module, optimizers: Sequence[Optimizer], ddp: dict[str, Any]) -> nn.Module:
        """Collective. The model, wrapped for this stage. ddp: arguments of DistributedDataParallel, for the stages that
        have them."""
        if self.plugin.stage == 3:
            wrapped: nn.Module = self._fsdp(model, optimizers, broadcast_buffers=ddp.get("broadcast_buffers", True))
        elif not any(param.requires_grad for param in model.parameters()):
            return model
        elif self.plugin.stage == 2:
            wrapped = self._sharded_ddp(model, optimizers, ddp)
        elif not dist.is_initialized():
            return model
        else:
            wrapped = self._ddp(model, ddp)
        self.wrapped[wrapped] = None
        return wrapped

    def _ddp(self, model: nn.Module, ddp: dict[str, Any]) -> DistributedDataParallel:
        options = {"gradient_as_bucket_view": True, **ddp}  # without views DDP holds every gradient twice
        if self.plugin.reduce_bucket_size:
            options["bucket_cap_mb"] = self.plugin.reduce_bucket_size * 4 / 2**20
        if self._device.type != "cpu":
            options |= {"device_ids": [self._device.index], "output_device": self._device.index}
        hook = options.pop("register_comm_hook", None)
        wrapped = DistributedDataParallel(model, init_sync=self.plugin.sync_module_states, **options)
        if hook is None:
            average_by_reading(wrapped, Comm(None))
        else:
            hook(wrapped)
        return wrapped

    def _sharded_ddp(self, model: nn.Module, optimizers: Sequence[Optimizer], ddp: dict[str, Any]) -> ShardedDDP:
        known = dict.fromkeys([*optimizers, *self._optimizers])
        own = [one for one in known if isinstance(one, OSS) and steps(one, model)]
        if not own:
            raise ValueError(
                "a model was prepared at stage 2 without its optimizer, which owns the gradients. Prepare both in one "
                "call: model, optimizer = accelerator.prepare(model, optimizer); or freeze what is not trained."
            )
        size, dtype = self.plugin.reduce_bucket_size, self.plugin.reduce_dtype
        if size is None and ddp.get("bucket_cap_mb", 25) != 25:
            size = int(ddp["bucket_cap_mb"] * 2**20 / 4)
        return ShardedDDP(
            model,
            own,
            broadcast_buffers=ddp.get("broadcast_buffers", True),
            sync_models_at_startup=self.plugin.sync_module_states,
            reduce_buffer_size=size,
            reduce_fp16=dtype if dtype in (torch.float16, torch.bfloat16) else False,
        )

    def _fsdp(self, model: nn.Module, optimizers: Sequence[Optimizer], *, broadcast_buffers: bool) -> FSDP:
        plugin = self.plugin
        as_one_unit = _classes(model, plugin.as_one_unit, "as_one_unit")
        policy = policy_of(plugin, model)
        if plugin.activation_checkpointing:
            units = [*unit_modules(model, policy, as_one_unit).values()][1:]
            _recompute(model, units)
            policy = CustomPolicy(lambda module: module in units)
        for module in model.modules():
            if callable(getattr(module, "generate", None)):  # of transformers: ranks generate until all have finished
                vars(module)["_is_fsdp_managed_module"] = True
        return FSDP(
            model,
            device_mesh=self._mesh(),
            auto_wrap_policy=policy,
            as_one_unit=as_one_unit,
            ignored_modules=_ignored(model, plugin.ignored_modules),
            partition=self._partition(model, optimizers),
            mixed_precision=self._precision,
            broadcast_buffers=broadcast_buffers,
            sharding_strategy=plugin.sharding_strategy,
            sync_module_states=plugin.sync_module_states,
            **plugin.handed,
        )

    def _partition(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Partition:
        """The partition that the optimizers need which exist already."""
        whole = any(cut_for("auto", finding_of_built(one)) == "whole" for one in optimizers if steps(one, model))
        return "whole" if whole and self.plugin.partition == "auto" else self.plugin.partition

    def _mesh(self) -> DeviceMesh | None:
        if not as_strategy(self.plugin.sharding_strategy).hybrid:
            return None
        world = dist.get_world_size()
        size = self.plugin.shard_size or int(os.environ.get("LOCAL_WORLD_SIZE") or world)
        if world % size:
            raise ValueError(
                f"{self.plugin.sharding_strategy} shards within {size} ranks, and {world} is no multiple of {size}. "
                "Set shard_size of the ZeroPlugin."
            )
        return init_device_mesh(self._device.type, (world // size, size))

    # ------------------------------------------------------------------------------------------- clipping

    def clips(self, params: Iterable[nn.Parameter]) -> list[Clip]:
        """The functions that clip the gradients of these parameters; none where torch's own clips them, as at stage 1.

        Raises RuntimeError at stage 2 for only some parameters of an optimizer.
        """
        given = {param for param in params if param.requires_grad}
        left, found = set(given), list[Clip]()
        for wrapped in self.wrapped:
            if not isinstance(wrapped, WRAPPERS):
                continue
            own = [param for param in wrapped.module.parameters() if param in given]
            left.difference_update(own)
            if own and isinstance(wrapped, FSDP):
                found.append(partial(wrapped.clip_grad_norm_, params=own))
        if self.plugin.stage == 2 and len(left) < len(given):
            found = [one.clip_grad_norm for one in self._optimizers if _all_or_none(one, given)]
        if found and left:
            raise RuntimeError(
                f"clip_grad_norm_ got the parameters of a prepared model and {len(left)} that are in no prepared "
                "model. Clip them in two calls."
            )
        return found

    def holder_of(self, optimizer: Optimizer) -> nn.Module:
        """The wrapper that holds the optimizer's parameters; a module of none where nothing is wrapped."""
        return next((one for one in self.wrapped if steps(optimizer, inside(one))), nn.Module())


def _all_or_none(optimizer: OSS, given: set[nn.Parameter]) -> bool:
    """Whether these are the optimizer's parameters. Raises RuntimeError if they are some of them only."""
    own = {param for param in params_of(optimizer) if param.requires_grad}
    if own & given and own - given:
        raise RuntimeError(
            f"clip_grad_norm_ got {len(own & given)} of the {len(own)} trained parameters of an optimizer. At stage 2 "
            "the norm is that of all gradients of an optimizer: pass all of its parameters."
        )
    return bool(own & given)


def _cast_inputs(precision: MixedPrecision, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A hook before the forward of a model in 16 bits."""
    return precision.cast_inputs(module, (args, kwargs), root=True)


def inside(model: nn.Module) -> nn.Module:
    """The module that a wrapper of any stage holds; of other modules the module itself."""
    return model.module if isinstance(model, Wrapped) else model


def clip_together(clips: Sequence[Clip], max_norm: float, norm_type: float) -> Tensor:
    """Collective. Clips as if all gradients were one vector; returns its norm."""
    if len(clips) == 1:
        return clips[0](max_norm, norm_type)
    norms = torch.stack([clip(math.inf, norm_type) for clip in clips])
    total: Tensor = torch.linalg.vector_norm(norms, norm_type)
    if total > max_norm:
        for clip, norm in zip(clips, norms, strict=True):
            clip(float(max_norm * norm / total), norm_type)
    return total


# ---------------------------------------------------------------------------------------------------- units


def policy_of(plugin: ZeroPlugin, model: nn.Module) -> Any:
    """FSDP's auto_wrap_policy. Raises ValueError for an unknown name, and if a class to wrap is not found."""
    policy = plugin.auto_wrap_policy
    if policy == "SIZE_BASED_WRAP" and plugin.min_num_params:
        return partial(size_based_auto_wrap_policy, min_num_params=plugin.min_num_params)
    if policy in ("SIZE_BASED_WRAP", "NO_WRAP"):
        return CustomPolicy(lambda module: False)
    if isinstance(policy, str) and policy not in WRAPPING:
        raise ValueError(f"auto_wrap_policy={policy!r} is unknown. Choose a policy, or one of {', '.join(WRAPPING)}.")
    if policy != "TRANSFORMER_BASED_WRAP":
        return policy
    if plugin.transformer_cls_names_to_wrap:
        return ModuleWrapPolicy(_classes(model, plugin.transformer_cls_names_to_wrap, "transformer_cls_names_to_wrap"))
    own = {*(getattr(model, "_no_split_modules", None) or ())}  # may name classes that this model does not have
    found = {type(module) for module in model.modules() if type(module).__name__ in own}
    if not found:
        raise ValueError(
            f"TRANSFORMER_BASED_WRAP: {type(model).__name__} has none of the classes in its _no_split_modules "
            f"({', '.join(sorted(own)) or 'which is empty'}). Name classes that it has, by "
            "fsdp_transformer_layer_cls_to_wrap, or transformer_cls_names_to_wrap of the ZeroPlugin. It has "
            f"{_inside(model)}."
        )
    return ModuleWrapPolicy(found)


def _classes(model: nn.Module, names: Sequence[str], option: str) -> list[type[nn.Module]]:
    by_name = {type(module).__name__: type(module) for module in model.modules()}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise ValueError(
            f"{option} names {', '.join(missing)}, of which {type(model).__name__} has no module. It has "
            f"{_inside(model)}."
        )
    return [by_name[name] for name in names]


def _inside(model: nn.Module) -> str:
    return ", ".join(sorted({type(module).__name__ for module in model.modules() if [*module.children()]}))


def _ignored(model: nn.Module, given: Iterable[nn.Module] | str) -> list[nn.Module]:
    if not isinstance(given, str):
        return [*given]
    pattern = re.compile(given)
    return [module for name, module in model.named_modules() if pattern.fullmatch(name)]


def _recompute(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Wraps the units so that their activations are recomputed in backward."""
    for parent in [*model.modules()]:
        for name, child in children_of(parent).items():
            if child is not None and child in units:
                children_of(parent)[name] = recomputed_in_backward(child)


def _same(device: torch.device, other: torch.device) -> bool:
    return device.type == other.type and (device.type == "cpu" or device.index == other.index)
