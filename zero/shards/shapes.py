"""Shapes and strides of parameters, and views of flat tensors in these shapes.

The elements of a parameter are counted in the order in which they lie in memory, so a transposed or channels_last
parameter keeps its strides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from zero._torch.tensors import as_plain_tensors, has_values, wraps_others
from zero.measure.shapes import shard_shape
from zero.shards.layout import ALIGNMENT, Layout, Span
from zero.tensor_parallel import parts


class Shapes:
    """Parameters in the order of the layout, of which a rank owns a segment.

    `full`: their shapes; `strides`: the dense strides of their order. `spans`: the elements that this rank owns, by
    position of the parameter.
    """

    def __init__(self, params: Sequence[nn.Parameter], layout: Layout, rank: int) -> None:
        self.full = [param.shape for param in params]
        self.strides = [dense_stride(param) for param in params]
        # The dimensions of each one's shard but the first.
        self._after_first = [shard_shape(shape, 0)[1:] for shape in self.full]
        self._layout = layout
        self.spans: dict[int, Span] = {span.index: span for span in layout.spans(rank)}

    def in_memory_order(self, index: int, tensor: Tensor) -> Tensor:
        """Flattens a tensor with the shape of parameter `index`, in the element order of the layout."""
        if tensor.is_conj() or tensor.is_neg():  # a flag of the tensor, not in its memory
            tensor = tensor.resolve_conj().resolve_neg()
        stride = self.strides[index]
        if tensor.stride() != stride:
            tensor = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        return tensor if stride == (1,) else tensor.as_strided((tensor.numel(),), (1,))

    def shaped(self, index: int, flat: Tensor) -> Tensor:
        """Reshapes the flat elements of parameter `index` that this rank owns to the shape of its shard."""
        if self.strides[index] == (1,):
            return flat
        if flat.numel() == self._layout.numels[index]:
            return flat.as_strided(self.full[index], self.strides[index], flat.storage_offset())
        return flat.view(flat.numel(), *self._after_first[index])

    def views_of_full(self, full: Tensor) -> list[Tensor]:
        """Views of a flat tensor as long as the layout: one a parameter, in the parameter's shape."""
        geometry = zip(self.full, self.strides, self._layout.offsets, strict=True)
        return [full.as_strided(shape, stride, offset) for shape, stride, offset in geometry]

    def read(self, params: Sequence[nn.Parameter], low: int, into: Tensor) -> None:
        """Overwrites a flat tensor by the elements of the layout from `low` on: parameters, and zeros between them."""
        end = 0
        for span in self._layout.within(low, low + len(into)):
            into[end : span.offset].zero_()
            end = span.offset + span.numel
            into[span.offset : end] = self._elements(span.index, params[span.index], span.start, span.stop)
        into[end:].zero_()

    def _elements(self, index: int, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of parameter `index`, in the element order of the layout. Of one that does not fill
        its memory this copies the rows that have them: it is read in many pieces."""
        strides = self.strides[index]
        rows = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
        while not rows.is_contiguous():
            numel = rows[0].numel()
            first, end = start // numel, -(-stop // numel)
            start, stop = start - first * numel, stop - first * numel
            rows = rows[first] if end == first + 1 else rows[first:end].contiguous()
        return rows.reshape(-1)[start:stop]

    def views_of_shard(self, shard: Tensor) -> list[Tensor]:
        """Views of a flat tensor as long as this rank's segment: one a parameter, in the shape of its shard, perhaps
        empty."""
        views = []
        for index in range(len(self.full)):
            span = self.spans.get(index)
            if span is None:
                views.append(shard[:0].view(0, *self._after_first[index]))
            else:
                views.append(self.shaped(index, shard[span.offset : span.offset + span.numel]))
        return views


def alignment(dtype: torch.dtype) -> int:
    """Elements in 64 bytes, at least one."""
    return max(ALIGNMENT // dtype.itemsize, 1)


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides that keep a tensor's order in memory where it fills its memory (channels_last, transposed)."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


def by_kind(params: Sequence[nn.Parameter]) -> list[list[int]]:
    """Groups the indices of parameters by dtype, device and `requires_grad`."""
    kinds: dict[tuple[torch.dtype, torch.device, bool], list[int]] = {}
    for index, param in enumerate(params):
        kinds.setdefault((param.dtype, param.device, param.requires_grad), []).append(index)
    return list(kinds.values())


def refuse_lazy(named: Iterable[tuple[str, object]]) -> None:
    """Raises ValueError for a tensor of a lazy module, which has no shape yet."""
    for name, tensor in named:
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise ValueError(
                f"{name} is of a lazy module and has no shape yet. Call the plain model once on a batch, on every "
                "rank, and wrap it then."
            )


def refuse_unusable(param: object, name: str) -> None:
    """Raises ValueError if a parameter cannot be sharded."""
    if not isinstance(param, Tensor):
        raise ValueError(f"{name} is a {type(param).__name__}, not a torch.Tensor. Pass model.parameters().")
    refuse_lazy([(name, param)])
    if param.grad_fn is not None or not (param.is_leaf):
        raise ValueError(f"{name} is not a leaf tensor: it was computed from others. Pass the nn.Parameter itself.")
    if wraps_others(param) and not parts.takes(param):
        raise ValueError(
            f"{name} is a {type(param).__name__}, which wraps other tensors (DTensor, quantised). zero shards plain "
            "parameters: undo the other library's sharding or quantisation first. torchao's float8 layers have plain "
            "parameters with enable_fsdp_float8_all_gather=False."
        )
    if param.layout != torch.strided:
        raise ValueError(
            f"{name} has layout {param.layout}. zero shards dense parameters: call .to_dense() on it first."
        )
    if param.is_inference():
        raise ValueError(
            f"{name} was made under torch.inference_mode, and cannot be written into. Build the model outside of it."
        )
    if param.is_meta:
        raise ValueError(
            f"{name} is on the meta device and has no values. Call model.to_empty(device=...) and initialise it first."
        )
    if has_values(param) and param.device.type == "cpu" and param.is_shared():  # on a GPU it always is
        raise ValueError(
            f"{name} lies in memory that processes share, as after share_memory(): the others would go on to read what "
            "it was before it moved into a buffer. Give it memory of its own, param.data = param.data.clone(), and "
            "share copies of trained weights, as zero.full_state_dict(model) returns."
        )


def refuse_unsendable(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError for a tensor that no rank can send another."""
    for name, tensor in named:
        if tensor.layout != torch.strided:
            raise ValueError(
                f"{name!r} has layout {tensor.layout}, which ranks cannot send one another, as they send buffers and "
                "what is not sharded. Call .to_dense() on it first, or pass it to forward as an argument."
            )
        if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(
                f"{name!r} is an expanded view, of which several elements are one number in memory, so that nothing "
                "can be received into it. Give each element its own: tensor.expand(...).clone()."
            )


def refuse_shared(named: Iterable[tuple[str, Any]], buffers: Iterable[tuple[str, Tensor]] = ()) -> None:
    """Raises ValueError if a parameter and another one, or a buffer, lie in overlapping ranges of memory.

    Parameters that lie side by side in one storage, as cuDNN's weights do, do not.
    """
    ranges, alone = [], {f"the buffer {name!r}": buffer for name, buffer in buffers}
    with as_plain_tensors():
        for name, param in (*named, *alone.items()):
            dense = isinstance(param, Tensor) and param.layout == torch.strided and not wraps_others(param)
            if dense and has_values(param) and not param.is_meta and param.numel():
                last = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
                begin = param.data_ptr()
                ranges.append((str(param.device), begin, begin + (last + 1) * param.element_size(), name))
    # Of the parameters, and of the buffers, up to here: which one reaches furthest. Buffers may overlap one another.
    furthest: dict[tuple[str, bool], tuple[int, str]] = {}
    for device, begin, end, name in sorted(ranges):
        for of_buffers in (False,) if name in alone else (False, True):
            reached, other = furthest.get((device, of_buffers), (begin, ""))
            if begin < reached:
                raise ValueError(_shared(name, other, with_buffer=of_buffers or name in alone))
        kind = device, name in alone
        furthest[kind] = max(furthest.get(kind, (end, name)), (end, name))


def _shared(name: str, other: str, *, with_buffer: bool) -> str:
    if with_buffer:
        return (
            f"{other} and {name} share memory, of which zero would give the parameter its own. Give the buffer "
            "a copy: register_buffer(..., param.detach().clone())."
        )
    return (
        f"{other} and {name} are two parameters that share memory, as after `out.weight.data = "
        "emb.weight.data`. zero would give each its own. Tie them as one parameter: out.weight = emb.weight."
    )


def with_own_storage(view: Tensor) -> Tensor:
    """A tensor on the view's memory whose storage covers only the view, and which keeps the memory alive: not for
    memory that is freed by shrinking its storage, which does not affect this tensor."""
    # Those without values, of zero.plan, have no memory.
    return torch.from_dlpack(view) if has_values(view) else view
