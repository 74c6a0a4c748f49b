"""The step of one shard group, piece by piece: what is widened before the step and rounded after it stays in the
processor's cache in between, so that the memory of the CPU is read and written once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.shards.offload import SteppedGroup

# Elements of a piece: few enough that they stay in the cache that torch's threads share, and so many that torch's
# kernels take much longer than what Python does for each piece.
_OF_A_THREAD, _LEAST = 2**18, 2**20


def in_the_cache() -> int:
    """Returns how many elements are best stepped at a time."""
    return max(_OF_A_THREAD * torch.get_num_threads(), _LEAST)


class Unwidened:
    """In the place of the event `arrival`, after which a gradient of 16 bits is there, for a step that widens it.

    `narrow`: this gradient. `gradient`: what stands for it meanwhile, of the dtype that is stepped. It has values only
    after `synchronize`, for whoever reads it otherwise.
    """

    def __init__(self, narrow: Tensor, arrival: Any, dtype: torch.dtype) -> None:
        self.narrow, self.arrival = narrow, arrival
        self.gradient = narrow.new_full((), torch.nan, dtype=dtype).expand(narrow.shape)

    def synchronize(self) -> None:
        self.arrival.synchronize()
        self.gradient.data = self.narrow.to(self.gradient.dtype)


class GroupStep:
    """A step of the shards of one group, whose gradients may be on their way: nobody but the step waits for them."""

    def __init__(self, group: SteppedGroup, optimizer: Optimizer, then: Callable[[slice], None] | None) -> None:
        """optimizer: of shards of this group only, and it treats each element by itself. then: called with each part of
        `group.main` once it has been stepped, until that was all of it."""
        self._optimizer, self._flat, self._then = optimizer, group.main, then
        unwidened = [one for one in group.copies if isinstance(one, Unwidened)]
        self._narrow = {one.gradient: one.narrow for one in unwidened}
        group.copies = [one.arrival if isinstance(one, Unwidened) else one for one in group.copies]

    def take(self, step: Callable[[Optimizer], None], longest: int) -> None:
        """step: steps an optimizer. longest: elements that are stepped at a time, and more of a parameter without state
        or whose elements do not lie in their order."""
        flat, done = self._flat, 0
        widened = flat.new_empty(0)
        for pieces in _together(self._pieces(longest), longest):
            numel = sum(piece.numel for piece in pieces if piece.param.grad in self._narrow)
            if numel > len(widened):
                widened = flat.new_empty(max(numel, min(longest, len(flat))))
            self._step(step, pieces, widened)
            end = max(piece.place + piece.numel for piece in pieces)
            self._stepped(slice(done, end))
            done = end
        self._stepped(slice(done, len(flat)))

    def _stepped(self, part: slice) -> None:
        if self._then is not None and part.start < part.stop:
            self._then(part)

    def _pieces(self, longest: int) -> list[Piece]:
        """In the order in which they lie in the flat tensor."""
        found = []
        for number, group in enumerate(self._optimizer.param_groups):
            for param in group["params"]:
                if param.grad is None:
                    continue
                numel = param.numel()
                place = (param.data_ptr() - self._flat.data_ptr()) // self._flat.element_size() if numel else 0
                length = longest if self._may_be_cut(param) else max(numel, 1)
                for begin in range(0, max(numel, 1), length):
                    found.append(Piece(param, number, place + begin, begin, min(begin + length, numel)))
        return sorted(found, key=lambda piece: piece.place)

    def _may_be_cut(self, param: nn.Parameter) -> bool:
        gradient, state = param.grad, self._optimizer.state[param].values()
        assert gradient is not None
        read = [param, self._narrow.get(gradient, gradient), *(one for one in state if isinstance(one, Tensor))]
        created = bool(state) and all(one is not None for one in state)
        return created and all(tensor.is_contiguous() for tensor in read)

    def _step(self, step: Callable[[Optimizer], None], pieces: Sequence[Piece], widened: Tensor) -> None:
        """Steps a few pieces at once. widened: memory for their gradients."""
        whole = self._optimizer
        part: Optimizer = object.__new__(type(whole))
        vars(part).update(vars(whole))
        part.state = defaultdict(dict)
        params: dict[int, list[nn.Parameter]] = defaultdict(list)
        states: list[dict[str, Any]] = []
        for piece in pieces:
            stepped = nn.Parameter(piece.of(piece.param.data))
            gradient: Tensor = piece.param.grad  # type: ignore[assignment]
            if gradient in self._narrow:
                narrow = piece.of(self._narrow[gradient])
                memory, widened = widened[: piece.numel], widened[piece.numel :]
                gradient = memory.as_strided(narrow.shape, narrow.stride()).copy_(narrow)
            else:
                gradient = piece.of(gradient)
            stepped.grad = gradient
            states.append(piece.state(whole.state[piece.param]))
            part.state[stepped] = states[-1]
            params[piece.options].append(stepped)
        part.param_groups = [{**whole.param_groups[number], "params": held} for number, held in params.items()]
        step(part)
        for piece, state in zip(pieces, states, strict=True):
            piece.keep(state, whole.state[piece.param])


@dataclass(frozen=True)
class Piece:
    """Elements `begin` to `end` of a parameter.

    options: the number of the optimizer's group that has it. place: that of the first element in the flat tensor.
    """

    param: nn.Parameter
    options: int
    place: int
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin

    @property
    def whole(self) -> bool:
        return self.numel == self.param.numel()

    def of(self, tensor: Tensor) -> Tensor:
        """The piece of a tensor of the parameter's shape."""
        return tensor if self.whole else tensor.view(-1)[self.begin : self.end]

    def state(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state to step the piece with: parts of tensors of the parameter's shape, and copies of others, such as
        the count of steps, since each piece begins with the same."""
        return state if self.whole else {key: self._part_of(value) for key, value in state.items()}

    def _part_of(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return self.of(value) if value.shape == self.param.shape else value.clone()

    def keep(self, stepped: dict[str, Any], state: dict[str, Any]) -> None:
        """Takes over what the step of the last piece has left in the place of copies."""
        if self.whole or self.end < self.param.numel():
            return
        for key, value in stepped.items():
            if not isinstance(value, Tensor):
                state[key] = value
            elif state[key].shape != self.param.shape:
                state[key].copy_(value)


def _together(pieces: Sequence[Piece], longest: int) -> Iterator[list[Piece]]:
    """Yields those that are stepped in one call, which costs as much for one as for many."""
    held: list[Piece] = []
    for piece in pieces:
        if held and sum(one.numel for one in held) + piece.numel > longest:
            yield held
            held = []
        held.append(piece)
    if held:
        yield held
