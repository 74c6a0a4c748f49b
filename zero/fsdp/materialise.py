"""Models built on the meta device, given memory and values one unit at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Holders = dict[nn.Parameter, list[tuple[nn.Module, str]]]


class Materialiser:
    """Turns meta parameters into real ones. Only the source of the first values initialises them; others receive them.

    param_init_fn: called with a module whose own parameters have memory but no values; by default the module's own
        `reset_parameters` is.
    initialises: whether this rank is that source.
    """

    def __init__(
        self, root: nn.Module, param_init_fn: Callable[[nn.Module], None] | None, *, initialises: bool
    ) -> None:
        cuda = torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._init, self._initialises = param_init_fn, initialises
        self._holders: Holders = {}
        for prefix, module in root.named_modules():
            for name, param in module.named_parameters(recurse=False):
                if param.is_meta:
                    self._holders.setdefault(param, []).append((module, name))
            empty = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
            for name in empty:
                module._buffers[name] = torch.zeros_like(module._buffers[name], device=self._device)
            if empty and initialises and next(module.parameters(recurse=False), None) is None:
                self._initialise(module, prefix)

    def materialise(self, owned: list[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
        """The parameters of one unit, real ones in place of meta ones, which every module that had those has now."""
        made, touched = [], []
        for name, param in owned:
            if param.is_meta:
                holders = self._holders.pop(param)
                param = nn.Parameter(torch.empty_like(param, device=self._device), requires_grad=param.requires_grad)
                for module, attribute in holders:
                    module.register_parameter(attribute, param)
                touched.append((holders[0][0], name))
            made.append((name, param))
        if self._initialises:
            for module, name in dict(touched).items():
                self._initialise(module, name)
        return made

    def _initialise(self, module: nn.Module, name: str) -> None:
        reset = self._init or getattr(type(module), "reset_parameters", None)
        if reset is None:
            raise ValueError(
                f"{name!r} is on the meta device, and {type(module).__name__} has no reset_parameters(). Pass "
                "param_init_fn=..., or build this module with real parameters on rank 0."
            )
        with torch.no_grad():
            reset(module)
