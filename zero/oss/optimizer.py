"""Stage 1: OSS, an optimizer of which every rank keeps and steps a shard. stepping.py has its step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero.checks.numbers import Agreed
from zero.comm import Comm, Wire
from zero.interop.from_optimizer import from_optimizer
from zero.measure.kinds import Finding, Kind, finding_of, known, title
from zero.measure.named import build
from zero.measure.param_groups import called, described_options, options
from zero.oss.stepping import Stepping
from zero.shards.announce import announce
from zero.shards.arguments import as_groups, describe, devices_of, master_problem, named_params, wire_of, wire_problem
from zero.shards.home import take_home
from zero.shards.masters import Masters
from zero.shards.owned_shards import OwnedShards
from zero.shards.partition import Partition, cut_for, optimizer_problem, partition_problem
from zero.state import optimizer_state as state


class OSS(Stepping):
    """Shards the state of an optimizer over the ranks of a process group (ZeRO stage 1; Rajbhandari et al.,
    "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 5.1).

        model = DistributedDataParallel(model)
        optimizer = OSS(model.parameters(), optim=torch.optim.Adam, lr=1e-3)

    Use it like the optimizer it wraps. The parameters move into flat buffers, and stay the same objects. Gradients must
    be the same on all ranks at each step; DistributedDataParallel or ShardedDDP averages them.

    OSS holds the parameters, not the module. A step refuses parameters that were moved or cast. If the module replaced
    all parameters (`load_state_dict(assign=True)`), none has a gradient: the step raises RuntimeError, or, without
    DistributedDataParallel, warns the second time. If it replaced some, ShardedDDP refuses the backward;
    DistributedDataParallel refuses the next forward, unless it looks for unused parameters.

    params: parameters, (name, parameter) pairs, or dicts of groups with options of their own. The optimizer gets names
        as `param_names` of its groups, or as pairs if it takes no groups, such as Adam-mini; `param_groups` are then
        the groups that it creates.
    optim: class of the optimizer to shard; `defaults` are its arguments.
    group: process group, by default all ranks. Without torch.distributed, this process alone.
    partition: "even" cuts inside parameters into shards of equal size, for optimizers that treat each element by
        itself. "whole" gives each parameter to one rank, for optimizers that need matrices or norms of parameters.
        "auto" chooses for the optimizer: torch's are known, others are measured in a few steps on small tensors.
    granularity: elements; cuts inside parameters are multiples of it, for optimizers that treat elements in blocks,
        such as those with 8-bit state. With it "auto" is "even".
    broadcast_fp16: after a step, parameters are sent as float16 (True), torch.bfloat16 or by a wire of fewer bits. The
        owner's copy keeps its precision.
    master_dtype: torch.float32: owners keep master weights of their shards in this dtype; parameters of a narrower
        dtype are the rounded masters (2Ψ + 2Ψ + 12Ψ/W bytes with Adam; section 3.1 of the paper).
    defaults: also options of features, which lay stepped tensors elsewhere; see zero.shards.home.

    If data ends earlier on some ranks than on others, train inside `with zero.join(ddp, optimizer):`, or torch's
    `with Join([ddp, optimizer]):`. There each forward must be followed by a backward and, except under no_sync, a step.

    Collective: the constructor, `add_param_group`, `step`, `clip_grad_norm`, `consolidate_state_dict`.
    Raises ValueError on every rank for parameters that cannot be sharded, for arguments that differ between ranks, and
    for optimizers whose step of one parameter depends on other parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optim: Callable[..., Optimizer] = torch.optim.SGD,
        group: torch.distributed.ProcessGroup | None = None,
        *,
        partition: Partition = "auto",
        granularity: int | None = None,
        broadcast_fp16: bool | torch.dtype | Wire = False,
        master_dtype: torch.dtype | None = None,
        **defaults: Any,
    ) -> None:
        self._comm = Comm(group)
        groups, problem = as_groups(params)
        self._wire, wrong_wire = wire_of(broadcast_fp16, "broadcast_fp16")
        self._home, wrong_home = take_home(defaults)
        problem = problem or partition_problem(partition, granularity) or wrong_wire or master_problem(master_dtype)
        problem = problem or wrong_home or wire_problem(named_params(groups), self._wire, "broadcast_fp16")
        self._built, self._built_by = False, (optim, defaults)
        self._partition, self._granularity = partition, granularity
        found, unfit = (None, None) if problem else self._look_at(groups)
        self._cut = cut_for(partition, found, granularity)
        writes_frozen = found is not None and found.writes_frozen
        signature = [
            f"optimizer {called(optim)}, partition {partition}, granularity {granularity}",
            f"broadcast_fp16 {broadcast_fp16}, master_dtype {master_dtype}, {self._home.alike}",
            f"defaults {described_options(defaults)}",
            f"cut {self._cut}, as the optimizer was found to need it",
            f"numbers in param_groups written by steps: {found is not None and found.writes_numbers}",
            f"parameters without gradients written by steps: {writes_frozen}",
        ]
        problem = problem or self._comm.device_problem(devices_of(groups)) or unfit
        self._comm.compare("the parameters given to OSS", [*signature, *describe(groups)], problem)
        agreed = Agreed(self._comm, expected=found.writes_numbers) if found and known(optim) is None else None
        self._master_dtype = torch.float32 if self._home.apart and master_dtype is None else master_dtype
        super().__init__(groups, agreed, writes_frozen=writes_frozen)
        self._shards = self._laid_out()
        self.optim = self._build_inner(optim, defaults)
        self.defaults = dict(self.optim.defaults)
        self._share_options(self.optim.param_groups, self.param_groups)
        self._built = True
        announce(f"OSS({called(optim)})", self._comm, self.shard_groups, sharded="optimizer state")

    # -------------------------------------------------------------------------------------- construction

    @classmethod
    def from_optimizer(
        cls, optimizer: Optimizer, group: torch.distributed.ProcessGroup | None = None, **options: Any
    ) -> OSS:
        """Collective. Builds an OSS from an existing optimizer of full parameters; see zero.interop.from_optimizer."""
        return from_optimizer(cls, optimizer, group, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Collective. Shards the parameters of another group, balanced with the shards that each rank owns."""
        if not self._built:
            super().add_param_group(param_group)
            return
        groups, problem = as_groups([param_group], seen=set(self._shards))
        problem = (
            problem or wire_problem(named_params(groups), self._wire, "broadcast_fp16") or self._look_at(groups)[1]
        )
        self._comm.compare("the parameters added to OSS", describe(groups), problem)
        super().add_param_group(groups[0])
        added = self.param_groups[-1]
        self._shards.add([added])
        self._refuse_full()
        given = self._shards.group(added)
        if "param_names" not in self.optim.param_groups[0]:
            given.pop("param_names", None)  # torch refuses groups of which only some have names
        self.optim.add_param_group(given)
        # Only of this group: a scheduler may have written into the others since the last step.
        self._share_options(self.optim.param_groups[-1:], [added])
        self.forget_full_state()

    def _look_at(self, groups: list[dict[str, Any]]) -> tuple[Finding | None, str | None]:
        """Measures the optimizer with the groups' options; returns an error message if it cannot be sharded so."""
        optim, defaults = self._built_by
        found = known(optim)
        if found is None and self._comm.world > 1:
            found = finding_of(optim, defaults, [options(group) for group in groups], self._granularity)
        if found is None:
            return None, None
        name = title(optim)
        if self._built and found.kind is Kind.TENSORWISE and self._cut == "even":
            return found, optimizer_problem(name, found, "even", self._granularity)
        return found, optimizer_problem(name, found, self._partition, self._granularity)

    def _build_inner(self, optim: Callable[..., Optimizer], defaults: dict[str, Any]) -> Optimizer:
        inner, by_name, problem = None, False, None
        groups, named = (
            [self._shards.group(group) for group in self.param_groups],
            self._shards.named(self.param_groups),
        )
        try:
            inner, by_name = build(optim, groups, named, defaults)
        except Exception as error:  # every rank must know of any error before it waits for this rank
            problem = f"{called(optim)} could not be built from these parameters: {type(error).__name__}: {error}"
        made = len(inner.param_groups) if inner is not None else 0
        self._comm.compare("the optimizers that OSS shards", [f"{type(inner).__name__}, {made} groups"], problem)
        assert inner is not None
        if by_name:
            self._shards.regroup(inner, self.param_groups)
        for name in ("train", "eval"):  # by which optimizers such as Schedule-Free switch between two sets of weights
            if callable(getattr(inner, name, None)):
                vars(inner)[name] = self._followed_by_gather(getattr(inner, name))
        return inner

    def _followed_by_gather(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a method of the inner optimizer that writes into shards; makes it collective."""

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._refuse_changes()
            self._shards.masters.refresh()
            result = method(*args, **kwargs)
            self._share_options(self.optim.param_groups, self.param_groups)
            self._gather(self.shard_groups)
            self.finish_gathers()
            return result

        return call

    def __getattr__(self, name: str) -> Any:
        """Values of the inner optimizer that this one lacks, and its `train` and `eval`, which are collective."""
        inner = self.__dict__.get("optim")
        value = None if inner is None or name.startswith("_") else getattr(inner, name, None)
        if value is None or (callable(value) and name not in ("train", "eval")):
            problem = f"'{type(self).__name__}' object has no attribute '{name}'"
            if value is not None:
                problem += (
                    f". {type(inner).__name__}'s sees this rank's shards alone: call it on `.optim` if that will do"
                )
            raise AttributeError(problem, name=name, obj=self)
        return value

    def _laid_out(self, numel: int | None = None) -> OwnedShards:
        shards = OwnedShards(
            self._comm,
            cut=self._cut,
            granularity=self._granularity,
            masters=Masters(self._master_dtype),
            home=self._home,
        )
        shards.add(self.param_groups, numel)
        self._refuse_full()
        return shards

    def _refuse_full(self) -> None:
        """Collective with a home apart. Raises ValueError on every rank if that of any rank is full."""
        if self._home.apart:
            self._comm.compare("the shards of OSS", [], self._home.problem("the shards of OSS"))

    def set_bucket_size(self, numel: int) -> None:
        """Collective. Lays the parameters out again, in shard groups of at most `numel` elements, or of one parameter.

        Keeps the optimizer state, and clears gradients. Raises RuntimeError if param_groups were edited.
        """
        self.finish_gathers()
        self._checks.refuse_edits(self._shards, self.param_groups)
        # Some ranks may own no shard that has state; before the first step no rank does.
        some_state = self.optim.state or (self.keeps_masters and self._shards.masters.differ())
        somewhere = any(self._comm.all_gather_text("some" if some_state else ""))
        full = state.consolidate(self, None, settle=False) if somewhere else None
        self._shards = self._laid_out(numel)
        self.optim.state.clear()
        for inner, outer in zip(self.optim.param_groups, self.param_groups, strict=True):
            inner["params"] = self._shards.group(outer)["params"]
        if full is not None:
            state.load(self, full)

    # ------------------------------------------------------------------------------------ what others need

    @property
    def bucket_bytes(self) -> int:
        """Bytes of the largest shard group: the size of a transfer."""
        return max(flat.full.nbytes for flat in self.shard_groups)

    def rename(self, given: dict[nn.Parameter, str]) -> None:
        """Collective. Sets the names of parameters in error messages.

        Raises ValueError on every rank if the order of parameters differs between ranks. Without names, parameters of
        the same shape cannot be told apart.
        """
        for flat in self.shard_groups:
            flat.names = [given.get(param, name) for param, name in zip(flat.params, flat.names, strict=True)]
        in_order = [given.get(param, "") for group in self.param_groups for param in group["params"]]
        self._comm.compare("the parameters given to OSS", in_order)
