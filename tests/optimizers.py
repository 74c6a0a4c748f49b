"""Optimizers: torch's that treat each element by itself, and those that people bring along: of every kind that
matters to who shards them."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.testing._internal.two_tensor import TwoTensor

MOMENTUM = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
ELEMENTWISE: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "SGD": (SGD, {"lr": 0.1}),
    "SGD momentum": (SGD, MOMENTUM),
    "SGD nesterov": (SGD, {**MOMENTUM, "nesterov": True}),
    "Adam": (Adam, {"lr": 0.01}),
    "Adam maximize": (Adam, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    "AdamW amsgrad": (AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1, "t0": 2}),
    "Adadelta": (torch.optim.Adadelta, {"weight_decay": 0.1}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
}
"""All of torch's that treat each element by itself, with options; on the CPU they step one parameter after another."""


class MyAdam(torch.optim.Adam):
    """A subclass may do anything with the tensors that it gets."""


class ByParameter(Optimizer):
    """Steps each parameter that has a gradient by itself. State of a new one is empty."""

    def __init__(self, params: Any, lr: float = 0.1, **defaults: Any) -> None:
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.step_one(param, self.state[param], group)

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lamb(ByParameter):
    """Y. You et al., Large Batch Optimization for Deep Learning, 2020, algorithm 2: needs whole-tensor norms."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        super().__init__(params, lr, betas=betas, eps=1e-6, weight_decay=0.01)

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(step=0, mean=torch.zeros_like(param), square=torch.zeros_like(param))
        state["step"] += 1
        first, second = group["betas"]
        state["mean"].mul_(first).add_(param.grad, alpha=1 - first)
        state["square"].mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
        mean = state["mean"] / (1 - first ** state["step"])
        square = state["square"] / (1 - second ** state["step"])
        update = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * param
        trust = param.norm() / update.norm() if param.norm() > 0 and update.norm() > 0 else 1.0
        param.sub_(update * trust, alpha=group["lr"])


class Shampoo(ByParameter):
    """Preconditions matrices from both sides (Gupta et al., 2018, algorithm 1); others are stepped as by SGD."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        update = param.grad
        assert update is not None
        if param.dim() == 2:
            if not state:
                state["left"] = torch.eye(param.shape[0]) * 1e-3
                state["right"] = torch.eye(param.shape[1]) * 1e-3
            state["left"] += update @ update.t()
            state["right"] += update.t() @ update
            update = inverse_fourth_root(state["left"]) @ update @ inverse_fourth_root(state["right"])
        param.sub_(update, alpha=group["lr"])


def inverse_fourth_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=1e-6) ** -0.25) @ vectors.t()


class Lion(ByParameter):
    """X. Chen et al., Symbolic Discovery of Optimization Algorithms, 2023: treats each element by itself.

    Steps in training only, as Schedule-Free does, and counts steps in its groups.
    """

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.1) -> None:
        super().__init__(params, lr, weight_decay=weight_decay, count=0)
        self.training = False

    def train(self) -> None:
        self.training = True

    def step(self, closure: Any = None) -> None:
        assert self.training
        super().step(closure)
        for group in self.param_groups:
            group["count"] += 1

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["mean"] = torch.zeros_like(param)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(state["mean"].lerp(param.grad, 0.1).sign_(), alpha=group["lr"])
        state["mean"].lerp_(param.grad, 0.01)


class TrainedLion(Lion):
    """Needs no call before it steps."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.1) -> None:
        super().__init__(params, lr, weight_decay)
        self.train()


class Eight(ByParameter):
    """SGD with a momentum rounded to 8 bits, in tensors of 4,096 elements or more; others keep theirs as it is."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["mean"] = torch.zeros_like(param)
        state["mean"].mul_(0.9).add_(param.grad)
        if param.numel() >= 4096:
            state["mean"].mul_(16).round_().div_(16)
        param.sub_(state["mean"], alpha=group["lr"])


class Clipping(ByParameter):
    """SGD that clips by the norm of all gradients, as timm's Lamb does."""

    def __init__(self, params: Any, lr: float = 0.1, most: float | None = 1e-3) -> None:
        super().__init__(params, lr, most=most)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.measure_norm()
        super().step(closure)

    def measure_norm(self) -> None:
        grads = [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]
        self.norm = torch.stack([grad.norm() for grad in grads]).norm() if grads else torch.ones(())

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        scale = 1 if group["most"] is None else group["most"] / self.norm
        param.sub_(param.grad * scale, alpha=group["lr"])


