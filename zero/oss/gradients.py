"""The gradients of this rank's shards, and what `param.grad` shows of them.

Without ShardedDDP each rank has full gradients in `param.grad`, and a step takes its slices. With ShardedDDP (stage 2)
a gradient lives with its owners. With None in `param.grad`, loops of torch and of users would take the parameter for
one without a gradient: torch's `clip_grad_norm_` clipped nothing. A gradient of the full shape that has no values
stands there instead: it can be asked for its shape, and cleared, and whatever would compute with it raises an error
that says what to call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn

from zero._torch import without_memory
from zero.shards import norm
from zero.shards.shard_group import ShardGroup

if TYPE_CHECKING:
    from zero.oss.optimizer import OSS

_KEPT, _CLEARED = {"detach", "alias"}, {"zero_", "_foreach_zero_"}
"""Operators that leave it as it is, and those that clear the shard."""


class OwnedGradient(Tensor):
    """Stands for the gradient of one parameter, of which each rank has a shard. It has no memory."""

    _name: str
    part: nn.Parameter

    @staticmethod
    def __new__(cls, param: Tensor, name: str, part: nn.Parameter, **cast: Any) -> OwnedGradient:
        made = without_memory(cls, param, **cast)
        made._name, made.part = name, part
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        operator = func.overloadpacket.__name__
        if operator in _KEPT:
            return args[0]
        if operator == "_to_copy":  # the module is moved or cast: the step refuses that in its own words
            cast = {key: value for key, value in (kwargs or {}).items() if key in ("dtype", "device") and value}
            return cls(args[0], args[0]._name, args[0].part, **cast)
        shown = [one for arg in args for one in (arg if isinstance(arg, (list, tuple)) else [arg])]
        shown = [one for one in shown if isinstance(one, cls)]
        if operator not in _CLEARED:
            shown[0]._refuse(operator)
        for one in shown:
            if one.part.grad is not None:
                one.part.grad.zero_()
        return args[0]

    def _refuse(self, operator: str) -> NoReturn:
        raise RuntimeError(
            f"{self._name} has no full gradient after a backward of ShardedDDP, which leaves each rank with a shard of "
            f"it, so {operator} cannot be computed from `param.grad`. Clip by "
            "optimizer.clip_grad_norm(max_norm) instead of torch's clip_grad_norm_, read the norm of all gradients "
            "from zero.grad_norm(model, optimizer), scale losses by zero.GradScaler; optimizer.part(param).grad is "
            "this rank's shard, such as for clip_grad_value_."
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OwnedGradient({self._name}, {list(self.shape)}, {self.dtype}, sharded by ShardedDDP)"


class OwnedGradients:
    """The gradients of the shards that one OSS steps.

    `arrive_sharded`: whether ShardedDDP sets them; otherwise steps take them from `param.grad`.
    """

    def __init__(self, optimizer: OSS) -> None:
        self.arrive_sharded = False
        self._oss = optimizer
        self._made: dict[nn.Parameter, OwnedGradient] = {}
        self._shown: list[tuple[nn.Parameter, OwnedGradient]] = []

    def arrive(self) -> None:
        """Makes the host wait for gradients that are on their way to it."""
        for group in self._oss.shards.shard_groups:
            group.arrive()

    def show(self, params: Iterable[tuple[nn.Parameter, str]]) -> None:
        """Shows that these parameters, given with their names, have gradients."""
        for param, name in params:
            shown = self._made.get(param)
            if shown is None:
                shown = self._made[param] = OwnedGradient(param, name, self._oss.shards[param])
            self._shown.append((param, shown))
            param.grad = shown

    def drop_cleared(self) -> None:
        """Drops the gradients of shards whose parameters' gradients were cleared by `param.grad = None`."""
        for param, shown in self._shown:
            if param.grad is None:
                shown.part.grad = None
        self._shown = [pair for pair in self._shown if pair[0].grad is not None]

    def hide(self) -> None:
        """Shows none any more, before autograd or the user puts full gradients into `param.grad`."""
        self.drop_cleared()
        for param, shown in self._shown:
            if param.grad is shown:
                param.grad = None
        self._shown = []

    def forget(self) -> None:
        """Shows none any more: the parameters were laid out again."""
        self.hide()
        self._made.clear()

    def collect(self) -> bool:
        """Puts gradients where the inner optimizer finds them. Returns whether there are any; True if ShardedDDP sets
        them. Raises RuntimeError for gradients that no_sync left unreduced, and for sparse ones."""
        self.drop_cleared()
        if self.arrive_sharded and not self._oss.saved.asked_for_full:  # who then steps with gradients of its own
            refuse_unreduced(self._oss.shards.shard_groups)
            return True
        shards = self._oss.shards
        for shard in shards.values():
            shard.grad = None
        for group, index, share in _shares(self._oss.shards.shard_groups):
            shards[group.params[index]].grad = group.bring(share, for_step=True)
        return any(param.grad is not None for param in shards)

    def norm(self, norm_type: float) -> Tensor:
        """Collective. Returns the norm of all gradients, 0-dim."""
        if self.arrive_sharded:
            self.drop_cleared()
            refuse_unreduced(self._oss.shards.shard_groups)
            owned = [(param, shard.grad) for param, shard in self._oss.shards.items()]
        else:
            shares = {group.params[index]: share for group, index, share in _shares(self._oss.shards.shard_groups)}
            owned = [(param, shares.get(param)) for param in self._oss.shards]
        dtypes = {shard.dtype for shard in self._oss.shards.values()}
        return norm.total_norm(owned, self._oss.comm, norm_type, self._oss.shards.shard_groups[0].full.device, dtypes)

    def clip(self, max_norm: float, total: Tensor) -> Tensor:
        """Scales all gradients, whose norm is `total`, to at most max_norm. Returns the norm before."""
        full = [param.grad for param in self._oss.shards if param.grad is not None]
        held, apart = self._oss.shards.gradients() if self.arrive_sharded else full, self._oss.shards.home.apart
        norm.clip(held, total, max_norm, apart=apart)
        return total


