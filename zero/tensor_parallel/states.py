"""The weights of modules that hold parts: state_dict() has DTensors, as before; DTensors and whole tensors load."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero._torch.modules import OwnHook, params_of
from zero.tensor_parallel import parts, table

_hooks: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()


def state_hooks(module: nn.Module) -> None:
    """Registers the hooks on a module that holds parts, once."""
    if module not in _hooks:
        _hooks[module] = [
            module.register_state_dict_post_hook(_AsDTensors()),
            module.register_load_state_dict_pre_hook(_Cut()),
        ]


def remove_hooks(module: nn.Module) -> None:
    for hook in _hooks.pop(module, []):
        hook.remove()


class _AsDTensors(OwnHook):
    """Puts DTensors into a module's state_dict(), except for keep_vars=True."""

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for name, param in params_of(module).items():
            saved = state_dict.get(prefix + name)
            dtensor = None if param is None else table.dtensor_of(param)
            if dtensor is not None and isinstance(saved, Tensor) and saved is not param and not table.is_dtensor(saved):
                state_dict[prefix + name] = table.like(dtensor, saved)


class _Cut(OwnHook):
    """Cuts whole tensors and DTensors to this rank's parts."""

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        errors = more[-1]
        for name, param in params_of(module).items():
            value = state_dict.get(prefix + name)
            dtensor = None if param is None else table.dtensor_of(param)
            if dtensor is not None and param is not None and isinstance(value, Tensor):
                try:
                    part = parts.cut(param, value)
                    state_dict[prefix + name] = table.like(dtensor, part) if table.is_dtensor(param) else part
                except ValueError as error:
                    errors.append(f"size mismatch for {prefix + name}, which is tensor parallel: it {error}.")
                    state_dict[prefix + name] = param.detach()