class Estimating(Clipping):
    """Estimates a number over all parameters for later, in its groups, as Prodigy does. Till then it steps as SGD."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr, None)
        for group in self.param_groups:
            group["d"] = 1e-6

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.measure_norm()
        ByParameter.step(self, closure)
        for group in self.param_groups:
            group["d"] = max(group["d"], float(self.norm))


class Noisy(ByParameter):
    """SGD with noise, drawn for one parameter after another."""

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(param.grad + torch.randn_like(param), alpha=group["lr"])


class ByPlace(Clipping):
    """SGD into directions that are chosen by a parameter's place in the list, as APOLLO's projections are."""

    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        for place, param in enumerate(params):
            self.state[param].setdefault("seed", place)
        super().step(closure)

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(state["seed"])
        param.sub_(param.grad * torch.rand(param.shape, generator=generator), alpha=group["lr"])


class Grouped(Clipping):
    """Reads full parameters where a group says so, as GaLore does."""

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        rank = group.get("rank")
        param.sub_(param.grad if rank is None else param.grad / param.grad.norm(), alpha=group["lr"])


class Sam(Optimizer):
    """P. Foret et al., Sharpness-Aware Minimization, 2021: ascends by the gradient over the norm of all of them."""

    def __init__(self, params: Any, base_optimizer: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base_optimizer(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            self.state[param]["ascent"] = param.grad * (self.defaults["rho"] / norm)
            param.add_(self.state[param]["ascent"])

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if "ascent" in self.state[param]:
                    param.sub_(self.state[param].pop("ascent"))
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:
        assert closure is not None
        self.first_step()
        closure()
        self.second_step()


class Curious(ByParameter):
    """Wants to know more than parameters, which nobody tells it who does not know it."""

    def __init__(self, params: Any, lr: float = 0.1, *, secret: str) -> None:
        super().__init__(params, lr)
        self.hidden = {secret: torch.ones(2)}

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert "known" in self.hidden
        param.sub_(param.grad, alpha=group["lr"])


class Slow(Optimizer):
    """Every second step goes half of the way from where the last such step ended (Lookahead; Zhang et al., 2019).

    As in packages, it wraps another optimizer, shares its groups, and does not call Optimizer's constructor.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.defaults = optimizer.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._patch_step_function()
        params = [param for group in self.param_groups for param in group["params"]]
        self.state = {param: {"slow": param.detach().clone()} for param in params}
        self.steps = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        self.steps += 1
        for param, state in self.state.items():
            if param.grad is not None and self.steps % 2 == 0:
                param.copy_(state["slow"].lerp_(param, 0.5))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Moments(ByParameter):
    """Adam whose moments have a dtype of their own, whatever that of the parameters; may round these at random."""

    def __init__(self, params: Any, lr: float = 1e-2, dtype: Any = torch.bfloat16, at_random: bool = False) -> None:
        super().__init__(params, lr)
        self.dtype, self.at_random = dtype, at_random

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(step=torch.tensor(0.0))
            state.update({name: torch.zeros_like(param, dtype=self.dtype) for name in ("mean", "square")})
        state["step"] += 1
        mean = state["mean"].float().lerp(param.grad.float(), 0.1)
        square = state["square"].float().lerp(param.grad.float().square(), 0.01)
        state["mean"].copy_(mean)
        state["square"].copy_(square)
        step = float(state["step"])
        update = mean / (1 - 0.9**step) / ((square / (1 - 0.99**step)).sqrt() + 1e-8)
        if self.at_random and param.dtype == torch.bfloat16:
            update = update * (1 + torch.rand_like(update) / 256)
        param.copy_(param.float() - group["lr"] * update)


class Wrapping(ByParameter):
    """Keeps its momentum in a tensor that wraps others, as quantised state is kept. compiled: the step of a tensor."""

    def __init__(self, params: Any, lr: float = 0.1, compiled: bool = False) -> None:
        super().__init__(params, lr)
        self.compiled = compiled

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["mean"] = TwoTensor(torch.zeros_like(param), torch.zeros_like(param))
        step = torch.compile(self.update, fullgraph=True) if self.compiled else self.update
        step(param, state["mean"].a, param.grad, group["lr"])

    @staticmethod
    def update(param: Tensor, mean: Tensor, gradient: Tensor, lr: float) -> None:
        param.sub_(mean.mul_(0.9).add_(gradient), alpha=lr)


class Hooked(ByParameter):
    """Steps parameters while backward runs, by hooks on them, and so can be no optimizer of shards."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for param in self.param_groups[0]["params"]:
            param.register_post_accumulate_grad_hook(lambda param: param.data.sub_(param.grad, alpha=lr))

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        pass


class Together(Optimizer):
    """Each rank steps every second parameter, and all receive them, as distributed Muon does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for number, param in enumerate(group["params"]):
                if number % world == rank and param.grad is not None:
                    param -= group["lr"] * param.grad / param.grad.norm()
                dist.broadcast(param.data, number % world)