def _shares(groups: Sequence[ShardGroup]) -> Iterator[tuple[ShardGroup, int, Tensor]]:
    """Yields this rank's slices of the gradients of full parameters, with their groups and positions: views where
    their order in memory allows. Raises RuntimeError for a sparse gradient, whichever rank owns it, on all alike."""
    for name, gradient in _gradients(groups):
        if gradient.is_sparse:
            refuse_sparse(name)
    for group in groups:
        for index, span in group.spans.items():
            full = group.params[index].grad
            if full is not None:
                ordered = group.shapes.in_memory_order(index, full)
                yield group, index, group.shapes.shaped(index, ordered[span.start : span.stop])


def refuse_sparse(name: str) -> NoReturn:
    """Raises RuntimeError for the sparse gradient of the parameter of this name."""
    raise RuntimeError(f"{name} has a sparse gradient. zero shards dense ones: build the embedding with sparse=False.")


def refuse_unreduced(groups: Sequence[ShardGroup]) -> None:
    """Raises RuntimeError for a gradient that is still in `param.grad`: ShardedDDP has not reduced it."""
    name, gradient = next(_gradients(groups), ("", None))
    if gradient is not None:
        raise RuntimeError(
            f"{name} has a gradient that was not reduced: the last backward ran under no_sync(), or went around "
            "ShardedDDP. Run the last backward before step() outside no_sync(), or call reduce()."
        )


def _gradients(groups: Sequence[ShardGroup]) -> Iterator[tuple[str, Tensor]]:
    for group in groups:
        for param, name in zip(group.params, group.names, strict=True):
            gradient = full_gradient(param)
            if gradient is not None:
                yield name, gradient


def full_gradient(param: Tensor) -> Tensor | None:
    """Returns `param.grad` if it has values: None if the gradient lives with its owners."""
    return None if isinstance(param.grad, OwnedGradient) else param.grad
