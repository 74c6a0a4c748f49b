"""Stage 1: every rank keeps and steps a part of the optimizer's state.

A step, on every rank:
    take gradients      the part's share of each param.grad, as views (or what ShardedDDP has put there)
    step                the user's optimizer, over this rank's parts only
    gather              every rank's segment reaches every rank, in the flat buffers that the parameters lie in
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.oss import state
from zero.oss.comm import Comm
from zero.oss.flat import FlatGroup, unusable
from zero.oss.partition import Partition, cut_for, lay_out, partition_problem

_SMALLEST_BUCKET, _LARGEST_BUCKET = 1 << 20, 1 << 25


class OSS(Optimizer):
    """Shards the state of an optimizer over the ranks of a process group (ZeRO stage 1; Rajbhandari et al.,
    "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 5.1).

        model = DistributedDataParallel(model)
        optimizer = OSS(model.parameters(), optim=torch.optim.Adam, lr=1e-3)

    Use it like the optimizer it wraps. The parameters are laid in flat buffers, and stay the objects they were.
    Gradients must be the same on all ranks when it steps: DistributedDataParallel, or ShardedDDP, sees to that.

    params: as of any torch optimizer: parameters, (name, parameter) pairs, or dicts of groups with their own options.
    optim: class of the optimizer to shard; `defaults` are its arguments.
    group: process group, by default all ranks. Without torch.distributed, this process alone.
    partition: "even" cuts inside parameters, so that all ranks own equally much; right for optimizers that treat each
        element by itself. "whole" keeps each parameter with one rank, for those that need whole matrices or norms.
        "auto" is "even" for torch's own element-wise optimizers and "whole" for all others.

    Collective: the constructor, `add_param_group`, `step`, `consolidate_state_dict`.
    Raises ValueError, on every rank, for parameters that cannot be sharded or that differ between ranks.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optim: Callable[..., Optimizer] = torch.optim.SGD,
        group: torch.distributed.ProcessGroup | None = None,
        *,
        partition: Partition = "auto",
        **defaults: Any,
    ) -> None:
        self._comm = Comm(group)
        groups, problem = _as_groups(params)
        problem = problem or partition_problem(partition, optim)
        told = [f"optimizer {getattr(optim, '__name__', optim)}, partition {partition}"]
        self._comm.compare("the parameters given to OSS", [*told, *_describe(groups)], problem)
        self._cut = cut_for(partition, optim)
        self._loads = [0] * self._comm.world
        self._flat_groups: list[FlatGroup] = []
        self._parts: dict[nn.Parameter, nn.Parameter] = {}
        self._owned: set[nn.Parameter] = set()
        self.gradients_arrive_in_parts = False
        self._step_channel = self._comm.channel("the step of OSS")
        self._whole_state: dict[str, Any] | None = None

        self._built = False
        super().__init__(groups, {})
        self._add_flat_groups(self.param_groups)
        self.optim = optim([self._inner_group(group) for group in self.param_groups], **defaults)
        self.defaults = dict(self.optim.defaults)
        self._share_options(self.optim.param_groups, self.param_groups)
        self._built = True

    # -------------------------------------------------------------------------------------- construction

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Collective. Shards the group's parameters too, balanced with what each rank owns already."""
        if not self._built:
            super().add_param_group(param_group)
            return
        groups, problem = _as_groups([param_group], seen=set(self._parts))
        self._comm.compare("the parameters added to OSS", _describe(groups), problem)
        super().add_param_group(groups[0])
        added = self.param_groups[-1]
        self._add_flat_groups([added])
        self.optim.add_param_group(self._inner_group(added))
        self._share_options(self.optim.param_groups, self.param_groups)
        self._whole_state = None

    def _add_flat_groups(self, param_groups: list[dict[str, Any]]) -> None:
        # Backwards, because that is how gradients come: a bucket of ShardedDDP then fills in one go.
        params = [param for group in param_groups for param in group["params"]][::-1]
        names = [name for group in param_groups for name in _names(group)][::-1]
        limit = min(max(sum(param.nbytes for param in params) // 16, _SMALLEST_BUCKET), _LARGEST_BUCKET)
        added = lay_out(params, names, self._comm, cut=self._cut, loads=self._loads, limit=limit)
        self._flat_groups += added
        for flat in added:
            for index, param in enumerate(flat.params):
                self._parts[param] = nn.Parameter(flat.part_views[index], requires_grad=param.requires_grad)
                if index in flat.spans:
                    self._owned.add(param)

    def _inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**_options(group), "params": [self._parts[param] for param in group["params"] if param in self._owned]}

    # ------------------------------------------------------------------------------------ what others need

    @property
    def comm(self) -> Comm:
        return self._comm

    @property
    def flat_groups(self) -> list[FlatGroup]:
        """The flat groups that the parameters lie in, in the order in which backward is expected to reach them."""
        return self._flat_groups

    @property
    def bucket_bytes(self) -> int:
        """Bytes of the largest flat group: what a transfer takes at a time."""
        return max(flat.full.nbytes for flat in self._flat_groups)

    def part(self, param: nn.Parameter) -> nn.Parameter:
        """This rank's part of a parameter, as the inner optimizer steps it; a view into the parameter's own memory.

        Empty where this rank owns nothing of it. Its `.grad` is the averaged gradient of the part.
        """
        return self._parts[param]

    def expect_gradients_in_parts(self) -> None:
        """From now on gradients are put into the parts (by ShardedDDP), not taken from `param.grad`."""
        self.gradients_arrive_in_parts = True

    def rename(self, names: dict[nn.Parameter, str]) -> None:
        """Gives the parameters the names that errors call them by."""
        for flat in self._flat_groups:
            flat.names = [names.get(param, name) for param, name in zip(flat.params, flat.names, strict=True)]

    # -------------------------------------------------------------------------------------------- stepping

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Collective. Steps this rank's parts and gathers everyone's. Returns the closure's loss.

        Raises RuntimeError where parameters were moved or replaced, where gradients were left unreduced by no_sync, and
        on every rank where another rank does something else.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_strays()
        self._take_gradients()
        self._share_options(self.param_groups, self.optim.param_groups)
        self.optim.step()
        self._share_options(self.optim.param_groups, self.param_groups)
        self._whole_state = None
        self._comm.agree(self._step_channel)
        changed = [flat for flat in self._flat_groups if any(param.requires_grad for param in flat.params)]
        for flat in changed:
            flat.launch_gather(agreed=True)
        for flat in changed:
            flat.finish_gather()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the parameters and of this rank's parts."""
        super().zero_grad(set_to_none)
        self.optim.zero_grad(set_to_none)

    def _take_gradients(self) -> None:
        for flat in self._flat_groups:
            if self.gradients_arrive_in_parts:
                self._refuse_unreduced(flat)
                continue
            for index, span in flat.spans.items():
                param = flat.params[index]
                gradient = param.grad
                if gradient is not None:
                    if gradient.is_sparse:
                        raise RuntimeError(
                            f"{flat.names[index]} has a sparse gradient. zero shards dense ones: build the embedding "
                            "with sparse=False."
                        )
                    taken = flat.in_memory_order(index, gradient)[span.start : span.stop]
                    gradient = flat.shaped(index, taken, span)
                self._parts[param].grad = gradient

    def _refuse_unreduced(self, flat: FlatGroup) -> None:
        for param, name in zip(flat.params, flat.names, strict=True):
            if param.grad is not None:
                raise RuntimeError(
                    f"{name} has a gradient that was not reduced: the last backward ran under no_sync(), or went "
                    "around ShardedDDP. Run the last backward before step() outside no_sync(), through the wrapper."
                )

    def _refuse_strays(self) -> None:
        for flat in self._flat_groups:
            stray = flat.stray()
            if stray is not None:
                raise RuntimeError(
                    f"{stray} was moved, cast or given other data after OSS was built, and would no longer be trained. "
                    "Move and cast the model first, then build OSS; load weights with load_state_dict (assign=False)."
                )

    def _share_options(self, source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        """Schedulers write into the outer groups, some optimizers into the inner ones: both see the same options."""
        for of, to in zip(source, target, strict=True):
            to.update(_options(of))

    # ----------------------------------------------------------------------------------------------- state

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Collective. Brings the whole state to rank `to` of the group (None: to all), for `state_dict` to return."""
        self._whole_state = state.consolidate(self, to)

    def state_dict(self) -> dict[str, Any]:
        """The whole state in the plain optimizer's format, where `consolidate_state_dict` brought it here since the
        last step (or where there is one rank only); otherwise this rank's part. Never communicates."""
        if self._comm.world == 1:
            return state.consolidate(self, None) or {}
        return self._whole_state or state.part_of(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a whole state (of OSS at any world size, or of the plain optimizer) or this rank's own part.

        The dictionary stays as it is. Raises ValueError where it does not fit.
        """
        state.load(self, state_dict)
        self._whole_state = None


def _as_groups(params: Iterable[Any], seen: set[nn.Parameter] | None = None) -> tuple[list[dict[str, Any]], str | None]:
    """Parameter groups in torch's form, and what is wrong with them in words for the user."""
    if isinstance(params, Tensor):
        return [], "OSS was given a single tensor. Pass an iterable of parameters, such as model.parameters()."
    given: list[Any] = list(params)
    groups: list[dict[str, Any]] = given if given and isinstance(given[0], dict) else [{"params": given}]
    groups = [{**group, "params": _listed(group.get("params"))} for group in groups]
    seen = set(seen or ())
    found: dict[nn.Parameter, str] = {}
    for position, group in enumerate(groups):
        for index, entry in enumerate(group["params"]):
            named = isinstance(entry, tuple)
            param = entry[1] if named else entry
            name = repr(entry[0]) if named else f"parameter {index} of group {position}"
            problem = unusable(param, name)
            if problem:
                return groups, problem
            if param in found or param in seen:
                return groups, (
                    f"{name} was given before{f' as {found[param]}' if param in found else ''}: each parameter must "
                    "be in exactly one group, once. Tied weights are one parameter; model.parameters() lists it once."
                )
            found[param] = name
    if not found:
        return groups, "OSS was given no parameters. Pass model.parameters() (a generator is used up after one pass)."
    return groups, None


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params or ())


def _describe(groups: list[dict[str, Any]]) -> list[str]:
    lines = []
    for position, group in enumerate(groups):
        for index, entry in enumerate(group["params"]):
            name, param = entry if isinstance(entry, tuple) else (f"parameter {index} of group {position}", entry)
            if isinstance(param, Tensor):
                kind = "trained" if param.requires_grad else "frozen"
                lines.append(f"{name}: {str(param.dtype).removeprefix('torch.')} {list(param.shape)}, {kind}")
    return lines


def _names(group: dict[str, Any]) -> list[str]:
    return group.get("param_names") or [
        f"parameter {i} of shape {list(p.shape)}" for i, p in enumerate(group["params"])
    ]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
