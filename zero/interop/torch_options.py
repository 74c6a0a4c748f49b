"""Converts options of PyTorch's FSDP1 that have another name in zero."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero._torch import buffers_of
from zero.fsdp.prefetch import Prefetch, as_prefetch
from zero.shards.home import homes

NAMES = (
    "backward_prefetch",
    "device_id",
    "forward_prefetch",
    "ignored_states",
    "limit_all_gathers",
    "use_orig_params",
)


@dataclass(frozen=True)
class TorchOptions:
    """zero's options that PyTorch's names and zero's own resulted in.

    device: the device that the module is moved to before it is sharded; None leaves it where it is.
    """

    prefetch: Prefetch
    ignored_modules: list[nn.Module]
    ignored_parameters: list[nn.Parameter]
    device: torch.device | None

    @property
    def ignored(self) -> list[nn.Parameter]:
        """All ignored parameters, including those of ignored modules."""
        of_modules = (param for module in self.ignored_modules for param in module.parameters())
        return [*dict.fromkeys([*of_modules, *self.ignored_parameters])]

    def move(self, module: nn.Module) -> None:
        """Moves parameters and buffers that have values to the device. Parameters remain the same objects."""
        if self.device is None:
            return
        for param in module.parameters():
            if not param.is_meta and param.device != self.device:
                param.data = param.data.to(self.device)
        for holder in module.modules():
            for name, buffer in holder.named_buffers(recurse=False):
                if not buffer.is_meta and buffer.device != self.device:
                    buffers_of(holder)[name] = buffer.to(self.device)


def refuse_unknown(given: Mapping[str, Any]) -> None:
    """Raises TypeError for arguments that neither zero's nor PyTorch's FSDP has."""
    unknown = sorted(given.keys() - {*NAMES, *homes})
    if unknown:
        known = ", ".join(sorted({*NAMES, *homes}))
        raise TypeError(f"FSDP got an unexpected argument {unknown[0]!r}. Besides its own names it takes {known}.")


def refuse_number_of_ranks(reshard_after_forward: Any) -> None:
    """Raises ValueError for a number of ranks, which FSDP2 takes beside True, False and None."""
    if not isinstance(reshard_after_forward, bool | None):
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward!r}: zero reshards parameters over all ranks (True) or keeps "
            "them until backward (False), not over fewer ranks in between. Pass True or False, or shard within a "
            "smaller group by sharding_strategy='HYBRID_SHARD'."
        )


def from_torch(
    given: Mapping[str, Any],
    prefetch: Any,
    ignored_modules: Iterable[nn.Module],
    ignored_parameters: Iterable[nn.Parameter],
) -> TorchOptions:
    """Merges options of PyTorch (`given`, by name) and zero's own (the other arguments).

    Raises ValueError for options that zero does not have, and if two options set the same thing.
    """
    if not isinstance(given.get("use_orig_params"), bool | None):
        raise ValueError(f"use_orig_params={given['use_orig_params']!r}: leave it out. Parameters are always original.")
    modules, params = _ignored(given.get("ignored_states"))
    return TorchOptions(
        _prefetch(given, prefetch),
        [*ignored_modules, *modules],
        [*ignored_parameters, *params],
        _device(given.get("device_id")),
    )


def _prefetch(given: Mapping[str, Any], own: Any) -> Prefetch:
    """Returns the Prefetch. limit_all_gathers=True is the default limit, False the largest."""
    names = [name for name in ("backward_prefetch", "forward_prefetch", "limit_all_gathers") if name in given]
    if not names:
        return as_prefetch(own)
    if own is not None:
        raise ValueError(f"prefetch and {names[0]} both say what is gathered ahead. Pass one of them.")
    for name in names:
        if name != "backward_prefetch" and not isinstance(given[name], bool):
            raise ValueError(f"{name}={given[name]!r}: pass True or False, or a zero.Prefetch as prefetch.")
    default = Prefetch()
    return Prefetch(
        given.get("backward_prefetch", default.backward_prefetch),
        forward_prefetch=given.get("forward_prefetch", default.forward_prefetch),
        limit=None if given.get("limit_all_gathers", True) else 3,
    )


def _ignored(states: Iterable[Any] | None) -> tuple[list[nn.Module], list[nn.Parameter]]:
    states = [*(states or ())]
    for state in states:
        if not isinstance(state, nn.Module | nn.Parameter):
            got = type(state).__name__
            raise ValueError(f"ignored_states holds a {got}. Pass modules and parameters of the model.")
    return [each for each in states if isinstance(each, nn.Module)], [p for p in states if isinstance(p, nn.Parameter)]


def _device(given: Any) -> torch.device | None:
    if given is None:
        return None
    if isinstance(given, int) and not isinstance(given, bool) and torch.cuda.is_available():
        device = torch.device("cuda", given)
    elif isinstance(given, torch.device):
        device = given
    else:
        raise ValueError(
            f"device_id={given!r}: pass the number of a GPU that torch can use (there are "
            f"{torch.cuda.device_count()}), a torch.device, or leave it out and move the model yourself."
        )
    if device.type != "cuda":
        return device
    current = torch.device("cuda", torch.cuda.current_device())
    if device.index not in (None, current.index):
        raise ValueError(
            f"device_id={given!r}, but this rank's current GPU is number {current.index}, which NCCL and meta modules "
            f"use. Call torch.cuda.set_device({device.index}) first."
        )
    return current
