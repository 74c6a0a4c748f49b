"""What `param.grad` shows at stage 2 after a backward, when the gradient lives with its owners.

With None there, loops of torch and of users would take the parameter for one without a gradient: torch's
`clip_grad_norm_` clipped nothing. A gradient of the full shape that has no values stands there instead: it can be asked
for its shape, and cleared, and whatever would compute with it raises an error that says what to call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from torch import Tensor, nn

from zero._torch import without_memory

_KEPT, _CLEARED = {"detach", "alias"}, {"zero_", "_foreach_zero_"}
"""Operators that leave it as it is, and those that clear the shard."""


class OwnedGradient(Tensor):
    """Stands for the gradient of one parameter, of which each rank has a shard. It has no memory."""

    _name: str
    _part: nn.Parameter

    @staticmethod
    def __new__(cls, param: Tensor, name: str, part: nn.Parameter, **cast: Any) -> OwnedGradient:
        made = without_memory(cls, param, **cast)
        made._name, made._part = name, part
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
            return cls(args[0], args[0]._name, args[0]._part, **cast)
        shown = [one for arg in args for one in (arg if isinstance(arg, (list, tuple)) else [arg])]
        shown = [one for one in shown if isinstance(one, cls)]
        if operator not in _CLEARED:
            shown[0]._refuse(operator)
        for one in shown:
            if one._part.grad is not None:
                one._part.grad.zero_()
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


class ShownGradients:
    """The gradients that one OSS shows. part: returns the shard that it steps for a parameter."""

    def __init__(self, part: Callable[[nn.Parameter], nn.Parameter]) -> None:
        self._part = part
        self._shown: dict[nn.Parameter, OwnedGradient] = {}

    def show(self, params: Iterable[tuple[nn.Parameter, str]]) -> None:
        """Shows that these parameters, given with their names, have gradients."""
        for param, name in params:
            if param not in self._shown:
                self._shown[param] = OwnedGradient(param, name, self._part(param))
            param.grad = self._shown[param]

    def drop_cleared(self) -> None:
        """Drops the gradients of shards whose parameters' gradients were cleared by `param.grad = None`."""
        for param in [param for param in self._shown if param.grad is None]:
            del self._shown[param]
            self._part(param).grad = None

    def hide(self) -> None:
        """Shows none any more, before autograd or the user puts full gradients into `param.grad`."""
        self.drop_cleared()
        for param, shown in self._shown.items():
            if param.grad is shown:
                param.grad = None
        self._shown.clear()


def full_gradient(param: Tensor) -> Tensor | None:
    """Returns `param.grad` if it has values: None if the gradient lives with its owners."""
    return None if isinstance(param.grad, OwnedGradient) else param.grad
