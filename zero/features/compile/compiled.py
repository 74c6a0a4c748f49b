"""Finds modules that torch.compile was called with, and refuses options of it that sharding does not permit."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from zero._torch import called_by_cuda_graphs, compiled_to_cuda_graphs, compiled_without_breaks, is_compiled, uncompiled

BETWEEN_UNITS = (
    "FSDP gathers and releases parameters between its units, which cannot be traced. Compile the model without "
    "fullgraph=True, or each of its units by itself, by unit.compile(fullgraph=True)"
)

RECORDING = ("cuda",)
"""The device types whose work can be recorded as a CUDA graph."""

_MOVING = (
    "which go on reading parameters where they were recorded. FSDP frees full parameters and gathers them into other "
    "memory each time (resize_)"
)

_AS_GRAPHS = (
    f"was compiled to run as CUDA graphs, {_MOVING}. Call torch.compile without mode='reduce-overhead' or "
    "'max-autotune' ('max-autotune-no-cudagraphs' can be), and without triton.cudagraphs in its options or in "
    "torch._inductor.config."
)


def compiled_modules(root: nn.Module) -> set[nn.Module]:
    """Returns all modules in compiled modules. Code that is traced must not contain the search for reads."""
    return {inner for module in root.modules() if is_compiled(module) for inner in module.modules()}


def compiled_in_pieces(root: nn.Module) -> bool:
    """Returns whether torch.compile was called with modules inside the root."""
    outermost = {root, uncompiled(root)}
    return any(is_compiled(module) for module in root.modules() if module not in outermost)


def compiling_problem(root: nn.Module, units: Collection[nn.Module], freed: Iterable[torch.device]) -> str | None:
    """Returns an error message if torch.compile was called with modules or options that FSDP cannot run, else None.

    units: the modules of all units below the root. freed: the devices of full parameters that are freed at rest.
    """
    records = any(device.type in RECORDING for device in freed)
    if records and called_by_cuda_graphs():
        return f"the code that calls the FSDP {_AS_GRAPHS}"
    for name, module in root.named_modules():
        if not is_compiled(module):
            continue
        title = f"{type(uncompiled(module)).__name__} {name!r}"
        if compiled_without_breaks(module) and not _inside(module).isdisjoint(units):
            return f"{title} was compiled with fullgraph=True, and units are inside it. {BETWEEN_UNITS}."
        if records and compiled_to_cuda_graphs(module):
            return f"{title} {_AS_GRAPHS}"
    return None


def _inside(module: nn.Module) -> set[nn.Module]:
    return {*module.modules()} - {module, uncompiled(module)}


def refuse_capture(freed: Iterable[torch.device]) -> None:
    """Raises RuntimeError while CUDA graphs of work on one of these devices are recorded."""
    if any(device.type in RECORDING for device in freed) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"FSDP ran forward while torch.cuda.graph or make_graphed_callables records CUDA graphs, {_MOVING}, and a "
            "replay would gather nothing. Run forward and backward without recording them."
        )
