"""Where shards lie in the memory of the CPU, or in mapped files, and the optimizer steps them there.

A group is stepped piece by piece: what is rounded after the step is still in the processor's cache, so that the memory
of the CPU is read and written once.

Norms of gradients are computed on the device before the gradients leave it. To read them in the memory of the CPU would
take about a tenth of the time of a step, between backward and step, where nothing else runs. torch counts writes into a
gradient, except through `.data`: for these a sample is compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from zero._torch.autograd import base_of, writes_so_far
from zero._torch.tensors import has_values, norms_of
from zero.comm.streams import on_other_device
from zero.measure.param_groups import like
from zero.shards.offload import Offload, SteppedGroup, part_of

# Elements of a piece: few enough that they stay in the cache that torch's threads share, and so many that torch's
# kernels take much longer than what Python does for each piece.
_OF_A_THREAD, _LEAST = 2**18, 2**20

# Elements of a flat tensor of gradients that are compared.
_SAMPLE = 256


# By flat tensor of gradients that have left the device: their norms by offset, every `stride`-th element, that stride,
# and how often the tensor was written.
_left = WeakIdKeyDictionary()


class OnHost(Offload):
    active = True

    def at_once(self) -> int:
        """How many elements of a group `step_part` is given at a time."""
        return max(_OF_A_THREAD * torch.get_num_threads(), _LEAST)

    def copied(self, there: Tensor, sums: Tensor, own: Sequence[Tensor]) -> None:
        if not own or not on_other_device(sums, there):
            return
        norms = norms_of([*own], 2.0, torch.promote_types(sums.dtype, torch.float32))
        offsets = [int(flat.storage_offset() - sums.storage_offset()) for flat in own]
        stride = max(len(sums) // _SAMPLE, 1)
        sample = sums[::stride].to(there.dtype, copy=True)
        _left[there] = dict(zip(offsets, norms, strict=True)), sample, stride, writes_so_far([there])

    def known_norms(self, gradients: Sequence[Tensor], norm_type: float) -> Mapping[int, Tensor]:
        found, unwritten = dict[int, Tensor](), dict[Any, bool]()
        for position, gradient in enumerate(gradients if norm_type == 2 else ()):
            copied = base_of(gradient)
            if copied is None or (left := _left.get(copied)) is None:
                continue
            norms, sample, stride, version = left
            if sample not in unwritten:  # waits for the sample
                same = writes_so_far([copied]) == version
                unwritten[sample] = same and torch.equal(copied[::stride], sample.to(copied.device))
            if unwritten[sample]:
                found[position] = norms[int(gradient.storage_offset())]
        return found

    def step_group(
        self,
        group: SteppedGroup,
        optimizer: Optimizer,
        params: Sequence[nn.Parameter],
        then: Callable[[slice], None] | None = None,
    ) -> None:
        flat, longest = group.main, self.at_once()
        if not has_values(flat):
            super().step_group(group, optimizer, params, then)
            return
        whole = part_of(optimizer, params)
        group.wait_for_copies()

        pieces = []
        for number, options in enumerate(whole.param_groups):
            for param in options["params"]:
                if param.grad is None:
                    continue
                numel, state = param.numel(), whole.state[param].values()
                place = (param.data_ptr() - flat.data_ptr()) // flat.element_size() if numel else 0
                # A parameter without state, or whose elements do not lie in their order, is one piece.
                created = bool(state) and all(one is not None for one in state)
                read = [param, param.grad, *(one for one in state if isinstance(one, Tensor))]
                cut = created and all(tensor.is_contiguous() for tensor in read)
                length = longest if cut else max(numel, 1)
                for begin in range(0, max(numel, 1), length):
                    pieces.append(Piece(param, number, place + begin, begin, min(begin + length, numel)))
        # Those that are stepped in one call, which costs as much for one as for many.
        calls: list[list[Piece]] = []
        for piece in sorted(pieces, key=lambda piece: piece.place):
            if not calls or sum(one.numel for one in calls[-1]) + piece.numel > longest:
                calls.append([])
            calls[-1].append(piece)

        done = 0
        for call in calls:
            stepped, states = defaultdict[int, list[nn.Parameter]](list), dict[nn.Parameter, dict[str, Any]]()
            for piece in call:
                part = nn.Parameter(piece.of(piece.param.data))
                part.grad = piece.of(piece.param.grad)  # type: ignore[arg-type]
                states[part] = piece.state(whole.state[piece.param])
                stepped[piece.options].append(part)
            groups = [{**whole.param_groups[number], "params": held} for number, held in stepped.items()]
            self.step_part(like(whole, groups, defaultdict(dict, states)))
            for piece, state in zip(call, states.values(), strict=True):
                piece.keep(state, whole.state[piece.param])
            end = max(piece.place + piece.numel for piece in call)
            if then is not None and done < end:
                then(slice(done, end))
            done = end
        if then is not None and done < len(flat):
            then(slice(done, len(flat)))


class Piece:
    """Elements `begin` to `end` of a parameter.

    options: the number of the optimizer's group that has it. place: that of the first element in the flat tensor.
    """

    def __init__(self, param: nn.Parameter, options: int, place: int, begin: int, end: int) -> None:
        self.param, self.options, self.place, self.begin, self.end = param, options, place, begin, end
        self.numel, self.whole = end - begin, end - begin == param.numel()

    def of(self, tensor: Tensor) -> Tensor:
        return tensor if self.whole else tensor.view(-1)[self.begin : self.end]

    def state(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state to step the piece with: parts of tensors of the parameter's shape, and copies of others."""
        if self.whole:
            return state
        parts = dict(state)
        for key, value in state.items():
            if isinstance(value, Tensor):
                parts[key] = self.of(value) if value.shape == self.param.shape else value.clone()
        return parts

    def keep(self, stepped: dict[str, Any], state: dict[str, Any]) -> None:
        """Takes over what the step of the last piece has left in the place of copies."""
        for key, value in () if self.whole or self.end < self.param.numel() else stepped.items():
            if not isinstance(value, Tensor):
                state[key] = value
            elif state[key].shape != self.param.shape:
                state[key].copy_(value)
